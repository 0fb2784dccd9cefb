"""cells.jsonl: the results of a study in one file, and the folders of the cells that are not in it yet."""

import json
import shutil

import pytest
from corpora import call, without_records
from made_up import claim, write_study

from mixdepth import isoflop
from mixdepth.isoflop import Study
from mixdepth.isoflop.results import LeftOut

CURVES = {(1e13, "dense"): (2e5, 1.40, 0.1), (1e13, "mod"): (4e5, 1.39, 0.1)}


@pytest.fixture
def folder(tmp_path):
    """A study of 0.1: all results are in folders."""
    return write_study(tmp_path / "study", CURVES, [claim("differs")], noise=1e-3)


@pytest.fixture
def gathered(folder):
    """A study whose results are all in cells.jsonl, without a folder."""
    isoflop.fit(folder)
    shutil.rmtree(folder / "cells")
    return folder


def records(folder):
    return [json.loads(line) for line in (folder / "cells.jsonl").read_text().splitlines()]


def write_records(folder, lines):
    (folder / "cells.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))


def test_a_run_gathers_its_cells(study):
    lines = records(study)
    assert [line["name"] for line in lines] == [cell.name for cell in Study.read(study).cells]
    for line in lines:
        run = study / "cells" / line["name"]
        for part, file in (("run", "run.json"), ("result", "result.json"), ("test", "test.json")):
            assert line[part] == json.loads((run / file).read_text())


def test_a_fit_gathers_the_folders_of_an_old_study(folder):
    isoflop.fit(folder)
    assert [line["name"] for line in records(folder)] == [cell.name for cell in Study.read(folder).cells]


def test_a_fit_of_the_file_alone_is_the_fit_of_the_folders_to_the_byte(folder):
    isoflop.fit(folder)
    before = (folder / "fit.json").read_bytes()
    shutil.rmtree(folder / "cells")
    isoflop.fit(folder)
    assert (folder / "fit.json").read_bytes() == before


def test_a_fit_takes_a_cell_from_its_folder_if_the_file_does_not_have_it(folder):
    isoflop.fit(folder)
    before = (folder / "fit.json").read_bytes()
    *others, last = records(folder)
    write_records(folder, others)
    for line in others:
        shutil.rmtree(folder / "cells" / line["name"])
    isoflop.fit(folder)
    assert (folder / "fit.json").read_bytes() == before
    assert records(folder) == [*others, last]


def test_gathering_what_is_gathered_writes_nothing(gathered):
    path = gathered / "cells.jsonl"
    before = path.stat().st_mtime_ns
    isoflop.fit(gathered)
    assert path.stat().st_mtime_ns == before


def test_a_study_without_folders_runs_nothing(study, tmp_path):
    copy = shutil.copytree(study, tmp_path / "copy", ignore=shutil.ignore_patterns("cells"))
    ran = call("isoflop", "run", str(copy))
    assert ran.returncode == 0, ran.stderr
    assert "2 of 2 runs are finished" in ran.stdout
    assert not (copy / "cells").exists()


def test_one_finished_cell_without_its_folder_is_not_run_either(study, tmp_path):
    copy = shutil.copytree(study, tmp_path / "copy", ignore=shutil.ignore_patterns("cells"))
    isoflop.run(copy, cell=Study.read(copy).cells[0].name)
    assert not (copy / "cells").exists()


def test_the_test_text_is_opened_from_the_file_alone(study, tmp_path):
    folders = without_records(study, tmp_path / "folders")
    file = shutil.copytree(study, tmp_path / "file", ignore=shutil.ignore_patterns("cells"))
    assert isoflop.fit(file, split="test") == isoflop.fit(folders, split="test")


def test_losses_on_the_test_text_that_come_later_are_gathered_later(study, tmp_path):
    copy = without_records(study, tmp_path / "copy")
    cell = Study.read(copy).cells[0]
    sealed = copy / "cells" / cell.name / "test.json"
    content = sealed.read_text()
    sealed.unlink()
    isoflop.fit(copy)
    assert "test" not in records(copy)[0]
    sealed.write_text(content)
    isoflop.fit(copy)
    assert records(copy)[0]["test"] == json.loads(content)


def test_a_cell_that_diverged_is_gathered_and_not_run_again(folder):
    cell = Study.read(folder).cells[0]
    shutil.rmtree(folder / "cells" / cell.name)
    failed = Study.read(folder).next_to(cell, "failed.json")
    failed.write_text(json.dumps({"kind": "diverged", "message": "the loss is nan"}))
    isoflop.fit(folder)
    assert records(folder)[0] == {"name": cell.name, "failed": {"kind": "diverged", "message": "the loss is nan"}}
    shutil.rmtree(folder / "cells")
    assert Study.read(folder).is_settled(cell)
    assert not Study.read(folder).is_finished(cell)
    assert isoflop.fit(folder).left_out[0] == LeftOut(cell=cell.name, reason="the loss is nan")


def test_a_cell_that_failed_is_not_gathered(folder):
    cell = Study.read(folder).cells[0]
    shutil.rmtree(folder / "cells" / cell.name)
    failed = Study.read(folder).next_to(cell, "failed.json")
    failed.write_text(json.dumps({"kind": "error", "message": "the disk is full"}))
    isoflop.fit(folder)
    assert cell.name not in [line["name"] for line in records(folder)]
    assert not Study.read(folder).is_settled(cell)


@pytest.mark.parametrize(
    ("sentence", "kind"),
    [
        ("loss is nan at step 3: the run has diverged; train anew with a lower learning_rate", "diverged"),
        ("its process was ended by SIGKILL", "error"),
    ],
)
def test_the_sentence_of_an_old_failure_is_read_as_its_kind(sentence, kind, folder):
    cell = Study.read(folder).cells[0]
    shutil.rmtree(folder / "cells" / cell.name)
    Study.read(folder).next_to(cell, "failed.json").write_text(json.dumps({"reason": sentence, "code": 1}))
    assert Study.read(folder).failure(cell) == (kind, sentence)
    assert Study.read(folder).is_settled(cell) == (kind == "diverged")


def test_a_new_message_that_says_diverged_does_not_settle_a_cell(folder):
    cell = Study.read(folder).cells[0]
    shutil.rmtree(folder / "cells" / cell.name)
    failure = {"kind": "error", "message": "the run has diverged"}
    Study.read(folder).next_to(cell, "failed.json").write_text(json.dumps(failure))
    assert not Study.read(folder).is_settled(cell)


@pytest.mark.parametrize(
    ("damage", "problem"),
    [
        (lambda lines: lines[0][:20] + "\n" + "".join(lines[1:]), "line 1: "),
        (lambda lines: "".join([*lines, "[]\n"]), "line 25 has no name of a cell"),
        (lambda lines: "".join([*lines, lines[0]]), "line 25 is about '10000000000000.0/dense/1x16/seed0', as an"),
        (lambda lines: "".join([*lines, '{"name": "x"}\n']), "it has the cell 'x', which study.json does not plan"),
        (lambda lines: "".join([*lines, '{"name": "x", "loss": 1}\n']), "line 25 has the unknown part 'loss'"),
    ],
)
def test_a_damaged_file_is_refused(damage, problem, gathered):
    path = gathered / "cells.jsonl"
    path.write_text(damage(path.read_text().splitlines(keepends=True)))
    with pytest.raises(ValueError, match=r"cells.jsonl' is damaged \(.*\): restore it, or delete it") as raised:
        isoflop.fit(gathered)
    assert problem in str(raised.value)


@pytest.mark.parametrize(
    ("part", "change", "problem"),
    [
        ("result", {"validation_loss": "x"}, 'validation_loss is "x", not a number'),
        ("result", {"validation_capacities": [0.5]}, "validation_capacities has length 1, but 0 layers are routed"),
        ("run", {"settings": {"layers": "two"}}, "settings: layers must be a whole number of at least 1, not 'two'"),
    ],
)
def test_a_damaged_part_leaves_its_cell_out_and_the_others_count(part, change, problem, gathered):
    lines = records(gathered)
    lines[0][part] |= change
    write_records(gathered, lines)
    fitted = isoflop.fit(gathered)
    entry = fitted.left_out[0]
    assert entry.cell == lines[0]["name"]
    assert f"cells.jsonl' is damaged ({part} of cell {entry.cell!r}.{problem}" in entry.reason
    assert entry.reason.endswith("restore it, or delete the line of this cell and run the study again")
    assert fitted.finished == len(lines) - 1


def test_a_line_about_a_run_of_other_settings_is_refused_and_trains_nothing(study, tmp_path):
    copy = shutil.copytree(study, tmp_path / "copy", ignore=shutil.ignore_patterns("cells"))
    lines = records(copy)
    lines[0]["run"]["settings"]["learning_rate"] = 0.5
    write_records(copy, lines)
    with pytest.raises(ValueError, match=r"cells.jsonl'.*its result is that of a run with other settings"):
        isoflop.run(copy, cell=lines[0]["name"])
    assert not list(copy.rglob("checkpoint-*"))
