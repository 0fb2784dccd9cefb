"""Training: what a run writes, and that nothing can disturb it."""

import json
import math
import os
import shutil
import subprocess
import sys
import time

import pytest
import torch
from corpora import TINY, call, call_in_two, documents, flags, lines, refusal, start, write_folder
from safetensors.torch import load_file

import mixdepth
from mixdepth.cli import main
from mixdepth.data import load_corpus
from mixdepth.run import Run
from mixdepth.schedule import plan
from mixdepth.trainer import DepthTrainer
from mixdepth.training import make_model, with_shape


def weights(run):
    return (run / "model.safetensors").read_bytes()


def kill_when(process, log, condition):
    """Kill -9 as soon as the condition holds."""
    while not condition():
        assert process.is_alive(), log.read_text()
        time.sleep(0.0005)
    process.kill()
    process.join()


@pytest.mark.parametrize("scheme", ["expert_choice", "random"])
def test_a_run_that_is_killed_again_and_again_ends_as_if_it_never_was(scheme, corpus, tmp_path):
    # 350 steps of 4 windows are more than two epochs; capacity falls over the first kills; lines between checkpoints
    text = write_folder(tmp_path / "texts", documents(18))
    settings = {**TINY, "corpus": text, "steps": 350, "save_every": 50, "eval_every": 125, "capacity_steps": 120}
    rule = {"scheme": scheme} | ({"causal": "threshold"} if scheme == "expert_choice" else {})
    arguments = ["train", *flags({**settings, **rule, "capacity": 0.25})]
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    process = call(*arguments, "--out", str(whole))
    assert process.returncode == 0, process.stderr
    assert 2 * len(load_corpus(text).train.windows(32)) < 350 * 4

    def half_written():
        return [path for path in killed.glob("checkpoint-*") if not (path / "complete.json").exists()]

    moments = [
        lambda: (killed / "metrics.jsonl").exists() and len(lines_so_far(killed)) > 3,  # before any checkpoint
        half_written,  # while one is being written
        lambda: (
            (killed / "checkpoint-100/complete.json").exists() and len(lines_so_far(killed)) > 38
        ),  # and lines after
        lambda: (killed / "checkpoint-250/complete.json").exists(),
        lambda: (killed / "model.safetensors").exists(),  # when all that is missing is the last file
    ]
    caught_half_written = False
    for moment in moments if scheme == "expert_choice" else moments[2:3]:  # what is random goes on where it was
        log = tmp_path / "log"
        kill_when(start(*arguments, "--out", str(killed), log=log), log, moment)
        caught_half_written |= bool(half_written())
        assert not (killed / "result.json").exists()
    process = call(*arguments, "--out", str(killed))
    assert process.returncode == 0, process.stderr
    assert "going on from checkpoint-" in process.stderr
    assert caught_half_written or scheme == "random"
    assert weights(killed) == weights(whole)
    assert (killed / "metrics.jsonl").read_bytes() == (whole / "metrics.jsonl").read_bytes()
    assert (killed / "result.json").read_bytes() == (whole / "result.json").read_bytes()
    assert [step["step"] for step in lines(killed / "timings.jsonl")] == [
        step["step"] for step in lines(whole / "timings.jsonl")
    ]


def lines_so_far(run):
    return (run / "metrics.jsonl").read_text().splitlines()


@pytest.fixture(scope="module")
def finished(corpus, tmp_path_factory):
    """A finished routed run and its dense twin."""
    folder = tmp_path_factory.mktemp("runs")
    settings = {**TINY, "corpus": corpus, "steps": 60, "save_every": 20}
    depth = mixdepth.DepthConfig(capacity=0.25)
    mixdepth.train(folder / "mod", **settings, depth=depth)
    mixdepth.train(folder / "dense", **settings, depth=None)
    return folder


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
    assert len(run.checkpoints()) == 2
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
    bits = found.loss / torch.log(torch.tensor(2.0)).item() * len(text.tokens) / text.num_bytes
    assert run.result["validation_bits_per_byte"] == pytest.approx(bits)


def test_dense_and_routed_models_of_a_seed_start_with_the_same_weights():
    config = mixdepth.TrainConfig(steps=1, layers=2, width=32)
    dense = make_model(mixdepth.TrainConfig(steps=1, layers=2, width=32, depth=None), 256).state_dict()
    for name, tensor in make_model(config, 256).state_dict().items():
        assert "depth_router" in name or torch.equal(tensor, dense[name])


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


@pytest.fixture
def interrupted(finished, tmp_path):
    """A copy of the finished run that has yet to get from step 40 to 60."""
    run = tmp_path / "mod"
    shutil.copytree(finished / "mod", run)
    (run / "result.json").unlink()
    for name in ("model.safetensors", "config.json"):
        (run / name).unlink()
    return run


def again(run):
    """The same command once more."""
    return call("train", *same(run), "--out", str(run))


def same(run):
    """The flags that the run was started with."""
    settings = Run(run).settings
    return flags({name: getattr(settings, name) for name in (*TINY, "corpus", "steps")} | {"capacity": 0.25})


@pytest.mark.parametrize("file", ["state/shard-00001-model-00001-of-00001.safetensors", "trainer_state.json"])
def test_a_damaged_checkpoint_falls_back_to_the_one_before_and_says_so(file, interrupted, finished):
    damaged = interrupted / "checkpoint-60" / file
    damaged.write_bytes(damaged.read_bytes()[:-7] + b"damaged")
    process = again(interrupted)
    assert process.returncode == 0, process.stderr
    assert f"checkpoint-60 is damaged ({file} is not what was written): going back to checkpoint-40" in process.stderr
    assert weights(interrupted) == weights(finished / "mod")
    assert (interrupted / "metrics.jsonl").read_bytes() == (finished / "mod" / "metrics.jsonl").read_bytes()
    assert (interrupted / "damaged-checkpoint-60").is_dir()  # for whoever wants to look


def test_a_full_disk_loses_nothing_and_says_what_to_do(interrupted, finished, tmp_path):
    shutil.rmtree(interrupted / "checkpoint-60")
    log = tmp_path / "log"
    # bytes in a file: the logs fit, a checkpoint does not
    process = start("train", *same(interrupted), "--out", str(interrupted), log=log, file_size=20_000)
    process.join()
    assert process.exitcode == 2
    said = log.read_text()
    assert "checkpoint-60' cannot be written" in said.splitlines()[-1]
    assert "goes on from there" in said.splitlines()[-1]
    assert "Traceback" not in said
    assert [path.name for path in Run(interrupted).checkpoints()] == ["checkpoint-40"]
    assert again(interrupted).returncode == 0
    assert weights(interrupted) == weights(finished / "mod")


def test_a_folder_that_is_named_like_a_checkpoint_is_left_alone(interrupted):
    shutil.copytree(interrupted / "checkpoint-40", interrupted / "checkpoint-40-backup")
    (interrupted / "checkpoint-notes").mkdir()
    assert again(interrupted).returncode == 0
    assert (interrupted / "checkpoint-40-backup" / "complete.json").exists()
    assert (interrupted / "checkpoint-notes").exists()


def test_a_checkpoint_whose_logs_were_lost_falls_back_too(interrupted, finished):
    marker = json.loads((interrupted / "checkpoint-40" / "complete.json").read_text())
    os.truncate(interrupted / "metrics.jsonl", marker["metrics.jsonl"] + 10)
    process = again(interrupted)
    assert (
        "checkpoint-60 is damaged (metrics.jsonl is shorter than it was): going back to checkpoint-40" in process.stderr
    )
    assert (interrupted / "metrics.jsonl").read_bytes() == (finished / "mod" / "metrics.jsonl").read_bytes()


def test_a_finished_run_is_not_trained_again(finished, capsys):
    before = {path: path.stat().st_mtime_ns for path in (finished / "mod").rglob("*") if path.name != ".lock"}
    assert main(["train", *same(finished / "mod"), "--out", str(finished / "mod")]) == 0
    assert json.loads(capsys.readouterr().out) == Run(finished / "mod").result
    assert {path: path.stat().st_mtime_ns for path in before} == before


def test_a_folder_with_another_run_is_refused_and_the_difference_named(finished):
    other = [*same(finished / "mod"), "--out", str(finished / "mod")]
    message = refusal("train", *other, "--seed", "3", "--weight-decay", "0.2", "--gate", "tanh")
    assert "weight_decay was 0.1 and is now 0.2; seed was 0 and is now 3" in message
    assert "depth.gate was 'raw' and is now 'tanh'" in message
    assert "Choose another --out" in message
    dense = [part for part in other if part not in ("--capacity", "0.25")]
    assert "holds a run of a routed model: choose another --out" in refusal("train", *dense, "--dense")
    dense = [*same(finished / "dense"), "--out", str(finished / "dense")]
    assert "holds a run of a dense model: choose another --out" in refusal("train", *dense)


def test_a_run_whose_corpus_has_changed_is_refused(corpus, tmp_path):
    text = tmp_path / "text.txt"
    text.write_text("".join(documents(20)))
    arguments = ["train", *flags({**TINY, "steps": 3, "corpus": text}), "--out", str(tmp_path / "run")]
    assert main(arguments) == 0
    text.write_text("".join(documents(21)))
    (tmp_path / "run" / "result.json").unlink()
    assert "is no longer what" in refusal(*arguments)


def test_a_run_of_a_version_with_other_defaults_is_refused(interrupted):
    about = json.loads((interrupted / "run.json").read_text())
    (interrupted / "run.json").write_text(json.dumps({**about, "learning_rate": 0.5}))
    message = refusal("train", *same(interrupted), "--out", str(interrupted))
    assert "in which learning_rate was 0.5 and not 0.004" in message


def test_folders_that_are_no_runs_are_left_alone(corpus, tmp_path):
    arguments = ["train", *flags({**TINY, "corpus": corpus, "steps": 3})]
    (tmp_path / "letters").mkdir()
    (tmp_path / "letters" / "dear.txt").write_text("Dear")
    assert "holds 'dear.txt' and no run.json" in refusal(*arguments, "--out", str(tmp_path / "letters"))
    assert os.listdir(tmp_path / "letters") == ["dear.txt"]
    assert "is a file" in refusal(*arguments, "--out", str(tmp_path / "letters" / "dear.txt"))
    (tmp_path / "half").mkdir()
    (tmp_path / "half" / "run.json").write_text('{"settings": {')
    assert "run.json' is damaged" in refusal(*arguments, "--out", str(tmp_path / "half"))
    assert "cannot be written" in refusal(*arguments, "--out", "/proc/run")


def test_two_processes_do_not_train_in_one_folder(corpus, tmp_path):
    arguments = ["train", *flags({**TINY, "corpus": corpus, "steps": 3000}), "--out", str(tmp_path / "run")]
    first = start(*arguments, log=tmp_path / "log")
    while not (tmp_path / "run" / "metrics.jsonl").exists():
        assert first.is_alive()
        time.sleep(0.05)
    message = refusal(*arguments)
    first.kill()
    assert "another process is training in" in message


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
        ({"steps": 3, "corpus": "nowhere"}, "nowhere' is no file, folder or glob"),
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


@pytest.mark.parametrize("setting", ["bf16", "compile", "gradient_checkpointing"])
def test_other_ways_of_computing_train_alike(setting, finished, corpus, tmp_path):
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


def test_a_compiled_run_stays_compiled_while_capacity_falls(corpus, tmp_path):
    compiled = []

    def count(graph, inputs):
        compiled.append(graph)
        return graph.forward

    torch._dynamo.reset()
    settings = {**TINY, "layers": 1, "corpus": corpus, "steps": 10, "capacity_steps": 9, "log_every": 100}
    depth = mixdepth.DepthConfig(capacity=0.25, every=1)
    config = mixdepth.TrainConfig(**settings, compile=True, depth=depth)
    compile_model = torch.compile
    with pytest.MonkeyPatch.context() as patch:  # counted, and not translated to machine code
        patch.setattr(torch, "compile", lambda model, **options: compile_model(model, backend=count))
        mixdepth.train(tmp_path / "run", config)
    torch._dynamo.reset()
    assert len(compiled) >= 10  # one for each capacity, and the target's among them: torch itself would stop at 8


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


@pytest.mark.parametrize(("engine", "causal"), [("ddp", "threshold"), ("fsdp", "predictor")])
def test_two_processes_train_as_one_does_and_either_goes_on_for_the_other(engine, causal, corpus, tmp_path):
    settings = {**TINY, "corpus": corpus, "steps": 40, "save_every": 20, "predictor_loss_coef": 0.5, "capacity": 0.25}
    arguments = ["train", *flags({**settings, "causal": causal, "engine": engine}), "--out"]
    one, two = tmp_path / "one", tmp_path / "two"
    assert call(*arguments, str(one)).returncode == 0
    codes, said = call_in_two(*arguments, str(two), log=tmp_path / "log")
    assert codes == [0, 0], said
    compare(two, one)

    # One process loads the two's checkpoint and goes on with it; two go on with that of one, and with their own.
    for run, processes in ((two, 1), (one, 2), (two, 2)):
        other = shutil.copytree(run, tmp_path / f"from_{run.name}_to_{processes}")
        (other / "result.json").unlink()
        shutil.rmtree(other / "checkpoint-40")
        if processes == 1:
            said = call(*arguments, str(other)).stderr
        else:
            codes, said = call_in_two(*arguments, str(other), log=tmp_path / f"{other.name}.log")
            assert codes == [0, 0], said
        assert said.count("going on from checkpoint-20") == 1
        compare(other, one)
    assert (other / "metrics.jsonl").read_bytes() == (two / "metrics.jsonl").read_bytes()
    assert weights(other) == weights(two)


def test_torchrun_starts_processes_that_train_together(corpus, tmp_path):
    arguments = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    arguments += ["-m", "mixdepth", "train", *flags({**TINY, "corpus": corpus, "steps": 3}), "--out"]
    process = subprocess.run([*arguments, str(tmp_path / "two")], capture_output=True, text=True)
    assert process.returncode == 0, process.stderr
    assert json.loads(process.stdout) == Run(tmp_path / "two").result  # told once
    compare(tmp_path / "two", mixdepth.train(tmp_path / "one", **TINY, corpus=corpus, steps=3).folder)


def test_what_the_first_process_refuses_all_refuse_without_a_traceback_of_ours(corpus, tmp_path):
    settings = {**TINY, "corpus": corpus, "steps": 3}
    arguments = ["train", *flags({**settings, "batch_size": 5}), "--out", str(tmp_path / "run")]
    codes, said = call_in_two(*arguments, log=tmp_path / "first.log")
    assert codes == [2, 2]
    assert said.count("batch_size=5 cannot be shared by 2 processes: make it a multiple") == 1
    assert "mixdepth/training.py" not in said
    assert not (tmp_path / "run").exists()
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "mine.txt").touch()
    codes, said = call_in_two("train", *flags(settings), "--out", str(tmp_path / "run"), log=tmp_path / "second.log")
    assert codes == [2, 2]
    assert said.count("holds 'mine.txt' and no run.json") == 1
    assert "Connection closed" not in said


def compare(run, expected):
    """Losses and gradients up to the order of sums, to 1e-5 in the first step. Later a token at the edge of the top k
    may fall to the other side, and where a gradient is almost zero AdamW makes steps of its rounding."""
    for ours, theirs in zip(lines(run / "metrics.jsonl"), lines(expected / "metrics.jsonl"), strict=True):
        assert ours.keys() == theirs.keys()
        first = ours["step"] == 1
        for name in ours.keys() & {"loss", "lm_loss", "predictor_loss", "validation_loss"}:
            assert ours[name] == pytest.approx(theirs[name], rel=1e-5 if first else 2e-3), (name, ours["step"])
        if "grad_norm" in ours:
            assert ours["grad_norm"] == pytest.approx(theirs["grad_norm"], rel=1e-5 if first else 3e-2), ours["step"]
        for name in ("flops", "tokens", "learning_rate"):
            assert ours.get(name) == theirs.get(name)
    found, wanted = (load_file(folder / "model.safetensors") for folder in (run, expected))
    assert {name: tensor.shape for name, tensor in found.items()} == {name: t.shape for name, t in wanted.items()}


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
