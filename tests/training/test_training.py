"""Training: what a run computes and writes."""

import json
import math
import time

import pytest
import torch
from corpora import TINY, documents, flags, lines, refusal, write_folder

import mixdepth
from mixdepth.data import corpus as corpus_module
from mixdepth.data.corpus import load_corpus
from mixdepth.models.fresh import make_model, with_shape
from mixdepth.runs.checkpoints import complete_checkpoints
from mixdepth.runs.run import Run
from mixdepth.runs.settings import MAY_DIFFER, NOT_COMMON, OF_FRESH, OF_PRETRAINED
from mixdepth.training.schedule import default_learning_rate, plan
from mixdepth.training.trainer import DepthTrainer, DivergedError


def test_a_run_tells_all_that_happened(finished, corpus):
    run = Run(finished / "mod")
    training = [line for line in run.metrics if "loss" in line]
    assert [line["step"] for line in training] == sorted({1, *range(3, 61, 3), 20, 40})
    model = mixdepth.load(str(run.folder)).model
    step_flops = 3 * 4 * mixdepth.count_flops(model, 32).total
    for line in training:
        assert line["flops"] == line["step"] * step_flops
        assert line["tokens"] == line["step"] * 4 * 32
        assert line["loss"] == pytest.approx(line["lm_loss"] + 0.01 * line["predictor_loss"], rel=1e-6)
        layers = line["layers"]
        assert layers["index"] == [1]
        assert layers["capacity"] == layers["target"] == [0.25]
        for name in ("causal_capacity", "precision", "recall", "never_chosen"):
            assert 0 <= layers[name][0] <= 1
        assert layers["gate_std"][0] > 0
    assert training[-1]["loss"] < training[0]["loss"] - 1
    assert run.result["flops"] == run.about["flops"] == 60 * step_flops
    timings = lines(run.folder / "timings.jsonl")
    assert [line["step"] for line in timings] == [line["step"] for line in training]
    assert all(line["tokens_per_second"] > 0 and line["share_of_peak"] > 0 for line in timings)
    assert len(complete_checkpoints(run.folder)) == 2
    dense = [line for line in Run(finished / "dense").metrics if "loss" in line]
    assert all("lm_loss" not in line and "layers" not in line for line in dense)


def test_the_learning_rate_rises_and_falls_to_zero_at_the_last_step(finished):
    rates = {line["step"]: line["learning_rate"] for line in Run(finished / "mod").metrics if "loss" in line}
    rising = round(Run(finished / "mod").settings.warmup * 60)
    assert rates[1] == pytest.approx(4e-3 / rising)
    assert rates[rising] == pytest.approx(4e-3)
    assert rates[60] == pytest.approx(2e-3 * (1 + math.cos(math.pi * (59 - rising) / (60 - rising))))
    schedule = plan(make_model(Run(finished / "mod").settings, 256), Run(finished / "mod").settings)
    assert schedule.learning_rate_at(60) == 0
    assert plan_of(warmup=0.0, steps=1).learning_rate_at(0) == 1


def plan_of(**settings):
    config = mixdepth.TrainConfig(layers=2, width=32, context=32, batch_size=4, depth=None, **settings)
    return plan(make_model(config, 256), config)


def test_the_result_is_the_loss_of_the_model_that_was_saved(finished, corpus):
    run = Run(finished / "mod")
    model = mixdepth.load(str(run.folder)).model
    text = load_corpus(corpus).validation
    found = mixdepth.evaluate(model, text.windows(32).spread(8).batches(16))
    assert found.loss == run.result["validation_loss"]
    assert found.lookahead_loss == run.result["validation_lookahead_loss"]
    assert [layer.capacity for layer in found.layers.values()] == run.result["validation_capacities"]
    bits = found.loss / torch.log(torch.tensor(2.0)).item() * len(text.tokens) / text.num_bytes
    assert run.result["validation_bits_per_byte"] == pytest.approx(bits)


def test_dense_and_routed_models_of_a_seed_start_with_the_same_weights():
    config = mixdepth.TrainConfig(steps=1, layers=2, width=32)
    dense = make_model(mixdepth.TrainConfig(steps=1, layers=2, width=32, depth=None), 256).state_dict()
    for name, tensor in make_model(config, 256).state_dict().items():
        assert "depth_router" in name or torch.equal(tensor, dense[name])


def test_heads_are_those_asked_for_and_of_16_by_default():
    for width, heads, expected in ((32, None, 2), (64, None, 4), (80, None, 5), (256, None, 8), (64, 8, 8), (64, 2, 2)):
        config = mixdepth.TrainConfig(steps=1, layers=1, width=width, heads=heads, depth=None)
        assert make_model(config, 256).config.num_attention_heads == expected
    with pytest.raises(ValueError, match=r"heads must divide width=64 into even parts, not be 3: give 4, say"):
        make_model(mixdepth.TrainConfig(steps=1, layers=1, width=64, heads=3, depth=None), 256)


def test_routers_do_not_decay_and_routed_layers_have_learning_rates_of_their_own(corpus, tmp_path, monkeypatch):
    groups = {}
    create = DepthTrainer.create_optimizer

    def watch(trainer, model=None):
        optimizer = create(trainer, model)
        names = {id(parameter): name for name, parameter in trainer.model.named_parameters()}
        for group in optimizer.param_groups:
            groups.update({names[id(p)]: (group["weight_decay"], group["lr"]) for p in group["params"]})
        return optimizer

    monkeypatch.setattr(DepthTrainer, "create_optimizer", watch)
    settings = {**TINY, "corpus": corpus, "steps": 2, "router_learning_rate": 3.0, "routed_learning_rate": 0.5}
    settings |= {"weight_decay": 0.5}
    run = mixdepth.train(tmp_path / "run", **settings, depth=mixdepth.DepthConfig(capacity=0.25))
    expected = {}
    for name, parameter in make_model(run.settings, 256).named_parameters():
        is_router = "depth_router" in name
        rate = (1.0 if "predictor" in name else 3.0) if is_router else 0.5 if ".layers.1." in name else 1.0
        expected[name] = (0.0 if is_router or parameter.ndim < 2 else 0.5, 4e-3 * rate)
    assert groups == expected
    assert {rate for _, rate in groups.values()} == {4e-3, 2e-3, 1.2e-2}

    groups.clear()
    depth = mixdepth.DepthConfig(capacity=0.25)
    mixdepth.train(tmp_path / "usual", **{**TINY, "corpus": corpus, "steps": 2}, depth=depth)
    for name, (_, rate) in groups.items():  # a routed layer and its router: the root of the capacity
        assert rate == (2e-3 if ".layers.1." in name and "predictor" not in name else 4e-3), name


def test_the_default_rate_goes_by_the_layers_that_a_token_passes():
    def rate(depth, **shape):
        return default_learning_rate(mixdepth.TrainConfig(steps=1, depth=depth, **shape))

    assert rate(None, layers=2, width=64) == 8e-3
    assert rate(None, layers=8, width=32) == 8e-3
    assert rate(mixdepth.DepthConfig(capacity=0.5), layers=4, width=64) == pytest.approx(8e-3 * (2 / 3) ** 0.5)
    assert rate(mixdepth.DepthConfig(capacity=0.1, every=1), layers=2, width=64) == 8e-3 * 2**0.5  # one, not 0.2


def test_micro_batches_change_nothing_but_the_order_of_sums(corpus, tmp_path):
    small = write_folder(tmp_path / "texts", documents(20, 150))  # not a multiple of 4 windows, and 3 epochs of them
    num_windows = len(load_corpus(small).train.windows(32))
    assert num_windows % 4
    runs = []
    for micro in (4, 1):
        settings = {**TINY, "corpus": small, "steps": 3 * (num_windows // 4), "micro_batch_size": micro}
        depth = mixdepth.DepthConfig(capacity=0.25, predictor_loss_coef=0.5)
        runs.append(mixdepth.train(tmp_path / str(micro), **settings, depth=depth).metrics)
    for ours, theirs in zip(*runs, strict=True):
        for name in ("loss", "lm_loss", "predictor_loss", "grad_norm"):
            if name in ours:
                assert ours[name] == pytest.approx(theirs[name], rel=1e-3), name  # after many steps
        if "layers" in ours:
            for name in ours["layers"]:
                assert ours["layers"][name] == pytest.approx(theirs["layers"][name], rel=1e-2), name


@pytest.mark.parametrize("budget", [{"flops": 1e9}, {"tokens": 6_000}, {"steps": 40}])
@pytest.mark.parametrize("capacity_steps", [0, 20])
def test_a_budget_is_spent_to_the_last_step_that_fits(budget, capacity_steps):
    shape = {"layers": 2, "width": 32, "context": 32, "batch_size": 4}
    depth = mixdepth.DepthConfig(capacity=0.25)
    config = mixdepth.TrainConfig(**shape, **budget, capacity_steps=capacity_steps, depth=depth)
    model = make_model(config, 256)
    schedule = plan(model, config)
    spent = sum(schedule.flops_at(step) for step in range(schedule.steps))
    assert schedule.flops == spent
    if "flops" in budget:
        assert spent <= 1e9 < spent + schedule.flops_at(schedule.steps)
    else:
        assert schedule.steps == {"tokens": 6_000 // 128, "steps": 40}[next(iter(budget))]
    assert model.depth_config.capacity == 0.25
    assert schedule.flops_at(schedule.steps) == 3 * 4 * mixdepth.count_flops(model, 32).total
    capacities = [schedule.capacity_at(step) for step in range(21)]
    assert capacities[20] == 0.25
    assert capacities[0] == (1 if capacity_steps else 0.25)
    assert capacities == sorted(capacities, reverse=True)


def test_capacity_follows_its_schedule(corpus, tmp_path):
    settings = {**TINY, "corpus": corpus, "steps": 24, "capacity_steps": 16, "log_every": 1}
    run = mixdepth.train(tmp_path / "run", **settings, depth=mixdepth.DepthConfig(capacity=0.25))
    targets = [line["layers"]["target"][0] for line in run.metrics if "layers" in line]
    assert targets == [1 - 0.75 * step / 16 for step in range(16)] + [0.25] * 8
    realised = [line["layers"]["capacity"][0] for line in run.metrics if "layers" in line]
    assert all(0 <= share - target < 1 / 32 for share, target in zip(realised, targets, strict=True))
    flops = [line["flops"] for line in run.metrics if "flops" in line]
    assert flops[-1] == run.about["flops"]
    assert flops[1] - flops[0] > flops[-1] - flops[-2]
    assert mixdepth.load(str(run.folder)).model.depth_config.capacity == 0.25


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"flops": 1e3}, "flops=1000 is too small for one step"),
        ({"tokens": 5}, "tokens=5 is too small for one step"),
        ({}, "give one budget of flops, tokens and steps, not none"),
        ({"steps": 3, "flops": 1e9}, "not flops and steps"),
        ({"steps": 3, "context": 60000}, "too few for"),
        ({"steps": 3, "width": 33}, "width must be a multiple of 16"),
        ({"steps": 3, "capacity": 1.5}, "capacity must be a fraction in (0, 1], not 1.5"),
        ({"steps": 3, "batch_size": 4, "micro_batch_size": 3}, "batch_size must be a multiple of micro_batch_size=3"),
        ({"steps": 3, "capacity_steps": 3}, "capacity_steps must be below the 3 steps"),
        ({"steps": 0}, "steps must be a whole number of at least 1, not 0"),
        ({"steps": 3, "learning_rate": "fast"}, "learning_rate must be a positive number, not 'fast'"),
        ({"steps": 3, "engine": "magic"}, "engine must be one of ddp, fsdp, not 'magic'"),
        ({"steps": 3, "corpus": "nowhere"}, "nowhere' is not a file, a folder or a glob"),
        ({"steps": 3, "tokenizer": "bpe:9"}, "must say how many tokens"),
        ({"steps": 3, "validation": "abc"}, "validation must be a positive number, not 'abc'"),
        ({"steps": 3, "warmup": "none"}, "warmup must be a number, not None"),
        ({"steps": 3, "seed": 2**32}, "seed must be below 2**32"),
        ({"steps": 3, "report_to": "wandb"}, "report_to='wandb' is not installed; there is "),
        ({"steps": 3, "shape": "params=1M"}, "shape finds layers and width: give it or layers, not both"),
        ({"steps": 3, "dense": "", "gate": "raw"}, "a dense model has no gate"),
    ],
)
def test_a_wrong_setting_is_answered_in_a_sentence(change, message, corpus, tmp_path):
    settings = flags({**TINY, "corpus": corpus, **change})
    assert message in refusal("train", *(part for part in settings if part), "--out", str(tmp_path / "run"))
    assert not (tmp_path / "run").exists()


def test_a_run_that_diverges_stops_and_says_so(corpus, tmp_path):
    settings = {**TINY, "corpus": corpus, "steps": 60, "learning_rate": 1e9, "max_grad_norm": 0.0}
    with pytest.raises(ValueError, match=r"(loss|grad_norm) is (nan|inf) at step \d+: the run has diverged"):
        mixdepth.train(tmp_path / "run", **settings, depth=None)


def test_a_run_that_has_diverged_raises_an_error_of_its_own_kind(corpus, tmp_path):
    settings = {**TINY, "corpus": corpus, "steps": 60, "learning_rate": 1e9, "max_grad_norm": 0.0}
    with pytest.raises(DivergedError):
        mixdepth.train(tmp_path / "run", **settings, depth=None)


def test_the_text_is_read_once_at_a_start(corpus, tmp_path, monkeypatch):
    read = []

    def watch(documents, source):
        read.append(source)
        return survey(documents, source)

    survey = corpus_module._survey
    monkeypatch.setattr(corpus_module, "_survey", watch)
    run = mixdepth.train(tmp_path / "run", **TINY, corpus=corpus, steps=2, depth=None)
    assert read == [corpus]
    run.corpus()
    assert read == [corpus, corpus]


def test_each_setting_says_which_runs_it_belongs_to():
    assert set(MAY_DIFFER) == {"engine", "report_to", "compile", "gradient_checkpointing", "micro_batch_size"}
    assert set(OF_PRETRAINED) == {"model", "method", "lora_rank", "distill"}
    shape = {"layers", "width", "heads", "shape"}
    assert set(OF_FRESH) == {*shape, "num_experts", "experts_per_token", "tokenizer"}
    found_by_plan = {*shape, "depth", "flops", "tokens", "steps", "seed"}
    assert set(NOT_COMMON) == {*found_by_plan, *OF_PRETRAINED, "capacity_steps"}


@pytest.mark.parametrize("setting", ["bf16", "compile", "gradient_checkpointing"])
def test_other_ways_of_computing_train_the_same_way(setting, finished, corpus, tmp_path):
    settings = {**TINY, "corpus": corpus, "steps": 6}
    depth = mixdepth.DepthConfig(capacity=0.25)
    runs = [
        mixdepth.train(tmp_path / str(value), **settings, depth=depth, **{setting: value}) for value in (False, True)
    ]
    tolerance = {"bf16": 0.02, "compile": 1e-4, "gradient_checkpointing": 0}[setting]  # checkpointing: to the bit
    for ours, theirs in zip(runs[1].metrics, runs[0].metrics, strict=True):
        name = "loss" if "loss" in ours else "validation_loss"
        assert abs(ours[name] - theirs[name]) <= tolerance
    torch._dynamo.reset()


@pytest.mark.parametrize(
    ("causal", "capacity_steps", "num_graphs"), [("predictor", 0, 1), ("threshold", 0, 1), ("predictor", 9, 10)]
)
def test_a_compiled_run_has_a_graph_for_each_capacity(corpus, tmp_path, causal, capacity_steps, num_graphs):
    """Logged steps and others share it; of falling capacities there are more than the 8 at which torch would stop."""
    compiled = []

    def count(graph, inputs):
        compiled.append(graph)
        return graph.forward

    torch._dynamo.reset()
    settings = {**TINY, "layers": 1, "corpus": corpus, "steps": 10, "log_every": 100}
    settings["capacity_steps"] = capacity_steps
    depth = mixdepth.DepthConfig(capacity=0.25, every=1, causal=causal)
    config = mixdepth.TrainConfig(**settings, compile=True, depth=depth)
    compile_model = torch.compile
    with pytest.MonkeyPatch.context() as patch:  # counted, and not translated to machine code
        patch.setattr(torch, "compile", lambda model, **options: compile_model(model, backend=count))
        mixdepth.train(tmp_path / "run", config)
    torch._dynamo.reset()
    assert len(compiled) == num_graphs


def test_experts_are_balanced_and_their_loss_is_told(corpus, tmp_path):
    for name, depth in (("dense", None), ("routed", mixdepth.DepthConfig(capacity=0.25))):
        settings = {**TINY, "corpus": corpus, "steps": 4, "num_experts": 4}
        run = mixdepth.train(tmp_path / name, **settings, depth=depth)
        line = run.metrics[0]
        assert line["balance_loss"] > 0
        assert "aux_loss" not in line
        coefs = 0.001 * line["balance_loss"] + 0.01 * line.get("predictor_loss", 0.0)
        assert line["loss"] == pytest.approx(line.get("lm_loss", line["loss"] - coefs) + coefs, rel=1e-6)


def test_the_clock_stands_still_while_something_else_is_done(corpus, tmp_path):
    settings = {**TINY, "corpus": corpus, "steps": 30, "log_every": 30, "depth": None, "eval_windows": 50}
    start = time.perf_counter()
    run = mixdepth.train(tmp_path / "run", **{**settings, "eval_every": 2, "save_every": 3})
    whole = time.perf_counter() - start
    timings = lines(run.folder / "timings.jsonl")
    trained = sum(line["seconds"] for line in timings)
    assert trained < whole / 2
    fast = mixdepth.train(tmp_path / "fast", **settings)
    alone = sum(line["seconds"] for line in lines(fast.folder / "timings.jsonl"))
    assert trained > alone / 5  # and it does not forget the steps in between


def test_tensorboard_gets_the_same_numbers(corpus, tmp_path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    settings = {**TINY, "corpus": corpus, "steps": 6, "report_to": ("tensorboard",)}
    run = mixdepth.train(tmp_path / "run", **settings, depth=mixdepth.DepthConfig(capacity=0.25))
    events = min(run.folder.rglob("events.out.tfevents*"), key=lambda file: len(file.parts))
    board = EventAccumulator(str(events.parent)).Reload()
    told = {event.step: event.value for event in board.Scalars("train/lm_loss")}
    for line in run.metrics:
        if "lm_loss" in line:
            assert told[line["step"]] == pytest.approx(line["lm_loss"])
    assert "train/layer_1/precision" in board.Tags()["scalars"]


def test_a_shape_is_found_for_a_target():
    layers, width = mixdepth.find_shape("params=1.5M", context=256)
    config = mixdepth.TrainConfig(steps=1, layers=layers, width=width)
    assert abs(make_model(config, 256).num_parameters() / 1.5e6 - 1) < 0.2
    dense = mixdepth.find_shape("flops=2M", context=256)
    routed = mixdepth.find_shape("flops=2M", mixdepth.DepthConfig(capacity=0.125), context=256)
    assert routed > dense  # what routing saves buys a larger model
    for shape, depth in ((dense, None), (routed, mixdepth.DepthConfig(capacity=0.125))):
        config = mixdepth.TrainConfig(steps=1, layers=shape[0], width=shape[1], depth=depth)
        assert abs(mixdepth.count_flops(make_model(config, 256), 256).total / 256 / 2e6 - 1) < 0.2


def test_a_run_takes_the_shape_that_was_found_for_its_routing():
    depth = mixdepth.DepthConfig(capacity=0.125)
    config = with_shape(mixdepth.TrainConfig(steps=1, shape="flops=2M", depth=depth), 256)
    assert (config.layers, config.width) == mixdepth.find_shape("flops=2M", depth)
    assert (config.layers, config.width) != mixdepth.find_shape("flops=2M")
    assert config.shape is None


def test_settings_go_through_json_and_back():
    config = mixdepth.TrainConfig(
        steps=3, report_to=("tensorboard",), depth=mixdepth.DepthConfig(layers=(1,), capacity=0.5)
    )
    assert mixdepth.TrainConfig.from_dict(json.loads(json.dumps(config.to_dict()))) == config
    dense = mixdepth.TrainConfig(steps=3, depth=None)
    assert mixdepth.TrainConfig.from_dict(json.loads(json.dumps(dense.to_dict()))) == dense
    with pytest.raises(ValueError, match=r"shape must be as in 'params=1\.5M' or 'flops=2M', not 'huge'"):
        mixdepth.find_shape("huge")
    with pytest.raises(ValueError, match="there is no training setting 'stepps'"):
        mixdepth.TrainConfig.from_dict({"stepps": 3})
