"""Two models in one graph: errors of the candidate's values against the float32 reference, measured in the runtime.

Beside the reference's nodes stand those of the candidate under new names. They read the candidate's own values, or
*shadow* the reference: every op reads the reference's values, in the candidate's types. The graph is an ordinary mixed
model, and `emulate` makes it round; the measuring nodes, which are float32, are added to that twin. They reduce each
pair of values to one row of numbers right after they are computed, so no activation leaves the runtime.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray
from onnx import ModelProto, NodeProto, ValueInfoProto

from amp_rewrite.dtypes import DType
from amp_rewrite.errors import ModelError
from amp_rewrite.evidence.conditions import Conditions, casting_in_graph
from amp_rewrite.evidence.data.feed import Batch, Feed
from amp_rewrite.evidence.instrument.pairing import Pairing, reads
from amp_rewrite.files.model import Model
from amp_rewrite.files.protos import clone, refill
from amp_rewrite.ir.builder import NodeBuilder, declared, new_cast, new_node
from amp_rewrite.ir.graphs import all_nodes, names_read, needed, rename_node
from amp_rewrite.ir.schema import TENSOR
from amp_rewrite.ir.versions import FIRST_WHERE
from amp_rewrite.ir.view import MAIN, ValueId
from amp_rewrite.reports.render import count
from amp_rewrite.rewrite.emulate import emulate
from amp_rewrite.runtime.runner import Given, Runner, SessionOptions

CHUNK = 256
"""Values measured in one session. More of them make larger graphs; fewer repeat the reference more often."""

Fed = Mapping[ValueId, ValueId]
"""Values of the candidate that its ops read from the reference."""


def local_errors(
    reference: Model, low: Model, feed: Feed, *, progress: Callable[[int, int], None] | None = None
) -> dict[str, float]:
    """Return the local error of each low op of `low`, by the op's name in `reference`, in topological order.

    `reference`: a float32 model (of a half model its widened twin); `low`: a conversion of it. For a conversion by this
    package these are `converted.view.model` and `converted.result`, and the names are those of `converted.view.ops`.
    Every op of the main graph that computes in a low type gets a *shadow*: it reads the reference's float32 values,
    rounded to the op's types in `low`, with the op's weights there, computes in float32 and rounds its result. The
    error is sqrt(sum (shadow - reference)^2 / sum reference^2) over all batches, the largest over all outputs; inf if a
    value is finite only in the reference. An op with bodies is measured as a whole; ops that move or select values
    (`amp_rewrite/ir/exact_ops.py`) have no local error and are left out.

    Only a few numbers per op leave the runtime. `progress(done, total)` counts runs. Raise ModelError if no value of
    the two models matches.
    """
    pairing = of_one_shape(Pairing.of(reference, low), feed)
    errors: dict[str, float] = {}
    for value, stats in shadow_errors(pairing, feed, Conditions(progress=progress)).items():
        op = pairing.reference.producer(pairing.measured[value])
        name = op.name if op is not None else ""
        errors[name] = max(errors.get(name, 0.0), stats.error(pairing.low.tiny))
    return errors


def shadow_errors(pairing: Pairing, feed: Feed, conditions: Conditions) -> dict[ValueId, ErrorStats]:
    """Return the local error of each value in `pairing.shadowed`: of its op, fed with the reference's values."""
    return _errors(pairing, pairing.shadowed, pairing.values, feed, conditions)


def accumulated_errors(pairing: Pairing, feed: Feed, conditions: Conditions) -> dict[ValueId, ErrorStats]:
    """Return the accumulated error of each paired value: the candidate as it runs against the reference."""
    return _errors(pairing, tuple(pairing.measured), inputs_of(pairing), feed, conditions)


def of_one_shape(pairing: Pairing, feed: Feed) -> Pairing:
    """Return the pairing without pairs whose shapes differ on the first batch. Raise ModelError if none is left."""
    values = tuple(pairing.measured)
    twin = _rounding(side_by_side(pairing, values, inputs_of(pairing)))
    names = [output.name for output in twin.proto.graph.output]
    shapes = [f"{pairing.stem}shape/{name}" for name in names]
    nodes = [new_node("Shape", [name], shape) for name, shape in zip(names, shapes, strict=True)]
    found = _run(_opened(_ending(twin, nodes, shapes, DType.INT64)), next(iter(feed)))
    equal = [np.array_equal(found[a], found[b]) for a, b in zip(shapes[::2], shapes[1::2], strict=True)]  # type: ignore[arg-type]
    other = {pairing.measured[value] for value, same in zip(values, equal, strict=True) if not same}
    left = replace(pairing, values={v: w for v, w in pairing.values.items() if w not in other})
    if not left.measured:
        raise ModelError(f"{count(len(values), 'value')} of the two models match by name, and none of them by shape")
    return left


def inputs_of(pairing: Pairing) -> Fed:
    """Return the candidate's inputs with the reference's, by name. Raise ModelError if the reference lacks one."""
    reference, view = pairing.reference, pairing.candidate
    known = {reference.value_name(v): v for v in reference.scopes[MAIN].inputs}
    named = {v: known.get(view.value_name(v)) for v in view.scopes[MAIN].inputs}
    for value, other in named.items():
        if other is None and view.values[value].tensor is None:
            name = view.value_name(value)
            raise ModelError(f"the candidate has an input {name!r}, and the reference has none of that name")
    return {value: other for value, other in named.items() if other is not None}


def side_by_side(pairing: Pairing, values: Sequence[ValueId], fed: Fed) -> Model:
    """Return the mixed model whose outputs are these values of the candidate, each followed by the reference's.

    It has the nodes and weights that these need, and all inputs of the reference.
    """
    reference, view, mine = pairing.reference, pairing.candidate, pairing.renamed
    source, graph = reference.model.proto.graph, clone(view.model.proto.graph)
    for held in (*graph.initializer, *(s.values for s in graph.sparse_initializer), *graph.value_info):
        held.name = mine(held.name)
    casts: list[NodeProto] = []
    names = {value: _fed_name(pairing, value, fed[value], casts) for value in fed}
    for op_id, node in zip(view.scopes[MAIN].ops, graph.node, strict=True):
        known = {view.value_name(v): names[v] for v in reads(view, view.ops[op_id]) if v in names}
        rename_node(node, lambda name, known=known: known.get(name) or mine(name))  # type: ignore[misc]
    for node in all_nodes(graph.node):
        node.ClearField("name")  # which a node of the reference may have
    pairs = [(mine(view.value_name(v)), reference.value_name(pairing.measured[v])) for v in values]
    outputs = [ValueInfoProto(name=name) for pair in pairs for name in pair]
    nodes = needed([*source.node, *casts, *graph.node], [output.name for output in outputs])
    read = {*names_read(nodes), *(formal.name for formal in source.input)}
    proto = ModelProto(ir_version=max(view.model.proto.ir_version for view in (reference, view)))
    for domain, version in {**reference.opsets, **view.opsets}.items():
        proto.opset_import.add(domain=domain, version=version)
    proto.graph.name = "measured"
    proto.graph.node.extend(nodes)
    proto.graph.input.extend(source.input)
    proto.graph.output.extend(outputs)
    for part in (source, graph):
        proto.graph.initializer.extend(t for t in part.initializer if t.name in read)
        proto.graph.sparse_initializer.extend(s for s in part.sparse_initializer if s.values.name in read)
        proto.graph.value_info.extend(v for v in part.value_info if v.name in read)
    return Model(proto, reference.model.path)


def _fed_name(pairing: Pairing, value: ValueId, theirs: ValueId, casts: list[NodeProto]) -> str:
    """Return the name of a value of the reference in the candidate's type; append its Cast if the types differ."""
    name = pairing.reference.value_name(theirs)
    before, after = pairing.reference.types[theirs], pairing.candidate.types[value]
    if before == after or after is None or after.dtype is None:
        return name
    if after.container != TENSOR:
        raise ModelError(
            f"{name!r} is {before} in the reference and {after} in the candidate; no Cast converts between them"
        )
    result = f"{pairing.stem}rounded/{pairing.candidate.value_name(value)}"
    casts.append(new_cast(name, result, after.dtype, name=result))
    return result


def measuring(twin: Model, pairing: Pairing, values: Sequence[ValueId]) -> Model:
    """Return the twin of `side_by_side` with one output, for `error_nodes.read`, in place of all values."""
    nodes = ErrorNodes(f"{pairing.stem}error", pairing.low)
    names = [output.name for output in twin.proto.graph.output]
    rows: list[str] = []
    for value, *pair in reversed(list(zip(values, names[::2], names[1::2], strict=True))):  # as in `tapped`
        types = pairing.candidate.dtype(value), pairing.reference.dtype(pairing.measured[value])
        widened = [nodes.cast(n, DType.FLOAT) if t is DType.DOUBLE else n for n, t in zip(pair, types, strict=True)]
        rows.append(nodes.row(*widened, is_low=types[0] is pairing.low))
    return _ending(twin, nodes.nodes, [nodes.op("Concat", *reversed(rows), axis=0)], DType.FLOAT)


def _ending(twin: Model, nodes: Sequence[NodeProto], outputs: Sequence[str], dtype: DType) -> Model:
    proto = clone(twin.proto)
    proto.graph.node.extend(nodes)
    refill(proto.graph, "output", [declared(name, dtype, None) for name in outputs])
    return replace(twin, proto=proto)


def _errors(
    pairing: Pairing, values: Sequence[ValueId], fed: Fed, feed: Feed, conditions: Conditions
) -> dict[ValueId, ErrorStats]:
    size = conditions.chunk or CHUNK
    starts = range(0, len(values), size)
    per_session = len(feed) if conditions.progress else 0
    stats = dict.fromkeys(values, ErrorStats())
    for number, start in enumerate(starts):
        part = values[start : start + size]
        runner = _opened(measuring(_rounding(side_by_side(pairing, part, fed)), pairing, part))
        for done, batch in enumerate(feed, 1):
            (packed,) = _run(runner, batch).values()
            for value, more in zip(part, read(packed), strict=True):  # type: ignore[arg-type]
                stats[value] = stats[value].merge(more)
            conditions.tell(number * per_session + done, len(starts) * per_session)
    return stats


def _rounding(model: Model) -> Model:
    return casting_in_graph(emulate(casting_in_graph(model), io="float32"))


def _opened(model: Model) -> Runner:
    """Open a model without graph optimizations, because fusion depends on the rest of the graph."""
    return Runner.open(model, SessionOptions(optimized=False, planned=False, spinning=False))


def _run(runner: Runner, batch: Batch) -> dict[str, Given]:
    inputs = {port.name for port in runner.inputs}
    return runner.run({name: array for name, array in batch.items() if name in inputs})


_WIDEST = 2.0**64  # its square is the first power of two that no float32 holds


@dataclass(frozen=True, slots=True)
class ErrorStats:
    """Error of values against their reference, over all batches.

    max_abs: the largest |value - reference|; noise: sum (value - reference)^2, over elements finite in both. absmax:
    the largest |reference|; signal: sum reference^2 without masks (`ErrorNodes.row`), over elements finite there.
    lost: the number of elements finite only in the reference.
    """

    max_abs: float = 0.0
    absmax: float = 0.0
    noise: float = 0.0
    signal: float = 0.0
    lost: int = 0

    def merge(self, other: ErrorStats) -> ErrorStats:
        """Return the statistics of both together."""
        return ErrorStats(
            max(self.max_abs, other.max_abs),
            max(self.absmax, other.absmax),
            self.noise + other.noise,
            self.signal + other.signal,
            self.lost + other.lost,
        )

    def error(self, floor: float) -> float:
        """Return sqrt(noise / signal), the inverse signal-to-noise ratio of amplitudes; inf if elements are lost.

        `floor`: lower bound on sqrt(signal).
        """
        if self.lost:
            return math.inf
        noise, signal = math.sqrt(self.noise), math.sqrt(self.signal)
        return noise / max(signal, floor) if noise else 0.0


class ErrorNodes(NodeBuilder):
    """Builder of nodes that measure pairs of values, each pair to one row. All its names begin with `prefix`."""

    def __init__(self, prefix: str, low: DType) -> None:
        """`low`: references below its smallest normal number count as that number."""
        super().__init__(set(), opset=FIRST_WHERE, region=prefix)
        self._flat = self.ints([-1])
        self._zero, self._infinity, self._least = map(self._number, (0.0, math.inf, low.tiny))
        self._bounds = [(self._number(-bound), self._number(bound)) for bound in (_WIDEST, min(low.max, _WIDEST))]

    def _number(self, value: float) -> str:
        return self.constant(np.array([value], np.float32))

    def row(self, value: str, reference: str, *, is_low: bool) -> str:
        """Add nodes for the row of two float32 tensors of one shape; return the row.

        Elements beyond the range of the value's type (`is_low`: the low one), or whose square overflows float32, count
        as masks: they are clamped to the bound, and excluded from the size of the reference.
        """
        lowest, highest = self._bounds[is_low]
        v, r = (self.op("Reshape", x, self._flat) for x in (value, reference))
        v_finite, r_finite = (self.op("Less", self.op("Abs", x), self._infinity) for x in (v, r))
        finite = self.op("And", v_finite, r_finite)
        # From here on all elements are finite; those not finite in both differ by 0.
        r = self.op("Where", r_finite, r, self._zero)
        v = self.op("Where", finite, v, r)
        error = self.op("Abs", self.op("Sub", *(self.op("Max", self.op("Min", x, highest), lowest) for x in (v, r))))
        size = self.op("Abs", r)
        unmasked = self.op("Where", self.op("Less", size, highest), size, self._zero)
        largest, scale, absmax = (self.op("ReduceMax", x, keepdims=1) for x in (error, unmasked, size))
        # Squares of large values must not overflow, those of small ones not vanish; the maximum of no element is -inf.
        unit = self.op("Max", scale, largest, self._least)
        noise, signal = (self.op("ReduceSumSquare", self.op("Div", x, unit), keepdims=1) for x in (error, unmasked))
        lost = self.op("ReduceSum", self.cast(self.op("Xor", r_finite, finite), DType.FLOAT), keepdims=1)
        return self.op("Concat", largest, absmax, noise, signal, lost, unit, axis=0)


def read(packed: NDArray[np.float32]) -> list[ErrorStats]:
    """Return the statistics of the rows in an output."""
    return [
        ErrorStats(max(0.0, error), max(0.0, size), noise * unit**2, signal * unit**2, int(lost))
        for error, size, noise, signal, lost, unit in packed.astype(np.float64).reshape(-1, 6).tolist()
    ]
