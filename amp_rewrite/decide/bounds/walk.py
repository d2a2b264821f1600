"""One walk over a model: the state of each value, from those before it."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from amp_rewrite.decide.bounds import activations, elementwise, movement, norms, products, quantized, windows
from amp_rewrite.decide.bounds.arithmetic import RoundingModel
from amp_rewrite.decide.bounds.context import OpContext, Table
from amp_rewrite.decide.bounds.rotation import rotated, rotation
from amp_rewrite.decide.bounds.state import MOST, MOST_OF_MAPS, Sizes, State, box, join, lengths, small, unknown
from amp_rewrite.decide.bounds.weights import constant
from amp_rewrite.decide.bounds.written_out import ends, written
from amp_rewrite.dtypes import DType
from amp_rewrite.ir.attributes import int_attribute
from amp_rewrite.ir.exact_ops import exact
from amp_rewrite.ir.op_classes import ELEMENTLESS
from amp_rewrite.ir.patterns.clusters import Cluster
from amp_rewrite.ir.shapes.infer import known_dims
from amp_rewrite.ir.shapes.onnx_shapes import shape_at
from amp_rewrite.ir.view import MAIN, Op, OpId, ValueId, View

STEPS: Table = {
    **activations.TABLE,
    **elementwise.TABLE,
    **movement.TABLE,
    **norms.TABLE,
    **products.TABLE,
    **quantized.TABLE,
    **windows.TABLE,
}
"""The step of each op."""
_LIMITS = (ValueError, IndexError, ArithmeticError, MemoryError)
"""Errors of a step on shapes that contradict each other, or that do not fit the memory: results are unknown then."""


@dataclass(slots=True)
class Walk:
    """The states of values. `seen`: those that are computed; constants are read when they are needed."""

    view: View
    to: DType
    inputs: Mapping[str, tuple[float, float]]
    spatial: bool = False
    frugal: bool = False
    exponent: int = 0
    known: dict[ValueId, State] = field(default_factory=dict)
    ends: Mapping[OpId, Cluster] = field(default_factory=dict)
    shapes: Callable[[ValueId | None], Sizes] = lambda _: None
    constants: dict[ValueId, State] = field(default_factory=dict)
    least: dict[ValueId, float] = field(default_factory=dict)
    unread: dict[ValueId, int] = field(default_factory=dict)
    """Uses of a value that are to come, in a walk along maps: a state that is not read again shrinks to its hull."""

    @classmethod
    def of(
        cls,
        view: View,
        to: DType,
        inputs: Mapping[str, tuple[float, float]],
        *,
        spatial: bool = False,
        frugal: bool = False,
        exponent: int = 0,
    ) -> Walk:
        """Return the walk, done. `spatial`: follow what differs from place to place of a map.

        `frugal`: read of large weights only the largest magnitude, save where the numbers that meet them are known.
        `exponent`: as in `BoundOptions`.
        """
        dims = known_dims(view)
        walk = cls(view, to, inputs, spatial, frugal, exponent, shapes=lambda value: shape_at(dims, view, value))
        walk.ends = ends(view)
        walk._start()
        for op in view.ops:
            walk._follow(op)
        return walk

    def _start(self) -> None:
        for scope in self.view.scopes:
            for value in scope.inputs:
                name = self.view.value_name(value)
                dtype = self.view.dtype(value)
                if scope.id == MAIN and name in self.inputs:
                    state = box(*self.inputs[name], "given")
                elif dtype is DType.BOOL:
                    state = replace(box(0.0, 1.0, "0 or 1"), whole=True)
                else:
                    state = unknown("an input of unknown range" if scope.id == MAIN else "an input of a body")
                if dtype is not None and not dtype.floating:
                    state = replace(state, whole=True)
                self.known[value] = self.arithmetic(value).settle(state) if state.known else state

    def arithmetic(self, value: ValueId | None) -> RoundingModel:
        """Return the roundings of a value in its own type, or the low one."""
        return RoundingModel.of(self.to, self.view.dtype(value), exponent=self.exponent)

    def state(self, value: ValueId) -> State:
        """Return the state of a value."""
        if value in self.known:
            return self.known[value]
        if value not in self.constants:
            own = constant(self.view, value, frugal=self.frugal) if self.view.constant(value) is not None else None
            own = own if own is not None else unknown("an unknown value")
            dtype = self.view.dtype(value)
            floating = dtype is not None and dtype.floating
            self.constants[value] = self.arithmetic(value).settle(own) if floating else own
        return self.constants[value]

    def _follow(self, op: Op) -> None:
        if op.kind == "Constant":
            return
        states = self._results(op)
        for slot, value in enumerate(op.outputs):
            if value is None:
                continue
            state = states[slot] if slot < len(states) else unknown(f"{op.kind} has no bound")
            dtype = self.view.dtype(value)
            if not state.known:
                state = elementwise.integers(dtype) or state
            if not exact(op) and (dtype is None or dtype.floating):
                terms = lengths(self.shapes(value), (state.along,)) if state.total < math.inf else None
                state = self.arithmetic(value).settle(state, terms[0] if terms else None)
            self.known[value] = small(state, MOST_OF_MAPS if self.spatial else MOST)
            self.least[value] = self.known[value].least if not state.fills else 0.0
            self.unread[value] = len(self.view.uses[value])
        for value in op.operands if self.spatial else ():
            self.unread[value] = self.unread.get(value, 0) - 1
            if self.unread[value] <= 0 and value in self.known:
                self.known[value] = self.known[value].hull()
        for value in op.inputs:  # each weight is needed once, or a few times in a row
            if value is not None and value in self.constants and len(self.view.uses[value]) == 1:
                del self.constants[value]

    def _results(self, op: Op) -> Sequence[State]:
        if op.bodies:
            return self._with_bodies(op)
        if op.id in self.ends:
            cluster = self.ends[op.id]
            unit = self.arithmetic(cluster.entry).unit
            state = written(self.view, cluster, self.state, self.shapes(cluster.entry), unit)
            if state is not None:
                return [state]
        if (found := rotation(self.view, op, self.shapes)) is not None:
            result = op.outputs[0]
            state = rotated(
                found, self.state(found.x), self.state(found.y), self.shapes(result), self.arithmetic(result)
            )
            if state is not None:
                return [state]
        if op.kind in ELEMENTLESS:
            return [replace(unknown("a size"), whole=True)]
        step = STEPS.get(op.kind)
        if step is None:
            return [unknown(f"{op.kind} has no bound")] * len(op.outputs)
        heavy = self._reads_alone(op)
        states = [
            None if v is None else unknown("a weight") if slot in heavy else self.state(v)
            for slot, v in enumerate(op.inputs)
        ]
        result = op.outputs[0] if op.outputs else None
        is_read = result is not None and bool(self.view.uses[result])
        context = OpContext(
            self.view, op, states, self.shapes, self.arithmetic(result), is_read, self.spatial, self.frugal
        )
        try:
            with np.errstate(all="ignore"):
                made = step(context)
        except _LIMITS:
            return [unknown(f"shapes of {op.kind} are unknown")] * len(op.outputs)
        return [made] if isinstance(made, State) else made

    def _reads_alone(self, op: Op) -> tuple[int, ...]:
        """Return the inputs that a step reads itself: weights of products and convolutions, in parts."""
        if op.kind in ("MatMul", "Gemm", "Conv", "com.microsoft::FusedMatMul", "com.microsoft::Attention"):
            value, first = op.inputs[1], op.inputs[0]
            tensor = self.view.constant(value)
            if first is not None and self.state(first).total < math.inf:
                return ()
            if tensor is not None and (op.kind == "Conv" or len(tensor.dims) == 2):
                return (1,)
        return ()

    # -- bodies ----------------------------------------------------------------------------------------

    def _with_bodies(self, op: Op) -> Sequence[State]:
        bodies = [self.view.scopes[body] for body in op.bodies]
        given = [[self.state(v).hull() for v in body.outputs] for body in bodies]
        if op.kind == "If" and len(given) == 2:
            return [join(a, b, "one of two branches") for a, b in zip(*given, strict=False)]
        if op.kind in ("Loop", "Scan") and len(given) == 1:
            at, first = (1, 2) if op.kind == "Loop" else (0, 0)
            count = len(bodies[0].inputs) - (2 if op.kind == "Loop" else int_attribute(op.node, "num_scan_inputs", 0))
            results: list[State] = []
            for slot, end in enumerate(given[0][at:]):
                start = op.inputs[first + slot] if slot < count and first + slot < len(op.inputs) else None
                own = end if slot >= count else unknown("a state") if start is None else end
                if start is not None and slot < count:
                    own = join(end, self.state(start).hull(), "a state, bounded by its body")
                results.append(own)
            return results
        return [unknown(f"a body of {op.kind}")] * len(op.outputs)
