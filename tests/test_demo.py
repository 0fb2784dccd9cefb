"""The demo, from its start to its report."""

import json
from pathlib import Path

import pytest
from test_page import CHROMIUM, browser, needs_browser  # noqa: F401

from mixdepth.cli import main
from mixdepth.report.summary import Column, verdict

KINDS = ("dense", "shallow", "routed")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """What a demo of a few steps leaves behind."""
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
    assert routed["difference_to_first"]["mean"] == pytest.approx(routed["loss"] - dense["loss"])
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
    assert shown.endswith(f"the report: {folder / 'report.html'}\n")


def test_a_demo_that_was_stopped_goes_on(folder, capsys):
    found = json.loads((folder / "results.json").read_text())
    samples = found.pop("samples")
    (folder / "results.json").write_text(json.dumps(found))
    (folder / "routed" / "result.json").unlink()
    untouched = files(folder / "dense")
    assert main(["demo", "--flops", "1e10", "--out", str(folder)]) == 0
    assert files(folder / "dense") == untouched
    assert (folder / "routed" / "result.json").exists()
    assert json.loads((folder / "results.json").read_text()) == {**found, "samples": samples}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--flops", "2e10"], "flops was 10000000000.0 and is now 20000000000.0"),
        (["--capacity", "1.5"], "capacity must be a fraction in (0, 1], not 1.5"),
        (["--flops", "-1"], "flops must be a positive number"),
        (["--every", "0"], "every must be a whole number of at least 1, not 0"),
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
def test_the_report_opens_without_errors_or_requests_and_holds_all_of_it(folder, browser):  # noqa: F811
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


def column(**changes) -> Column:
    values = {"name": "m", "parameters": 100, "flops": 1e9, "tokens": 10, "flops_per_token": 5.0, "loss": 2.0}
    values |= {"lookahead_loss": 2.0, "bits_per_byte": 3.0, "difference": None, "capacities": [], "training": 1.0}
    return Column(**{**values, "decode": {1: 10.0, 8: 20.0}, "cache_bytes": 1000, **changes})


def test_the_verdict_says_which_way_it_went():
    routed = column(loss=1.9, decode={1: 12.0, 8: 20.0}, cache_bytes=560)
    said, other = verdict([column(), column(name="other", loss=1.8), routed])
    assert "against m: the routed model has seen 1.00 times the text, its loss is 5.00% lower" in said
    assert "1.20 times the speed" in said
    assert "0.56 times the bytes" in said
    assert "against other" in other
    assert "its loss is 5.56% higher under causal routing (1.9000 against 1.8000 nats per byte)" in other
