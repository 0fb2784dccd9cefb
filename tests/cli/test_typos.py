"""A typo is answered with the usage of its own verb, what was probably meant, and exit code 2."""

import pytest
from corpora import call

from mixdepth.cli import main
from mixdepth.cli.parser import did_you_mean


@pytest.mark.parametrize(
    ("arguments", "usage", "message"),
    [
        ("train --capcity 0.125", "mixdepth train", "there is no flag --capcity: did you mean --capacity?"),
        ("train --capcity=0.125 --out run", "mixdepth train", "there is no flag --capcity: did you mean --capacity?"),
        ("train --routed-layer-seed 3", "mixdepth train", "did you mean --routed-layers?"),
        ("train --zzz 3", "mixdepth train", "there is no flag --zzz: `mixdepth train --help` shows the flags"),
        ("train runs/mod --out run", "mixdepth train", "there is one word too many: 'runs/mod'"),
        ("isoflop plan --budget-list 1e13", "mixdepth isoflop plan", "did you mean --budgets?"),
        ("isoflop plann", "mixdepth isoflop", "there is no step plann: did you mean plan?"),
        ("trian --out run", "mixdepth", "there is no verb trian: did you mean train?"),
        ("--verison", "mixdepth", "there is no flag --verison: did you mean --version?"),
    ],
)
def test_a_typo_is_answered_with_what_was_meant(capsys, arguments, usage, message):
    with pytest.raises(SystemExit) as leaving:
        main(arguments.split())
    assert leaving.value.code == 2
    errors = capsys.readouterr().err
    assert errors.startswith(f"usage: {usage} ")
    last_line = errors.splitlines()[-1]
    assert last_line.startswith(f"{usage}: error: ")
    assert message in last_line


def test_a_verb_like_no_other_is_answered_with_all_verbs(capsys):
    with pytest.raises(SystemExit):
        main(["xyzzy"])
    assert "there is no verb xyzzy: choose one of train, convert, tune, eval" in capsys.readouterr().err


def test_a_choice_with_a_typo_is_answered_with_what_was_meant():
    process = call("flops", "--scheme", "expertchoice")
    assert process.returncode == 2
    assert process.stderr.endswith("not 'expertchoice': did you mean expert_choice?\n")


def test_the_beginning_of_a_flag_is_no_typo():
    process = call("flops", "--widt", "33")
    assert "width must be a multiple of 16" in process.stderr


def test_values_may_look_like_flags_after_two_hyphens_and_in_sentences():
    process = call("generate", "nowhere", "-- is a comment in SQL")
    assert "'nowhere'" in process.stderr


def test_a_word_unlike_all_others_has_no_answer():
    assert did_you_mean("--device", ["--dense"]) == ""
