"""Errors of a candidate's values against the float32 reference.

The two models run separately, in pieces: each run returns some of their values as outputs, and numpy compares each
pair. For the accumulated error, the candidate runs unchanged. For the local error, its ops *shadow* the reference: each
op reads the reference's values, rounded to its own types. Low types are emulated in both cases.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import accumulate, groupby
from typing import Any

import numpy as np
from onnx import ModelProto

from amp_rewrite.dtypes import LOW_TYPES, DType
from amp_rewrite.errors import ModelError
from amp_rewrite.evidence.data.feed import Batch, Feed
from amp_rewrite.evidence.opening import casting_in_graph
from amp_rewrite.files.casting import Array
from amp_rewrite.files.model import Model
from amp_rewrite.files.protos import clone, names_read, needed, refill, rename_node
from amp_rewrite.ir.dataflow import casts_floats, exact
from amp_rewrite.ir.names import unused_prefix
from amp_rewrite.ir.op_classes import CASTS, MOVES, RANDOM
from amp_rewrite.ir.view import MAIN, Op, OpId, Role, ValueId, View
from amp_rewrite.reports.diff import match
from amp_rewrite.reports.render import count
from amp_rewrite.reports.report_builder import report_of
from amp_rewrite.rewrite.builder import declared, new_node
from amp_rewrite.rewrite.emulate import emulate
from amp_rewrite.rewrite.passes.inline import inlined
from amp_rewrite.runtime.runner import Runner, SessionOptions

PIECE = 1 << 26
"""Approximate number of elements to compare in one run. A smaller number saves memory but takes more runs."""

Progress = Callable[[int, int], None]

_MASK = 2.0**64
"""Smallest magnitude of a mask; its square overflows float32."""


@dataclass(frozen=True, slots=True)
class ErrorStats:
    """Error of values against their reference, over all batches.

    Over the elements that are finite in both, `max_abs` is the largest |value - reference|, and `noise` is
    sum (value - reference)^2. Over the finite elements of the reference, `absmax` is the largest |reference|, and
    `signal` is sum reference^2 without masks. `lost`: the number of elements that are finite only in the reference.
    """

    max_abs: float = 0.0
    absmax: float = 0.0
    noise: float = 0.0
    signal: float = 0.0
    lost: int = 0

    @classmethod
    def of(cls, value: Array, reference: Array, bound: float) -> ErrorStats:
        """Return the error of one array.

        Elements beyond the bound are masks: they are clamped to it and do not count toward the signal.
        """
        v, r = (np.asarray(x, np.float64).reshape(-1) for x in (value, reference))
        finite = np.isfinite(r)
        both = finite & np.isfinite(v)
        error = np.abs(np.clip(v[both], -bound, bound) - np.clip(r[both], -bound, bound))
        size = np.abs(r[finite])
        unmasked = size[size < bound]
        return cls(
            max_abs=float(error.max(initial=0.0)),
            absmax=float(size.max(initial=0.0)),
            noise=float(error @ error),
            signal=float(unmasked @ unmasked),
            lost=int(finite.sum() - both.sum()),
        )

    def merge(self, other: ErrorStats) -> ErrorStats:
        """Return the statistics of both sets of values."""
        return ErrorStats(
            max(self.max_abs, other.max_abs),
            max(self.absmax, other.absmax),
            self.noise + other.noise,
            self.signal + other.signal,
            self.lost + other.lost,
        )

    def error(self, floor: float) -> float:
        """Return sqrt(noise / signal), the inverse amplitude signal-to-noise ratio; infinity if elements are lost.

        `floor`: lower bound on sqrt(signal).
        """
        if self.lost:
            return math.inf
        noise, signal = math.sqrt(self.noise), math.sqrt(self.signal)
        return noise / max(signal, floor) if noise else 0.0


Errors = Mapping[ValueId, ErrorStats]
"""Error of each value of the candidate."""


@dataclass(frozen=True)
class Pairing:
    """A reference and a candidate with matching values, and data for both.

    Only tensors of the main graphs are paired, and floats only with floats. Constants are never paired. `values` maps
    values of the candidate to values of the reference. Several may map to the same one, such as a value and its Cast
    to another floating type. `elements`: the number of elements of each measured value in the first batch.
    """

    reference: View
    candidate: View
    values: Mapping[ValueId, ValueId]
    feed: Feed
    elements: Mapping[ValueId, int] = field(default_factory=dict)

    @classmethod
    def of(cls, reference: Model, candidate: Model, feed: Feed) -> Pairing:
        """Match ops by `reports.diff.match`, and other values by name; drop pairs of unequal shape in the first batch.

        Nearly O(ops + values), plus one run of each model. Raise ModelError if the candidate computes no floats, if
        it has an input that is missing in the reference, or if no value matches.
        """
        source, low = (View.of(inlined(model)) for model in (reference, candidate))
        ops = {OpId(j): OpId(i) for i, j in match(report_of(source), report_of(low))}
        ops = {j: i for j, i in ops.items() if low.ops[j].scope == source.ops[i].scope == MAIN}
        pairing = cls(source, low, _values(source, low, ops), feed)
        if not pairing.measurable:
            raise ModelError("the candidate's main graph computes no floating-point value; there is nothing to compare")
        if not pairing.measured:
            raise ModelError("no values of the two models match: their ops have neither names nor structure in common")
        names = {source.value_name(value) for value in source.scopes[MAIN].inputs}
        for value in low.scopes[MAIN].inputs:
            if low.values[value].tensor is None and (name := low.value_name(value)) not in names:
                raise ModelError(f"the candidate has an input {name!r}, but the reference does not")
        measured, batch = pairing.measured, next(iter(feed))
        shapes = _run(_open(low, tuple(measured), {}, "Shape"), batch)
        expected = _run(_open(source, tuple(measured.values()), {}, "Shape"), batch)
        unequal = {w for w, a, b in zip(measured.values(), shapes, expected, strict=True) if not np.array_equal(a, b)}
        elements = {value: int(np.prod(shape)) for value, shape in zip(measured, shapes, strict=True)}
        values = {v: w for v, w in pairing.values.items() if w not in unequal}
        pairing = replace(pairing, values=values, elements=elements)
        if not pairing.measured:
            number = count(len(measured), "value")
            raise ModelError(f"{number} of the two models match by name, but none by shape")
        return pairing

    def accumulated(self, progress: Progress | None = None) -> Errors:
        """Return the accumulated error of each measured value: run the candidate unchanged."""
        return self._errors(tuple(self.measured), {}, progress)

    def local(self, progress: Progress | None = None) -> Errors:
        """Return the local error of each value in `shadowed`: feed its op with the reference's values."""
        return self._errors(self.shadowed, self.values, progress)

    def _errors(self, values: Sequence[ValueId], fed: Mapping[ValueId, ValueId], progress: Progress | None) -> Errors:
        """Return the errors of values. `fed`: values of the candidate that its ops read from the reference instead."""
        view, references = self.candidate, self.measured
        prefix = unused_prefix("fed/", view.names)
        inputs = {value: f"{prefix}{view.value_name(value)}" for value in fed}
        ends = dict(zip(values, accumulate(self.elements[value] for value in values), strict=True))
        pieces = [tuple(piece) for _, piece in groupby(values, lambda value: ends[value] // PIECE)]
        stats, runs = dict.fromkeys(values, ErrorStats()), len(self.feed) * len(pieces) if progress else 0
        for number, piece in enumerate(pieces):
            candidate = _open(view, piece, inputs)
            ports = {port.name for port in candidate.inputs}
            extra = {name: fed[value] for value, name in inputs.items() if name in ports}
            reference = _open(self.reference, (*(references[value] for value in piece), *extra.values()), {})
            for done, batch in enumerate(self.feed, 1):
                expected = _run(reference, batch)
                results = _run(candidate, {**batch, **dict(zip(extra, expected[len(piece) :], strict=True))})
                for value, a, b in zip(piece, results, expected, strict=False):
                    bound = min(self.low.max, _MASK) if view.dtype(value) is self.low else _MASK
                    stats[value] = stats[value].merge(ErrorStats.of(a, b, bound))
                if progress:
                    progress(number * len(self.feed) + done, runs)
        return stats

    @cached_property
    def low(self) -> DType:
        return next(iter(self.candidate.low_types), DType.FLOAT)

    @cached_property
    def measured(self) -> Mapping[ValueId, ValueId]:
        first: dict[ValueId, ValueId] = {}
        for value, reference in self.values.items():
            if self._computes(value):
                first.setdefault(reference, value)
        return {value: reference for reference, value in first.items()}

    @cached_property
    def measurable(self) -> int:
        """Number of floating-point values computed by the candidate, without Casts and constants."""
        view = self.candidate
        return sum(view.constant(v.id) is None and self._computes(v.id) for v in view.values_of[MAIN])

    def _computes(self, value: ValueId) -> bool:
        op = self.candidate.producer(value)
        return op is not None and not casts_floats(self.candidate, op) and self.candidate.holds_floats(value)

    @cached_property
    def shadowed(self) -> tuple[ValueId, ...]:
        """Values with a local error: results of low ops, with all inputs available from the reference."""
        shadowed = (op for op in self.candidate.ops if op.id in self._available and self.rounds(op))
        return tuple(value for op in shadowed for value in op.results if value in self.measured)

    def rounds(self, op: Op) -> bool:
        """True if an op can round: a low op that does more than move or select elements."""
        if not self.is_low(op.id) or op.op_type in RANDOM:
            return False
        view = self.candidate
        weights = (v for v in op.inputs if v is not None and v not in self.values)
        return bool(op.bodies) or not exact(op) or any((view.dtype(v) or DType.FLOAT).low for v in weights)

    def is_low(self, op: OpId) -> bool:
        """True if an op reads or writes a low type, or contains one in its bodies."""
        view = self.candidate
        inner = (other for body in view.ops[op].bodies for other in view.scopes[body].ops)
        return any(view.dtype(v) in LOW_TYPES for v in view.ops[op].ports) or any(map(self.is_low, inner))

    @cached_property
    def _available(self) -> frozenset[OpId]:
        """Ops of the main graph computable from paired values and the candidate's constants."""
        view = self.candidate
        available: set[OpId] = set()
        for op in (view.ops[op] for op in view.scopes[MAIN].ops):
            unpaired = [view.values[v] for v in reads(view, op) if v not in self.values]
            if all(v.role is Role.INITIALIZER if v.producer is None else v.producer in available for v in unpaired):
                available.add(op.id)
        return frozenset(available)


def reads(view: View, op: Op) -> Iterator[ValueId]:
    """Yield the values of the main graph read by an op or its bodies."""
    yield from (v for v in op.inputs if v is not None and view.values[v].scope == MAIN)
    for body in op.bodies:
        for inner in view.scopes[body].ops:
            yield from reads(view, view.ops[inner])
        yield from (v for v in view.scopes[body].outputs if view.values[v].scope == MAIN)


def _values(reference: View, candidate: View, ops: Mapping[OpId, OpId]) -> dict[ValueId, ValueId]:
    named = {v.name: v.id for v in reference.values if v.scope == MAIN and _pairable(reference, v.id)}
    by_ops: dict[ValueId | None, ValueId | None] = {}
    for j, i in ops.items():
        by_ops.update(zip(candidate.ops[j].outputs, reference.ops[i].outputs, strict=False))
    paired_by_op = set(by_ops.values())
    pairs: dict[ValueId, ValueId] = {}
    for value in candidate.values:
        if value.scope != MAIN or not _pairable(candidate, value.id):
            continue
        op = candidate.producer(value.id)
        other = by_ops.get(value.id)
        if other is None and op is not None and casts_floats(candidate, op):
            other = pairs.get(op.inputs[0])  # type: ignore[arg-type]
        if other is None and named.get(value.name) not in paired_by_op:
            other = named.get(value.name)
        if other is not None and _comparable(reference, other, candidate, value.id):
            pairs[value.id] = other
    return pairs


def _pairable(view: View, value: ValueId) -> bool:
    info = view.values[value]
    if view.tensor_dtype(value) is None:
        return False
    return info.overridable or (info.role is not Role.INITIALIZER and info.tensor is None)


def _comparable(reference: View, expected: ValueId, candidate: View, value: ValueId) -> bool:
    if reference.holds_floats(expected) != candidate.holds_floats(value):
        return False
    if not candidate.holds_floats(value) and reference.types[expected] != candidate.types[value]:
        return False
    a, b = reference.producer(expected), candidate.producer(value)
    if a is None or b is None:
        return a is None
    if a.kind == b.kind or {a.kind, b.kind} & (CASTS | {"Identity"}):
        return True
    # The op moves a value that is missing in the reference, because the conversion changed the layout of its producer.
    if b.kind in MOVES and candidate.value_name(b.operands[0]) not in reference.names:
        return True
    # An op of another type replaces the old one under its name, as a Where replaces the Add of a mask.
    return a.node.name == b.node.name != ""


def _open(view: View, values: Sequence[ValueId], inputs: Mapping[ValueId, str], op_type: str = "Identity") -> Runner:
    """Open the emulated model with these values, or their shapes, as outputs, and with additional `inputs` by name.

    Optimization is off, because fusion depends on the rest of the graph.
    """
    proto: ModelProto = clone(view.model.proto)
    graph, stem = proto.graph, unused_prefix("tap/", view.names)
    for op, node in zip(view.scopes[MAIN].ops, graph.node, strict=True):
        rename_node(node, {view.value_name(v): inputs[v] for v in reads(view, view.ops[op]) if v in inputs})
    taps = [new_node(op_type, [view.value_name(v)], f"{stem}{i}") for i, v in enumerate(values)]
    dtypes = [DType.INT64 if op_type == "Shape" else _dtype(view, value) for value in values]
    refill(graph, "output", [declared(f"{stem}{i}", dtype, None) for i, dtype in enumerate(dtypes)])
    refill(graph, "node", needed([*graph.node, *taps], [tap.output[0] for tap in taps]))
    graph.input.extend(declared(name, _dtype(view, value), None) for value, name in inputs.items())
    read = set(names_read(graph.node))
    refill(graph, "initializer", [tensor for tensor in graph.initializer if tensor.name in read])
    refill(graph, "sparse_initializer", [sparse for sparse in graph.sparse_initializer if sparse.values.name in read])
    refill(graph, "input", [formal for formal in graph.input if formal.name in read])
    twin = casting_in_graph(emulate(casting_in_graph(replace(view.model, proto=proto)), io="float32"))
    return Runner.open(twin, SessionOptions(optimized=False, planned=False, spinning=False))


def _dtype(view: View, value: ValueId) -> DType:
    return view.tensor_dtype(value) or DType.FLOAT


def _run(runner: Runner, batch: Mapping[str, Any] | Batch) -> list[Any]:
    inputs = {port.name: batch[port.name] for port in runner.inputs if port.name in batch}
    for port in runner.inputs:
        if isinstance(inputs.get(port.name), np.ndarray) and port.dtype not in (None, DType.STRING):
            inputs[port.name] = inputs[port.name].astype(port.dtype.numpy, copy=False)
    return list(runner.run(inputs).values())


def local_errors(reference: Model, low: Model, feed: Feed, *, progress: Progress | None = None) -> dict[str, float]:
    """Return the local error of each low op of `low`, by the op's name in `reference`, in topological order.

    `reference`: a float32 model, or the float32 twin of a half-precision model; `low`: a conversion of it. For a
    conversion by this package, pass `converted.view.model` and `converted.result`; the names are then those of
    `converted.view.ops`. The error is sqrt(sum (shadow - reference)^2 / sum reference^2) over all batches, the largest
    over all outputs; it is infinite if a value is finite only in the reference. An op with bodies is measured as a
    whole; ops that move or select values (`exact` in `ir/dataflow.py`) do not have a local error and are omitted.
    `progress(done, total)` counts runs. Raise ModelError if no values of the two models match.
    """
    pairing, errors = Pairing.of(reference, low, feed), dict[str, float]()
    for value, stats in pairing.local(progress).items():
        op = pairing.reference.producer(pairing.measured[value])
        name = op.name if op is not None else ""
        errors[name] = max(errors.get(name, 0.0), stats.error(pairing.low.tiny))
    return errors
