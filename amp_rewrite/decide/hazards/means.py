"""Weighted means whose sums are divided last: linear attention and its kin."""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property

from amp_rewrite.decide.flops import summed_terms
from amp_rewrite.decide.hazards.rule import HeldOp
from amp_rewrite.decide.hazards.steps import described, learned_ops
from amp_rewrite.dtypes import DType
from amp_rewrite.ir.dataflow import Flow, first_input_of, float32_ops, number_throughout, origin
from amp_rewrite.ir.op_classes import ALL, BOUNDED, CLAMPS, COPIES, DEQUANTIZES, PAIR_SUMS, PICKS, PRODUCTS, Slots
from amp_rewrite.ir.shapes.onnx_shapes import elements, shape_of
from amp_rewrite.ir.view import Op, OpId, ValueId, View

_REDUCED = ("CumSum", "ReduceL1", "ReduceSum")
_SHIFTED = PAIR_SUMS | CLAMPS
_FOLLOWED: Slots = {
    **COPIES,
    **dict.fromkeys((*_REDUCED, "Abs", "Div"), (0,)),
    **dict.fromkeys((*_SHIFTED, "Einsum", "Where"), ALL),
    **dict.fromkeys((*(PRODUCTS - {"Einsum"}), "Mul"), (0, 1)),
}
"""The inputs from which a weighted sum is made; of `_SHIFTED`, if the others are constants."""
_DIVIDED: Slots = {**COPIES, "Mul": (0, 1)}
_PARTS = PICKS | {"Split"}
_TERM = 32
"""The size that a term of a sum may have."""
_ENDLESS = 1 << 40
"""The terms of a sum of unknown length."""
_FAR = 64
"""Ops through which a sum is followed."""
_STORED = first_input_of(COPIES.keys() | DEQUANTIZES)
_Sum = Mapping[OpId, Collection[OpId]]
"""Ops that make a sum, in order, each with the ops that it reads; none for what is summed up."""


def weighted_means(view: View, to: DType) -> Iterator[HeldOp]:
    """Hold quotients of two long sums over the same weights, and these sums. None for types with float32's range."""
    means = _Means(view, to.max / _TERM)
    for op in float32_ops(view, ("Div", "Reciprocal")) if to.tiny > DType.FLOAT.tiny else ():
        for op_id in means.parts(op):
            yield HeldOp(op_id, op.id, f"part of a mean: {described(view, op.id)} divides by the sum of its weights")


@dataclass
class _Means:
    """Weighted means of a model; `most`: the terms that a sum may have in the low type."""

    view: View
    most: float

    def parts(self, quotient: Op) -> Collection[OpId]:
        """Return a quotient of two long sums over the same weights, and what computes them; none for other quotients.

        The dividend may also come later, as a factor of the reciprocal.
        """
        divisor = self._made(self.view.producer(quotient.inputs[-1]))
        if not any(map(self._adds, divisor)):
            return ()
        divided = self._flow.forth(dict.fromkeys(quotient.results))
        factors = (op for value in divided for op in self.view.readers(value) if op.kind in PRODUCTS | {"Mul"})
        for op in (quotient, *factors):
            if found := self._sums(divisor, self._made(op), divided):
                return {quotient.id, *found}
        return ()

    def _sums(self, divisor: _Sum, dividend: _Sum, divided: Collection[ValueId]) -> Collection[OpId]:
        """Return what computes two long sums from the weights that they share; none if one is not such a sum.

        `divided`: quotients, and their products with other factors, whose sums are bounded.
        """
        shared = divisor.keys() & dividend.keys()
        paths = [_above(made, shared) for made in (divisor, dividend)]
        parts = any(self.view.ops[op].kind in _PARTS for op in paths[0])
        if parts and not any(map(self._adds, (*paths[0], *paths[1]))):  # of one sum
            shared = {op for op in shared if not divisor[op]}
            paths = [_above(made, shared) for made in (divisor, dividend)]
        late = [op for op in paths[1] if self._adds(op) and not any(v in divided for v in self.view.ops[op].operands)]
        weights = [op for op in shared if not dividend[op] and op in learned_ops(self.view)]
        bounded = len(late) == 1 and all(map(self._bounded, weights))
        if not weights or not late or bounded or not any(map(self._adds, paths[0])):
            return ()
        return {*paths[0], *paths[1]} if self._terms(dividend) > self.most else ()

    def _made(self, op: Op | None) -> _Sum:
        """Return the ops that make a sum, in order."""
        made: dict[OpId, Collection[OpId]] = {}
        queue = deque([op] if op is not None else [])
        while queue and len(made) < _FAR:
            op = queue.popleft()
            if op.id not in made:
                read = [source for v in self._read(op) if (source := self.view.producer(v)) is not None]
                made[op.id] = [source.id for source in read]
                queue.extend(read)
        return dict(sorted(made.items()))

    def _read(self, op: Op) -> Collection[ValueId]:
        """Return the inputs from which an op makes a weighted sum; none for layers and other functions."""
        slots = _FOLLOWED.get(op.kind, ())
        read = [v for at, v in enumerate(op.inputs) if at in slots and v is not None]
        fixed = [v for v in read if self.view.constant(origin(self.view, v, _STORED, most=_FAR)) is not None]
        varying = [v for v in read if v not in fixed and self.view.dtype(v) is DType.FLOAT]
        layer = op.kind in PRODUCTS and any(number_throughout(self.view, v) is None for v in fixed)
        return () if layer or (op.kind in _SHIFTED and len(varying) > 1) else varying

    def _adds(self, op_id: OpId) -> bool:
        op = self.view.ops[op_id]
        return op.kind in _REDUCED or (op.kind in PRODUCTS and bool(self._read(op)))

    def _terms(self, made: _Sum) -> int:
        """Return how many terms are added up in all."""
        terms: dict[OpId, int] = {}
        for op, read in made.items():
            terms[op] = max((terms.get(source, 1) for source in read), default=1)
            terms[op] *= self._length(self.view.ops[op]) if self._adds(op) else 1
        return max(terms.values())

    def _length(self, op: Op) -> int:
        ports = (*op.inputs, op.outputs[0])
        shapes = [shape_of(self.view, value, through_values=True) for value in ports]
        if op.kind in PRODUCTS:
            return summed_terms(op, shapes[:-1], _ENDLESS)
        before, after = (elements(shape) if shape is not None else None for shape in (shapes[0], shapes[-1]))
        return before // after if before and after and op.kind != "CumSum" else _ENDLESS

    def _bounded(self, op_id: OpId) -> bool:
        """True for weights of at most 1: results of a bounded function, or exponentials of x − max(x)."""
        op = self.view.ops[op_id]
        below = self.view.producer(op.inputs[0], "Sub") if op.kind == "Exp" else None
        return op.kind in BOUNDED or (below is not None and bool(self.view.producer(below.inputs[1], "ReduceMax")))

    @cached_property
    def _flow(self) -> Flow:
        return Flow.of(self.view, _DIVIDED)


def _above(made: _Sum, weights: Collection[OpId]) -> list[OpId]:
    """Return the ops that compute with weights, in order."""
    path, reached = list[OpId](), set(weights)
    for op, read in made.items():
        if op not in weights and not reached.isdisjoint(read):
            reached.add(op)
            path.append(op)
    return path
