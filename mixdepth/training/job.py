"""`train`: a budget goes in, and a model and its numbers come out, in a folder from which the run can be resumed."""

from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import transformers
from accelerate import PartialState
from transformers import TrainingArguments
from transformers.integrations import get_available_reporting_integrations

from mixdepth.data.corpus import Corpus, collate
from mixdepth.data.sources import absolute
from mixdepth.evaluation.calibration import has_thresholds, set_thresholds
from mixdepth.files import write_json, writing
from mixdepth.machine import matmul_peak
from mixdepth.models.card import write_adapter_card, write_card
from mixdepth.models.fresh import with_shape
from mixdepth.runs.checkpoints import check_step, go_back_to, newest_checkpoint, step_of
from mixdepth.runs.digests import write_digests
from mixdepth.runs.layout import RESULT
from mixdepth.runs.run import Run, tokenise
from mixdepth.runs.settings import TrainConfig
from mixdepth.text import tell
from mixdepth.training.processes import is_first, main_first
from mixdepth.training.schedule import CAPACITY_LEVELS, Schedule, default_learning_rate, plan
from mixdepth.training.start import Start, make_start
from mixdepth.training.trainer import DepthTrainer
from mixdepth.version import made_by

ADAPTER = "adapter"
"""The folder within a run's folder that holds the adapter of a run with method='lora'."""
NUM_CHECKPOINTS = 10
"""How many checkpoints a run writes if its settings do not say."""
EVAL_BATCH_SIZE = 16


def train(out: str | Path, config: TrainConfig | None = None, **settings: Any) -> Run:
    """Train a model in the folder `out`, or resume the run that was stopped there. A finished run is returned as it is.

    Settings are the fields of `TrainConfig`, or one such value: `train("runs/mod", steps=1000)`.
    """
    if config is not None and settings:
        raise ValueError(f"give a TrainConfig or settings, not both: {', '.join(settings)}")
    if config is None:
        config = TrainConfig.from_dict(settings)
    config = replace(config, corpus=absolute(config.corpus))
    run = Run(out)
    if config.model is not None and run.result is not None and run.is_of(config):
        _tell_complete(run)
        return run  # the model that it started from may be gone
    train_on(read_corpus(config), run, config)
    return run


def read_corpus(config: TrainConfig) -> Corpus:
    """Read the text of a run. The first process reads and tokenises it; the others find its tokens in the cache."""
    tokenised = main_first(_processes(), lambda: tokenise(config))
    if not tokenised.folder.is_dir():  # this process is on another machine, with a cache of its own
        tokenised = tokenise(config)
    return tokenised.open()


def train_on(corpus: Corpus, run: Run, config: TrainConfig) -> None:
    """Train a run, or resume it, on its corpus, which has been read already."""
    # 1. Make the model, and plan the steps that fit into the budget.
    state = _processes()
    config = with_shape(config, len(corpus.tokenizer))
    check_windows(corpus, config)
    start = make_start(config, corpus.tokenizer)
    schedule = plan(start.model, config, start.capacity, start.teacher)
    rate = config.learning_rate or default_learning_rate(config)
    trainer_arguments = arguments(run, config, schedule, rate, state.num_processes)

    # 2. Open the folder: make the run, or check that it is the one that is there.
    about = {
        "settings": config.to_dict(),
        "corpus_digest": corpus.digest,
        "parameters": start.model.num_parameters(),
        "heads": getattr(start.model.config, "num_attention_heads", None),
        "steps": schedule.steps,
        "flops": schedule.flops,
        "learning_rate": rate,
        "versions": {**made_by(), "torch": torch.__version__, "transformers": transformers.__version__},
    }
    with ExitStack() as stack:
        main_first(state, lambda: stack.enter_context(run.open(about)))

        # 3. Train and write the model, unless the run is finished.
        if run.result is None:
            trainer = _train(run, config, corpus, start, schedule, trainer_arguments, state)
            _finish(trainer, run, config, corpus, start, schedule, state)
        else:
            _tell_complete(run)
        state.wait_for_everyone()


def _tell_complete(run: Run) -> None:
    """Say that a finished run was asked for again."""
    if is_first():
        tell(f"{run.folder} is already complete: nothing was trained")


def _processes() -> PartialState:
    """Return the processes that train together; there may be only one."""
    return PartialState(cpu=not torch.accelerator.is_available())


def _train(
    run: Run,
    config: TrainConfig,
    corpus: Corpus,
    start: Start,
    schedule: Schedule,
    trainer_arguments: TrainingArguments,
    state: PartialState,
) -> DepthTrainer:
    """Train from the newest checkpoint to the last step."""
    model = start.model
    batches = corpus.train.windows(config.context).whole_batches(config.batch_size)
    tokenizer = start.tokenizer or corpus.tokenizer

    # 1. Find the checkpoint to resume from, and remove what was written after it.
    def prepare() -> Path | None:
        num_epochs = schedule.steps * config.batch_size / len(batches)
        tell(
            f"{type(model).__name__} of {model.num_parameters():,} parameters: {schedule.steps:,} steps, "
            f"{schedule.flops:.3g} FLOPs, {num_epochs:.2f} epochs of {config.corpus}"
        )
        if config.engine == "fsdp" and state.num_processes == 1:
            tell("engine='fsdp' has no effect on one process: start several with torchrun")
        with writing(run.folder):
            tokenizer.save_pretrained(run.folder)
            return _go_back(run, schedule.steps)

    checkpoint = main_first(state, prepare)

    # 2. Train. If the last step was done already, only the end is missing.
    dtype = torch.bfloat16 if config.bf16 else torch.float32
    trainer = DepthTrainer(
        model,
        trainer_arguments,
        run=run,
        config=config,
        schedule=schedule,
        teacher=start.teacher,
        shard=config.engine == "fsdp" and state.num_processes > 1,
        peak=matmul_peak(state.device, dtype) * state.num_processes,
        train_dataset=batches,
        eval_dataset=corpus.validation.windows(config.context).spread(config.eval_windows),
        data_collator=collate,
    )
    if checkpoint is None:
        trainer.train()
    elif step_of(checkpoint) < schedule.steps:
        trainer.train(resume_from_checkpoint=str(checkpoint))
    else:
        trainer.restore(checkpoint)
    return trainer


def _finish(
    trainer: DepthTrainer,
    run: Run,
    config: TrainConfig,
    corpus: Corpus,
    start: Start,
    schedule: Schedule,
    state: PartialState,
) -> None:
    """Write the trained model and its results."""
    # 1. Set thresholds so that causal routing chooses its intended share of the tokens.
    model = start.model
    if config.calibrate and has_thresholds(model):
        tell("calibrating")
        windows = corpus.train.windows(config.context).spread(config.calibrate)
        set_thresholds(model, [batch.to(state.device) for batch in windows.batches(EVAL_BATCH_SIZE)])

    # 2. Save the adapter, and merge it into the model.
    if start.adapter is not None:
        if state.is_main_process:
            with writing(run.folder):
                start.adapter.save_pretrained(run.folder / ADAPTER)
                write_adapter_card(run.folder / ADAPTER, run.folder.resolve().name, str(config.model))
        start.adapter.merge_and_unload()

    # 3. Evaluate and save the model. The result is written last: with it the run is finished.
    evaluation = trainer.evaluate()
    trainer.save_model(str(run.folder))
    if state.is_main_process:
        result = {
            **evaluation,
            "validation_bits_per_byte": corpus.validation.bits_per_nat * evaluation["validation_loss"],
            "tokens": schedule.steps * schedule.tokens_per_step,
            "flops": schedule.flops,
        }
        with writing(run.folder):
            write_card(run.folder, run.folder.resolve().name, model, config.model, _card_settings(config), result)
            write_digests(run.folder)
            write_json(run.folder / RESULT, result)
        sentence = idle_sentence(model, evaluation.get("validation_capacities", []))
        if sentence is not None:
            tell(sentence)


def idle_sentence(model: Any, capacities: list[float]) -> str | None:
    """Return what to say about the routed layers whose realised causal capacity is 0; None if there is no such layer.

    `capacities` has one value for each layer with a router. A model without thresholds chooses by chance.
    """
    if 0 not in capacities or not has_thresholds(model):
        return None
    idle = []
    for index, capacity in zip(model.deciding_layers, capacities, strict=True):
        if capacity == 0:
            idle.append(str(index))
    named = f"layer {idle[0]}"
    if len(idle) > 1:
        named = f"layers {', '.join(idle[:-1])} and {idle[-1]}"
    return (
        f"no token is routed through {named} when the model chooses causally: train longer, or run mixdepth.calibrate"
    )


def _go_back(run: Run, num_steps: int) -> Path | None:
    """Put the folder back to its newest whole checkpoint, or to the start, and say so."""
    checkpoint, damaged = newest_checkpoint(run.folder)
    goal = "the start" if checkpoint is None else checkpoint.name
    for sentence in damaged:
        tell(f"{sentence}: going back to {goal}")
    if checkpoint is not None:
        tell(f"resuming from {checkpoint.name}")
        check_step(checkpoint, num_steps)
    go_back_to(run.folder, checkpoint)
    return checkpoint


def _card_settings(config: TrainConfig) -> dict[str, Any]:
    """Return the settings that the model card of a run lists."""
    settings: dict[str, Any] = {"text": Path(config.corpus).name, "context": config.context}
    if config.model is not None:
        settings["method"] = config.method
        settings["distill"] = config.distill
    return settings


def check_windows(corpus: Corpus, config: TrainConfig) -> None:
    """Refuse a corpus that is too small for one batch to train on and one window to evaluate on."""
    for name, side, needed in (("training", corpus.train, config.batch_size), ("validation", corpus.validation, 1)):
        number = len(side.windows(config.context))
        if number < needed:
            raise ValueError(
                f"the {name} text of corpus {corpus.name!r} has {len(side.tokens)} tokens, too few for {needed} "
                f"windows of context={config.context}: take more text, a shorter context or a smaller batch_size"
            )


def arguments(run: Run, config: TrainConfig, schedule: Schedule, rate: float, num_processes: int) -> TrainingArguments:
    """Translate the settings of a run into those of transformers' Trainer."""
    # 1. How a batch is shared out: over processes, and then over forward passes.
    if config.batch_size % num_processes:
        raise ValueError(
            f"batch_size={config.batch_size} cannot be shared by {num_processes} processes: make it a multiple"
        )
    share = config.batch_size // num_processes
    micro_batch_size = min(config.micro_batch_size or share, share)
    if share % micro_batch_size:
        raise ValueError(f"micro_batch_size={micro_batch_size} does not divide a process's share of {share} windows")

    # 2. What else must be there.
    trackers = get_available_reporting_integrations()
    for name in config.report_to:
        if name not in trackers:
            raise ValueError(f"report_to={name!r} is not installed; there is {', '.join(trackers) or 'none'}")
    if config.compile:  # a graph for each capacity on its way down, and for what evaluation needs
        torch._dynamo.config.recompile_limit = max(torch._dynamo.config.recompile_limit, 2 * CAPACITY_LEVELS)

    # 3. The Trainer's names for it all.
    return TrainingArguments(
        output_dir=str(run.folder),
        max_steps=schedule.steps,
        per_device_train_batch_size=micro_batch_size,
        gradient_accumulation_steps=share // micro_batch_size,
        per_device_eval_batch_size=EVAL_BATCH_SIZE,
        learning_rate=rate,
        weight_decay=config.weight_decay,
        adam_beta2=config.beta2,
        max_grad_norm=config.max_grad_norm,
        seed=config.seed,
        data_seed=config.seed,
        bf16=config.bf16,
        torch_compile=config.compile,
        gradient_checkpointing=config.gradient_checkpointing,
        gradient_checkpointing_kwargs={"use_reentrant": False} if config.gradient_checkpointing else None,
        ddp_find_unused_parameters=False,
        dataloader_drop_last=True,
        dataloader_pin_memory=torch.accelerator.is_available(),
        logging_steps=config.log_every,
        logging_first_step=True,
        logging_nan_inf_filter=False,  # it would wait for the device in every step
        save_steps=config.save_every or max(1, schedule.steps // NUM_CHECKPOINTS),
        eval_strategy="no" if config.eval_every is None else "steps",
        eval_steps=config.eval_every,
        report_to=list(config.report_to) or "none",
        remove_unused_columns=False,
        use_cpu=not torch.accelerator.is_available(),
    )
