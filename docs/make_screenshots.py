"""Pictures of the routing page, from the model that `make demo` has trained, in Chromium.

python docs/make_screenshots.py demo
"""

import shutil
import sys
import tempfile
from pathlib import Path

import mixdepth

PICTURES = Path(__file__).parent / "pictures"


def main(demo: Path) -> None:
    from playwright.sync_api import sync_playwright

    from mixdepth.demo.steps import traced

    trace = traced(mixdepth.Run(demo / "routed"))
    with tempfile.TemporaryDirectory() as folder, sync_playwright() as playwright:
        file = mixdepth.write_page(trace, Path(folder) / "page.html")
        browser = playwright.chromium.launch(executable_path=shutil.which("chromium"), args=["--no-sandbox"])
        for name, view in (
            ("page", {"viewport": {"width": 1200, "height": 960}, "color_scheme": "light"}),
            ("page-phone", {"viewport": {"width": 390, "height": 780}, "color_scheme": "dark"}),
        ):
            page = browser.new_page(**view)
            page.goto(file.as_uri())
            page.locator('[data-t="131"]').hover()
            page.screenshot(path=PICTURES / f"{name}.png")
        browser.close()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
