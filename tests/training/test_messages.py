"""What a run says on stderr. Its result alone goes to stdout."""

import json

from corpora import TINY, call, flags
from tiny import dense, routed

import mixdepth
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
