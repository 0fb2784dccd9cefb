"""What `measure_speed` found: comparisons of a routed model with a dense one, and their table."""

from typing import Any, NamedTuple

from mixdepth.bench.bounds import Work
from mixdepth.bench.timing import Spread
from mixdepth.text import columns


class Machine(NamedTuple):
    """What the models ran on."""

    name: str
    dtype: str
    flops_per_second: float  # of a large matrix product
    bytes_per_second: float  # of reading memory


class Cache(NamedTuple):
    """Bytes of the key-value caches after a text."""

    dense: int
    routed: int
    routed_allocated: int


class Speed(NamedTuple):
    """One comparison, in tokens per second of all rows together; and what it takes at least."""

    what: str
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
    """The share of tokens that routed layers took: of the prompt, or of the new tokens; when training, as
    configured. None if no layer is routed."""
    seconds: float
    """Of the dense model, the median."""
    cache: Cache | None = None

    @property
    def by_flops(self) -> float | None:
        """The speed-up at which both models compute equally fast."""
        return _ratio(self.dense_work.flops, self.routed_work.flops)

    @property
    def by_bytes(self) -> float | None:
        """The speed-up at which both models read equally fast."""
        return _ratio(self.dense_work.bytes, self.routed_work.bytes)

    def share_of_peak(self, machine: Machine) -> float | None:
        """How near the dense model comes to what the machine can do: in decoding to its bandwidth, else to its
        matrix products."""
        if self.what == "decode":
            return _ratio(self.dense_work.bytes, self.seconds * machine.bytes_per_second)
        return _ratio(self.dense_work.flops, self.seconds * machine.flops_per_second)

    def to_dict(self) -> dict[str, Any]:
        values = {n: v._asdict() if isinstance(v, tuple) else v for n, v in self._asdict().items()}  # type: ignore
        return {**values, "by_flops": self.by_flops, "by_bytes": self.by_bytes}


class Speeds(NamedTuple):
    """A routed model beside a dense one."""

    machine: Machine
    models: dict[str, dict[str, Any]]
    """Class and number of parameters, by `dense` and `routed`."""
    repeats: int
    rows: list[Speed]
    notes: list[str]

    def to_dict(self) -> dict[str, Any]:
        rows = [{**row.to_dict(), "dense_share_of_peak": row.share_of_peak(self.machine)} for row in self.rows]
        return {**self._asdict(), "machine": self.machine._asdict(), "rows": rows}

    def __str__(self) -> str:
        """The machine and the models, a table with a line for each comparison, and notes."""
        machine = self.machine
        about = [f"{kind} {m['class']}, {m['parameters'] / 1e6:.2f} M parameters" for kind, m in self.models.items()]
        lines = [
            f"{machine.name}: {machine.flops_per_second / 1e9:,.0f} GFLOP/s in matrix products, "
            f"{machine.bytes_per_second / 1e9:.1f} GB/s from memory",
            f"{'; '.join(about)}; {machine.dtype}; medians of {self.repeats}, speed-ups with lowest and highest",
        ]
        names = ("", "batch", "context", "dense tokens/s", "routed tokens/s", "speed-up", "by FLOPs", "by bytes")
        rows = [[*names, "taken", "dense reaches", "cache", "allocated"], *(self._cells(row) for row in self.rows)]
        return "\n".join([*lines, columns(rows, left=(0,)), *self.notes])

    def _cells(self, row: Speed) -> list[str]:
        def number(value: float | None, spec: str = ".2f") -> str:
            return "" if value is None else f"{value:{spec}}"

        share = number(row.share_of_peak(self.machine), ".0%")
        unit = "GB/s" if row.what == "decode" else "FLOP/s"
        cells = [row.what, str(row.batch_size), f"{row.context:,}", _tokens(row.dense), _tokens(row.routed)]
        cells += [f"{row.speed_up:.2f}", number(row.by_flops) or "not counted", number(row.by_bytes)]
        cells += [number(row.taken, ".1%"), share and f"{share} of {unit}"]
        if row.cache is None:
            return [*cells, "", ""]
        dense, routed, allocated = row.cache
        return [*cells, f"{routed / dense:.1%} of {dense / 1e6:.2f} MB", f"{allocated / dense:.1%}"]


def _ratio(above: float | None, below: float | None) -> float | None:
    return None if above is None or below is None else above / below


def _tokens(speed: Spread) -> str:
    return f"{speed.median:,.0f}" if speed.median >= 100 else f"{speed.median:.1f}"
