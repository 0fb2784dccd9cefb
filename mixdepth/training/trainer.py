"""transformers' Trainer for dense and routed models: exact FLOPs, logs of routing, checkpoints that resume to the bit.

This class overrides what it needs and nothing else. The loop, gradient accumulation, mixed precision, compilation and
DDP are those of transformers and accelerate; sharding is torch's. What a checkpoint holds is in `runs/checkpoints.py`.
"""

import math
import warnings
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.fsdp import fully_shard
from torch.optim.lr_scheduler import LambdaLR
from transformers import Trainer, TrainerCallback
from transformers.trainer_callback import PrinterCallback, ProgressCallback

from mixdepth.evaluation.held_out import evaluate
from mixdepth.files import writing
from mixdepth.hf.architectures import decoder_layers
from mixdepth.hf.layer import RoutedLayer
from mixdepth.hf.model import RoutedCausalLM
from mixdepth.hf.names import ROUTER_NAME
from mixdepth.hf.router_updates import UpdateRouters
from mixdepth.losses import divergence
from mixdepth.modes import active
from mixdepth.runs.checkpoints import (
    checkpoint_at,
    mark_complete,
    own_names,
    read_schedule,
    read_training_state,
    read_weights,
    reading,
    step_of,
    write_schedule,
    write_training_state,
    writing_checkpoint,
)
from mixdepth.runs.layout import METRICS, TIMINGS
from mixdepth.runs.run import Run
from mixdepth.runs.settings import TrainConfig
from mixdepth.training.callbacks import Clock, FollowSchedule, LogAtCheckpoints, Progress
from mixdepth.training.routing_statistics import describe, routing_counts
from mixdepth.training.schedule import Schedule

LOSSES = ("loss", "lm_loss", "predictor_loss", "aux_loss", "capacity_loss", "balance_loss", "distill_loss")
"""The losses that are logged, in the order of a line."""


class DivergedError(ValueError):
    """The loss or the gradient of a run is not finite any more. With the same settings the run would diverge again."""


class DepthTrainer(Trainer):
    """Trains one run, and writes into its folder."""

    optimizer: Any
    lr_scheduler: Any
    control: Any

    def __init__(
        self,
        model: Any,
        args: Any,
        *,
        run: Run,
        config: TrainConfig,
        schedule: Schedule,
        teacher: Any = None,
        shard: bool = False,
        peak: float | None = None,
        **kwargs: Any,
    ) -> None:
        """Prepare a model for training.

        `teacher` is the model that is distilled, `shard` shards the model over the processes, and `peak` is the number
        of FLOPs per second that the machine can do at best.
        """
        callbacks: list[TrainerCallback] = [LogAtCheckpoints()]
        if isinstance(model, RoutedCausalLM):
            callbacks += [UpdateRouters(), FollowSchedule(schedule)]
        super().__init__(model, args, callbacks=callbacks, **kwargs)
        for callback in (PrinterCallback, ProgressCallback):
            self.remove_callback(callback)
        self.run = run
        self.config = config
        self.schedule = schedule
        self.peak = peak
        self.teacher = None if teacher is None else teacher.to(self.args.device)
        self.vocab_size = model.config.vocab_size
        self.sums: dict[str, Any] = {}  # losses and counts since the last line of the log
        if shard:
            self._shard(model)
        self.clock = Clock()
        self.progress = Progress(schedule, is_shown=self.is_world_process_zero())
        self.add_callback(self.progress)
        self.add_callback(self.clock)

    def _shard(self, model: Any) -> None:
        """Shard a model with torch's FSDP2, and keep accelerate from wrapping it once more."""
        for layer in decoder_layers(model):
            fully_shard(layer)
        fully_shard(model)
        self.is_distributed_loading_by_transformers = True
        # The Trainer scales the loss in place, which is not a view of anything. The warning does not apply: gradients
        # equal those of one process.
        warnings.filterwarnings("ignore", message="FSDP2-wrapped module .* returned a view")

    def train(self, *args: Any, **kwargs: Any) -> Any:
        try:
            return super().train(*args, **kwargs)
        finally:
            self.progress.close()

    # Losses and FLOPs

    def compute_loss(self, model: Any, inputs: dict[str, Any], *args: Any, **kwargs: Any) -> Any:
        """Return the loss of a micro-batch, and add it and its parts to the sums that are logged."""
        # 1. The model's own loss. Routes are asked for in every step, whether they are logged or not: torch.compile
        #    would make one graph with them and one without.
        is_routed = isinstance(self.model, RoutedCausalLM)
        if is_routed:
            inputs = {**inputs, "output_routes": True}
        kwargs["return_outputs"] = True
        loss, out = super().compute_loss(model, inputs, *args, **kwargs)

        # 2. Its parts. The model's loss is divided by all labels of the step already; routing losses are means over
        #    this micro-batch, and count by its share of the labels.
        num_labels = kwargs["num_items_in_batch"]
        share = (inputs["labels"][..., 1:] != -100).sum() / num_labels
        parts: dict[str, Any] = {}
        for name, value in self._routing_losses(out).items():
            if value is not None:
                parts[name] = share * value
        num_processes = self.accelerator.num_processes  # the Trainer has multiplied the loss by it
        lm_loss = out.lm_loss if is_routed else loss / num_processes

        # 3. Distillation takes a share of the language-model loss.
        if self.teacher is not None:
            with torch.no_grad():
                teacher_logits = self.teacher(input_ids=inputs["input_ids"], use_cache=False).logits  # (B, T, V)
            parts["distill_loss"] = divergence(out.logits, teacher_logits, inputs["labels"]) / num_labels
            loss = loss + self.config.distill * num_processes * (parts["distill_loss"] - lm_loss)

        # 4. Add up what is logged.
        parts["loss"] = loss / num_processes
        if is_routed or self.teacher is not None:
            parts["lm_loss"] = lm_loss
        if is_routed and out.routes and self._is_logged_step():
            routers = self.model.depth_routers
            parts["counts"] = routing_counts(out.routes, routers, inputs["input_ids"], self.vocab_size)
        for name, part in parts.items():
            self.sums[name] = self.sums.get(name, 0) + part.detach()
        return loss

    def _routing_losses(self, out: Any) -> dict[str, Any]:
        """Return each routing loss under one name. transformers calls the balance loss of experts `aux_loss`."""
        if not isinstance(self.model, RoutedCausalLM):
            return {"balance_loss": out.get("aux_loss")}
        names = ["predictor_loss", "capacity_loss", "balance_loss"]
        if self.model.depth_config.causal == "aux_loss":
            names.append("aux_loss")
        return {name: out.get(name) for name in names}

    def _is_logged_step(self) -> bool:
        step = self.state.global_step + 1
        intervals = (self.args.logging_steps, self.args.save_steps, self.state.max_steps)
        return step == 1 or any(step % interval == 0 for interval in intervals)

    def floating_point_ops(self, inputs: dict[str, Any]) -> int:
        """Count nothing: the schedule counts FLOPs, and transformers would add up another formula in float32."""
        return 0

    # Optimizer and learning rates

    def create_optimizer(self, model: Any = None) -> Any:
        """Make AdamW with a group of parameters for each pair of weight decay and learning rate.

        Matrices decay; vectors and routers do not. Routers, predictors and routed layers have their own rates.
        """
        if self.optimizer is None:
            groups: dict[tuple[float, float], list[Any]] = {}
            decaying = set(self.get_decay_parameter_names(self.model))
            rates = self._routed_rates()
            for name, parameter in self.model.named_parameters():
                if not parameter.requires_grad:
                    continue
                decay = self.args.weight_decay if name in decaying else 0.0
                rate = rates.get(id(parameter), 1.0)
                if ROUTER_NAME in name:
                    decay = 0.0
                    rate = self._rate_of_router(name, rate)
                groups.setdefault((decay, rate), []).append(parameter)
            optimizer_class, options = self.get_optimizer_cls_and_kwargs(self.args, self.model)
            described = []
            for (decay, rate), parameters in groups.items():
                described.append({"params": parameters, "weight_decay": decay, "lr": options["lr"] * rate})
            self.optimizer = optimizer_class(described, **options)
        return self.optimizer

    def _rate_of_router(self, name: str, rate_of_layer: float) -> float:
        """Return the learning rate of a router's parameter, as a multiple of the model's rate."""
        if "predictor" in name:
            return self.config.predictor_learning_rate
        if self.config.router_learning_rate is None:
            return rate_of_layer
        return self.config.router_learning_rate

    def _routed_rates(self) -> dict[int, float]:
        """Return the rate of each parameter of routed layers, by its id, as a multiple of the model's rate."""
        rates: dict[int, float] = {}
        capacity = 1.0
        for layer in decoder_layers(self.model):
            if not isinstance(layer, RoutedLayer):
                continue
            if layer.depth_router is not None:  # a layer without one processes what an earlier exit kept
                capacity = active(layer.depth_router).capacity
            rate = self.config.routed_learning_rate
            if rate is None:
                rate = math.sqrt(capacity)
            for parameter in layer.parameters():
                rates[id(parameter)] = rate
        return rates

    def create_scheduler(self, num_training_steps: int, optimizer: Any = None) -> Any:
        if self.lr_scheduler is None:
            self.lr_scheduler = LambdaLR(self.optimizer, self.schedule.learning_rate_at)
            self._created_lr_scheduler = True
        return self.lr_scheduler

    def _get_grad_norm(self, model: Any, grad_norm: Any = None) -> Any:
        norm = super()._get_grad_norm(model, grad_norm)
        if hasattr(norm, "full_tensor"):  # sharded
            return norm.full_tensor()
        return norm

    # Logs and evaluation

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        """Write a line of metrics.jsonl and one of timings.jsonl, and hand the same numbers to all callbacks."""
        if "loss" not in logs:  # the Trainer's summary of a call, which does not include earlier calls
            return

        # 1. Means over the steps since the last line, and counts, over all processes.
        step = self.state.global_step
        names = [name for name in LOSSES if name in self.sums]
        losses = torch.stack([self.sums[name].double() for name in names])  # (number of losses,)
        losses = losses / (step - self.clock.step)
        counts = self.sums.get("counts")
        if torch.distributed.is_available() and torch.distributed.is_initialized():
            torch.distributed.all_reduce(losses)
            if counts is not None:
                torch.distributed.all_reduce(counts)
        self.sums = {}
        metrics: dict[str, Any] = {
            "step": step,
            "tokens": step * self.schedule.tokens_per_step,
            "flops": self.schedule.flops_until(step),
            **dict(zip(names, losses.tolist(), strict=True)),
            "grad_norm": logs["grad_norm"],
            "learning_rate": logs["learning_rate"],
        }

        # 2. Stop a run that has diverged.
        for name in ("loss", "grad_norm"):
            if not math.isfinite(metrics[name]):
                raise DivergedError(
                    f"{name} is {metrics[name]} at step {step}: the run has diverged; train again with a lower "
                    "learning_rate"
                )

        # 3. Statistics of routing, and the speed.
        if counts is not None:
            metrics["layers"] = {"index": self.model.deciding_layers, **describe(counts)}
            metrics["layers"]["target"] = [router.capacity for router in self.model.depth_routers]
        timings = self.clock.read(step, self.schedule, self.peak)
        self._write(metrics, timings)

    def _write(self, metrics: dict[str, Any], timings: dict[str, Any] | None = None) -> None:
        """Append lines to the logs, and hand their numbers to the callbacks under flat names."""
        if self.is_world_process_zero():
            self.run.append(METRICS, metrics)
            if timings is not None:
                self.run.append(TIMINGS, timings)
        flat = {**metrics, **(timings or {})}
        layers = flat.pop("layers", {})
        for name in layers.keys() - {"index"}:
            for index, value in zip(layers["index"], layers[name], strict=True):
                flat[f"layer_{index}/{name}"] = value
        self.control = self.callback_handler.on_log(self.args, self.state, self.control, flat)

    def evaluate(self, *args: Any, **kwargs: Any) -> dict[str, Any]:
        """Take the causal and look-ahead loss on the validation windows.

        All processes evaluate all windows: sharded layers need every process.
        """
        device = next(self.model.parameters()).device
        windows = self.eval_dataset.batches(self.args.per_device_eval_batch_size)
        with self.clock.paused():
            evaluation = evaluate(self.model, (batch.to(device) for batch in windows))
        metrics = {"step": self.state.global_step, "validation_loss": evaluation.loss}
        if isinstance(self.model, RoutedCausalLM):
            metrics["validation_lookahead_loss"] = evaluation.lookahead_loss
            metrics["validation_capacities"] = [layer.capacity for layer in evaluation.layers.values()]
        self._write(metrics)
        self.control = self.callback_handler.on_evaluate(self.args, self.state, self.control, metrics)
        return metrics

    # Saving. The Trainer calls these methods for each checkpoint.

    def _save_checkpoint(self, model: Any, trial: Any) -> None:
        """Write a checkpoint, and its marker last, once all processes have written their part."""
        checkpoint = checkpoint_at(self.run.folder, self.state.global_step)
        with writing_checkpoint(checkpoint), self.clock.paused():
            super()._save_checkpoint(model, trial)
            self.accelerator.wait_for_everyone()
            if self.is_world_process_zero():
                mark_complete(checkpoint)
            self.accelerator.wait_for_everyone()

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """Save the model as transformers reads it. A checkpoint gets its config only, and its weights elsewhere."""
        if _internal_call:
            if self.args.should_save:
                self.model.config.save_pretrained(output_dir)
            return
        options = StateDictOptions(full_state_dict=True, cpu_offload=True)  # gathered on the first process
        weights = get_model_state_dict(self.model, options=options)
        if self.args.should_save:
            names = own_names(self.model)
            weights = {name: tensor for name, tensor in weights.items() if name in names}
            with writing(self.run.folder):
                self.model.save_pretrained(output_dir, state_dict=weights)

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        write_training_state(Path(output_dir), self.model, self.optimizer.optimizer)
        if self.args.should_save:
            write_schedule(Path(output_dir), self.lr_scheduler)

    # Resuming

    def restore(self, checkpoint: Path) -> None:
        """Take the weights of a checkpoint, to be evaluated."""
        read_weights(checkpoint, self.model)
        self.state.global_step = step_of(checkpoint)

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: Any = None) -> None:
        """Load nothing yet: weights are read with the optimizer's state, once the model is wrapped."""

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        if checkpoint is None:
            return
        read_training_state(Path(checkpoint), self.model, self.optimizer.optimizer)
        read_schedule(Path(checkpoint), self.lr_scheduler)
        for group, rate in zip(self.optimizer.param_groups, self.lr_scheduler.get_last_lr(), strict=True):
            group["lr"] = rate

    def _load_rng_state(self, checkpoint: str | None) -> None:
        if checkpoint is None:
            return
        name = "rng_state.pth"
        if self.args.world_size > 1:
            name = f"rng_state_{self.args.process_index}.pth"
        with reading(Path(checkpoint) / name):
            super()._load_rng_state(checkpoint)

    def _load_scaler(self, checkpoint: str | None) -> None:
        """Load nothing: only float16 scales its losses, and nothing is trained in float16 here."""
