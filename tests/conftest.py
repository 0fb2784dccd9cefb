import gc
import multiprocessing
import os
import re

os.environ.setdefault("OMP_NUM_THREADS", "1")  # the tests run in parallel
# Some virtual machines announce AMX and trap on its instructions: bf16 products do without it here.
os.environ.setdefault("ONEDNN_MAX_CPU_ISA", "AVX512_CORE_FP16")
# On some machines MKL's products depend on where a tensor lies in memory, and a mapped file lies elsewhere than a copy.
os.environ.setdefault("MKL_CBWR", "AUTO,STRICT")
# A name that is not a folder would be looked up on the hub each time.
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("MIXDEPTH_CACHE", os.path.join(os.path.dirname(__file__), "..", ".pytest_cache", "tokens"))

import pytest
import torch
import transformers
from chromium import CHROMIUM
from corpora import CENTRE, SMALL, TINY, call, documents, flags, write_folder

import mixdepth

multiprocessing.set_forkserver_preload(["mixdepth"])  # once for all processes that tests start


def pytest_collection_finish() -> None:
    """Keep what is imported out of garbage collection, which a trainer runs again and again."""
    gc.freeze()


@pytest.fixture(autouse=True)
def _same_every_time() -> None:
    """Every test begins with the same random state, and transformers prints no warnings."""
    torch.manual_seed(0)
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    """A corpus of about 1,250 windows, and a cache of its own."""
    folder = tmp_path_factory.mktemp("corpus")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("MIXDEPTH_CACHE", str(folder / "cache"))
        yield write_folder(folder / "texts", documents())


@pytest.fixture(scope="module")
def finished(corpus, tmp_path_factory):
    """A finished routed run and its dense twin."""
    folder = tmp_path_factory.mktemp("runs")
    settings = {**TINY, "corpus": corpus, "steps": 60, "save_every": 20}
    depth = mixdepth.DepthConfig(capacity=0.25)
    mixdepth.train(folder / "mod", **settings, depth=depth)
    mixdepth.train(folder / "dense", **settings, depth=None)
    return folder


@pytest.fixture(scope="module")
def study(corpus, tmp_path_factory):
    """Planned and run by the command line: two cells."""
    folder = tmp_path_factory.mktemp("study") / "study"
    asked = {"budgets": 3e8, "variants": "dense,mod", "seeds": 1, "sizes": 1, "centre": CENTRE}
    planned = call("isoflop", "plan", *flags({**asked, **SMALL, "corpus": corpus, "out": folder}))
    assert planned.returncode == 0, planned.stderr
    assert re.search(r"2 runs of 5\.\d+e\+08 FLOPs in all, 0 finished", planned.stdout)
    ran = call("isoflop", "run", str(folder), "--workers", "2")
    assert ran.returncode == 0, ran.stderr
    assert "2 of 2 runs are finished" in ran.stdout
    return folder


@pytest.fixture(scope="module")
def browser():
    """A real browser, for tests that carry `needs_browser`."""
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield browser
        browser.close()
