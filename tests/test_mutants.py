"""The list of deliberate bugs fits the package and its tests. `tests/mutants.py` runs the list."""

import subprocess
import sys
from collections import Counter
from dataclasses import replace

import pytest
from bugs import BUGS
from mutants import ROOT, copy_to, mistakes

TWO_BUGS = """
import runpy
import sys

script, outcomes = sys.argv[1:]
sys.path.insert(0, script.removesuffix("/mutants.py"))
import bugs

common = {"file": "routes.py", "test": "test_routes.py::test_the_realised_capacity_counts_real_tokens_only"}
bugs.BUGS[:] = [
    bugs.Bug(what="Padding counts.", find="self.real.sum().clamp(min=1)", replace="self.real.numel()", **common),
    bugs.Bug(what="No bug at all.", find="self.real.sum().clamp(min=1)", replace="self.real.sum().clamp(1)", **common),
]
sys.argv = [script, "--outcomes", outcomes]
runpy.run_path(script, run_name="__main__")
"""


def test_each_bug_fits_the_source_exactly_once_and_has_a_test_that_exists():
    assert [problem for bug in BUGS for problem in mistakes(bug)] == []


def test_no_bug_is_listed_twice():
    sentences = Counter(bug.what for bug in BUGS)
    changes = Counter((bug.file, bug.find, bug.replace) for bug in BUGS)
    assert max(sentences.values()) == max(changes.values()) == 1


def test_a_bug_that_no_longer_fits_and_a_test_that_is_gone_are_named():
    bug = BUGS[0]
    (problem,) = mistakes(replace(bug, find="this stands nowhere"))
    assert problem == f"'this stands nowhere' stands 0 times in mixdepth/{bug.file}, not once: {bug.what}"
    (problem,) = mistakes(replace(bug, test="test_config.py::test_of_nothing"))
    assert problem == f"there is no test test_config.py::test_of_nothing: {bug.what}"


@pytest.mark.slow
def test_a_run_tells_a_killed_bug_from_a_survivor_and_goes_on_where_it_was(tmp_path):
    folder = copy_to(ROOT, tmp_path / "copy")  # nothing else changes it between the two runs
    source = (folder / "mixdepth" / "routes.py").read_text()
    for known in (0, 2):
        arguments = [str(folder / "tests" / "mutants.py"), str(tmp_path / "outcomes.jsonl")]
        ran = subprocess.run([sys.executable, "-c", TWO_BUGS, *arguments], capture_output=True, text=True)
        assert ran.returncode == 1, ran.stderr
        assert f"{known} of 2 bugs are known" in ran.stdout
        assert "survived: No bug at all." in ran.stdout
        assert "survived: Padding counts." not in ran.stdout
        assert "1 of 2 bugs were killed" in ran.stdout
        assert len((tmp_path / "outcomes.jsonl").read_text().splitlines()) == 2
    assert (folder / "mixdepth" / "routes.py").read_text() == source
