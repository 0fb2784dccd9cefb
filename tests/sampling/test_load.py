"""The server holds after 2,000 requests of every kind what it held before them. load.py records the figures."""

import json

import load
import pytest

KEPT_FOR_REUSE = 32
"""Megabytes. The allocators of C and of Python keep some freed memory, depending on how requests happened to overlap.
A thread for each request would take more, and so would bodies that are not released."""


@pytest.mark.load
def test_a_server_holds_after_2000_requests_what_it_held_before(tmp_path):
    figures = load.run(tmp_path)
    before, after = figures["before"], figures["after"]
    assert (after["threads"], after["files"]) == (before["threads"], before["files"])
    assert after["megabytes"] < before["megabytes"] + KEPT_FOR_REUSE
    for kind, (_, _, expected) in load.KINDS.items():
        assert list(figures["outcomes"][kind]) == [expected]
    assert figures["is_same_answer"]
    assert figures["log"] == []
    assert figures["exit_code"] == 0
    assert figures["dawdlers"]["seconds_for_another"] < 5
    assert figures["dawdlers"]["seconds_until_closed"] < figures["limits"]["arrival_seconds"] + 5
    assert figures["seconds_after_eight_left"] < 1


def test_the_recorded_figures_are_those_of_this_load():
    figures = json.loads(load.FIGURES.read_text())
    assert sum(sum(counts.values()) for counts in figures["outcomes"].values()) == load.NUM_REQUESTS
    assert {kind: list(counts) for kind, counts in figures["outcomes"].items()} == {
        kind: [expected] for kind, (_, _, expected) in load.KINDS.items()
    }
    assert figures["before"]["threads"] == figures["after"]["threads"]
