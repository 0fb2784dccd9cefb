"""The routing page, in a real browser."""

import os
from dataclasses import replace

import pytest
import torch
from chromium import needs_browser
from corpora import TINY
from tiny import dense

import mixdepth
from mixdepth.cli import main
from mixdepth.data.tokenizers import byte_tokenizer
from mixdepth.evaluation.tracing import trace_tokens
from mixdepth.report.page import document, routing_section, write_page

TEXT = 'if x <script>alert(1)</script>:\n\treturn "é & 日"  # <b>\n' * 6
CONTEXT = 64
NOTHING = "\u2013"
ATTACK = "</script><script>alert(1)</script><b>"
"""Text that attacks a page, as one token. A vocabulary may hold it."""


@pytest.fixture(scope="module")
def model():
    """Make a model with predictors that are wrong now and then."""
    model = mixdepth.route(dense(vocab_size=256), capacity=0.4, layers=(1, 2, 3))
    torch.manual_seed(1)
    with torch.no_grad():
        for router in model.depth_routers:
            router.projection.weight.normal_(std=0.5)
            for parameter in router.predictor.parameters():
                parameter.normal_()
    return model


@pytest.fixture(scope="module")
def trace(model):
    ids = byte_tokenizer()(TEXT).input_ids
    return trace_tokens(model, ids, byte_tokenizer(), context=CONTEXT, num_given=200, name="<i>model</i>")


@pytest.fixture
def opened(browser, trace, tmp_path):
    """Open the page from disk. Any message and any request of the page fails the test."""
    troubles, contexts = [], []

    def opened(**options):
        file = write_page(trace, tmp_path / "page.html")
        contexts.append(browser.new_context(**options))
        page = contexts[-1].new_page()
        page.on("console", lambda message: troubles.append(message.text))
        page.on("pageerror", lambda error: troubles.append(str(error)))
        page.on("dialog", lambda dialog: troubles.append(dialog.message))
        page.on("request", lambda request: request.url != file.as_uri() and troubles.append(request.url))
        page.goto(file.as_uri())
        return page

    yield opened
    for context in contexts:
        context.close()
    assert troubles == []


def depths(rows):
    return [sum(row[t] == "1" for row in rows) for t in range(len(rows[0]))]


def shown(page):
    return page.eval_on_selector_all(".tokens span", "all => all.map(one => +one.dataset.depth)")


def choose(page, name):
    page.get_by_role("radio", name=name).check(force=True)


@needs_browser
def test_every_token_is_there_as_text_and_shaded_by_its_depth(opened, trace):
    page = opened()
    texts = page.eval_on_selector_all(".tokens span", "all => all.map(one => one.textContent)")
    assert [text.replace("↵\n", "\n") for text in texts] == trace.tokens
    assert page.locator("h1").inner_text() == "How <i>model</i> routes a text"
    assert page.locator("b, i:not(.scale i)").count() == 0
    counts = depths(trace.causal.chosen)
    assert shown(page) == counts
    shades = page.eval_on_selector_all(".tokens span", "all => all.map(one => getComputedStyle(one).backgroundColor)")
    of_depth = {count: {shade for shade, c in zip(shades, counts, strict=True) if c == count} for count in set(counts)}
    assert len(of_depth) > 2
    assert all(len(found) == 1 for found in of_depth.values())
    assert len(set.union(*of_depth.values())) == len(of_depth)
    windows = page.eval_on_selector_all(".tokens .window", "all => all.map(one => +one.dataset.t)")
    assert windows == list(range(CONTEXT, len(trace.tokens), CONTEXT))
    assert page.locator(".tokens .made").count() == len(trace.tokens) - 200


@needs_browser
def test_a_token_that_is_markup_is_a_token(browser, trace, tmp_path):
    file = write_page(replace(trace, tokens=[ATTACK, *trace.tokens[1:]]), tmp_path / "page.html")
    page = browser.new_page()
    alerts = []
    page.on("dialog", lambda dialog: (alerts.append(dialog.message), dialog.dismiss()))
    page.goto(file.as_uri())
    assert page.locator('[data-t="0"]').inner_text() == ATTACK
    assert page.locator(".tokens span").count() == len(trace.tokens)
    page.close()
    assert alerts == []


@needs_browser
def test_hovering_over_a_token_shows_what_the_data_says(opened, trace):
    page = opened()
    for t in (0, 3, 77):
        page.locator(f'[data-t="{t}"]').hover()
        said = page.locator(".details").inner_text()
        assert f"token {t + 1} of {len(trace.tokens)}" in said
        surprise = trace.causal.surprise[t]
        assert f"surprise {NOTHING if surprise is None else f'{surprise:.2f}'} nats" in said
        for layer, index in enumerate(trace.layers):
            cells = page.locator(".details tbody tr").nth(layer).locator("td").all_inner_texts()
            passed = trace.causal
            assert cells[0] == str(index)
            assert cells[1].startswith("✓" if passed.chosen[layer][t] == "1" else NOTHING)
            values = [rows[layer][t] for rows in (passed.scores, passed.guesses, passed.gates)]
            assert [float(cell) for cell in cells[2:]] == pytest.approx(values, abs=6e-4)


@needs_browser
def test_the_switch_shows_look_ahead_and_where_the_causal_rule_errs(opened, trace):
    page = opened()
    choose(page, "look-ahead")
    assert shown(page) == depths(trace.lookahead.chosen)
    page.locator('[data-t="5"]').hover()
    cells = page.locator(".details tbody tr").first.locator("td").all_inner_texts()
    assert float(cells[2]) == pytest.approx(trace.lookahead.scores[0][5], abs=6e-4)
    assert page.locator(".layers tbody tr").first.locator("td").nth(2).inner_text() == (
        f"{trace.lookahead.layers[0].capacity:.1%}".replace("%", " %")
    )
    choose(page, "where the causal rule errs")
    pairs = list(zip(trace.causal.chosen, trace.causal.best, strict=True))
    extra = [sum(a[t] > b[t] for a, b in pairs) for t in range(len(trace.tokens))]
    missed = [sum(a[t] < b[t] for a, b in pairs) for t in range(len(trace.tokens))]
    assert sum(extra)
    assert sum(missed)
    assert shown(page) == extra
    marks = page.eval_on_selector_all(".tokens span", "all => all.map(one => +one.style.getPropertyValue('--m'))")
    assert marks == pytest.approx([count / 3 for count in missed])
    wrong = missed.index(max(missed))
    page.locator(f'[data-t="{wrong}"]').hover()
    assert "missed" in page.locator(".details").inner_text()


@needs_browser
def test_the_map_has_the_colour_of_the_choice_in_each_cell_and_hovering_it_selects(opened, trace):
    page = opened(viewport={"width": 2400, "height": 900})
    canvas = page.locator("canvas")
    picture = canvas.evaluate(
        """(canvas, numTokens) => {
            const pixels = canvas.getContext("2d").getImageData(0, 0, canvas.width, canvas.height).data;
            const step = (canvas.width - 34) / numTokens;
            const line = (layer) => Math.floor((2.5 - layer) * canvas.height / 3) * canvas.width;
            const filled = (layer, t) => pixels[4 * (line(layer) + Math.floor(35 + t * step)) + 3];
            const row = (layer) => Array.from({ length: numTokens }, (_, t) => filled(layer, t) ? "1" : "0").join("");
            return [0, 1, 2].map(row);
        }""",
        len(trace.tokens),
    )
    assert picture == trace.causal.chosen
    box = canvas.bounding_box()
    width = (box["width"] - 34) / len(trace.tokens)
    canvas.hover(position={"x": 34 + 10.5 * width, "y": 5})
    assert "token 11 of" in page.locator(".details").inner_text()


@needs_browser
def test_the_page_stays_under_the_pointer_and_the_map_follows_the_keys(opened, trace):
    page = opened(viewport={"width": 900, "height": 400})
    canvas = page.locator("canvas")
    canvas.scroll_into_view_if_needed()
    before = page.evaluate("scrollY")
    assert before > 0
    canvas.hover(position={"x": 300, "y": 5})
    assert page.evaluate("scrollY") == before
    page.locator(".tokens").focus()
    page.keyboard.press("End")
    inside = """([part, whole]) => {
        const [a, b] = [part, whole].map((name) => document.querySelector(name).getBoundingClientRect());
        return a.left >= b.left && a.right <= b.right + 1 && a.bottom <= b.bottom + 1;
    }"""
    for pair in ([".cursor", ".map"], [".now", ".tokens"]):
        assert page.evaluate(inside, pair), pair


@needs_browser
def test_keys_move_from_token_to_token_and_from_line_to_line(opened, trace):
    page = opened()
    page.locator(".tokens").focus()

    def now():
        assert page.locator(".tokens").get_attribute("aria-activedescendant") == page.locator(".now").get_attribute(
            "id"
        )
        return int(page.locator(".now").get_attribute("data-t"))

    for key, expected in (("ArrowRight", 1), ("ArrowRight", 2), ("ArrowLeft", 1), ("End", len(trace.tokens) - 1)):
        page.keyboard.press(key)
        assert now() == expected
    page.keyboard.press("Home")
    page.keyboard.press("ArrowDown")
    assert now() == trace.tokens.index("\n") + 1  # the start of the second line
    page.keyboard.press("ArrowUp")
    assert now() == 0
    page.locator(".map").focus()
    page.keyboard.press("ArrowRight")
    assert now() == 1  # on the map too


@needs_browser
def test_a_phone_shows_all_of_it_and_a_tap_selects(opened, trace):
    page = opened(viewport={"width": 390, "height": 844}, has_touch=True, is_mobile=True)
    assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")
    page.locator('[data-t="9"]').tap()
    assert "token 10 of" in page.locator(".details").inner_text()
    assert page.locator(".details").bounding_box()["height"] < 0.45 * 844


@needs_browser
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_text_can_be_read_on_every_shade(opened, scheme):
    page = opened(color_scheme=scheme)
    contrast = """() => {
        const pen = document.createElement("canvas").getContext("2d", { willReadFrequently: true });
        const light = (...colours) => {
            for (const colour of colours) { pen.fillStyle = colour; pen.fillRect(0, 0, 1, 1); }
            const linear = (c) => c <= 0.04045 ? c / 12.92 : ((c + 0.055) / 1.055) ** 2.4;
            const [r, g, b] = [...pen.getImageData(0, 0, 1, 1).data].map((c) => linear(c / 255));
            return 0.2126 * r + 0.7152 * g + 0.0722 * b;
        };
        const paper = getComputedStyle(document.body).backgroundColor;
        const ratio = (one) => {
            const style = getComputedStyle(one);
            const [a, b] = [light(paper, style.backgroundColor), light(style.color)].sort((x, y) => x - y);
            return (b + 0.05) / (a + 0.05);
        };
        return Math.min(...[...document.querySelectorAll(".tokens span, .scale i")].map(ratio));
    }"""
    page.wait_for_timeout(300)  # for shades to settle
    assert page.evaluate(contrast) >= 4.5
    choose(page, "where the causal rule errs")
    page.wait_for_timeout(300)
    assert page.evaluate(contrast) >= 4.5


@needs_browser
def test_a_screen_reader_is_told_of_tokens_choices_and_pictures(opened, trace):
    page = opened()
    assert page.get_by_role("listbox").get_attribute("aria-label").startswith("The text")
    count = depths(trace.causal.chosen)[0]
    assert page.get_by_role("option").first.get_attribute("aria-label") == f"i: {count} of 3 routed layers"
    assert page.get_by_role("option", selected=True).count() == 1
    assert page.locator(".details").get_attribute("aria-live") == "polite"
    assert page.get_by_role("radio").count() == 3
    assert page.get_by_role("group", name="Routing").count() == 1
    for picture in page.get_by_role("img").all():
        assert picture.get_attribute("aria-label")
    assert page.get_by_role("row").count() > 20
    assert page.evaluate("document.documentElement.lang") == "en"


@needs_browser
def test_4096_tokens_open_and_answer(opened, browser, model, tmp_path):
    ids = torch.randint(32, 127, (4096,), generator=torch.Generator().manual_seed(0)).tolist()
    file = write_page(trace_tokens(model, ids, byte_tokenizer(), context=CONTEXT), tmp_path / "long.html")
    page = browser.new_page()
    page.goto(file.as_uri())
    assert page.locator(".tokens span").count() == 4096
    page.locator(".tokens").focus()
    page.keyboard.press("End")
    assert "token 4096 of 4096" in page.locator(".details").inner_text()
    assert page.locator(".now").is_visible()
    page.close()


def test_text_cannot_leave_its_script_element(trace):
    section = routing_section(replace(trace, tokens=[ATTACK, *trace.tokens[1:]]))
    assert section.count("<script") == 1
    assert section.count("</script") == 1
    assert "<b>" not in section
    assert "<h1>&lt;i&gt;</h1>" in document("<i>", section)


def test_a_page_is_made_from_a_run_from_a_file_and_from_what_was_generated(corpus, tmp_path, capsys):
    run, page = str(tmp_path / "run"), str(tmp_path / "page.html")
    mixdepth.train(run, corpus=corpus, steps=2, **TINY)
    (tmp_path / "text.txt").write_text("def f(x):\n    return x\n")
    for arguments in (
        ["page", run, "--out", page],
        ["page", run, "--text", "hello", "--out", page],
        ["page", run, "--file", str(tmp_path / "text.txt"), "--context", "16", "--out", page],
        ["generate", run, "def f(", "--max-new-tokens", "8", "--page", page],
    ):
        assert main(arguments) == 0
        assert capsys.readouterr().out.endswith(f"{page}\n")
        assert "routing" in (tmp_path / "page.html").read_text()
        os.remove(page)
    (tmp_path / "binary").write_bytes(b"\xff\xfe\x00")
    for arguments, message in (
        ([run, "--text", "a", "--file", "b"], "give --text or --file, not both"),
        ([run, "--file", str(tmp_path / "nowhere")], "nowhere"),
        ([run, "--file", str(tmp_path / "binary")], "is not text in UTF-8"),
        ([run, "--text", ""], "there is no text to route"),
        ([run, "--context", "1"], "context must be a whole number of at least 2"),
        ([run, "--out", str(tmp_path / "no" / "where.html")], "the page cannot be written to"),
        ([run, "--out", str(tmp_path)], "the page cannot be written to"),
        (["nowhere"], "'nowhere' is neither a run"),
    ):
        assert main(["page", *arguments]) == 2
        assert message in capsys.readouterr().err
    assert main(["generate", run, "a", "--page", str(tmp_path)]) == 2
    assert capsys.readouterr().out == ""
    assert not os.path.exists(page)
    assert not list(tmp_path.glob("*.part"))
