"""Plots of runs and of loss against speed draw what was logged."""

import json
import re
import shutil
import sys
import xml.dom.minidom
from dataclasses import replace

import numpy as np
import pytest
from corpora import TINY, documents, lines, write_folder
from matplotlib.colors import same_color, to_rgb
from matplotlib.image import imread

import mixdepth
from mixdepth.cli import main
from mixdepth.report import plots
from mixdepth.report.figures import COLOURS, INK, RAMP
from mixdepth.report.logs import LoggedEvaluation, read_logs, smooth
from mixdepth.report.routing_of_layers import STATISTICS, draw_profile
from mixdepth.report.tradeoff import as_rows, draw_speed
from mixdepth.report.training_curves import draw_curves

ROWS = [
    {"name": "original", "loss": 3.1, "tokens_per_second": 10.0, "low": 9.5, "high": 10.5, "group": "dense"},
    {"name": "half", "loss": 3.15, "tokens_per_second": 12.9, "low": 12.5, "high": 13.3, "group": "routed"},
    {"name": "half, again", "loss": 3.15, "tokens_per_second": 12.95, "group": "routed"},
    {"name": "an eighth", "loss": 3.5, "tokens_per_second": 15.0},
]


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """Make a long log of two routed layers, and a short one of a dense model."""
    folder = tmp_path_factory.mktemp("runs")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("MIXDEPTH_CACHE", str(folder / "cache"))
        settings = {**TINY, "corpus": write_folder(folder / "texts", documents()), "save_every": 20}
        depth = mixdepth.DepthConfig(capacity=(0.25, 0.5), layers=(1, 2))
        mixdepth.train(folder / "mod", **{**settings, "layers": 3, "log_every": 1}, steps=60, depth=depth)
        mixdepth.train(folder / "dense", **settings, steps=20, eval_every=8, depth=None)
    return folder


def copied(run, folder):
    """Copy the logs of a run. Plots need nothing else."""
    folder.mkdir(parents=True)
    for name in ("run.json", "metrics.jsonl", "timings.jsonl"):
        shutil.copy(run / name, folder)
    return folder


def data(line):
    return [list(line.get_xdata()), list(line.get_ydata())]


def test_runs_are_drawn_by_the_command_line(runs, tmp_path, capsys):
    out = tmp_path / "some" / "plots"
    assert main(["plot", str(runs / "mod"), str(runs / "dense"), "--out", str(out)]) == 0
    names = ["training.png", "training.svg", "routing-mod.png", "routing-mod.svg"]
    assert capsys.readouterr().out.splitlines() == [str(out / name) for name in names]
    assert sorted(path.name for path in out.iterdir()) == sorted(names)
    for name in names:
        if name.endswith(".png"):
            assert imread(out / name).std() > 0.05
        else:
            assert xml.dom.minidom.parse(str(out / name)).documentElement.tagName == "svg"
    words = (out / "training.svg").read_text()
    for label in ("mod", "dense", "steps", "training FLOPs", "training time (seconds)", "loss (nats per token)"):
        assert f">{label}</text>" in words
    before = words
    plots.training_curves([runs / "mod", mixdepth.Run(runs / "dense")], out)
    assert (out / "training.svg").read_text() == before


def test_training_curves_are_the_lines_of_the_logs(runs):
    logs = read_logs([runs / "mod", runs / "dense"])
    panels = draw_curves(logs).axes
    for index, (name, key) in enumerate((("mod", "lm_loss"), ("dense", "loss"))):
        training = [line for line in lines(runs / name / "metrics.jsonl") if "loss" in line]
        seconds = np.cumsum([line["seconds"] for line in lines(runs / name / "timings.jsonl")])
        losses = [line[key] for line in training]
        for panel, x in zip(
            panels, ([line["step"] for line in training], [line["flops"] for line in training], seconds), strict=True
        ):
            own = [line for line in panel.lines if same_color(line.get_color(), COLOURS[index])]
            assert data(own[0]) == [list(x), losses]
            if name == "mod":  # long: what was logged is faint, with a smoother line before it
                assert own[0].get_alpha() < 0.5
                assert data(own[1])[1] == list(smooth(np.array(losses), logs[0].weights))
            else:
                assert own[0].get_alpha() is None


def test_the_held_out_loss_is_marked_where_it_was_measured_and_look_ahead_is_hollow_next_to_it(runs):
    panels = draw_curves(read_logs([runs / "mod", runs / "dense"])).axes
    *_, causal, lookahead = [line for line in panels[1].lines if same_color(line.get_color(), COLOURS[0])]
    result = mixdepth.Run(runs / "mod").result
    assert data(causal) == [[result["flops"]], [result["validation_loss"]]]
    assert data(lookahead) == [[result["flops"]], [result["validation_lookahead_loss"]]]
    assert lookahead.get_markerfacecolor() == "none" != causal.get_markerfacecolor()
    (x, _), (x_hollow, _) = (line.get_transform().transform((result["flops"], 5)) for line in (causal, lookahead))
    assert x_hollow > x + 5
    *_, earlier, last = [line for line in panels[0].lines if same_color(line.get_color(), COLOURS[1])]
    found = [line for line in lines(runs / "dense" / "metrics.jsonl") if "validation_loss" in line]
    assert [line["step"] for line in found] == [8, 16, 20]
    assert data(earlier) == [[8, 16], [line["validation_loss"] for line in found[:2]]]
    assert data(last) == [[20], [found[2]["validation_loss"]]]


def test_all_held_out_losses_are_in_view_and_the_steep_beginning_of_a_long_run_is_not(runs):
    (log,) = read_logs([runs / "mod"])
    low, high = draw_curves([replace(log, loss=1 + 9 / log.steps, evaluations=[])]).axes[0].get_ylim()
    assert low < 1.15 < 2.5 < high < 4
    apart = [LoggedEvaluation(30, 9.0, 8.0), LoggedEvaluation(60, 8.5, 0.5)]
    low, high = draw_curves([replace(log, evaluations=apart)]).axes[0].get_ylim()
    assert low < 0.5 < 9.0 < high
    diverged = draw_curves([replace(log, evaluations=[LoggedEvaluation(60, float("nan"), None)])])
    assert np.isfinite(diverged.axes[0].get_ylim()).all()


def test_a_smoothed_line_keeps_what_is_smooth_and_begins_where_it_began():
    steps = np.arange(1.0, 201)
    assert smooth(np.full(200, 2.5), steps) == pytest.approx(np.full(200, 2.5))
    assert smooth(steps)[:190] == pytest.approx(steps[:190])
    noise = np.random.default_rng(0).normal(size=(400, 2))
    assert (smooth(noise)[20:].std(0) < noise.std(0) / 3).all()
    values, weights = np.zeros(80), np.full(80, 9.0)
    values[-1], weights[-1] = 1.0, 1.0  # the mean of one step counts for one step
    assert smooth(values, weights)[-1] == pytest.approx(1 / 19)


def test_the_routing_profile_is_what_was_logged_of_each_layer(runs):
    (log,) = read_logs([runs / "mod"])
    figure = draw_profile(log)
    training = [line for line in lines(runs / "mod" / "metrics.jsonl") if "loss" in line]
    steps = [line["step"] for line in training]
    assert len(steps) == 60
    for (left, right), statistic in zip(np.reshape(figure.axes, (6, 2)), STATISTICS, strict=True):
        assert left.get_title(loc="left") == statistic.title
        values = [line["layers"][statistic.key] for line in training]
        bars = [bar for bar in right.patches if bar.get_width() == 0.75]
        for layer in range(2):
            assert data(left.lines[2 * layer]) == [steps, [value[layer] for value in values]]
            assert bars[layer].get_height() == pytest.approx(np.mean([value[layer] for value in values[-6:]]))
            assert same_color(bars[layer].get_facecolor(), left.lines[2 * layer + 1].get_color())
        assert [label.get_text() for label in right.get_xticklabels()] == ["1", "2"]
        assert left.get_ylim() == right.get_ylim()
    targets = figure.axes[0].lines[4:]
    assert [data(line) for line in targets] == [[steps, [0.25] * 60], [steps, [0.5] * 60]]


def test_a_run_that_is_still_written_is_drawn_as_far_as_it_got(runs, tmp_path):
    for name in ("mod", "dense"):
        run = copied(runs / name, tmp_path / name)
        text = (run / "metrics.jsonl").read_text().splitlines(keepends=True)
        (run / "metrics.jsonl").write_text("".join(text[:5]) + text[5][:20])
        timings = (run / "timings.jsonl").read_text().splitlines(keepends=True)
        (run / "timings.jsonl").write_text("".join(timings[:3]) + '{"st')
    logs = read_logs([tmp_path / "mod", tmp_path / "dense"])
    assert [len(log.steps) for log in logs] == [5, 4]  # one line of the dense run is an evaluation
    assert [int(np.isnan(log.seconds).sum()) for log in logs] == [2, 1]
    assert len(plots.plot([str(tmp_path / "mod"), str(tmp_path / "dense")], tmp_path / "out")) == 4
    (tmp_path / "dense" / "timings.jsonl").unlink()
    draw_curves(read_logs([tmp_path / "dense"]))


def test_runs_are_named_by_what_tells_them_apart(runs, tmp_path):
    folders = [copied(runs / "dense", tmp_path / name / "seed0") for name in ("a/x", "b/y")]
    assert [log.name for log in read_logs([*folders, folders[0]])] == ["a/x", "b/y"]
    assert [log.name for log in read_logs([runs / "mod"])] == ["mod"]
    folders.append(copied(runs / "mod", tmp_path / "b" / "y" / "seed1"))
    assert [log.name for log in read_logs(folders)] == ["a/x/seed0", "b/y/seed0", "b/y/seed1"]


def test_figures_of_a_page_are_transparent_elements_with_ids_of_their_own(runs):
    figures = [
        plots.training_curves_svg([runs / "mod", runs / "dense"]),
        plots.training_curves_svg([runs / "dense"]),
        plots.loss_against_speed_svg(ROWS, reference="original"),
    ]
    seen = set()
    for svg in figures:
        root = xml.dom.minidom.parseString(svg).documentElement
        assert svg.startswith("<svg ")
        assert root.getAttribute("aria-label")
        assert "<style" not in svg
        assert INK not in svg
        assert "fill: currentColor" in svg  # words take the page's colour
        assert not re.search(r"#fff\b|#ffffff|fill: white", svg)
        ids = re.findall(r' id="([^"]+)"', svg)
        assert len(ids) == len(set(ids))
        assert set(re.findall(r'(?:url\(|href=")#([^")]+)', svg)) == set(ids)
        assert not seen & set(ids)
        seen |= set(ids)
    assert "routed layer: mod" in plots.routing_profile_svg(runs / "mod")


def luminance(colour):
    parts = np.array(to_rgb(colour))
    return np.where(parts <= 0.04045, parts / 12.92, ((parts + 0.055) / 1.055) ** 2.4) @ [0.2126, 0.7152, 0.0722]


@pytest.mark.parametrize("colour", [*COLOURS, *RAMP])
def test_colours_have_a_contrast_of_3_on_light_and_on_dark_pages(colour):
    assert (luminance("white") + 0.05) / (luminance(colour) + 0.05) >= 3
    assert (luminance(colour) + 0.05) / (luminance("#16181d") + 0.05) >= 3


def test_loss_against_speed_has_a_mark_an_interval_and_a_name_for_each_row(tmp_path, capsys):
    panel = draw_speed(as_rows(ROWS), "original").axes[0]
    drawn = [data(line) for line in panel.lines]
    for row in ROWS:
        assert [[row["tokens_per_second"]], [row["loss"]]] in drawn
    assert [[9.5, 10.5], [3.1, 3.1]] in drawn
    assert [[0, 1], [3.1 * 1.03] * 2] in drawn
    assert [[12.5, 12.5], [0, 1]] in drawn
    names = [text for text in panel.texts if text.get_text() in [row["name"] for row in ROWS]]
    assert len(names) == 4
    boxes = [text.get_window_extent() for text in names]
    assert not any(a.overlaps(b) for i, a in enumerate(boxes) for b in boxes[:i])
    assert [text.get_text() for text in panel.get_legend().get_texts()] == ["dense", "routed"]
    assert draw_speed(as_rows([{**row, "group": None} for row in ROWS])).axes[0].get_legend() is None
    file = tmp_path / "rows.json"
    file.write_text(json.dumps(ROWS))
    assert main(["plot", str(file), "--out", str(tmp_path / "out"), "--reference", "original"]) == 0
    assert capsys.readouterr().out.split() == [str(tmp_path / "out" / f"speed.{kind}") for kind in ("png", "svg")]
    assert "1.25 x speed" in (tmp_path / "out" / "speed.svg").read_text()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["nowhere"], "'nowhere' is not the folder of a run: it has no run.json"),
        (["unlogged"], "'unlogged' has logged no step yet"),
        (["begun"], "'begun' has logged no step yet"),
        (["damaged"], "damaged/metrics.jsonl' is damaged"),
        (["foreign"], "the logs in 'foreign' are damaged"),
        (["begun", "rows.json"], "'rows.json' is a file: give the folders of runs, or one JSON file alone"),
        (["good", "--reference", "x"], "reference='x' has no meaning for runs"),
        (["good", "--out", "rows.json"], "'rows.json' cannot be written"),
        (["missing.json"], "'missing.json' is not a file"),
        (["broken.json"], "'broken.json' is damaged"),
        (["empty.json"], "'empty.json' must be a list of rows"),
        (["rows.json", "--reference", "x"], "the reference 'x' is none of the rows: original"),
        (["lossless.json"], "row 2 of 'lossless.json' has no loss"),
        (["words.json"], "row 1 of 'words.json': loss must be a positive number, not 'low'"),
        (["half.json"], "low and high come together"),
        (["text.json"], "row 1 of 'text.json' must have name, loss and tokens_per_second"),
    ],
)
def test_what_cannot_be_drawn_is_said_in_one_sentence(arguments, message, runs, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name in ("unlogged", "begun", "damaged", "foreign", "good"):
        copied(runs / "dense", tmp_path / name)
    (tmp_path / "unlogged" / "metrics.jsonl").unlink()
    (tmp_path / "begun" / "metrics.jsonl").write_text('{"step": 1, "lo')
    (tmp_path / "damaged" / "metrics.jsonl").write_text('{"step": 1\n{"step": 2}\n')
    (tmp_path / "foreign" / "metrics.jsonl").write_text('{"loss": 1.0}\n')
    (tmp_path / "broken.json").write_text("[{")
    for name, rows in {
        "rows": ROWS[:1],
        "empty": [],
        "lossless": [ROWS[0], {"name": "x", "tokens_per_second": 1}],
        "words": [{**ROWS[0], "loss": "low"}],
        "half": [{"name": "x", "loss": 1.0, "tokens_per_second": 1.0, "low": 0.5}],
        "text": ["x"],
    }.items():
        (tmp_path / f"{name}.json").write_text(json.dumps(rows))
    assert main(["plot", *([] if "--out" in arguments else ["--out", "out"]), *arguments]) == 2
    said = capsys.readouterr().err.strip().splitlines()
    assert len(said) == 1
    assert message in said[0]
    assert not (tmp_path / "out").exists()


def test_without_routed_layers_there_is_no_routing_to_plot(runs, tmp_path):
    with pytest.raises(ValueError, match="'dense' has no routed layers"):
        plots.routing_profile(runs / "dense", tmp_path)


def test_without_matplotlib_the_way_to_it_is_named(runs, tmp_path, capsys, monkeypatch):
    for name in [name for name in sys.modules if name.split(".")[0] == "matplotlib"]:
        monkeypatch.setitem(sys.modules, name, None)
    assert main(["plot", str(runs / "dense"), "--out", str(tmp_path)]) == 2
    assert capsys.readouterr().err == "mixdepth: plots need Matplotlib: pip install 'mixdepth[plots]'\n"


def test_a_file_that_cannot_be_written_leaves_no_other_behind(runs, tmp_path):
    (tmp_path / "training.svg" / "taken").mkdir(parents=True)
    with pytest.raises(OSError, match="cannot be written"):
        plots.training_curves([runs / "dense"], tmp_path)
    assert not list(tmp_path.glob(".*"))
