"""The demo, from its start to its report."""

import json
import shutil
from pathlib import Path

import pytest
from chromium import CHROMIUM, needs_browser

from mixdepth.cli import main

KINDS = ("dense", "shallow", "routed")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Make the folder of a demo of a few steps."""
    folder = tmp_path_factory.mktemp("demo") / "out"
    assert main(["demo", "--flops", "1e10", "--out", str(folder)]) == 0
    return folder


def files(folder: Path) -> dict[str, int]:
    return {str(file): file.stat().st_mtime_ns for file in folder.rglob("*") if file.is_file() and file.name != ".lock"}


def test_both_models_spend_the_same_flops_and_are_compared_on_the_same_text(folder):
    found = json.loads((folder / "results.json").read_text())
    dense, shallow, routed = found["comparison"]["models"]
    spent = [json.loads((folder / kind / "result.json").read_text())["flops"] for kind in KINDS]
    steps = [json.loads((folder / kind / "run.json").read_text())["steps"] for kind in KINDS]
    assert all(abs(flops - 1e10) <= 1e10 / step for flops, step in zip(spent, steps, strict=True))
    for kind, other in (("dense", dense), ("shallow", shallow)):
        difference = found["comparison"]["routed_minus"][kind]
        assert difference["mean"] == pytest.approx(routed["loss"] - other["loss"])
        assert difference["low"] < difference["mean"] < difference["high"]
    assert routed["parameters"] > dense["parameters"] > shallow["parameters"]
    assert routed["flops_per_token"] == pytest.approx(shallow["flops_per_token"], rel=0.1)
    assert len(routed["layers"]) == 2
    for kind in ("dense", "shallow"):
        rows = found[f"speed against {kind}"]["rows"]
        assert {row["what"] for row in rows} == {"training step", "prefill", "decode"}
    assert all(text.startswith("def get_") for text in found["samples"].values())


def test_a_second_run_reuses_what_is_done_and_prints_the_same(folder, capsys):
    (folder / "report.html").unlink()
    before = files(folder)
    assert main(["demo", "--flops", "1e10", "--out", str(folder)]) == 0
    shown = capsys.readouterr().out
    after = files(folder)
    assert {name: when for name, when in after.items() if not name.endswith("report.html")} == before
    assert "held-out loss, causal" in shown
    assert "a sample of the routed model:\ndef get_" in shown
    found = json.loads((folder / "results.json").read_text())
    models = dict(zip(KINDS, (model["loss"] for model in found["comparison"]["models"]), strict=True))
    for kind, sentence in zip(("dense", "shallow"), shown.splitlines()[-3:-1], strict=True):
        change = models["routed"] / models[kind] - 1
        assert f"{abs(change):.2%} {'lower' if change < 0 else 'higher'}" in sentence
        rows = found[f"speed against {kind}"]["rows"]
        speed = next(row["speed_up"] for row in rows if (row["what"], row["batch_size"]) == ("decode", 1))
        assert f"{speed['median']:.2f} ({speed['low']:.2f} to {speed['high']:.2f}) times the speed" in sentence
    assert shown.endswith(f"the report: {folder / 'report.html'}\n")


def test_a_demo_that_was_stopped_resumes(folder, capsys):
    found = json.loads((folder / "results.json").read_text())
    samples = found.pop("samples")
    (folder / "results.json").write_text(json.dumps(found))
    (folder / "routed" / "result.json").unlink()
    untouched = files(folder / "dense")
    assert main(["demo", "--flops", "1e10", "--out", str(folder)]) == 0
    assert files(folder / "dense") == untouched
    assert (folder / "routed" / "result.json").exists()
    assert json.loads((folder / "results.json").read_text()) == {**found, "samples": samples}


def test_results_of_another_model_are_not_shown_for_a_new_one(folder, tmp_path, capsys):
    other = tmp_path / "other"
    shutil.copytree(folder, other)
    shutil.rmtree(other / "routed")
    assert main(["demo", "--flops", "1e10", "--capacity", "0.9", "--out", str(other)]) == 0
    before, after = (json.loads((at / "results.json").read_text())["comparison"]["models"] for at in (folder, other))
    assert [model["loss"] for model in before][:2] == [model["loss"] for model in after][:2]
    assert before[2]["loss"] != after[2]["loss"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--flops", "2e10"], "flops was 10000000000.0 and is now 20000000000.0"),
        (["--capacity", "1.5"], "capacity must be a fraction in (0, 1], not 1.5"),
        (["--flops", "-1"], "flops must be a positive number"),
        (["--every", "0"], "every must be a whole number of at least 1, not 0"),
        (["--every", "9"], "every must be at most the model's 4 layers, not 9"),
    ],
)
def test_a_wrong_setting_gets_one_sentence_and_leaves_all_as_it_was(folder, arguments, message, capsys):
    before = files(folder)
    assert main(["demo", "--flops", "1e10", "--out", str(folder), *arguments]) == 2
    error = capsys.readouterr().err.splitlines()[-1]
    assert error.startswith("mixdepth: ")
    assert message in error
    assert files(folder) == before


@needs_browser
def test_the_report_opens_without_errors_or_requests_and_holds_all_of_it(folder, browser):
    assert CHROMIUM is not None
    troubles: list[str] = []
    page = browser.new_page()
    file = (folder / "report.html").resolve()
    page.on("console", lambda message: troubles.append(message.text))
    page.on("pageerror", lambda error: troubles.append(str(error)))
    page.on("request", lambda request: request.url != file.as_uri() and troubles.append(request.url))
    page.goto(file.as_uri())
    headings = page.locator("h2").all_inner_texts()
    assert headings[:4] == ["Training", "Speed on this machine, and its limits", "Samples", "Where the tokens go"]
    cells = page.locator("table").first.locator("tr").nth(5).locator("td").all_inner_texts()
    found = json.loads((folder / "results.json").read_text())["comparison"]["models"]
    assert cells[1:] == [f"{model['loss']:.4f}" for model in found]
    assert page.locator(".tokens span").count() == 1024
    assert page.locator("svg path").count() > 3
    assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")
    page.close()
    assert troubles == []
