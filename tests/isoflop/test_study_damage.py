"""A study whose files are damaged: one sentence names the file, the field, its value and the way out."""

import copy
import json
import math
import shutil
from dataclasses import fields

import pytest
from corpora import call, plan, without_records
from made_up import claim, write_study

from mixdepth import isoflop
from mixdepth.isoflop import Cell, Hypothesis, Study, forms
from mixdepth.isoflop.results import (
    BestResult,
    ClaimResult,
    CurveResult,
    Fit,
    LeftOut,
    OptimumResult,
    PairResult,
    PointResult,
)

CURVES = {(1e13, "dense"): (2e5, 1.40, 0.1), (1e13, "mod"): (4e5, 1.39, 0.1)}

NO_TEXT = [None, 5, [], {}, True]
NO_NUMBER = [None, "x", [], {}, True, math.nan, math.inf, -math.inf, 1e300, -1e300, 10**300]
NOT_POSITIVE = [*NO_NUMBER, 0, -1]
NO_COUNT = [*NOT_POSITIVE, 2.5]
NO_SHARE = [*NO_NUMBER, -0.1, 1.1]
NO_LIST = [None, 5, "x", {}, [None], ["x"], [math.nan], [[]]]


def cases(values_by_field):
    return [(field, value) for field, values in values_by_field.items() for value in values]


OF_CELLS = cases(
    {
        "name": [*NO_TEXT, "", "../../../d/run", "/d/run", "a//b", "a/./b", "a\0b", "a\\..\\b"],
        "budget": NOT_POSITIVE,
        "variant": [*NO_TEXT, "moe", "mod:capacity=7", "mod:capacity=[]"],
        "seed": [*NO_NUMBER, -1, 0.5],
        "rung": NOT_POSITIVE,
        "settings": [None, 5, "x", [], {}],
        "parameters": NO_COUNT,
        "flops_per_token": NOT_POSITIVE,
        "steps": NO_COUNT,
        "flops": NO_COUNT,
        "epochs": [*NO_NUMBER, -1],
        "seconds": [*NO_NUMBER, -1],
    }
)
OF_SETTINGS = cases(
    {
        "layers": NO_COUNT,
        "width": NO_COUNT,
        "context": NO_COUNT,
        "learning_rate": NOT_POSITIVE,
        "depth": [5, "x", []],
        "corpus": NO_TEXT,
        "report_to": [None, 5, "x", [5]],
        "nonsense": [1],
    }
)
OF_HYPOTHESES = cases(
    {
        "name": NO_TEXT,
        "claim": NO_TEXT,
        "kind": [*NO_TEXT, "x"],
        "budget": NOT_POSITIVE,
        "variant": NO_TEXT,
        "against": NO_TEXT,
        "margin": NO_SHARE,
        "family": [*NO_TEXT, "x"],
        "finished_before": [*NO_NUMBER, -1],
        "seeds": [*NO_LIST, [-1], [0.5]],
    }
)
OF_RESULTS = cases(
    {
        "validation_loss": [None, "x", [], True, 0, -5, 1e300, 1e29, 1e-300, -math.inf, 10**300],
        "validation_lookahead_loss": [None, "x", [], True, 0, -5, 1e300, 1e29, 1e-300, -math.inf, 10**300],
        "validation_capacities": [
            *[None, 5, "x", {}, [None, None], [1e308, "x"], [1e308, 0.2], [1.01, 0.2], [-0.1, 0.2]],
            *[[math.nan, 0.2], [], [0.2], [0.2, 0.2, 0.2]],
        ],
    }
)


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """A whole study of one seed, which is fitted quickly. Layers of `mod` are all routed."""
    folder = tmp_path_factory.mktemp("whole") / "study"
    return write_study(folder, CURVES, [claim("differs"), claim("equivalent", against="mod")], seeds=(0,))


@pytest.fixture
def damaged(whole, tmp_path):
    return shutil.copytree(whole, tmp_path / "study")


def rewrite(path, change):
    """Change what a JSON file says."""
    content = json.loads(path.read_text())
    change(content)
    path.write_text(json.dumps(content))


def refusal(*arguments):
    """The one line that a command ends with."""
    ran = call("isoflop", *map(str, arguments))
    assert (ran.returncode, ran.stdout) == (2, "")
    (line,) = ran.stderr.splitlines()
    return line


def check_refused(folder, field, value):
    """The study is refused where it is read; the sentence names the file, the field, the value and the way out."""
    with pytest.raises(ValueError, match="damaged") as raised:
        Study.read(folder)
    said = str(raised.value)
    assert said.startswith(f"{str(folder / 'study.json')!r} is damaged (")
    assert field in said
    assert said.endswith("): restore it, or plan again in another folder")
    if not isinstance(value, dict | list):
        assert json.dumps(value).strip('"')[:40] in said
    assert "\n" not in said
    assert len(said) < 600


@pytest.mark.parametrize(("field", "value"), OF_CELLS)
def test_a_cell_with_a_wrong_value_is_refused(field, value, damaged):
    rewrite(damaged / "study.json", lambda content: content["cells"][3].update({field: value}))
    check_refused(damaged, f"cells[3].{field}", value)


@pytest.mark.parametrize(("field", "value"), OF_SETTINGS)
def test_a_cell_with_a_wrong_setting_is_refused(field, value, damaged):
    rewrite(damaged / "study.json", lambda content: content["cells"][3]["settings"].update({field: value}))
    with pytest.raises(ValueError, match=r"study.json' is damaged \(cells\[3\].settings.*: restore it") as raised:
        Study.read(damaged)
    assert field in str(raised.value)


@pytest.mark.parametrize(
    ("depth", "problem"),
    [
        ({}, "routing settings must have a format version of at least 1, not None"),
        ({"version": 3, "capacity": "x"}, "capacity must be a fraction in (0, 1], not 'x'"),
        ({"version": 3, "every": 9}, "every must be at most the model's 4 layers, not 9"),
    ],
)
def test_a_cell_with_wrong_routing_is_refused(depth, problem, damaged):
    rewrite(damaged / "study.json", lambda content: content["cells"][3]["settings"].update(depth=depth))
    assert f"study.json' is damaged (cells[3].settings: {problem}): restore it" in refusal("fit", damaged)


@pytest.mark.parametrize(("field", "value"), OF_HYPOTHESES)
def test_a_hypothesis_with_a_wrong_value_is_refused(field, value, damaged):
    rewrite(damaged / "study.json", lambda content: content["hypotheses"][1].update({field: value}))
    check_refused(damaged, f"hypotheses[1].{field}", value)


@pytest.mark.parametrize("value", [None, 5, "x", {}, [5], [None], [[]]])
@pytest.mark.parametrize("field", ["cells", "hypotheses", "plans"])
def test_a_list_of_a_study_that_is_none_is_refused(field, value, damaged):
    rewrite(damaged / "study.json", lambda content: content.update({field: value}))
    check_refused(damaged, field, value)


def test_a_format_that_is_no_number_is_not_called_an_unknown_one(damaged):
    rewrite(damaged / "study.json", lambda content: content.update(format="2"))
    check_refused(damaged, "format", "2")
    rewrite(damaged / "study.json", lambda content: content.update(format=9))
    assert "has the format 9, and this version reads 2: use the version that wrote it" in refusal("fit", damaged)


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        (lambda cells: cells[1].update(name=cells[0]["name"]), "cells[1].name is '10000000000000.0/dense/1x16/seed0'"),
        (lambda cells: cells[1].update(seed=7), "cells[1].seed is 7, but in its settings 0"),
        (
            lambda cells: cells[1]["settings"].update(steps=None, flops=1e12),
            "cells[1].budget is 1e+13, but flops in its settings 1e+12",
        ),
        (lambda cells: cells[1].update(nonsense=1), "cells[1].nonsense is unknown"),
        (lambda cells: cells[1].pop("rung"), "cells[1] has no 'rung'"),
    ],
)
def test_cells_that_contradict_themselves_or_each_other_are_refused(change, problem, damaged):
    rewrite(damaged / "study.json", lambda content: change(content["cells"]))
    assert problem in refusal("fit", damaged)


@pytest.mark.parametrize(("field", "value"), [("parameters", -5), ("budget", "x"), ("name", "../../../d/run")])
def test_every_command_refuses_a_damaged_study_in_the_same_sentence(field, value, damaged, corpus, capfd):
    isoflop.fit(damaged)
    rewrite(damaged / "study.json", lambda content: content["cells"][0].update({field: value}))
    said = refusal("fit", damaged)
    assert f"cells[0].{field} is {json.dumps(value)}, not " in said
    assert refusal("fit", damaged, "--split", "test") == said
    assert refusal("plot", damaged) == said
    assert refusal("run", damaged) == said
    assert refusal("run", damaged, "--cell", "x") == said
    with pytest.raises(ValueError, match="is damaged") as raised:
        plan(damaged, corpus)
    assert said == f"mixdepth: {raised.value}"
    assert capfd.readouterr().out == ""  # LAPACK would write there without asking Python


@pytest.mark.parametrize(("field", "value"), OF_RESULTS)
def test_a_damaged_result_is_left_out_and_the_others_count(field, value, whole, damaged):
    cell = next(cell for cell in Study.read(damaged).cells if cell.variant == "mod" and cell.shape == "2x16")
    path = damaged / "cells" / cell.name / "result.json"
    rewrite(path, lambda result: result.update({field: value}))
    ran = call("isoflop", "fit", str(damaged))
    assert (ran.returncode, ran.stderr) == (0, "")
    (note,) = (line for line in ran.stdout.splitlines() if line.startswith("left out: "))
    assert note.startswith(f"left out: {cell.name}, {str(path)!r} is damaged ({field}")
    assert note.endswith(f"): restore it, or delete the folder {str(path.parent)!r} and run the study again")
    without = shutil.copytree(whole, damaged.with_name("without"))
    (without / "cells" / cell.name / "result.json").unlink()
    fitted, expected = isoflop.fit(damaged), isoflop.fit(without)
    assert fitted.curves == expected.curves
    assert fitted.comparisons == expected.comparisons


@pytest.mark.parametrize("field", ["validation_loss", "validation_lookahead_loss"])
@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_a_loss_that_is_not_a_number_is_a_divergence_and_no_damage(field, value, damaged):
    cell = Study.read(damaged).cells[0]
    rewrite(damaged / "cells" / cell.name / "result.json", lambda result: result.update({field: value}))
    (entry,) = isoflop.fit(damaged).left_out
    assert entry.reason == "it diverged: its loss is not a number"


@pytest.mark.parametrize(
    ("field", "value"),
    [("settings", 5), ("settings", []), ("corpus_digest", 5), ("settings", {"layers": "two"}), ("settings", {"x": 1})],
)
def test_damaged_settings_of_a_run_are_named_with_their_file(field, value, damaged):
    cell = Study.read(damaged).cells[0]
    path = damaged / "cells" / cell.name / "run.json"
    rewrite(path, lambda about: about.update({field: value}))
    (entry,) = isoflop.fit(damaged).left_out
    assert entry.reason.startswith(f"{str(path)!r} is damaged ({field}")
    assert entry.reason.endswith("and run the study again")


def test_a_run_names_the_damaged_result_and_trains_nothing(study, tmp_path):
    folder = without_records(study, tmp_path / "study")
    found = Study.read(folder)
    cell = found.cells[1]
    path = folder / "cells" / cell.name / "result.json"
    rewrite(path, lambda result: result.update(validation_capacities=5))
    ran = call("isoflop", "run", str(folder))
    assert ran.returncode == 2
    assert "1 of 2 runs are finished" in ran.stdout
    assert f"cell {cell.name} failed: {str(path)!r} is damaged (validation_capacities is 5, not a list)" in ran.stderr
    written = json.loads(found.next_to(cell, "failed.json").read_text())
    assert written == found.failure(cell)._asdict()
    shutil.rmtree(path.parent)  # the way out that it names
    assert call("isoflop", "run", str(folder)).returncode == 0


@pytest.mark.parametrize(
    "damage",
    [{"loss": -1}, {"loss": "x"}, {"lookahead_loss": None}, {"capacities": [2.0]}, {"capacities": [0.1] * 3}],
)
def test_a_damaged_loss_on_the_test_text_does_not_count(damage, study, tmp_path):
    folder = without_records(study, tmp_path / "study", "*.safetensors")
    cell = Study.read(folder).cells[1]
    rewrite(folder / "cells" / cell.name / "test.json", lambda sealed: sealed.update(damage))
    (entry,) = isoflop.fit(folder, split="test").left_out
    assert entry == LeftOut(cell=cell.name, reason="it has no loss on the test text, and its weights are gone")


def leaves(value, place=()):
    """The places of all values in a JSON value that are neither lists nor objects."""
    items = []
    if isinstance(value, dict):
        items = list(value.items())
    elif isinstance(value, list):
        items = list(enumerate(value))
    if not items:
        yield place
    for name, item in items:
        yield from leaves(item, (*place, name))


def with_value(content, place, value):
    changed = copy.deepcopy(content)
    *outer, last = place
    part = changed
    for name in outer:
        part = part[name]
    part[last] = value
    return changed


def test_no_value_in_a_fit_of_the_test_text_ends_in_a_traceback(tmp_path):
    folder = write_study(tmp_path / "study", CURVES, [claim("differs"), claim("larger")], noise=1e-3)
    isoflop.fit(folder)
    content = json.loads((folder / "fit.json").read_text())
    content["left_out"] = [{"cell": "x", "reason": "y"}]
    content["curves"] = content["curves"][1:]
    content["curves"][0]["points"] = content["curves"][0]["points"][:1]
    path = folder / "fit-test.json"
    refusals = []
    for place in leaves(content):
        for value in (None, "x", [], {}, True, -1, 1e300, math.nan):
            path.write_text(json.dumps(with_value(content, place, value)))
            try:
                str(isoflop.fit(folder, split="test"))
            except ValueError as error:
                refusals.append(str(error))
    assert len(refusals) > 300
    assert all(said.startswith(f"{str(path)!r} is damaged (") for said in refusals)
    assert all(said.endswith("): restore it: the test text is opened once") for said in refusals)


@pytest.mark.parametrize(
    ("place", "value"),
    [
        (("points",), 3),
        (("points",), []),
        (("points", 0, "losses"), {"x": 1}),
        (("points", 0, "losses", "0"), "x"),
        (("points", 0, "flops_per_token"), 0),
        (("parabola",), [1, 2]),
        (("best", "loss"), "x"),
        (("best", "loss"), math.nan),
        (("optimum", "parameters"), None),
        (("variant",), "moe"),
        (("budget",), "x"),
    ],
)
def test_a_picture_of_a_damaged_fit_is_refused(place, value, damaged):
    isoflop.fit(damaged)
    path = damaged / "fit.json"
    path.write_text(json.dumps(with_value(json.loads(path.read_text()), ("curves", 0, *place), value)))
    said = refusal("plot", damaged)
    assert said.startswith(f"mixdepth: {str(path)!r} is damaged (")
    assert "curves[0]." in said
    assert said.endswith(f"): mixdepth isoflop fit {damaged} makes it again")


def test_a_value_that_is_very_long_is_shown_by_its_beginning(damaged):
    rewrite(damaged / "study.json", lambda content: content["cells"][0].update(budget="x" * 10**6))
    assert len(refusal("fit", damaged)) < 500


def test_the_forms_have_the_fields_that_are_written():
    pairs = [
        (forms.CELL, Cell),
        (forms.HYPOTHESIS, Hypothesis),
        (forms.POINT, PointResult),
        (forms.BEST, BestResult),
        (forms.OPTIMUM, OptimumResult),
        (forms.CURVE, CurveResult),
        (forms.COMPARISON, PairResult),
        (forms.CLAIM, ClaimResult),
        (forms.LEFT_OUT, LeftOut),
        (forms.FIT, Fit),
    ]
    for form, kind in pairs:
        assert list(form.fields) == [field.name for field in fields(kind)]
