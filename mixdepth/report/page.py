"""The routing page: one HTML file that shows where each token of a text went. No server, no network."""

import json
from html import escape
from importlib.resources import files
from pathlib import Path
from typing import TYPE_CHECKING

from mixdepth.files import check_name, write_text, writing

if TYPE_CHECKING:  # a page is made of a trace, and needs nothing of the module that makes traces
    from mixdepth.evaluation.tracing import Trace

VIEWS = {"causal": "causal", "lookahead": "look-ahead", "difference": "where the causal rule errs"}
"""What a page can show, and the words for it."""

NOTHING_FROM_OUTSIDE = "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; img-src data:"


def write_page(trace: "Trace", path: str | Path) -> Path:
    """Write the page of a trace, as in `write_page(mixdepth.trace("runs/mod", "def f(x):"), "page.html")`."""
    path = Path(path)
    with writing(path):
        write_text(path, document(f"How {trace.name} routes a text", routing_section(trace)))
    return path


def check_path(path: str | Path) -> None:
    """Refuse a path that cannot be written, before there is work to lose."""
    check_name(path)
    if not Path(path).resolve().parent.is_dir() or Path(path).is_dir():
        raise ValueError(f"the page cannot be written to {str(path)!r}: name a file in a folder that exists")


def document(title: str, *sections: str) -> str:
    """Return a self-contained page. Sections are HTML; the title is text."""
    package = files("mixdepth.report")
    style = package.joinpath("page.css").read_text(encoding="utf-8")
    script = package.joinpath("page.js").read_text(encoding="utf-8")
    return f"""<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta http-equiv="Content-Security-Policy" content="{NOTHING_FROM_OUTSIDE}">
<link rel="icon" href="data:,">
<title>{escape(title)}</title>
<style>{style}</style>
</head>
<body>
<h1>{escape(title)}</h1>
{"".join(sections)}
<noscript><p>The routes are drawn by a script within this file: allow it to run.</p></noscript>
<script>{script}</script>
</body>
</html>
"""


def routing_section(trace: "Trace", name: str = "routing") -> str:
    """Return the part of a page that shows a trace; `name` is its id, for pages with several."""
    switch = ""
    for value, label in VIEWS.items():
        checked = " checked" if value == "causal" else ""
        switch += f'<label><input type="radio" name="{name}" value="{value}"{checked}><span>{label}</span></label>'
    note = f'<p class="note">{escape(trace.note)}</p>' if trace.note else ""
    return f"""<section class="routing" id="{name}">
<script type="application/json">{as_data(trace)}</script>
<p>{escape(_description(trace))}</p>
{note}
<p class="loss"></p>
<fieldset><legend>Routing</legend>{switch}</fieldset>
<p class="scale"></p>
<div class="reader">
<div class="tokens" role="listbox" tabindex="0" aria-label="The text, token by token; arrow keys move"></div>
<aside class="details" aria-live="polite" aria-label="The token"></aside>
</div>
<h2>Layers and tokens</h2>
<p class="note">A row for each routed layer, the first one below; a column for each token. Coloured: it went through.
A line separates windows of {trace.context:,} tokens, which are read one by one.</p>
<div class="map" tabindex="0" role="group" aria-label="Map of layers and tokens; arrow keys move">
<canvas role="img" aria-label="Which token went through which routed layer; the table below has the numbers"></canvas>
<div class="cursor"></div>
</div>
<h2>Realised capacity</h2>
<div class="layers wide"></div>
<h2>Gates</h2>
<p class="note">How far tokens move: of those that were chosen, and in grey what it would have been for the others.
The outermost bars hold all values beyond them.</p>
<svg class="histogram" viewBox="0 0 488 182" role="img"></svg>
<h2>Which tokens</h2>
<p class="correlation"></p>
<div class="types wide"></div>
</section>
"""


def as_data(trace: "Trace") -> str:
    """Return JSON that may stand inside a script element, whatever the text says."""
    text = json.dumps(trace.to_dict(), ensure_ascii=False, separators=(",", ":"), allow_nan=False)
    # "<" could end the element; the two others end a line in JavaScript.
    return text.replace("<", "\\u003c").replace("\u2028", "\\u2028").replace("\u2029", "\\u2029")


def _description(trace: "Trace") -> str:
    settings = trace.settings
    routed = f"{len(trace.layers)} of {trace.num_layers} layers decide"
    words = [f"scheme {settings['scheme']}", f"gate {settings['gate']}"]
    if settings["causal"] is not None:
        words.append(f"causal rule {settings['causal']}")
    return f"{trace.model}: {routed}; {', '.join(words)}."
