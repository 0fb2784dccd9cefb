"""How fluid the routing page is at 4,096 tokens and 12 routed layers, in headless Chromium.

Opening, moving to the next token, and switching between ways of routing: milliseconds until the page has been drawn
again, medians of 20.

    python benchmarks/page.py
"""

import shutil
import tempfile
from pathlib import Path
from statistics import median

from machine import describe, header, row


def main() -> None:
    import torch
    from playwright.sync_api import sync_playwright
    from transformers import AutoModelForCausalLM

    import mixdepth
    from mixdepth.data.tokenizers import byte_tokenizer
    from mixdepth.evaluation.tracing import trace_tokens
    from mixdepth.models.shape import model_config
    from mixdepth.report.page import write_page

    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(model_config(24, 32, context=1024))
    model = mixdepth.route(model, capacity=0.25, causal="threshold")
    ids = torch.randint(32, 127, (4096,))
    mixdepth.calibrate(model, [ids[:2048].view(2, 1024)])
    drawn = "act => new Promise((done) => { const start = performance.now(); eval(act); requestAnimationFrame(() => "
    drawn += "setTimeout(() => done(performance.now() - start))); })"
    press = "document.querySelector('.tokens').dispatchEvent(new KeyboardEvent('keydown', { key: 'ArrowRight' }))"
    switch = "document.querySelector('input:not(:checked)').click()"
    with tempfile.TemporaryDirectory() as folder, sync_playwright() as playwright:
        file = write_page(trace_tokens(model, ids.tolist(), byte_tokenizer(), context=1024), Path(folder) / "page.html")
        browser = playwright.chromium.launch(executable_path=shutil.which("chromium"), args=["--no-sandbox"])
        page = browser.new_page(bypass_csp=True)
        times: dict[str, list[float]] = {"open": [], "next token": [], "switch": []}
        for _ in range(20):
            page.goto(file.as_uri())
            times["open"].append(page.evaluate("performance.getEntriesByType('navigation')[0].loadEventEnd"))
            times["next token"].append(page.evaluate(drawn, press))
            times["switch"].append(page.evaluate(drawn, switch))
        print(f"{describe()}, a page of {file.stat().st_size / 1e6:.1f} MB")
        browser.close()
    header("", "ms")
    for name, values in times.items():
        row(name, f"{median(values):.0f}")


if __name__ == "__main__":
    main()
