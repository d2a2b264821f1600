"""Calibration: run a model on data and measure the ranges of its values."""

from __future__ import annotations

from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial, reduce
from itertools import count
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray
from onnx import GraphProto, NodeProto

from amp_rewrite.dtypes import DType
from amp_rewrite.errors import ModelError, PolicyError
from amp_rewrite.evidence.data.feed import Feed
from amp_rewrite.evidence.opening import decompose, unrolled
from amp_rewrite.evidence.ranges import Range, Ranges, key
from amp_rewrite.files.casting import thresholds
from amp_rewrite.files.fingerprint import fingerprint
from amp_rewrite.files.model import Model, ModelSource
from amp_rewrite.files.protos import bodies, clone, refill
from amp_rewrite.ir.names import unused_prefix
from amp_rewrite.ir.schema import TENSOR, ValueType
from amp_rewrite.ir.versions import FIRST_UNBATCHED_SCAN, FIRST_WHERE
from amp_rewrite.ir.view import MAIN, Scope, ScopeId, ValueId, View
from amp_rewrite.rewrite.builder import declared, new_node
from amp_rewrite.rewrite.emulate import emulate
from amp_rewrite.rewrite.node_builder import NodeBuilder
from amp_rewrite.rewrite.passes.inline import inline_functions, inline_schema_functions
from amp_rewrite.runtime.installation import require
from amp_rewrite.runtime.runner import Runner, SessionOptions
from amp_rewrite.settings.choices import LowType, low_type
from amp_rewrite.settings.option import Data, checked
from amp_rewrite.settings.request import Request

CHUNK = 2000
"""Maximum number of taps in one session. A tap uses no memory between runs, but sessions with more taps load slower."""


@checked
def calibrate(
    model: ModelSource,
    data: Data,
    *,
    to: LowType = "float16",
    threads: int | None = None,
    folder: str | Path | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> Ranges:
    """Run a model on data and return the range of every floating-point value; see docs/concepts/ranges.md.

    onnxruntime runs the model on the CPU without optimizations, so each op computes exactly what the model specifies.
    Low values are measured in a float32 copy of the model, which shows their true ranges.

    Args:
        model: anything that `Model.load` accepts.
        data: a Feed, or any data that `Feed.of` accepts; with feedback, the ranges cover all steps.
        to: the low type, as for `convert`.
        threads: threads per op; None means one per core.
        folder: folder of the external data of a ModelProto.
        progress: called as `progress(done, total)` after each run; requires data of known length.

    Returns:
        The ranges, for `convert(…, ranges=…)`.

    Raises:
        PolicyError: `to` is not a low type, or `threads` is below 1.
        ModelError: the model is invalid or does not run.
        FeedError: the data does not fit the model.

    Example:
        >>> import amp_rewrite
        >>> ranges = amp_rewrite.calibrate("model.onnx", "batches.npz")
        >>> ranges.save("ranges.json")
    """
    low = low_type(to)
    if threads is not None and threads < 1:
        raise PolicyError(f"{threads} is not a valid number of threads; use 1 or more, or omit it for one per core")
    require("calibrate")
    source = Model.load(model, folder=folder)
    parts = tuple(_parts(source, low))
    feed = Feed.of(data, parts[0].view.model)
    measured, runs = _measure(parts, unrolled(feed, parts[0].view.model), low, threads or 0, progress)
    values: dict[str, Range] = {}
    for part, part_ranges in zip(parts, measured, strict=True):
        for value in part.constants:
            part_ranges[value] = Range().merge(part.view.fit(value, low)).times(runs)
        for value, range_ in sorted(part_ranges.items()):
            name = key(part.view, value)
            values[name] = values[name].merge(range_) if name in values else range_
    identity = fingerprint(source)
    return Ranges(
        to=low.spelling,
        values=values,
        batches=feed.place(runs - 1)[0] + 1,
        origin=feed.origin,
        random=feed.random,
        model=source.path.name if source.path else source.proto.graph.name,
        graph=identity.graph,
        weights=identity.weights,
        untapped=parts[0].untapped,
    )


def _parts(source: Model, low: DType) -> Iterator[Taps]:
    """Yield the taps of the inlined model, or of its float32 copy if it has low values.

    Operators without a CPU kernel are decomposed, and their intermediate values are not measured. A second item covers
    the bodies of ONNX's function ops, which a conversion for CUDA with the default op lists inlines.
    """
    view = inline_functions(View.of(source))[0]
    original, low_types = {key(view, value.id) for value in view.values}, view.low_types
    decomposed = emulate(source, rounding=False, io="float32") if low_types else decompose(source)
    if decomposed is not source:
        view = inline_functions(View.of(decomposed))[0]
    yield Taps.of(view, {key(view, value.id) for value in view.values} - original)
    if low_types:
        return
    expanded, inlined = inline_schema_functions(view, Request(to=low))
    if inlined:
        tapped_already = {key(view, value.id) for value in view.values}
        yield Taps.of(expanded, tapped_already)


def _measure(
    parts: Sequence[Taps], feed: Feed, to: DType, threads: int, progress: Callable[[int, int], None] | None
) -> tuple[list[dict[ValueId, Range]], int]:
    """Return the ranges of each part's tapped values, and the number of runs."""
    sessions = [(i, p.taps[at : at + CHUNK]) for i, p in enumerate(parts) for at in range(0, len(p.taps), CHUNK)]
    measured: list[dict[ValueId, Range]] = [{} for _ in parts]
    total = runs = len(feed) if progress or not sessions else 0
    for number, (i, taps) in enumerate(sessions):
        model = tapped(parts[i].view, taps, to)
        options = SessionOptions(outputs=(model.rows,), optimized=False, spinning=False, threads=threads)
        runner = Runner.open(model.model, options)
        rows = neutral(len(model.values))
        for runs, batch in enumerate(feed, 1):
            rows = merged(rows, np.asarray(runner.run(batch)[model.rows]))
            if progress:
                progress(number * total + runs, len(sessions) * total)
        measured[i].update(zip(model.values, ranges(rows), strict=True))
    return measured, runs


# -- taps: the measured values of a model, and the model with measurement nodes added -------------------------


@dataclass(frozen=True, slots=True)
class Taps:
    """The floating-point values of a model: measured, constant, or impossible to measure.

    `taps`: the values to measure, in topological order. `untapped`: the reason for each value that cannot be measured,
    by key.
    """

    view: View
    taps: tuple[ValueId, ...]
    constants: tuple[ValueId, ...]
    untapped: Mapping[str, str]

    @classmethod
    def of(cls, view: View, skipped: Container[str] = ()) -> Taps:
        """Classify the floating-point values of a model.

        `skipped`: keys of the values to ignore.
        """
        closed = _closed_bodies(view)
        taps: list[ValueId] = []
        constants: list[ValueId] = []
        untapped: dict[str, str] = {}
        for value in view.values:
            type_ = view.types[value.id]
            floating = type_ is None or type_.dtype is None or type_.dtype.floating
            if not floating or key(view, value.id) in skipped:
                continue
            reason = _unmeasurable_reason(type_) or closed.get(value.scope, "")
            if reason:
                untapped[key(view, value.id)] = reason
            elif view.constant(value.id) is not None:
                constants.append(value.id)
            else:
                taps.append(value.id)
        return cls(view, tuple(taps), tuple(constants), untapped)


def _unmeasurable_reason(type_: ValueType | None) -> str:
    """Return the reason a value of this type cannot be measured, or ""."""
    if type_ is None or (type_.dtype is None and type_.container == TENSOR):
        return "its element type is unknown"
    return "" if type_.container == TENSOR else f"it is not a tensor but {type_}; tensors taken from it are measured"


def _closed_bodies(view: View) -> dict[ScopeId, str]:
    """Map each body with a fixed number of outputs to the reason its values cannot be measured."""
    closed: dict[ScopeId, str] = {}
    for scope in view.scopes:
        owner = view.ops[scope.owner] if scope.owner is not None else None
        if scope.parent in closed:
            closed[scope.id] = closed[scope.parent]
        elif owner is not None:
            since = owner.signature.since if owner.signature else 0
            batched = owner.op_type == "Scan" and since < FIRST_UNBATCHED_SCAN
            if batched or not since or owner.kind not in ("If", "Loop", "Scan"):
                kind = f"{owner.kind}-{since}" if since else owner.kind
                closed[scope.id] = f"it is in a body of {owner.name!r}, and a body of {kind} cannot return more values"
    return closed


class Tapped(NamedTuple):
    """A model with taps: its output `rows` contains one row for each of `values`, in order."""

    model: Model
    values: tuple[ValueId, ...]
    rows: str


def tapped(view: View, taps: Sequence[ValueId], to: DType) -> Tapped:
    """Add taps on values to a copy of a model, and their rows as an additional last output.

    All other outputs are unchanged. `to`: the low type to compare magnitudes with. The taps come after the model's
    nodes, in reverse order of their values. onnxruntime orders nodes backward from the end, so each tap runs right
    after its value, and only one value at a time needs memory for its reductions. Raise ModelError for ai.onnx opsets
    before 9, which introduced Where. O(nodes + taps).
    """
    assert taps, "nothing to measure"
    opset = view.opsets.get("", FIRST_WHERE)
    if opset < FIRST_WHERE:
        raise ModelError(
            f"the model imports ai.onnx opset {opset}, but measuring ranges requires opset {FIRST_WHERE} or later;"
            " convert the model with onnx.version_converter"
        )
    proto = clone(view.model.proto)
    proto.ClearField("training_info")
    if not any(o.domain in ("", "ai.onnx") for o in proto.opset_import):
        proto.opset_import.add(domain="", version=FIRST_WHERE)
    builder = _TapBuilder(view, taps, to)
    rows, values = builder.graph(proto.graph, view.scopes[MAIN])
    refill(proto.graph, "node", [*builder.head.nodes, *proto.graph.node])
    proto.graph.output.append(declared(rows, DType.DOUBLE, [WIDTH * len(values)]))
    return Tapped(replace(view.model, proto=proto), values, rows)


class _Rows(NamedTuple):
    name: str
    values: tuple[ValueId, ...]


class _TapBuilder:
    """Builder of the taps in a copy of the model. All new names begin with an unused prefix.

    The rows of a graph are concatenated into one vector. The op that owns a body returns the body's vector, merged over
    the iterations. The vector of the main graph becomes the additional output. `head`: the constants of the measurement
    nodes, placed before all other nodes.
    """

    def __init__(self, view: View, taps: Sequence[ValueId], to: DType) -> None:
        self.view = view
        self._stem = unused_prefix("tap_", view.names)
        self._numbers = count(1)
        self.head = self.nodes()
        used = dict.fromkeys(map(self._measurement_dtype, taps))
        self.range_nodes = {dtype: RangeNodes(self.head, dtype, to) for dtype in used}
        self.taps: dict[ScopeId, list[ValueId]] = {}
        for value in taps:
            self.taps.setdefault(view.values[value].scope, []).append(value)

    def _measurement_dtype(self, value: ValueId) -> DType:
        """Return the type to measure a value in: float32 also represents the narrower types exactly."""
        return DType.DOUBLE if self.view.dtype(value) is DType.DOUBLE else DType.FLOAT

    def fresh(self) -> str:
        return f"{self._stem}{next(self._numbers)}"

    def nodes(self) -> NodeBuilder:
        return NodeBuilder(set(), opset=self.view.opsets.get("", FIRST_WHERE), region=self.fresh())

    def graph(self, graph: GraphProto, scope: Scope) -> _Rows:
        """Add taps to a copied graph and its bodies, in place."""
        parts: list[_Rows] = []
        after: list[NodeProto] = []
        for op_id, node in zip(scope.ops, list(graph.node), strict=True):
            op = self.view.ops[op_id]
            pairs = zip(op.bodies, bodies(node), strict=True)
            inner = [self.graph(body, self.view.scopes[s]) for s, (_, body) in pairs]
            if values := tuple(value for rows in inner for value in rows.values):
                nodes = self.nodes()
                carried = self._if_output(node, inner) if op.op_type == "If" else self._scan_output(nodes, node, *inner)
                parts.append(_Rows(carried, values))
                after += nodes.nodes
        graph.node.extend(after)
        measured = [_Rows(self._measure(graph, value), (value,)) for value in reversed(self.taps.get(scope.id, ()))]
        parts += reversed(measured)
        values = tuple(value for part in parts for value in part.values)
        return _Rows(self._concat(graph, [part.name for part in parts]) if parts else "", values)

    def _concat(self, graph: GraphProto, rows: Sequence[str]) -> str:
        name = self.fresh()
        graph.node.append(new_node("Concat", rows, name, axis=0))
        return name

    def _measure(self, graph: GraphProto, value: ValueId) -> str:
        nodes, dtype, name = self.nodes(), self._measurement_dtype(value), self.view.value_name(value)
        row = self.range_nodes[dtype].row(nodes, nodes.cast(name, dtype, of=self.view.dtype(value)))
        graph.node.extend(nodes.nodes)
        return row

    def _if_output(self, node: NodeProto, inner: list[_Rows]) -> str:
        """Add an output to an If: the rows of the taken branch, with neutral rows for the other branch."""
        out = self.fresh()
        node.output.append(out)
        others = [self.head.constant(neutral(len(rows.values))) for rows in inner]
        for branch, (_, graph) in enumerate(bodies(node)):
            parts = [rows.name if i == branch else others[i] for i, rows in enumerate(inner) if rows.values]
            graph.output.append(declared(self._concat(graph, parts), DType.DOUBLE, None))
        return out

    def _scan_output(self, nodes: NodeBuilder, node: NodeProto, rows: _Rows) -> str:
        """Add a scan output with the rows of each iteration, and merge them after the op."""
        each, ((_, body),) = self.fresh(), bodies(node)
        states = len(body.output) - (node.op_type == "Loop")  # the first output of a Loop's body is its condition
        body.output.append(declared(rows.name, DType.DOUBLE, [WIDTH * len(rows.values)]))
        node.output.extend(["" for _ in range(len(node.output), states)] + [each])
        for attribute in node.attribute:
            if attribute.name in ("scan_output_axes", "scan_output_directions"):
                attribute.ints.append(0)
        sums, maxima = (nodes.reduce(op_type, each, [0], keepdims=False) for op_type in ("ReduceSum", "ReduceMax"))
        return nodes.op("Where", nodes.constant(np.tile(_IS_SUM, len(rows.values))), sums, maxima)


# -- the row of one tensor -----------------------------------------------------------------------------------

WIDTH = 9

_SUM_COLUMNS = 7  # the first columns merge by sum, the others by maximum
_IS_SUM = np.arange(WIDTH) < _SUM_COLUMNS
_EXACT_IN_FLOAT = 1 << 24  # float32 represents all integers up to this one
_NAMES = ("number", "nonzero", "survives", "normal", "infinite_in_low", "infinite")
_NEUTRAL = [0.0] * 8 + [-np.inf]

Rows = NDArray[np.float64]


def neutral(rows: int) -> Rows:
    """Return the concatenated rows of empty tensors."""
    return np.array(_NEUTRAL * rows)


def merged(a: Rows, b: Rows) -> Rows:
    added = np.tile(_IS_SUM, len(a) // WIDTH)
    with np.errstate(invalid="ignore"):  # -inf + -inf in a column merged by maximum
        return np.where(added, a + b, np.maximum(a, b))


def ranges(rows: Rows) -> Iterator[Range]:
    for row in rows.reshape(-1, WIDTH):
        elements, numbers, nonzero, survive, normal, beyond, infinite = (int(n) for n in row[:_SUM_COLUMNS])
        yield Range(
            count=elements,
            nonfinite=elements - numbers + infinite,
            absmax=max(0.0, float(row[7])),
            absmin=float(-row[8]) if np.isfinite(row[8]) else 0.0,
            overflow=beyond - infinite,
            flushed=nonzero - survive,
            subnormal=survive - normal,
        )


class RangeNodes:
    """Builder of the measurement nodes for one element type, FLOAT or DOUBLE; `head` receives their constants.

    The nodes reduce a tensor of any size to a *row* of nine float64 numbers. To merge two rows, add the first seven
    numbers and take the maximum of each of the last two. Several batches or loop iterations thus merge into one row.

        0       number of elements
        1 to 6  number of magnitudes above each of these: -1 (counts all except NaN), 0, the largest magnitude that
                rounds to zero, the largest that rounds to a subnormal number, the largest that rounds to a finite
                number, and the largest finite number. Zeros may be counted in all of the first four, since only
                differences are used
        7       the largest finite magnitude
        8       minus the smallest nonzero finite magnitude; -infinity if there is none
    """

    def __init__(self, head: NodeBuilder, dtype: DType, to: DType) -> None:
        self._dtype, one = dtype, dtype.numpy.type
        overflows, half, normal = thresholds(to, dtype.numpy)  # rounding is to nearest, ties to even
        below, last = np.nextafter([normal, overflows], one(0)), np.finfo(dtype.numpy).max
        self._all_normal = below[0] < half
        values = {
            **dict(zip(_NAMES, (one(-1), one(0), half, *below, last), strict=True)),
            "overflows": overflows,
            "zero": one(0),
            "infinity": one(np.inf),
            "flat": np.array([-1]),
            "many": np.array([_EXACT_IN_FLOAT]),
            "no_count": np.zeros(1),
        }
        self._constants = {name: head.constant(np.asarray(value)) for name, value in values.items()}

    def row(self, nodes: NodeBuilder, name: str) -> str:
        """Append the nodes for the row of the tensor `name`, and return the row's name.

        One count is enough if all numbers are finite, none overflows, and only zeros round to zero. ReduceMax and
        ReduceMin on the CPU may ignore NaN; only ReduceSum detects it reliably. For an empty tensor, the maximum is
        -infinity and the minimum infinity.
        """
        a = nodes.op("Reshape", nodes.op("Abs", name), self._constants["flat"])
        n = nodes.op("Shape", a)
        number, largest, nonzero = nodes.cast(n, DType.DOUBLE), _reduced(nodes, "ReduceMax", a), self._nonzero(nodes, a)
        smallest = _reduced(nodes, "ReduceMin", nonzero)
        limits = ((_reduced(nodes, "ReduceSum", a), "infinity"), (largest, "overflows"), (n, "many"))
        tests = [nodes.op("Less", value, self._constants[limit]) for value, limit in limits]
        dense = reduce(partial(nodes.op, "And"), [*tests, nodes.op("Greater", smallest, self._constants["survives"])])

        def one_count(branch: NodeBuilder) -> str:
            normal = number if self._all_normal else self._count_above(branch, nonzero, "normal", self._dtype)
            return self._concat(branch, [number] * 4 + [normal], largest, smallest)

        return nodes.choice(dense, one_count, lambda branch: self._all_counts(branch, a, number))

    def _all_counts(self, nodes: NodeBuilder, a: str, number: str) -> str:
        """Return the row of a tensor with any values, including NaN, infinities, overflow and underflow."""
        counts = [self._count_above(nodes, a, name, DType.DOUBLE) for name in _NAMES]
        finite = nodes.op("Where", nodes.op("Less", a, self._constants["infinity"]), a, self._constants["zero"])
        smallest = _reduced(nodes, "ReduceMin", self._nonzero(nodes, finite))
        return self._concat(nodes, [number, *counts], _reduced(nodes, "ReduceMax", finite), smallest)

    def _nonzero(self, nodes: NodeBuilder, a: str) -> str:
        return nodes.op("Where", nodes.op("Greater", a, self._constants["zero"]), a, self._constants["infinity"])

    def _count_above(self, nodes: NodeBuilder, a: str, name: str, counted_in: DType) -> str:
        ones = nodes.cast(nodes.op("Greater", a, self._constants[name]), counted_in)
        return nodes.cast(_reduced(nodes, "ReduceSum", ones), DType.DOUBLE)

    def _concat(self, nodes: NodeBuilder, counts: list[str], largest: str, smallest: str) -> str:
        zeros = [self._constants["no_count"]] * (_SUM_COLUMNS - len(counts))
        ends = (nodes.cast(end, DType.DOUBLE) for end in (largest, nodes.op("Neg", smallest)))
        return nodes.op("Concat", *counts, *zeros, *ends, axis=0)


def _reduced(nodes: NodeBuilder, op_type: str, name: str) -> str:
    return nodes.op(op_type, name, keepdims=1)
