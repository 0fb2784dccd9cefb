"""`--help` is grouped and short, and shows every choice; `--help-all` shows everything."""

from dataclasses import fields

import pytest

from mixdepth import DepthConfig, TrainConfig
from mixdepth.cli import main, make_parser
from mixdepth.cli.flags import (
    COMMON_ROUTING_SETTINGS,
    COMMON_RUN_SETTINGS,
    RUN_GROUPS,
    field_descriptions,
    first_sentence,
    flag_of,
    metavar_of,
)

VERBS_WITH_HELP_ALL = ("train", "convert", "tune", "flops", "bench", "isoflop plan")


@pytest.fixture
def help_of(capsys, monkeypatch):
    """Return what a command prints before it exits, on a terminal of 80 columns."""
    monkeypatch.setenv("COLUMNS", "80")

    def run(*arguments):
        with pytest.raises(SystemExit) as leaving:
            main(arguments)
        assert leaving.value.code == 0
        return capsys.readouterr().out

    return run


def test_every_setting_of_a_run_is_in_one_group():
    members = [name for names in RUN_GROUPS.values() for name in names]
    settings = [field.name for field in fields(TrainConfig) if field.name not in ("model", "depth")]
    assert sorted(members) == sorted(settings)


def test_the_common_settings_exist():
    assert {field.name for field in fields(TrainConfig)} >= COMMON_RUN_SETTINGS
    assert {field.name for field in fields(DepthConfig)} >= COMMON_ROUTING_SETTINGS


@pytest.mark.parametrize("settings", [TrainConfig, DepthConfig])
def test_every_setting_has_a_description(settings):
    assert set(field_descriptions(settings)) == {field.name for field in fields(settings)}


def test_the_common_flags_of_train_fit_on_one_screen(help_of):
    assert len(help_of("train", "--help").splitlines()) <= 50


@pytest.mark.parametrize("title", ["model", "data", "budget", "optimiser", "routing", "run"])
def test_the_flags_of_train_are_in_groups(help_of, title):
    assert f"\n{title}:\n" in help_of("train", "--help")


@pytest.mark.parametrize("verb", VERBS_WITH_HELP_ALL)
def test_help_all_shows_more_than_help(help_of, verb):
    words = verb.split()
    assert len(help_of(*words, "--help-all")) > len(help_of(*words, "--help"))


def test_help_all_shows_every_setting_of_train(help_of):
    text = help_of("train", "--help-all")
    names = [field.name for field in fields(TrainConfig)]
    for name in set(names) - {"model", "depth", "method", "lora_rank", "distill"}:
        assert f"  {flag_of(name, {})}" in text


def test_choices_are_shown(help_of):
    text = help_of("train", "--help")
    assert "--scheme {expert_choice,token_choice,early_exit,random,soft}" in text


def test_a_setting_that_help_leaves_out_can_be_given():
    options = make_parser().parse_args(["train", "--out", "run", "--weight-decay", "0.2"])
    assert options.weight_decay == 0.2


def test_flags_that_are_not_given_leave_no_trace():
    options = vars(make_parser().parse_args(["train", "--out", "run"]))
    assert "width" not in options
    assert "depth_capacity" not in options


def test_a_metavar_names_the_kind_of_value():
    assert metavar_of(float | None) == "X"
    assert metavar_of(float | tuple[float, ...]) == "X"
    assert metavar_of(tuple[str, ...]) == "TEXT,TEXT,..."


def test_an_abbreviation_does_not_end_the_first_sentence():
    assert first_sentence("As in Fig. 1 of it. More.") == "As in Fig. 1 of it."
