"""transformers' Trainer for dense and routed models: exact FLOPs, logs of routing, checkpoints that resume to the bit.

What is overridden is here, and nothing else: the loop, the schedule, gradient accumulation, mixed precision,
compilation and DDP are transformers' and accelerate's, sharding and its checkpoints are torch's.
"""

import math
import shutil
import warnings
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageWriter
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_state_dict,
    set_state_dict,
)
from torch.distributed.checkpoint.state_dict_saver import save
from torch.distributed.fsdp import fully_shard
from torch.optim.lr_scheduler import LambdaLR
from transformers import Trainer, TrainerCallback
from transformers.trainer import SCHEDULER_NAME
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
from mixdepth.runs.checkpoints import STATE_FOLDER, load_state, model_tensors, own_names, reading
from mixdepth.runs.run import MARKER, METRICS, PREFIX, TIMINGS, Run, step_of
from mixdepth.training.callbacks import Clock, FollowSchedule, LogAtCheckpoints, Progress
from mixdepth.training.routing_statistics import describe, routing_counts
from mixdepth.training.schedule import Schedule

LOSSES = ("loss", "lm_loss", "predictor_loss", "aux_loss", "capacity_loss", "balance_loss", "distill_loss")

DIVERGED = "the run has diverged"


class DepthTrainer(Trainer):
    """Trains one run, in its folder."""

    optimizer: Any
    lr_scheduler: Any
    control: Any

    def __init__(
        self,
        model: Any,
        args: Any,
        *,
        run: Run,
        schedule: Schedule,
        router_learning_rate: float | None = None,
        predictor_learning_rate: float = 1.0,
        routed_learning_rate: float | None = None,
        teacher: Any = None,
        distill: float = 0.0,
        shard: bool = False,
        peak: float | None = None,
        **kwargs: Any,
    ) -> None:
        callbacks: list[TrainerCallback] = [LogAtCheckpoints()]
        if isinstance(model, RoutedCausalLM):
            callbacks += [UpdateRouters(), FollowSchedule(schedule)]
        super().__init__(model, args, callbacks=callbacks, **kwargs)
        for callback in (PrinterCallback, ProgressCallback):
            self.remove_callback(callback)
        self.run, self.schedule, self.peak = run, schedule, peak
        self.router_learning_rate, self.predictor_learning_rate = router_learning_rate, predictor_learning_rate
        self.routed_learning_rate = routed_learning_rate
        self.teacher = None if teacher is None else teacher.to(self.args.device)
        self.distill = distill
        self.vocab_size = model.config.vocab_size
        self.sums: dict[str, Any] = {}
        self.clock = Clock()
        if shard:
            for layer in decoder_layers(model):
                fully_shard(layer)
            fully_shard(model)
            self.is_distributed_loading_by_transformers = True  # which accelerate must not wrap once more
            # HF scales the loss in place, which is no view; gradients equal those of one process
            warnings.filterwarnings("ignore", message="FSDP2-wrapped module .* returned a view")
        self.progress = Progress(is_shown=self.is_world_process_zero())
        self.add_callback(self.progress)
        self.add_callback(self.clock)

    def train(self, *args: Any, **kwargs: Any) -> Any:
        try:
            return super().train(*args, **kwargs)
        finally:
            self.progress.close()

    # --- what is optimised, and what is counted ---

    def compute_loss(self, model: Any, inputs: dict[str, Any], *args: Any, **kwargs: Any) -> Any:
        is_routed = isinstance(self.model, RoutedCausalLM)
        if is_routed:  # in every step, read or not: with and without them torch.compile makes two graphs
            inputs = {**inputs, "output_routes": True}
        kwargs["return_outputs"] = True
        loss, out = super().compute_loss(model, inputs, *args, **kwargs)
        # A micro-batch's part of the mean over the whole batch: the model's losses are normalised so already.
        share = (inputs["labels"][..., 1:] != -100).sum() / kwargs["num_items_in_batch"]
        parts = {name: share * value for name, value in self._routing_losses(out).items() if value is not None}
        num_processes = self.accelerator.num_processes  # by which the Trainer has multiplied the loss
        lm_loss = out.lm_loss if is_routed else loss / num_processes
        if self.teacher is not None:
            with torch.no_grad():
                foretold = self.teacher(input_ids=inputs["input_ids"], use_cache=False).logits
            parts["distill_loss"] = divergence(out.logits, foretold, inputs["labels"]) / kwargs["num_items_in_batch"]
            loss = loss + self.distill * num_processes * (parts["distill_loss"] - lm_loss)
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
        """Each by one name: what transformers calls aux_loss is the balance loss of experts."""
        if not isinstance(self.model, RoutedCausalLM):
            return {"balance_loss": out.get("aux_loss")}
        own = ("predictor_loss", "capacity_loss", "balance_loss")
        by_rule = ("aux_loss",) if self.model.depth_config.causal == "aux_loss" else ()
        return {name: out.get(name) for name in (*own, *by_rule)}

    def _is_logged_step(self) -> bool:
        step = self.state.global_step + 1
        every = (self.args.logging_steps, self.args.save_steps, self.state.max_steps)
        return step == 1 or any(step % number == 0 for number in every)

    def floating_point_ops(self, inputs: dict[str, Any]) -> int:
        """The schedule counts them: transformers would take a float32 sum of another formula."""
        return 0

    def create_optimizer(self, model: Any = None) -> Any:
        """AdamW: matrices decay, vectors and routers do not; routers and routed layers have their own rates."""
        if self.optimizer is None:
            decaying, rates = set(self.get_decay_parameter_names(self.model)), self._routed_rates()
            groups: dict[tuple[float, float], list[Any]] = {}
            for name, parameter in self.model.named_parameters():
                if not parameter.requires_grad:
                    continue
                decay, rate = self.args.weight_decay if name in decaying else 0.0, rates.get(id(parameter), 1.0)
                if ROUTER_NAME in name:
                    decay = 0.0
                    own = self.predictor_learning_rate if "predictor" in name else self.router_learning_rate
                    rate = rate if own is None else own
                groups.setdefault((decay, rate), []).append(parameter)
            optimizer, options = self.get_optimizer_cls_and_kwargs(self.args, self.model)
            self.optimizer = optimizer(
                [
                    {"params": parameters, "weight_decay": decay, "lr": options["lr"] * rate}
                    for (decay, rate), parameters in groups.items()
                ],
                **options,
            )
        return self.optimizer

    def _routed_rates(self) -> dict[int, float]:
        """Of each parameter of routed layers, as a multiple of the model's rate."""
        rates: dict[int, float] = {}
        capacity = 1.0
        for layer in decoder_layers(self.model):
            if isinstance(layer, RoutedLayer):
                if layer.depth_router is not None:  # without one it takes whom an earlier exit has left
                    capacity = active(layer.depth_router).capacity
                rate = math.sqrt(capacity) if self.routed_learning_rate is None else self.routed_learning_rate
                rates |= {id(parameter): rate for parameter in layer.parameters()}
        return rates

    def create_scheduler(self, num_training_steps: int, optimizer: Any = None) -> Any:
        if self.lr_scheduler is None:
            self.lr_scheduler = LambdaLR(self.optimizer, self.schedule.learning_rate_at)
            self._created_lr_scheduler = True
        return self.lr_scheduler

    def _get_grad_norm(self, model: Any, grad_norm: Any = None) -> Any:
        norm = super()._get_grad_norm(model, grad_norm)
        return norm.full_tensor() if hasattr(norm, "full_tensor") else norm

    # --- what is told ---

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        """A line of metrics.jsonl and one of timings.jsonl, and the same numbers to whoever listens."""
        if "loss" not in logs:  # the summary of a call, which knows nothing of the calls before it
            return
        names = [name for name in LOSSES if name in self.sums]
        losses = torch.stack([self.sums[name].double() for name in names])
        losses = losses / (self.state.global_step - self.clock.step)
        counts = self.sums.get("counts")
        if torch.distributed.is_available() and torch.distributed.is_initialized():
            torch.distributed.all_reduce(losses)
            if counts is not None:
                torch.distributed.all_reduce(counts)
        self.sums = {}
        metrics: dict[str, Any] = {
            "step": self.state.global_step,
            "tokens": self.state.global_step * self.schedule.tokens_per_step,
            "flops": self.schedule.flops_until(self.state.global_step),
            **dict(zip(names, losses.tolist(), strict=True)),
            "grad_norm": logs["grad_norm"],
            "learning_rate": logs["learning_rate"],
        }
        for name in ("loss", "grad_norm"):
            if not math.isfinite(metrics[name]):
                raise ValueError(
                    f"{name} is {metrics[name]} at step {self.state.global_step}: {DIVERGED}; train anew "
                    "with a lower learning_rate"
                )
        if counts is not None:
            metrics["layers"] = {"index": self.model.deciding_layers, **describe(counts)}
            metrics["layers"]["target"] = [router.capacity for router in self.model.depth_routers]
        timings = self.clock.read(self.state.global_step, self.schedule, self.peak)
        self._tell(metrics, timings)

    def _tell(self, metrics: dict[str, Any], timings: dict[str, Any] | None = None) -> None:
        if self.is_world_process_zero():
            self.run.append(METRICS, metrics)
            if timings is not None:
                self.run.append(TIMINGS, timings)
        flat = {**metrics, **(timings or {})}
        layers = flat.pop("layers", {})
        for name in layers.keys() - {"index"}:
            flat |= {f"layer_{i}/{name}": value for i, value in zip(layers["index"], layers[name], strict=True)}
        self.control = self.callback_handler.on_log(self.args, self.state, self.control, flat)

    def evaluate(self, *args: Any, **kwargs: Any) -> dict[str, Any]:
        """Causal and look-ahead loss on the validation windows; alike on all processes, as sharded layers need it."""
        device = next(self.model.parameters()).device
        batches = (batch.to(device) for batch in self.eval_dataset.batches(self.args.per_device_eval_batch_size))
        with self.clock.paused():
            found = evaluate(self.model, batches)
        metrics = {"step": self.state.global_step, "validation_loss": found.loss}
        if isinstance(self.model, RoutedCausalLM):
            metrics["validation_lookahead_loss"] = found.lookahead_loss
            metrics["validation_capacities"] = [layer.capacity for layer in found.layers.values()]
        self._tell(metrics)
        self.control = self.callback_handler.on_evaluate(self.args, self.state, self.control, metrics)
        return metrics

    # --- checkpoints ---

    def _save_checkpoint(self, model: Any, trial: Any) -> None:
        """Weights and optimizer by torch's DCP in safetensors, the rest as the Trainer has it; the marker last."""
        folder = self.run.folder / f"{PREFIX}{self.state.global_step}"
        try:
            with self.clock.paused(), writing(folder):
                super()._save_checkpoint(model, trial)
                self.accelerator.wait_for_everyone()
                if self.is_world_process_zero():
                    self.run.complete(folder)
                self.accelerator.wait_for_everyone()
        except OSError:
            if not (folder / MARKER).exists():
                shutil.rmtree(folder, ignore_errors=True)  # a full disk needs the room
            raise

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """The model as transformers reads it; a checkpoint holds its config alone, and its weights by DCP."""
        if _internal_call:
            if self.args.should_save:
                self.model.config.save_pretrained(output_dir)
            return
        whole = StateDictOptions(full_state_dict=True, cpu_offload=True)  # gathered, on the first process
        weights = get_model_state_dict(self.model, options=whole)
        if self.args.should_save:
            own = own_names(self.model)
            with writing(self.run.folder):
                self.model.save_pretrained(output_dir, state_dict={k: v for k, v in weights.items() if k in own})

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        writer = HuggingFaceStorageWriter(str(Path(output_dir) / STATE_FOLDER), save_distributed=True)
        with warnings.catch_warnings(action="ignore"):  # that there is one process only
            save(self._tensors()[0], storage_writer=writer)
        if self.args.should_save:
            torch.save(self.lr_scheduler.state_dict(), Path(output_dir) / SCHEDULER_NAME)

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: Any = None) -> None:
        """Nothing yet: weights come with the optimizer, once the model is wrapped."""

    def restore(self, checkpoint: Path) -> None:
        """The model of a checkpoint, to be evaluated."""
        tensors = model_tensors(self.model, get_model_state_dict(self.model))
        load_state(checkpoint, tensors)
        self.state.global_step = step_of(checkpoint)

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        if checkpoint is None:
            return
        tensors, optimizer = self._tensors()
        load_state(checkpoint, tensors)
        for name, states in optimizer["state"].items():
            for key in states:
                states[key] = tensors[f"optimizer.{name}.{key}"]
        weights = {name.removeprefix("model."): t for name, t in tensors.items() if name.startswith("model.")}
        options = StateDictOptions(strict=False)  # a weight that is tied to another is stored once
        set_state_dict(
            self.model, self.optimizer.optimizer, model_state_dict=weights, optim_state_dict=optimizer, options=options
        )
        scheduler = Path(checkpoint) / SCHEDULER_NAME
        with reading(scheduler):
            self.lr_scheduler.load_state_dict(torch.load(scheduler, weights_only=True))
        for group, rate in zip(self.optimizer.param_groups, self.lr_scheduler.get_last_lr(), strict=True):
            group["lr"] = rate

    def _load_rng_state(self, checkpoint: str | None) -> None:
        if checkpoint is None:
            return
        name = f"rng_state_{self.args.process_index}.pth" if self.args.world_size > 1 else "rng_state.pth"
        with reading(Path(checkpoint) / name):
            super()._load_rng_state(checkpoint)

    def _load_scaler(self, checkpoint: str | None) -> None:
        """There is none: losses are scaled for float16 alone, in which nothing is trained here."""

    def _tensors(self) -> tuple[dict[str, Any], dict[str, Any]]:
        """All tensors of model and optimizer, by one flat name each, and the optimizer's state around them."""
        weights, optimizer = get_state_dict(self.model, self.optimizer.optimizer)
        states: Any = optimizer["state"]
        return {
            **model_tensors(self.model, weights),
            **{f"optimizer.{name}.{k}": v for name, state in states.items() for k, v in state.items()},
        }, optimizer
