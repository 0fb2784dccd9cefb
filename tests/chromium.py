"""The real browser that pages are opened in, if the machine has one."""

import shutil

import pytest

NAMES = ("chromium", "chromium-browser", "google-chrome")
CHROMIUM = next((path for path in map(shutil.which, NAMES) if path), None)
"""The path of the browser, or None."""

needs_browser = pytest.mark.skipif(CHROMIUM is None, reason="there is no chromium: apt-get install chromium")
