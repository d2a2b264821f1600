"""Free and fixed type variables, and the types of the maker and readers of each value."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from functools import cached_property

from amp_rewrite.decide.coloring.problem import Problem, Spread
from amp_rewrite.decide.reasons import Paint
from amp_rewrite.dtypes import DType
from amp_rewrite.ir import op_classes as kinds
from amp_rewrite.ir.dataflow import exact, first_input, is_external, keeps_type, origin, trail
from amp_rewrite.ir.patterns.clusters import Cluster
from amp_rewrite.ir.versions import FIRST_FUSED
from amp_rewrite.ir.view import Op, OpId, ValueId, View
from amp_rewrite.settings.list_entry import Color

LOW, HIGH = "low", "high"
"""The terminals of the cut: source and sink."""
End = int | str | tuple[str, int]
"""A vertex, the terminal of a fixed type, or an auxiliary node."""
_copied = first_input(kinds.COPIES)


def scale_is_tied(view: View, cluster: Cluster, low: DType) -> bool:
    """True if onnxruntime fuses a written-out norm and then requires its scale and bias in the type of its input.

    It fuses at the BASIC optimization level and above, and ignores a Cast that only the norm reads: the fused node
    takes the type before that Cast, and the runtime rejects the model if scale and bias have another type. The types of
    the ops in between do not matter. Source: about 360 small models loaded with onnxruntime 1.31.1.
    """
    if cluster.kind == "layer_normalization":
        return low is DType.BFLOAT16 or view.opset >= FIRST_FUSED["LayerNormalization"]
    return cluster.kind == "rms_normalization" and low is DType.BFLOAT16


@dataclass
class Free:
    """Type variables for the cut to decide, and their gain from a low type.

    `must_stay`: vertices to keep in float32, in addition to those of the problem.
    """

    problem: Problem
    spread: Spread
    must_stay: Mapping[int, Paint] = field(default_factory=dict)

    @cached_property
    def follows(self) -> frozenset[int]:
        """Vertices without cost in either type: Shape and Size, inputs of Casts, Casts from float32 to float32."""
        p = self.problem
        casts = (
            v for v in p.of_kinds(("Cast",)) if "T1" in p.vertices[v].variables or self._copied_by(p.op(v)) is not None
        )
        return frozenset((*p.of_kinds(kinds.ELEMENTLESS), *casts))

    @cached_property
    def ends(self) -> list[End]:
        """The node of each vertex: a terminal if its type is fixed, otherwise itself or the first of its sequence."""
        fixed = [self._fixed(v) for v in range(len(self.problem.vertices))]
        groups = (self.problem.sequence_of.get(v, (v,)) for v in range(len(fixed)))
        ends = (({fixed[v] for v in group}, group[0]) for group in groups)
        return [HIGH if HIGH in types else LOW if LOW in types else first for types, first in ends]

    def _fixed(self, v: int) -> str | None:
        p, op = self.problem, self.problem.op(v)
        if v in self.follows:
            return None
        if v in self.must_stay or not p.can_be_low(v):
            return HIGH
        if v in self.spread.roots:
            return LOW
        if v in self.after_products:
            return HIGH
        if op.kind == "Cast" and v not in self.spread.low:
            return HIGH if p.widens(op) else None
        codes = (
            trail(p.view, op.inputs[0], first_input(kinds.QUANTIZES), 1)[1] if op.kind in kinds.DEQUANTIZES else None
        )
        if v in self.spread.low or p.view.constant(codes) is not None:
            return None  # a Cast after a decoded weight would run on every call and hide the quantization
        if p.colors[v] not in (Color.GRAY, Color.CLEAR):
            return HIGH
        if exact(op):
            return None
        return HIGH if self._grows(op) or any(map(self._unbounded, filter(self.varies, op.operands))) else None

    def _grows(self, op: Op) -> bool:
        return op.kind in kinds.GROWS and not (op.kind in kinds.LONG_SUMS and op.id in self.problem.needs.unneeded)

    def _unbounded(self, value: ValueId) -> bool:
        """True for an unbounded value, and for a value that the model itself widens.

        Inputs of the model or a body are unbounded, as are results of ops that can outgrow their inputs.
        """
        view = self.problem.view
        producer, maker = view.producer(value), view.producer(origin(view, value, _copied))
        return producer is None or self.problem.widens(producer) or (maker is not None and self._grows(maker))

    def _copied_by(self, op: Op) -> ValueId | None:
        """Return the input of a Cast from float32 to float32; None for other ops."""
        view = self.problem.view
        copies = op.kind == "Cast" and keeps_type(view, op) and view.dtype(op.inputs[0]) is DType.FLOAT
        return op.inputs[0] if copies else None

    # -- values ------------------------------------------------------------------------------------

    def maker_end(self, value: ValueId) -> End:
        p, view = self.problem, self.problem.view
        op = view.producer(value)
        while op is not None and (source := self._copied_by(op)) is not None:
            value, op = source, view.producer(source)
        if is_external(view, value):
            return self._edge(value)
        if op is not None and op.kind == "Cast" and view.dtype(op.inputs[0]) is p.to:
            return LOW
        v = p.maker(value)
        return self.ends[v] if v is not None else HIGH

    def reader_ends(self, value: ValueId, without: Collection[OpId] = (), integers: bool = False) -> set[End]:
        """Return the nodes of a value's readers, except ops in `without`. `integers`: include Casts to integers."""
        p, view = self.problem, self.problem.view
        found: set[End] = set()
        pending = [value]
        for source in pending:
            for use in view.uses[source]:
                op = view.ops[use.op]
                if op.id in without or (op.kind in kinds.ELEMENTLESS and op.signature is not None):
                    continue
                if op.kind != "Cast":
                    v = p.reader(use)
                    found.add(self.ends[v] if v is not None else HIGH)
                elif self._copied_by(op) is not None:
                    pending.extend(op.results)
                elif (made := view.dtype(op.outputs[0])) is p.to:
                    found.add(LOW)
                elif integers and made is not None and not made.floating:
                    found.add(HIGH)
            if source in view.yielded or (view.values[source].public and not is_external(view, source)):
                found.add(self._edge(source))
        return found

    def _edge(self, value: ValueId) -> str:
        return LOW if value in self.problem.low_io else HIGH

    def results(self, v: int) -> list[ValueId]:
        op, names = self.problem.op(v), self.problem.vertices[v].variables
        slots = (slot for x in self.problem.view.variables[op.id] if x.name in names for slot in x.outputs)
        return [value for slot in slots if (value := op.outputs[slot]) is not None]

    def varies(self, value: ValueId) -> bool:
        view = self.problem.view
        return view.dtype(value) is DType.FLOAT and view.constant(value) is None

    def _varying(self, op: Op) -> list[ValueId]:
        view = self.problem.view
        return [v for v in op.operands if self.varies(v) and view.constant(origin(view, v, _copied)) is None]

    # -- gain --------------------------------------------------------------------------------------

    def earns(self, v: int) -> bool:
        """True for a vertex in TensorFlow's set upstream of a lowered product."""
        return v in self.spread.low and (
            not self.problem.only_before_products or self.problem.vertices[v].op in self.upstream
        )

    @cached_property
    def _products(self) -> set[OpId]:
        p = self.problem
        return {p.vertices[v].op for v in p.of_kinds(kinds.HEAVY) if v in self.spread.roots and v not in self.must_stay}

    @cached_property
    def upstream(self) -> set[OpId]:
        """Ops upstream of lowered products, and owners of bodies with lowered products.

        Ops and outputs lowered by the user count as products.
        """
        p, view = self.problem, self.problem.view
        products = self._products | p.lower.keys()
        owners = {owner for op in products for owner in view.owners(op)}
        made = {producer.id for value in p.low_io if (producer := view.producer(value)) is not None}
        sources = {source for op in (*products, *owners) for source in view.flow.predecessors(op)}
        return view.before(owners | made | sources)

    @cached_property
    def _downstream(self) -> set[OpId]:
        return self.problem.view.after(self._products)

    @cached_property
    def before_products(self) -> frozenset[int]:
        """Copies, sums and products without a lowered product upstream; low only if all their readers are."""
        p, before = self.problem, set[int]()
        for v in range(len(p.vertices) if p.only_before_products else 0):
            op = p.op(v)
            candidate = p.colors[v] is Color.CLEAR or op.kind in kinds.PAIR_SUMS | {"Mul"}
            if candidate and isinstance(self.ends[v], int) and v not in self.follows and op.id not in p.lower:
                inputs = [self._precedes_products(value, before) for value in self._varying(op)]
                if inputs and (any(inputs) if op.kind == "Concat" else all(inputs)):
                    before.add(v)
        return frozenset(before)

    def _precedes_products(self, value: ValueId, before: Collection[int]) -> bool:
        producer, maker = self.problem.view.producer(value), self.problem.maker(value)
        unrelated = producer is None or producer.id not in self._downstream
        return maker in before or (self.maker_end(value) == HIGH and unrelated)

    @cached_property
    def after_products(self) -> frozenset[int]:
        """Sums and products of values rounded after the last lowered product."""
        p, view, after = self.problem, self.problem.view, set[int]()
        downstream = self._downstream - self.upstream if p.only_before_products else ()
        for v in p.of_kinds(kinds.SUMS | kinds.SCALINGS):
            op = p.op(v)
            if op.id not in downstream or not p.can_be_low(v) or v in self.spread.roots or len(self._varying(op)) < 2:
                continue
            makers = (view.producer(origin(view, value, self._carried)) for value in self._varying(op))
            if any(m is not None and m.id not in self.upstream and m.kind not in kinds.HEAVY for m in makers):
                after.add(v)
        return frozenset(after)

    def _carried(self, op: Op) -> ValueId | None:
        carries = op.kind in kinds.COPIES or op.kind in kinds.AFFINE or op.kind.endswith("Normalization")
        varying = self._varying(op) if carries else []
        return varying[0] if len(varying) == 1 else None
