"""A routed model against a dense one on this machine: tokens per second, cache bytes, and their limits."""

from mixdepth.bench.limits import Work, decode_work, prefill_work, step_work, tokens_taken
from mixdepth.bench.measure import measure_speed
from mixdepth.bench.pair import Pair, fresh_pair, pair_of
from mixdepth.bench.speeds import Speed, Speeds
from mixdepth.bench.timing import CacheSize, Decoded, Spread, decode_in_turns, describe_machine, interleave

__all__ = [
    "CacheSize",
    "Decoded",
    "Pair",
    "Speed",
    "Speeds",
    "Spread",
    "Work",
    "decode_in_turns",
    "decode_work",
    "describe_machine",
    "fresh_pair",
    "interleave",
    "measure_speed",
    "pair_of",
    "prefill_work",
    "step_work",
    "tokens_taken",
]
