"""A callback that updates routers while the Trainer of transformers trains."""

from typing import Any

from transformers import TrainerCallback

from mixdepth.modes import update_routers


class UpdateRouters(TrainerCallback):
    """Calls `mixdepth.update_routers` after each optimizer step: `Trainer(..., callbacks=[UpdateRouters()])`.

    The settings `causal="threshold"`, `scheme="random"` and `experts="expert_choice"` need it. With others it does
    nothing.
    """

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        update_routers(kwargs["model"])
