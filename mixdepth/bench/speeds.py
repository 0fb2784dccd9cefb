"""The results of `measure_speed`: comparisons of a routed model with a dense one, and their table."""

from dataclasses import dataclass
from typing import Any, NamedTuple

from mixdepth.bench.bounds import Work
from mixdepth.bench.timing import Spread
from mixdepth.text import columns

TITLES = (
    "",
    "batch",
    "context",
    "dense tokens/s",
    "routed tokens/s",
    "speed-up",
    "by FLOPs",
    "by bytes",
    "taken",
    "dense reaches",
    "cache",
    "allocated",
)


class Machine(NamedTuple):
    """The machine that the models ran on, and what it can do at best."""

    name: str
    dtype: str
    flops_per_second: float
    """FLOPs per second of a large matrix product."""
    bytes_per_second: float
    """Bytes that are read from memory per second."""

    def to_dict(self) -> dict[str, Any]:
        return self._asdict()


class Cache(NamedTuple):
    """Bytes of the key-value caches after a text."""

    dense: int
    routed: int
    routed_allocated: int

    def to_dict(self) -> dict[str, int]:
        return self._asdict()


@dataclass(frozen=True, kw_only=True)
class Speed:
    """One comparison, in tokens per second of all rows together, with the least work of both models."""

    what: str
    """`training step`, `prefill` or `decode`."""
    batch_size: int
    context: int
    """Tokens in a training window or in a prompt."""
    dense: Spread
    routed: Spread
    speed_up: Spread
    """Routed over dense, pair by pair."""
    dense_work: Work
    routed_work: Work
    taken: float | None
    """The share of tokens that routed layers took: tokens of the prompt in prefill, new tokens in decoding. In a
    training step it is the configured capacity. None if no layer is routed."""
    seconds: float
    """The median seconds of the dense model."""
    cache: Cache | None = None

    @property
    def by_flops(self) -> float | None:
        """The speed-up if both models computed equally fast."""
        return _ratio(self.dense_work.flops, self.routed_work.flops)

    @property
    def by_bytes(self) -> float | None:
        """The speed-up if both models read equally fast."""
        return _ratio(self.dense_work.bytes, self.routed_work.bytes)

    def share_of_peak(self, machine: Machine) -> float | None:
        """Return the dense model's speed relative to the best of the machine.

        In decoding this is the machine's memory bandwidth, else its speed in matrix products.
        """
        if self.what == "decode":
            return _ratio(self.dense_work.bytes, self.seconds * machine.bytes_per_second)
        return _ratio(self.dense_work.flops, self.seconds * machine.flops_per_second)

    def to_dict(self) -> dict[str, Any]:
        return {
            "what": self.what,
            "batch_size": self.batch_size,
            "context": self.context,
            "dense": self.dense.to_dict(),
            "routed": self.routed.to_dict(),
            "speed_up": self.speed_up.to_dict(),
            "dense_work": self.dense_work.to_dict(),
            "routed_work": self.routed_work.to_dict(),
            "taken": self.taken,
            "seconds": self.seconds,
            "cache": None if self.cache is None else self.cache.to_dict(),
            "by_flops": self.by_flops,
            "by_bytes": self.by_bytes,
        }


@dataclass(frozen=True, kw_only=True)
class Speeds:
    """A routed model and a dense one, compared in several ways."""

    machine: Machine
    models: dict[str, dict[str, Any]]
    """Class and number of parameters, by `dense` and `routed`."""
    repeats: int
    rows: list[Speed]
    notes: list[str]

    def to_dict(self) -> dict[str, Any]:
        rows = []
        for row in self.rows:
            rows.append({**row.to_dict(), "dense_share_of_peak": row.share_of_peak(self.machine)})
        return {
            "machine": self.machine.to_dict(),
            "models": self.models,
            "repeats": self.repeats,
            "rows": rows,
            "notes": self.notes,
        }

    def __str__(self) -> str:
        """Return the machine and the models, a table with a line for each comparison, and notes."""
        machine = self.machine
        sizes = []
        for kind, model in self.models.items():
            sizes.append(f"{kind} {model['class']}, {model['parameters'] / 1e6:.2f} M parameters")
        head = [
            f"{machine.name}: {machine.flops_per_second / 1e9:,.0f} GFLOP/s in matrix products, "
            f"{machine.bytes_per_second / 1e9:.1f} GB/s from memory",
            f"{'; '.join(sizes)}; {machine.dtype}; medians of {self.repeats}, speed-ups with lowest and highest",
        ]
        table = columns([list(TITLES), *(self._cells(row) for row in self.rows)], left=(0,))
        return "\n".join([*head, table, *self.notes])

    def _cells(self, row: Speed) -> list[str]:
        share = row.share_of_peak(self.machine)
        reached = ""
        if share is not None:
            unit = "GB/s" if row.what == "decode" else "FLOP/s"
            reached = f"{share:.0%} of {unit}"
        cached = allocated = ""
        if row.cache is not None:
            dense_bytes = row.cache.dense
            cached = f"{row.cache.routed / dense_bytes:.1%} of {dense_bytes / 1e6:.2f} MB"
            allocated = f"{row.cache.routed_allocated / dense_bytes:.1%}"
        return [
            row.what,
            str(row.batch_size),
            f"{row.context:,}",
            _tokens(row.dense),
            _tokens(row.routed),
            f"{row.speed_up:.2f}",
            _number(row.by_flops, ".2f") or "not counted",
            _number(row.by_bytes, ".2f"),
            _number(row.taken, ".1%"),
            reached,
            cached,
            allocated,
        ]


def _ratio(above: float | None, below: float | None) -> float | None:
    if above is None or below is None:
        return None
    return above / below


def _number(value: float | None, spec: str) -> str:
    return "" if value is None else f"{value:{spec}}"


def _tokens(speed: Spread) -> str:
    return f"{speed.median:,.0f}" if speed.median >= 100 else f"{speed.median:.1f}"
