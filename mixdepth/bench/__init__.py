"""The speed of a routed model against a dense one on this machine: tokens per second, cache bytes, and their limits."""

from typing import TYPE_CHECKING

from mixdepth.lazy import lazily

if TYPE_CHECKING:
    from mixdepth.bench.bounds import Work as Work
    from mixdepth.bench.bounds import decode_work as decode_work
    from mixdepth.bench.bounds import prefill_work as prefill_work
    from mixdepth.bench.bounds import step_work as step_work
    from mixdepth.bench.bounds import tokens_taken as tokens_taken
    from mixdepth.bench.measure import measure_speed as measure_speed
    from mixdepth.bench.pair import Pair as Pair
    from mixdepth.bench.pair import fresh_pair as fresh_pair
    from mixdepth.bench.pair import pair_of as pair_of
    from mixdepth.bench.speeds import Speed as Speed
    from mixdepth.bench.speeds import Speeds as Speeds
    from mixdepth.bench.timing import CacheSize as CacheSize
    from mixdepth.bench.timing import Decoded as Decoded
    from mixdepth.bench.timing import Spread as Spread
    from mixdepth.bench.timing import decode_in_turns as decode_in_turns
    from mixdepth.bench.timing import interleave as interleave
    from mixdepth.machine import describe_machine as describe_machine

PLACES = {
    "CacheSize": "mixdepth.bench.timing",
    "Decoded": "mixdepth.bench.timing",
    "Pair": "mixdepth.bench.pair",
    "Speed": "mixdepth.bench.speeds",
    "Speeds": "mixdepth.bench.speeds",
    "Spread": "mixdepth.bench.timing",
    "Work": "mixdepth.bench.bounds",
    "decode_in_turns": "mixdepth.bench.timing",
    "decode_work": "mixdepth.bench.bounds",
    "describe_machine": "mixdepth.machine",
    "fresh_pair": "mixdepth.bench.pair",
    "interleave": "mixdepth.bench.timing",
    "measure_speed": "mixdepth.bench.measure",
    "pair_of": "mixdepth.bench.pair",
    "prefill_work": "mixdepth.bench.bounds",
    "step_work": "mixdepth.bench.bounds",
    "tokens_taken": "mixdepth.bench.bounds",
}

__all__ = [*PLACES]
__getattr__, __dir__ = lazily(PLACES, globals())
