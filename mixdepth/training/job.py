"""`train`: a budget in, a model and its numbers out, in a folder that remembers how far it got."""

import functools
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
from mixdepth.models.fresh import make_model, with_shape
from mixdepth.runs.checkpoints import check_checkpoint
from mixdepth.runs.digests import write_digests
from mixdepth.runs.run import RESULT, Run, corpus_of, step_of
from mixdepth.runs.settings import TrainConfig
from mixdepth.text import tell
from mixdepth.training.processes import main_first
from mixdepth.training.schedule import CAPACITY_LEVELS, Schedule, default_learning_rate, plan
from mixdepth.training.start import Start, start_from
from mixdepth.training.trainer import DepthTrainer
from mixdepth.version import __version__

ADAPTER = "adapter"


def train(out: str | Path, config: TrainConfig | None = None, **settings: Any) -> Run:
    """Train a model from scratch in the folder `out`, or go on where an earlier call was stopped.

    Settings are the fields of `TrainConfig`, or one such value: `train("runs/mod", steps=1000)`. Of a run that is
    finished nothing is done again.
    """
    if config is not None and settings:
        raise ValueError(f"give a TrainConfig or settings, not both: {', '.join(settings)}")
    given = TrainConfig.from_dict(settings) if config is None else config
    config = replace(given, corpus=absolute(given.corpus))
    state = PartialState(cpu=not torch.accelerator.is_available())
    run = Run(out)
    if config.model is not None and run.result is not None and run.is_of(config):
        return run  # what it started from may be gone

    read = functools.partial(corpus_of, config)
    main_first(state, read)  # the others find the tokens in the cache
    corpus = read()
    config = with_shape(config, len(corpus.tokenizer))
    check_windows(corpus, config)
    start = make_start(config, corpus.tokenizer)
    schedule = plan(start.model, config, start.capacity, start.teacher)
    rate = config.learning_rate or default_learning_rate(config)
    trainer_arguments = arguments(run, config, schedule, rate, state.num_processes)
    about = {
        "settings": config.to_dict(),
        "corpus_digest": corpus.digest,
        "parameters": start.model.num_parameters(),
        "heads": getattr(start.model.config, "num_attention_heads", None),
        "steps": schedule.steps,
        "flops": schedule.flops,
        "learning_rate": rate,
        "versions": {
            "mixdepth": __version__,
            "torch": torch.__version__,
            "transformers": transformers.__version__,
        },
    }
    with ExitStack() as stack:
        main_first(state, lambda: stack.enter_context(run.open(about)))
        if run.result is None:
            _train(run, config, corpus, start, schedule, trainer_arguments, state)
        state.wait_for_everyone()
    return run


def _train(
    run: Run, config: TrainConfig, corpus: Corpus, start: Start, schedule: Schedule, args: Any, state: PartialState
) -> None:
    model = start.model
    windows = corpus.train.windows(config.context).whole_batches(config.batch_size)

    def begin() -> Path | None:
        epochs = schedule.steps * config.batch_size / len(windows)
        tell(
            f"{type(model).__name__} of {model.num_parameters():,} parameters: {schedule.steps:,} steps, "
            f"{schedule.flops:.3g} FLOPs, {epochs:.2f} epochs of {config.corpus}"
        )
        with writing(run.folder):
            (start.tokenizer or corpus.tokenizer).save_pretrained(run.folder)
            checkpoint, damaged = run.newest_checkpoint()
            for sentence in damaged:
                tell(f"{sentence}: going back to {checkpoint.name if checkpoint else 'the start'}")
            if checkpoint is not None:
                tell(f"going on from {checkpoint.name}")
                check_checkpoint(checkpoint, schedule.steps)
            run.go_back_to(checkpoint)
        return checkpoint

    checkpoint = main_first(state, begin)
    trainer = DepthTrainer(
        model,
        args,
        run=run,
        schedule=schedule,
        router_learning_rate=config.router_learning_rate,
        predictor_learning_rate=config.predictor_learning_rate,
        routed_learning_rate=config.routed_learning_rate,
        teacher=start.teacher,
        distill=config.distill,
        shard=config.engine == "fsdp" and state.num_processes > 1,
        peak=matmul_peak(state.device, torch.bfloat16 if config.bf16 else torch.float32) * state.num_processes,
        train_dataset=windows,
        eval_dataset=corpus.validation.windows(config.context).spread(config.eval_windows),
        data_collator=collate,
    )
    if checkpoint is None or step_of(checkpoint) < schedule.steps:
        trainer.train(resume_from_checkpoint=None if checkpoint is None else str(checkpoint))
    else:  # all that is missing is the end
        trainer.restore(checkpoint)
    if config.calibrate and has_thresholds(model):
        tell("calibrating")
        text = corpus.train.windows(config.context).spread(config.calibrate)
        set_thresholds(model, [batch.to(state.device) for batch in text.batches(args.per_device_eval_batch_size)])
    if start.adapter is not None:
        if state.is_main_process:
            with writing(run.folder):
                start.adapter.save_pretrained(run.folder / ADAPTER)
                write_adapter_card(run.folder / ADAPTER, run.folder.resolve().name, str(config.model))
        start.adapter.merge_and_unload()
    found = trainer.evaluate()
    trainer.save_model(str(run.folder))
    if state.is_main_process:
        bits = corpus.validation.bits_per_nat * found["validation_loss"]
        spent = {"tokens": schedule.steps * schedule.tokens_per_step, "flops": schedule.flops}
        result = {**found, "validation_bits_per_byte": bits, **spent}
        with writing(run.folder):
            write_card(run.folder, run.folder.resolve().name, model, config.model, _about(config), result)
            write_digests(run.folder)
            write_json(run.folder / RESULT, result)


def _about(config: TrainConfig) -> dict[str, Any]:
    """What a model card tells of a run, beside what it came to."""
    names = ("method", "distill") if config.model is not None else ()
    text = Path(config.corpus).name
    return {"text": text, "context": config.context, **{name: getattr(config, name) for name in names}}


def make_start(config: TrainConfig, tokenizer: Any) -> Start:
    """A fresh model, or a pretrained one."""
    if config.model is not None:
        return start_from(config)
    model = make_model(config, len(tokenizer))
    model.generation_config.eos_token_id = model.generation_config.pad_token_id = tokenizer.eos_token_id
    return Start(model)


def check_windows(corpus: Corpus, config: TrainConfig) -> None:
    for name, side, needed in (("training", corpus.train, config.batch_size), ("validation", corpus.validation, 1)):
        number = len(side.windows(config.context))
        if number < needed:
            raise ValueError(
                f"the {name} text of corpus {corpus.name!r} has {len(side.tokens)} tokens, too few for {needed} "
                f"windows of context={config.context}: take more text, a shorter context or a smaller batch_size"
            )


def arguments(run: Run, config: TrainConfig, schedule: Schedule, rate: float, num_processes: int) -> TrainingArguments:
    """The run in the Trainer's words."""
    if config.batch_size % num_processes:
        raise ValueError(
            f"batch_size={config.batch_size} cannot be shared by {num_processes} processes: make it a multiple"
        )
    share = config.batch_size // num_processes
    micro = min(config.micro_batch_size or share, share)
    if share % micro:
        raise ValueError(f"micro_batch_size={micro} does not divide a process's share of {share} windows")
    known = get_available_reporting_integrations()
    for name in config.report_to:
        if name not in known:
            raise ValueError(f"report_to={name!r} is not installed; there is {', '.join(known) or 'none'}")
    if config.compile:  # a graph for each capacity on its way down, and for what evaluation needs
        torch._dynamo.config.recompile_limit = max(torch._dynamo.config.recompile_limit, 2 * CAPACITY_LEVELS)
    return TrainingArguments(
        output_dir=str(run.folder),
        max_steps=schedule.steps,
        per_device_train_batch_size=micro,
        gradient_accumulation_steps=share // micro,
        per_device_eval_batch_size=16,
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
        save_steps=config.save_every or max(1, schedule.steps // 10),
        eval_strategy="no" if config.eval_every is None else "steps",
        eval_steps=config.eval_every,
        report_to=list(config.report_to) or "none",
        remove_unused_columns=False,
        use_cpu=not torch.accelerator.is_available(),
    )
