"""What a run says on stderr. Its result alone goes to stdout."""

import json
import re
from types import SimpleNamespace

import pytest
from corpora import TINY, call, flags
from tiny import dense, routed

import mixdepth
from mixdepth.training import callbacks
from mixdepth.training.callbacks import Progress, duration
from mixdepth.training.job import idle_sentence


def command(out, corpus, **options):
    return ["train", *flags({**TINY, "corpus": corpus, "out": out, "steps": 2, **options})]


def test_the_end_says_where_the_model_is_and_what_to_try_next(corpus, tmp_path):
    out = tmp_path / "a run"
    process = call(*command(out, corpus))
    assert process.returncode == 0, process.stderr
    assert json.loads(process.stdout)["step"] == 2
    sentence = f"mixdepth: saved to {out}; next: mixdepth generate '{out}' 'def f('  or  mixdepth eval '{out}'"
    assert process.stderr.splitlines()[-1] == sentence


def test_a_finished_run_that_is_asked_for_again_is_said_to_be_complete(corpus, tmp_path, capsys):
    out = tmp_path / "run"
    first = call(*command(out, corpus))
    assert "complete" not in first.stderr
    again = call(*command(out, corpus))
    assert again.stdout == first.stdout
    assert f"mixdepth: {out} is already complete: nothing was trained\n" in again.stderr

    tuned = {**TINY, "corpus": corpus, "steps": 2}
    for name in ("layers", "width"):
        del tuned[name]
    mixdepth.tune(out, tmp_path / "tuned", **tuned)
    capsys.readouterr()
    mixdepth.tune(out, tmp_path / "tuned", **tuned)  # its start is not read again
    assert capsys.readouterr().err == f"mixdepth: {tmp_path / 'tuned'} is already complete: nothing was trained\n"


def test_one_process_is_told_that_fsdp_has_no_effect(corpus, tmp_path):
    process = call(*command(tmp_path / "run", corpus, engine="fsdp"))
    assert "mixdepth: engine='fsdp' has no effect on one process: start several with torchrun\n" in process.stderr
    assert "fsdp" not in call(*command(tmp_path / "other", corpus)).stderr


def test_layers_that_route_no_token_are_named_at_the_end(corpus, tmp_path):
    routing = {"layers": 4, "capacity": 0.25}
    process = call(*command(tmp_path / "predictor", corpus, **routing))
    assert json.loads(process.stdout)["validation_capacities"] == [0.0, 0.0]
    assert "mixdepth: no token is routed through layers 1 and 3 when the model chooses causally" in process.stderr
    process = call(*command(tmp_path / "threshold", corpus, **routing, causal="threshold"))
    assert min(json.loads(process.stdout)["validation_capacities"]) > 0
    assert "no token is routed" not in process.stderr


def test_layers_that_route_no_token_are_listed():
    model = routed()  # layers 0, 2 and 3 of 4
    assert idle_sentence(model, [0.1, 0.001, 0.3]) is None
    advice = "when the model chooses causally: train longer, or run mixdepth.calibrate"
    assert idle_sentence(model, [0.1, 0.0, 0.3]) == f"no token is routed through layer 2 {advice}"
    assert idle_sentence(model, [0.0, 0.0, 0.0]) == f"no token is routed through layers 0, 2 and 3 {advice}"
    assert idle_sentence(routed(scheme="random"), [0.0, 0.0, 0.0]) is None  # chance alone decided
    assert idle_sentence(dense(), []) is None


def test_the_time_it_will_take_is_said_after_a_few_steps(corpus, tmp_path):
    process = call(*command(tmp_path / "run", corpus, steps=40))
    said = process.stderr.splitlines()  # the bar ends its states with a carriage return, which ends a line here
    pattern = r"mixdepth: about \d+ seconds? to go, at [\d,]+ tokens/s"
    assert len([line for line in said if re.fullmatch(pattern, line)]) == 1
    bars = [line for line in said if line.startswith("training:")]
    assert re.search(r"loss \d\.\d+, [\d,]+ tokens/s, \d\.\d+e\+\d+ FLOPs\]$", bars[-1])

    again = call(*command(tmp_path / "run", corpus, steps=40))
    assert "to go" not in again.stderr
    short = call(*command(tmp_path / "short", corpus, steps=4))
    assert "to go" not in short.stderr


def test_the_time_to_go_follows_from_flops_and_the_speed_from_tokens(monkeypatch):
    now = iter([100.0, 106.0])
    monkeypatch.setattr(callbacks.time, "perf_counter", lambda: next(now))
    said = []
    monkeypatch.setattr(callbacks, "tell", said.append)
    # Steps cost half as much from step 10 on. Steps 2 to 4 take 2 seconds each.
    schedule = SimpleNamespace(tokens_per_step=2400, flops_until=lambda step: 2 * min(step, 10) + max(step - 10, 0))
    progress = Progress(schedule, is_shown=True)
    for step in range(1, 9):
        progress.on_step_end(None, SimpleNamespace(global_step=step, max_steps=250), None)
    assert said == ["about 4 minutes to go, at 1,200 tokens/s"]  # 6 of 6 steps at 2 s, and 240 at 1 s


@pytest.mark.parametrize(
    ("seconds", "words"),
    [
        (0.2, "1 second"),
        (1.4, "1 second"),
        (44, "44 seconds"),
        (89, "89 seconds"),
        (91, "2 minutes"),
        (5000, "83 minutes"),
        (5500, "1.5 hours"),
        (90000, "25 hours"),
        (130000, "1.5 days"),
        (4e5, "4.6 days"),
        (1e7, "116 days"),
    ],
)
def test_a_time_is_said_in_the_unit_that_fits(seconds, words):
    assert duration(seconds) == words
