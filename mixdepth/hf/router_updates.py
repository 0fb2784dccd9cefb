"""What transformers' Trainer needs to know of routing."""

from typing import Any

from transformers import TrainerCallback

from mixdepth.modes import update_routers


class UpdateRouters(TrainerCallback):
    """Calls `mixdepth.update_routers` after each optimizer step: `Trainer(..., callbacks=[UpdateRouters()])`.

    Needed with `causal="threshold"`, `scheme="random"` and `experts="expert_choice"`, and harmless elsewhere.
    """

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        update_routers(kwargs["model"])
