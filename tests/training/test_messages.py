"""What a run says on stderr. Its result alone goes to stdout."""

import json

from corpora import TINY, call, flags

import mixdepth


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
