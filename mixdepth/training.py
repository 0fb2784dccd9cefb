"""`train`: a budget in, a model and its numbers out, in a folder that remembers how far it got."""

import functools
import math
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import transformers
from accelerate import PartialState
from accelerate.utils import broadcast_object_list
from transformers import AutoModelForCausalLM, TrainingArguments
from transformers.integrations import get_available_reporting_integrations

import mixdepth
from mixdepth.card import write_adapter_card, write_card
from mixdepth.data import Corpus, collate, load_corpus
from mixdepth.digests import write_digests
from mixdepth.evaluation import has_thresholds, set_thresholds
from mixdepth.files import tell, write_json
from mixdepth.flops import find_shape
from mixdepth.hf import route
from mixdepth.loading import tokenizer_of
from mixdepth.pretrained import Start, start_from
from mixdepth.run import RESULT, Run, step_of, writing
from mixdepth.schedule import CAPACITY_LEVELS, Schedule, plan
from mixdepth.settings import TrainConfig
from mixdepth.shape import model_config
from mixdepth.sources import absolute
from mixdepth.trainer import DepthTrainer, check_checkpoint

PEAK_SIZE = 1024
ADAPTER = "adapter"
TUNING_RATES = {"full": 1e-4, "lora": 3e-4, "router": 1e-3}


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
        "versions": {package.__name__: package.__version__ for package in (mixdepth, torch, transformers)},
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


def corpus_of(config: TrainConfig, tokenizer: str | None = None) -> Corpus:
    """The text that these settings name, by the model's tokenizer or another that is the same."""
    own = config.tokenizer if config.model is None else tokenizer_of(config.model)
    return load_corpus(
        config.corpus,
        tokenizer or own,
        text_field=config.text_field,
        validation=config.validation,
        test=config.test,
    )


def text_of(run: Run) -> Corpus:
    """The text that a run was trained on, by the run's own tokenizer; any other is refused."""
    settings = run.settings
    corpus = corpus_of(settings, None if settings.model is None else str(run.folder))
    if run.about["corpus_digest"] != corpus.digest:
        raise ValueError(
            f"the corpus {settings.corpus!r} is no longer what {str(run.folder)!r} was trained on: restore it, or name "
            "another text"
        )
    return corpus


def main_first(state: PartialState, work: Callable[[], Any]) -> Any:
    """Do it on the first process and hand the result to all; what it refuses, all refuse."""
    answer: list[Any] = [None, None]
    if state.is_main_process:
        try:
            answer[0] = work()
        except (ValueError, OSError) as error:
            answer[1] = error
    if state.num_processes > 1:
        told = [answer[0] if isinstance(answer[0], Path) else None, None if answer[1] is None else str(answer[1])]
        broadcast_object_list(told)
        if not state.is_main_process:
            answer = [told[0], None if told[1] is None else ValueError(told[1])]
    if answer[1] is not None:
        raise answer[1]
    return answer[0]


def with_shape(config: TrainConfig, vocab_size: int) -> TrainConfig:
    """The settings with `shape` resolved to layers and width."""
    if config.shape is None:
        return config
    rest = {"num_experts": config.num_experts, "experts_per_token": config.experts_per_token}
    layers, width = find_shape(config.shape, config.depth, vocab_size=vocab_size, context=config.context, **rest)
    return replace(config, layers=layers, width=width, shape=None)


def make_start(config: TrainConfig, tokenizer: Any) -> Start:
    """A fresh model, or a pretrained one."""
    if config.model is not None:
        return start_from(config)
    model = make_model(config, len(tokenizer))
    model.generation_config.eos_token_id = model.generation_config.pad_token_id = tokenizer.eos_token_id
    return Start(model)


def make_model(config: TrainConfig, vocab_size: int) -> Any:
    """A fresh model; the weights of a dense and a routed model of one seed are the same."""
    torch.manual_seed(config.seed)
    shape = model_config(
        config.layers,
        config.width,
        vocab_size,
        config.num_experts,
        config.experts_per_token,
        config.context,
        config.heads,
    )
    model = AutoModelForCausalLM.from_config(shape)
    return model if config.depth is None else route(model, config.depth)


def check_windows(corpus: Corpus, config: TrainConfig) -> None:
    for name, side, needed in (("training", corpus.train, config.batch_size), ("validation", corpus.validation, 1)):
        number = len(side.windows(config.context))
        if number < needed:
            raise ValueError(
                f"the {name} text of corpus {corpus.name!r} has {len(side.tokens)} tokens, too few for {needed} "
                f"windows of context={config.context}: take more text, a shorter context or a smaller batch_size"
            )


def default_learning_rate(config: TrainConfig) -> float:
    """8e-3 for two layers of width 64, less for wider models and where a token passes more layers on average: LOG.md,
    section 5. Of a pretrained model by what is trained."""
    if config.model is not None:
        return TUNING_RATES[config.method]
    routed = {} if config.depth is None else config.depth.routed_layers(config.layers)
    passed = config.layers - sum(1 - capacity for capacity in routed.values())
    return 8e-3 * (64 / config.width) * math.sqrt(2 / max(1, passed))


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


@functools.cache
def matmul_peak(device: torch.device, dtype: torch.dtype, seconds: float = 0.2) -> float:
    """FLOPs in a second of a large matrix product: what this machine can do at best."""
    x = torch.ones(PEAK_SIZE, PEAK_SIZE, device=device, dtype=dtype)

    def measure(repeats: int) -> float:
        start = time.perf_counter()
        for _ in range(repeats):
            y = x @ x
        y[0, 0].item()  # wait for the device
        return time.perf_counter() - start

    once = max(measure(2) / 2, 1e-6)
    repeats = max(1, int(seconds / once))
    return 2 * PEAK_SIZE**3 * repeats / measure(repeats)
