"""The VJPs of Scan and Loop: a Scan from the last step to the first, which computes each step again and then back.

The op itself is made to give what each of its steps began with (the carried values, a Loop's counter) as further
outputs, so that memory grows by the carried values per step, not by all that a step computes. How many steps a Loop
made is the length of those outputs.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import onnx.helper
from onnx import GraphProto, NodeProto, ValueInfoProto

from amp_rewrite.dtypes import DType
from amp_rewrite.errors import GradientError
from amp_rewrite.files.protos import clone, refill
from amp_rewrite.ir.build import bodies
from amp_rewrite.ir.nodes import ScopeId, ValueId
from amp_rewrite.ir.schema import TENSOR
from amp_rewrite.train.builder import Builder, declared
from amp_rewrite.train.paths import paths
from amp_rewrite.train.vjp.row import Call, Joint, Row, Rows, Stop
from amp_rewrite.train.vjp.subgraph import arrivals, prune, reads, refuse_random

_ANY = 1 << 30


@dataclass(frozen=True, slots=True)
class _Carried:
    """A value that one step hands to the next: what a step calls it before and after, and the op's input and output."""

    before: str
    after: str
    slot: int
    output: int


@dataclass(frozen=True, slots=True)
class _Sliced:
    """A tensor of which each step sees, or gives, one slice, from the front or (1) from the back.

    `inner` is the slice in a step; `slot` counts the op's inputs or its outputs.
    """

    inner: str
    slot: int
    axis: int = 0
    direction: int = 0


@dataclass(frozen=True, slots=True)
class _Steps:
    """What Scan and Loop have in common: a body that is run once for each step."""

    scope: ScopeId
    carried: tuple[_Carried, ...]
    read: tuple[_Sliced, ...]
    written: tuple[_Sliced, ...]
    told: tuple[str, ...]
    """What else a step is told: its number, and whether to go on."""

    @property
    def counting(self) -> set[str]:
        """Something that there is one of for each step."""
        return {next(iter((*[s.inner for s in self.read], *self.told)))}


def _scan(v: Call) -> _Steps:
    graph = v.b.facts.view.scopes[v.op.bodies[0]].graph
    before, after = [i.name for i in graph.input], [o.name for o in graph.output]
    count = len(before) - v.attr("num_scan_inputs")

    def sliced(names: Sequence[str], kind: str) -> tuple[_Sliced, ...]:
        axes, directions = (v.attr(f"scan_{kind}_{what}") or [0] * len(names) for what in ("axes", "directions"))
        places = enumerate(zip(names, axes, directions, strict=True), start=count)
        return tuple(_Sliced(name, slot, axis, direction) for slot, (name, axis, direction) in places)

    pairs = enumerate(zip(before[:count], after[:count], strict=True))
    carried = tuple(_Carried(b, a, i, i) for i, (b, a) in pairs)
    return _Steps(v.op.bodies[0], carried, sliced(before[count:], "input"), sliced(after[count:], "output"), ())


def _loop(v: Call) -> _Steps:
    graph = v.b.facts.view.scopes[v.op.bodies[0]].graph
    before, after = [i.name for i in graph.input], [o.name for o in graph.output][1:]
    pairs = enumerate(zip(before[2:], after, strict=False))
    carried = tuple(_Carried(b, a, i + 2, i) for i, (b, a) in pairs)
    written = tuple(_Sliced(name, slot) for slot, name in enumerate(after) if slot >= len(carried))
    return _Steps(v.op.bodies[0], carried, (), written, tuple(before[:2]))


def _back(v: Call, slots: Sequence[int], names: Sequence[str]) -> Sequence[str]:
    steps = _scan(v) if v.op.op_type == "Scan" else _loop(v)
    refuse_random(v, steps.scope, "body")
    moved = _moved(v, steps, slots, names)
    return _Backwards(v, steps, moved, tuple(s for s in steps.read if s.slot in slots), tuple(names)).made(slots)


def _moved(v: Call, steps: _Steps, slots: Sequence[int], names: Sequence[str]) -> tuple[_Carried, ...]:
    """The carried tensors that depend on what is differentiated by, be it after several steps."""
    view, ids = v.b.facts.view, v.b.facts.ids[steps.scope]
    ends = view.scopes[steps.scope].outputs
    fixed = [*names, *[s.inner for s in steps.read if s.slot in slots]]
    found = [c for c in steps.carried if c.slot in slots]
    while True:
        wrt = [ids[name] for name in (*fixed, *[c.before for c in found])]
        reached = paths(view, steps.scope, ends, wrt, {}).reached
        tensors = [c for c in steps.carried if _tensor(v, ids[c.before])]
        now = [c for c in tensors if c in found or ids[c.after] in reached]
        if len(now) == len(found):
            return tuple(found)
        found = now


def _tensor(v: Call, value: ValueId) -> bool:
    kind = v.b.facts.view.types[value]
    return kind is None or kind.container == TENSOR


@dataclass(frozen=True, slots=True)
class _Backwards:
    """The Scan that goes back: of the gradients of `carried`, `read`, and of `names`, which its body captures."""

    v: Call
    steps: _Steps
    carried: tuple[_Carried, ...]
    read: tuple[_Sliced, ...]
    names: tuple[str, ...]

    def made(self, slots: Sequence[int]) -> list[str]:
        """Append it; the gradients of these inputs, then those of the names."""
        v, b = self.v, self.v.b.body(self.steps.scope)
        arrived = [s for s in self.steps.written if v.gradients[s.slot] is not None]
        handed = [self._formal(b, c.before) for c in self.carried]
        sums = [self._formal(b, name, summed(b, name)) for name in self.names]
        slices = [self._formal(b, s.inner) for s in arrived]
        results = self._body(b, handed, sums, arrivals(v, self._arrivals(handed, arrived, slices)))
        graph = self._pruned(b, results)
        wanted = reads(graph) if arrived else reads(graph) | self.steps.counting
        kept = _saved(v, self.steps, wanted)
        again = [s for s in self.steps.read if s.inner in wanted]
        formals = [*kept, *[s.inner for s in again]]
        graph.input.extend([*handed, *sums, *[_declared(b, name) for name in formals], *slices])
        _lift(b, graph, v.b)
        begin = [self._begin(c) for c in self.carried] + [self._zeros(name) for name in self.names]
        scanned = [*kept.values(), *[v.x(s.slot) for s in again], *[v.gradients[s.slot] or "" for s in arrived]]
        ends = self._append(graph, begin, scanned, [_Sliced("", 0)] * len(kept) + again + arrived)
        return self._gradients(ends, slots)

    @staticmethod
    def _formal(b: Builder, name: str, dtype: DType | None = None) -> ValueInfoProto:
        own = b.dtype(name)
        assert own is not None
        return declared(b.fresh(f"{name}_back"), dtype or own, b.shape(name))

    def _arrivals(
        self, handed: Sequence[ValueInfoProto], arrived: Sequence[_Sliced], slices: Sequence[ValueInfoProto]
    ) -> Iterator[tuple[str, str]]:
        yield from ((c.after, formal.name) for c, formal in zip(self.carried, handed, strict=True))
        yield from ((s.inner, formal.name) for s, formal in zip(arrived, slices, strict=True))

    def _body(
        self, b: Builder, handed: Sequence[ValueInfoProto], sums: Sequence[ValueInfoProto], arrived: dict[str, str]
    ) -> list[ValueInfoProto]:
        """Append a step back; what it gives: the carried values' gradients, the sums, the slices' gradients."""
        found = self.v.backward(b, arrived, [*[c.before for c in self.carried], *self._wanted])
        results = [(found[c.before], formal) for c, formal in zip(self.carried, handed, strict=True)]
        for name, formal in zip(self.names, sums, strict=True):
            term = b.cast(found[name], summed(b, name)) if summed(b, name) is not b.dtype(name) else found[name]
            results.append((b.op("Add", formal.name, term), formal))
        return _given(b, [*results, *[(found[s.inner], _declared(b, s.inner)) for s in self.read]])

    @property
    def _wanted(self) -> list[str]:
        return [*self.names, *[s.inner for s in self.read]]

    @staticmethod
    def _pruned(b: Builder, results: Sequence[ValueInfoProto]) -> GraphProto:
        graph = b.finished()
        del graph.input[:], graph.output[:]
        graph.output.extend(results)
        prune(graph)
        return graph

    def _begin(self, carried: _Carried) -> str:
        """What arrived at the value after the last step."""
        arrived, start = self.v.gradients[carried.output], self.v.x(carried.slot)
        return arrived if arrived is not None else self.v.b.zeros_like(start, self._dtype(start))

    def _zeros(self, name: str) -> str:
        return self.v.b.zeros_like(name, summed(self.v.b, name))

    def _dtype(self, name: str) -> DType:
        found = self.v.b.dtype(name)
        assert found is not None
        return found

    def _append(
        self, graph: GraphProto, begin: Sequence[str], scanned: Sequence[str], slices: Sequence[_Sliced]
    ) -> list[str]:
        b, name = self.v.b, self.v.b.fresh(f"{self.v.op.name}_grad")
        graph.name = name
        node = onnx.helper.make_node(
            "Scan",
            [*begin, *scanned],
            [b.fresh(f"{name}_{i}") for i in range(len(graph.output))],
            name=name,
            body=graph,
            num_scan_inputs=len(scanned),
            scan_input_axes=[s.axis for s in slices],
            scan_input_directions=[1 - s.direction for s in slices],
        )
        if self.read:
            node.attribute.append(onnx.helper.make_attribute("scan_output_axes", [s.axis for s in self.read]))
            turned = [1 - s.direction for s in self.read]
            node.attribute.append(onnx.helper.make_attribute("scan_output_directions", turned))
        b.append(node)
        return list(node.output)

    def _gradients(self, ends: Sequence[str], slots: Sequence[int]) -> list[str]:
        b, first = self.v.b, len(self.carried)
        inputs = [*[c.slot for c in self.carried], *[s.slot for s in self.read]]
        last = first + len(self.names)
        by_slot = dict(zip(inputs, [*ends[:first], *ends[last:]], strict=True))
        captured = zip(self.names, ends[first:last], strict=True)
        narrowed = [g if summed(b, n) is b.dtype(n) else b.op("Cast", g, to=self._dtype(n).code) for n, g in captured]
        return [*[by_slot[slot] for slot in slots], *narrowed]


def summed(b: Builder, name: str) -> DType:
    """The type in which the gradients of all steps are added up: float32 for a low one, a sum of many terms."""
    own = b.dtype(name)
    assert own is not None
    return DType.FLOAT if own.low else own


def _declared(b: Builder, name: str) -> ValueInfoProto:
    dtype = b.dtype(name)
    if dtype is None:
        raise GradientError(f"the element type of {name!r} in a body is unknown; declare it")
    return declared(name, dtype, b.shape(name))


def _given(b: Builder, results: Sequence[tuple[str, ValueInfoProto]]) -> list[ValueInfoProto]:
    """Values as outputs, declared like others. What no appended node made, and what is given twice, is copied."""
    found: dict[str, ValueInfoProto] = {}
    made = {name for node in b.finished().node for name in node.output if not b.known(name)}
    for source, like in results:
        out = clone(like)
        out.name = source
        if source not in made or source in found:
            out.name = b.fresh(f"{like.name}_out")
            b.append(_copied(source, out.name))
        found[out.name] = out
    return list(found.values())


def _copied(source: str, name: str) -> NodeProto:
    return NodeProto(op_type="Identity", input=[source], output=[name], name=name)


def _lift(b: Builder, graph: GraphProto, outside: Builder) -> None:
    """Move the nodes of the way back that read nothing of a step, such as a weight's Transpose, out of the body.

    Constants stay: onnx infers no shapes from those outside. So do nodes of the step itself, whose names are taken.
    """
    inside = {i.name for i in graph.input} | {t.name for t in graph.initializer}
    given = {o.name for o in graph.output}
    kept = list[NodeProto]()
    for node in graph.node:
        free = inside.isdisjoint(node.input) and not any(b.known(name) for name in node.output)
        if free and given.isdisjoint(node.output) and node.op_type != "Constant" and not list(bodies(node)):
            outside.append(node)
        else:
            inside.update(node.output)
            kept.append(node)
    refill(graph, "node", kept)


def _saved(v: Call, steps: _Steps, wanted: set[str]) -> dict[str, str]:
    """What the steps of the op began with and the way back reads, by name, each stacked as a further output."""
    node = v.b.graph.node[v.position]
    graph = next(body for _, body in bodies(node))
    inner = v.b.body(steps.scope)
    found = {}
    for name in (*steps.told, *[c.before for c in steps.carried]):
        if name in wanted:
            if not _tensor(v, v.b.facts.ids[steps.scope][name]):
                raise v.error(f"its steps hand on {name!r}, no tensor, and compute with it; no gradient passes there")
            given = _declared(inner, name)
            given.name = v.b.fresh(f"{name}_before")
            graph.node.append(_copied(name, given.name))
            graph.output.append(given)
            found[name] = v.b.extra_output(v.position, len(graph.output) - 1 - (v.op.op_type == "Loop"))
    for attribute in node.attribute:
        if attribute.name in ("scan_output_axes", "scan_output_directions"):
            attribute.ints.extend([0] * len(found))
    return found


ROWS: Rows = {
    ("", "Scan"): Row((Joint(),), outputs=_ANY, together=_back),
    ("", "Loop"): Row((Stop("a count"), Stop("a condition"), Joint()), outputs=_ANY, together=_back),
}
