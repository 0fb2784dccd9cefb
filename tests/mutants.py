"""Break the core on purpose, one bug at a time, and see whether the test that is about it turns red.

    .venv/bin/python tests/mutants.py                 # all of tests/bugs.py
    .venv/bin/python tests/mutants.py mask.py top_k   # those whose file, sentence or test has one of these words

Each bug is put into a copy of the package, so that nothing here touches the working tree. Each outcome is written down
as it comes: a run that was stopped resumes where it was, as long as neither the package nor the tests have changed.
"""

import argparse
import hashlib
import importlib
import json
import multiprocessing
import os
import shutil
import signal
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from multiprocessing.connection import wait
from multiprocessing.process import BaseProcess
from pathlib import Path

from bugs import BUGS, Bug
from tqdm import tqdm

ROOT = Path(__file__).parents[1]
OUTCOMES = ROOT / ".pytest_cache" / "mutants.jsonl"
COPIED = ("mixdepth", "tests")
NOT_TESTED = ("bugs.py", "mutants.py", "test_mutants.py")
"""Files of tests/ that no outcome depends on."""
SECONDS = 600
"""How long the test of a bug may take before it counts as stuck."""
SECONDS_UNBROKEN = 3600
"""The same for all tests without a bug."""
PRELOADED = ("hypothesis", "pytest", "torch", "transformers.models.llama.modeling_llama", "transformers.trainer")
"""What is imported once and inherited by all tests."""
ENVIRONMENT = {
    "CI": "1",  # hypothesis then draws the same examples each time, and sets no deadline
    # As in conftest.py, which is read after torch is imported here
    "OMP_NUM_THREADS": "1",
    "ONEDNN_MAX_CPU_ISA": "AVX512_CORE_FP16",
    "MKL_CBWR": "AUTO,STRICT",
    "HF_HUB_OFFLINE": "1",
}

KILLED, SURVIVED, BROKEN = "killed", "survived", "broken"
"""The test failed; it passed; or it did neither: it was not found, or could not begin, and the list is wrong."""


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """What a test said to a bug."""

    kind: str
    reason: str
    """The line that pytest printed about it."""


@dataclass(frozen=True, kw_only=True)
class Trial:
    """Tests that run in a process and a copy of their own."""

    process: BaseProcess
    folder: Path

    @property
    def output(self) -> str:
        return (self.folder / "output.txt").read_text()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("words", nargs="*", help="only bugs whose file, sentence or test has one of these words")
    parser.add_argument("--workers", type=int, default=2, help="how many tests run at a time (default: 2)")
    parser.add_argument("--outcomes", type=Path, default=OUTCOMES, help="where outcomes are kept")
    options = parser.parse_args()
    chosen = [bug for bug in BUGS if is_meant(bug, options.words)]
    problems = [problem for bug in chosen for problem in mistakes(bug)]
    if problems:
        print("\n".join(problems), file=sys.stderr)
        return 1

    with tempfile.TemporaryDirectory(prefix="mutants-") as folder:
        # 1. Copy the package and its tests, which others may be changing.
        source = copy_to(ROOT, Path(folder) / "unbroken")
        digest = digest_of(source)
        # 2. Leave out what is known about this very code.
        known = read_outcomes(options.outcomes)
        outcomes = {bug: known[key_of(bug, digest)] for bug in chosen if key_of(bug, digest) in known}
        remaining = [bug for bug in chosen if bug not in outcomes]
        print(f"{len(outcomes)} of {len(chosen)} bugs are known")
        # 3. The tests must be green without a bug.
        if remaining and not is_green(source, remaining):
            return 1
        # 4. Apply each bug by itself, and run its test.
        for bug, outcome in tqdm(outcomes_of(remaining, source, options.workers), total=len(remaining), unit="bug"):
            outcomes[bug] = outcome
            append_outcome(options.outcomes, key_of(bug, digest), bug, outcome)
            if outcome.kind != KILLED:
                tqdm.write(f"{outcome.kind}: {bug.what}")
    return report([(bug, outcomes[bug]) for bug in chosen])


def is_meant(bug: Bug, words: list[str]) -> bool:
    text = f"{bug.file} {bug.what} {bug.test}"
    return not words or any(word in text for word in words)


def mistakes(bug: Bug, root: Path = ROOT) -> list[str]:
    """Say what is wrong with an entry of the list, one sentence each."""
    problems = []
    number = (root / "mixdepth" / bug.file).read_text().count(bug.find)
    if number != 1:
        problems.append(f"{bug.find!r} stands {number} times in mixdepth/{bug.file}, not once: {bug.what}")
    file, _, name = bug.test.partition("::")
    function = name.partition("[")[0]
    if f"\ndef {function}(" not in (root / "tests" / file).read_text():
        problems.append(f"there is no test {bug.test}: {bug.what}")
    return problems


def copy_to(root: Path, folder: Path) -> Path:
    for name in COPIED:
        shutil.copytree(root / name, folder / name, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(root / "pyproject.toml", folder)
    return folder


def digest_of(folder: Path) -> str:
    """Hash all that was copied, except for the list of bugs and what runs it."""
    digest = hashlib.sha256()
    for file in sorted(folder.rglob("*")):
        if file.is_file() and file.name not in NOT_TESTED:
            digest.update(str(file.relative_to(folder)).encode() + b"\0" + file.read_bytes())
    return digest.hexdigest()


def key_of(bug: Bug, digest: str) -> str:
    return hashlib.sha256(f"{digest} {bug!r}".encode()).hexdigest()


def read_outcomes(path: Path) -> dict[str, Outcome]:
    if not path.exists():
        return {}
    entries = [json.loads(line) for line in path.read_text().splitlines()]
    return {entry["key"]: Outcome(kind=entry["kind"], reason=entry["reason"]) for entry in entries}


def append_outcome(path: Path, key: str, bug: Bug, outcome: Outcome) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    entry = {"key": key, "what": bug.what, "kind": outcome.kind, "reason": outcome.reason}
    with path.open("a") as file:
        file.write(json.dumps(entry) + "\n")


def is_green(source: Path, bugs: list[Bug]) -> bool:
    """Whether the tests of these bugs pass without a bug."""
    tests = sorted({bug.test for bug in bugs})
    print(f"{len(tests)} tests run without a bug first")
    trial = start(source, tests, SECONDS_UNBROKEN)
    trial.process.join()
    if trial.process.exitcode == 0:
        return True
    print(trial.output, "Tests are red, or were not found, without any bug.", sep="\n", file=sys.stderr)
    return False


def outcomes_of(bugs: list[Bug], source: Path, workers: int) -> Iterator[tuple[Bug, Outcome]]:
    """Yield each bug with its outcome, as they come, `workers` at a time."""
    waiting = list(enumerate(bugs))
    running: dict[int, tuple[Bug, Trial]] = {}  # by what says that its process has ended
    while waiting or running:
        while waiting and len(running) < workers:
            number, bug = waiting.pop(0)
            trial = start_with(bug, source, source.with_name(str(number)))
            running[trial.process.sentinel] = bug, trial
        for sentinel in wait(list(running)):
            bug, trial = running.pop(sentinel)
            trial.process.join()
            yield bug, outcome_of(trial)
            shutil.rmtree(trial.folder)


def start_with(bug: Bug, source: Path, folder: Path) -> Trial:
    """Put the bug into a copy of its own, and start its test there."""
    copy_to(source, folder)
    file = folder / "mixdepth" / bug.file
    file.write_text(file.read_text().replace(bug.find, bug.replace))
    return start(folder, [bug.test], SECONDS)


def start(folder: Path, tests: list[str], seconds: int) -> Trial:
    # A fork has torch and transformers already, which take much longer to import than most of these tests to run.
    process = multiprocessing.get_context("fork").Process(target=run_tests, args=(folder, tests, seconds))
    process.start()
    return Trial(process=process, folder=folder)


def run_tests(folder: Path, tests: list[str], seconds: int) -> None:
    """Run tests of the copy in this folder, in a process that has not imported mixdepth."""
    assert "mixdepth" not in sys.modules
    # 1. Write to a file of the copy, and end if nothing comes of it.
    with open(folder / "output.txt", "w") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    signal.alarm(seconds)
    # 2. Take the package from the copy, in processes that tests start too.
    os.chdir(folder)
    os.environ["PYTHONPATH"] = str(folder)
    os.environ["MIXDEPTH_CACHE"] = str(folder / "cache")
    sys.path.remove(str(ROOT / "tests"))
    sys.path.insert(0, str(folder))
    # 3. Run the tests; the exit code says how they ended.
    import pytest

    names = [f"tests/{test}" for test in tests]
    sys.exit(int(pytest.main(["-x", "-q", "-p", "no:cacheprovider", "-W", "ignore", *names])))


def outcome_of(trial: Trial) -> Outcome:
    code = trial.process.exitcode
    lines = trial.output.strip().splitlines() or [""]
    failures = [line for line in lines if line.startswith("FAILED")]
    if code == 0:
        return Outcome(kind=SURVIVED, reason=lines[-1])
    if code == 1 and failures:
        return Outcome(kind=KILLED, reason=failures[0])
    if code == -signal.SIGALRM:
        return Outcome(kind=BROKEN, reason=f"no answer within {SECONDS} seconds")
    return Outcome(kind=BROKEN, reason=lines[-1])


def report(outcomes: list[tuple[Bug, Outcome]]) -> int:
    """Print what was not killed; the exit code."""
    alive = [(bug, outcome) for bug, outcome in outcomes if outcome.kind != KILLED]
    for bug, outcome in alive:
        print(f"{outcome.kind}: {bug.what}\n    mixdepth/{bug.file}: {bug.find!r} -> {bug.replace!r}")
        print(f"    tests/{bug.test}\n    {outcome.reason}")
    print(f"{len(outcomes) - len(alive)} of {len(outcomes)} bugs were killed")
    return 1 if alive else 0


if __name__ == "__main__":
    os.environ.update(ENVIRONMENT)
    for module in PRELOADED:
        importlib.import_module(module)
    sys.exit(main())
