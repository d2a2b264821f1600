"""Result of a benchmark: data, text and JSON."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass

from amp_rewrite.deploy.bench.profile import OpChange, OpTime, TypeChange, by_type
from amp_rewrite.deploy.bench.timing import SpeedUp, Timing
from amp_rewrite.reports.render import count, size, table

SCHEMA = 1
_MOST_OPS = 10


@dataclass(frozen=True, slots=True)
class Sized:
    """One batch size: its timing, and peak memory in bytes; `fault` is the reason for a missing timing."""

    items: int
    timing: Timing | None = None
    memory: int | None = None
    fault: str = ""

    @property
    def throughput(self) -> float | None:
        """Return items per second, by the median run."""
        return self.items / self.timing.median if self.timing else None


@dataclass(frozen=True, slots=True)
class Largest:
    """The largest batch that fits into `limit` bytes (0 if none does), and the smallest tried that does not.

    `fault`: the reason if that one does not run at all.
    """

    limit: int
    items: int
    too_large: int | None
    fault: str = ""


@dataclass(frozen=True)
class Entry:
    """One model in one mode. `types`: its low types. `tf32`: float32 may be computed in TF32.

    `latency`: inputs and outputs stay on the device; `copies`: they are copied from and to numpy. `speed_ups`: against
    each baseline, by its name. `memory`: peak bytes for the given batch; None if not measured, with the reason in
    `fault` if measuring failed.
    """

    name: str
    types: tuple[str, ...]
    tf32: bool
    latency: Timing
    copies: Timing
    speed_ups: Mapping[str, SpeedUp]
    memory: int | None = None
    sweep: tuple[Sized, ...] = ()
    largest: Largest | None = None
    fault: str = ""


@dataclass(frozen=True)
class Changed:
    """Changes of one model's ops against the first model, the largest slowdown first."""

    name: str
    ops: tuple[OpChange, ...]


@dataclass(frozen=True)
class Benchmark:
    """Models side by side on one machine. The first entry is the baseline; with TF32 the second is a baseline too.

    `device`: the name of the device; `versions`: those of the packages; `fed`: origin of the data; `notes`: caveats.
    """

    provider: str
    device: str
    versions: Mapping[str, str]
    fed: str
    rounds: int
    runs: int
    warm_up: int
    entries: tuple[Entry, ...]
    changed: tuple[Changed, ...] = ()
    notes: tuple[str, ...] = ()

    @property
    def baselines(self) -> tuple[str, ...]:
        """Return the names of the baselines."""
        return tuple(dict.fromkeys(name for entry in self.entries for name in entry.speed_ups))

    def text(self) -> str:
        """Return a text: device and versions, a table of latencies, and a table per further measurement."""
        parts = (self._head(), self._latencies(), self._throughputs(), self._largest(), *map(_slower, self.changed))
        lines = [line for part in parts if part for line in (*part, "")]
        return "\n".join([*lines, *(f"note: {note}" for note in self.notes)]).rstrip("\n") + "\n"

    def _head(self) -> list[str]:
        versions = ", ".join(f"{name} {version}" for name, version in self.versions.items())
        each = f"{count(self.rounds, 'round')} of {count(self.runs, 'run')} of each"
        measured = f"{each}, taking turns, after {self.warm_up} to warm up"
        rows = (("runs on", self.provider), ("device", f"{self.device}; {versions}"), ("data", self.fed))
        names = ", ".join(dict.fromkeys(entry.name for entry in self.entries))
        return [names, *table((*rows, ("measured", measured)))]

    def _latencies(self) -> list[str]:
        weighed = any(entry.memory is not None for entry in self.entries)
        head = ["latency, ms", "median", "p5", "p95", "with copies", *(f"vs {name}" for name in self.baselines)]
        rows = [
            [
                entry.name,
                *(_ms(x) for x in (entry.latency.median, entry.latency.p5, entry.latency.p95, entry.copies.median)),
                *(_factor(entry.speed_ups.get(name), entry.name == name) for name in self.baselines),
                *([_bytes(entry.memory)] if weighed else []),
            ]
            for entry in self.entries
        ]
        return table(rows, head=[*head, *(["peak memory"] if weighed else [])], right=" >>>>" + ">" * 9)

    def _throughputs(self) -> list[str]:
        rows = [row for entry in self.entries for row in _swept(entry)]
        head = ("items/s", "batch", "throughput", "median ms", "peak memory", "")
        return table(rows, head=head, right=" >>>>") if rows else []

    def _largest(self) -> list[str]:
        return [
            f"largest batch of {entry.name} within {size(entry.largest.limit)}: {_most(entry.largest)}"
            for entry in self.entries
            if entry.largest
        ]

    def to_json(self) -> str:
        """Return JSON; `docs/how-to/bench.md` describes the fields. It ends with a newline."""
        told = asdict(self)
        for entry, row in zip(self.entries, told["entries"], strict=True):
            for sized, swept in zip(entry.sweep, row["sweep"], strict=True):
                swept["throughput"] = sized.throughput
        return json.dumps({"schema": SCHEMA, **told}, indent=1, allow_nan=False) + "\n"


def _swept(entry: Entry) -> Iterator[Sequence[str]]:
    for sized in entry.sweep:
        numbers = ("-", "-") if sized.timing is None else (f"{sized.throughput:.4g}", _ms(sized.timing.median))
        yield (entry.name, str(sized.items), *numbers, _bytes(sized.memory), sized.fault)


def _most(found: Largest) -> str:
    why = f"does not run: {found.fault}" if found.fault else "does not fit"
    if not found.items:
        return f"none: not one item fits; it {why}" if found.fault else "none: not one item fits"
    return f"{found.items}" + (f" ({found.too_large} {why})" if found.too_large else ", the most that was tried")


def _slower(changed: Changed) -> list[str]:
    slower = [change for change in changed.ops if change.seconds > 0][:_MOST_OPS]
    if not slower:
        return [f"{changed.name}: no op got slower"]
    head = ("by type, µs a run", "ops", "before", "after", "difference")
    types = table(map(_type_cells, by_type(changed.ops)[:_MOST_OPS]), head=head, right=" >>>>")
    head_of_ops = ("slower ops, µs a run", "op", "before", "after", "difference", "")
    ops = table(map(_op_cells, slower), head=head_of_ops, right="  >>>")
    return [f"{changed.name}: where time went", *types, "", *ops]


def _type_cells(change: TypeChange) -> Sequence[str]:
    before, after = (f"{seconds * 1e6:.1f}" for seconds in change.seconds)
    ops = str(change.count[0]) if change.count[0] == change.count[1] else f"{change.count[0]} → {change.count[1]}"
    return change.op, ops, before, after, f"{(change.seconds[1] - change.seconds[0]) * 1e6:+.1f}"


def _op_cells(change: OpChange) -> Sequence[str]:
    op = change.after or change.before
    assert op is not None
    numbers = (_us(change.before), _us(change.after), f"{change.seconds * 1e6:+.1f}")
    return op.name or "(no name)", op.op, *numbers, _moved(change)


def _moved(change: OpChange) -> str:
    """Return other differences of an op: its type, its provider, or that it is new."""
    if change.before is None:
        return "new"
    if change.after is None:
        return "gone"
    pairs = ((change.before.dtype, change.after.dtype), (change.before.place, change.after.place))
    return ", ".join(f"{a or 'no type'} → {b or 'no type'}" for a, b in pairs if a != b)


def _us(op: OpTime | None) -> str:
    return "-" if op is None else f"{op.seconds * 1e6:.1f}"


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:.4g}"


def _bytes(number: int | None) -> str:
    return "-" if number is None else size(number)


def _factor(found: SpeedUp | None, itself: bool) -> str:
    if found is None or itself:
        return "-"
    if found.low is None:
        return f"{found.factor:.2f}×"
    return f"{found.factor:.2f}× ({found.low:.2f}–{found.high:.2f})"
