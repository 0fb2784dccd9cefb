"""What a run says on stderr. Its result alone goes to stdout."""

import json

from corpora import TINY, call, flags


def command(out, corpus, **options):
    return ["train", *flags({**TINY, "corpus": corpus, "out": out, "steps": 2, **options})]


def test_the_end_says_where_the_model_is_and_what_to_try_next(corpus, tmp_path):
    out = tmp_path / "a run"
    process = call(*command(out, corpus))
    assert process.returncode == 0, process.stderr
    assert json.loads(process.stdout)["step"] == 2
    sentence = f"mixdepth: saved to {out}; next: mixdepth generate '{out}' 'def f('  or  mixdepth eval '{out}'"
    assert process.stderr.splitlines()[-1] == sentence
