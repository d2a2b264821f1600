"""Dataflow between ops: single steps along the graph, and walks.

Steps find the only reader of a value, the number in a constant, and the source of a value upstream of copies and casts.
Walks (`Flow`) follow numbers through copies, arithmetic and small reductions, and into and out of bodies, along the
tables of `op_classes`. An op missing from the table stops a walk, for example a product over a long axis, attention, a
normalization, a recurrent cell, or an op that returns an index or a truth value (ArgMax, comparisons, Shape).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Container, Iterable, Iterator, Sequence
from typing import TypeVar

import networkx as nx
import numpy as np

from amp_rewrite.dtypes import DType
from amp_rewrite.files.casting import BLOCK
from amp_rewrite.ir.attributes import ints_attribute, text_attribute
from amp_rewrite.ir.nodes import BODY_PORTS
from amp_rewrite.ir.op_classes import CASTS, COPIES, EXACT, SCALINGS, SCATTERS, Slots
from amp_rewrite.ir.versions import FIRST_PAD_WITH_INPUTS, FIRST_UNBATCHED_SCAN
from amp_rewrite.ir.view import Op, OpId, Role, ValueId, View, once

Node = TypeVar("Node")
Step = Callable[[Op], ValueId | None]
"""A function from an op to the input that its result copies or scales; None if the op computes new numbers."""

# -- readers -----------------------------------------------------------------------------------------


def exposed(view: View, value: ValueId) -> bool:
    """True for an input of the model, or for an output of the model or of a body."""
    return view.values[value].public or value in view.yielded


def confined(view: View, value: ValueId | None, ops: Container[OpId]) -> bool:
    """True if a value is not exposed, and only these ops read it."""
    return value is not None and not exposed(view, value) and all(use.op in ops for use in view.uses[value])


def is_external(view: View, value: ValueId) -> bool:
    """True for a value from outside its graph: an input, or an overridable initializer."""
    return view.values[value].role is Role.INPUT or view.values[value].overridable


def only_reader(
    view: View, value: ValueId | None, *kinds: str, captured: bool = False, yielded: bool = False
) -> Op | None:
    """Return the only reader of a value; None if there are more, or if it is of another kind or in another graph.

    `captured`: the reader may be in a body. `yielded`: the value may also be exposed.
    """
    if value is None or (not yielded and exposed(view, value)):
        return None
    uses = view.uses[value]
    if len(uses) != 1:
        return None
    op = view.ops[uses[0].op]
    if (kinds and op.kind not in kinds) or (not captured and op.scope != view.values[value].scope):
        return None
    return op


def is_only_reader(view: View, value: ValueId | None, reader: Op) -> bool:
    return only_reader(view, value) is view.ops[reader.id]


# -- constants ---------------------------------------------------------------------------------------


def number(view: View, value: ValueId | None, axes: int | None = None, *, copied: bool = False) -> float | None:
    """Return the number in a constant with a single element; None for other values and for bool.

    `axes`: the maximum number of axes of the constant. `copied`: also accept a copy of a constant.
    """
    tensor = view.copied(value) if copied else view.constant(value)
    if tensor is None or any(dim != 1 for dim in tensor.dims) or (axes is not None and len(tensor.dims) > axes):
        return None
    array = view.model.array(tensor)
    return float(array.item()) if array.dtype.kind in "fiu" else None


def orders(op: Op) -> Iterator[tuple[ValueId, ValueId]]:
    """Yield the operands of a binary op in both orders; nothing for other ops."""
    if len(op.operands) == 2:
        first, second = op.operands
        yield from ((first, second), (second, first))


OUTWEIGHS = 2.0**11
"""The ratio of a bias's norm to that of the weights above which the bias hides the product in a low type."""
_MAX_LOSS = 2.0**-8
"""The largest acceptable change of a constant by rounding, relative to its norm."""


def outweighs(view: View, bias: ValueId | None, weight: ValueId | None, to: DType, *, by: float = OUTWEIGHS) -> bool:
    """True if the norm of a constant bias is more than `by` times the norm of the constant weights."""
    if bias is None or weight is None or view.copied(bias) is None or view.copied(weight) is None:
        return False
    added, factors = view.fit(bias, to), view.fit(weight, to)
    if added.nonfinite or added.absmax * math.sqrt(added.count) <= by * factors.absmax:
        return False
    return _norm(view, bias) > by * _norm(view, weight)


def loses_digits(view: View, value: ValueId, to: DType) -> bool:
    """True if rounding a constant to a type changes it by more than 2⁻⁸ of its norm: most of it is subnormal."""
    fit, half = view.fit(value, to), to.smallest_subnormal / 2
    if fit.nonfinite or fit.overflow or not (fit.flushed or fit.subnormal):
        return False
    if fit.absmax * _MAX_LOSS > half * math.sqrt(fit.count):  # the error of a subnormal is at most half the spacing
        return False
    return _norm(view, value, to) > _MAX_LOSS * _norm(view, value)


def _norm(view: View, value: ValueId, rounded_to: DType | None = None) -> float:
    tensor, squares = view.copied(value), 0.0
    for chunk in view.model.chunks(tensor, BLOCK) if tensor is not None else ():
        exact = chunk.astype(np.float64)
        numbers = exact if rounded_to is None else chunk.astype(rounded_to.numpy).astype(np.float64) - exact
        squares += float(np.square(numbers).sum())
    return math.sqrt(squares)


# -- type variables ------------------------------------------------------------------------------------


def input_variable(op: Op, slot: int) -> tuple[OpId, str] | None:
    """Return an op and the type variable of an input; None past the last input, with bodies or without a schema."""
    name = op.signature.input_variable(slot) if op.signature is not None and not op.bodies else None
    return (op.id, name) if name is not None else None


def output_variable(view: View, value: ValueId) -> tuple[OpId, str] | None:
    """Return the producer of a value and its type variable; None as in `input_variable`, or without a producer."""
    op = view.producer(value)
    if op is None or op.signature is None or op.bodies:
        return None
    name = op.signature.output_variable(op.outputs.index(value))
    return (op.id, name) if name is not None else None


# -- upstream sources of values ----------------------------------------------------------------------


def upstream(view: View, value: ValueId | None, step: Step, limit: int | None = None) -> Iterator[tuple[Op, ValueId]]:
    """Follow `step` upstream from a value, at most `limit` times; yield each op and its input, nearest first."""
    passed = 0
    while passed != limit and (op := view.producer(value)) is not None and (value := step(op)) is not None:
        yield op, value
        passed += 1


def trail(view: View, value: ValueId | None, step: Step, limit: int | None = None) -> tuple[list[Op], ValueId | None]:
    """Return the ops passed by `upstream` and the last input; the value itself if there are none."""
    passed = list(upstream(view, value, step, limit))
    return [op for op, _ in passed], passed[-1][1] if passed else value


def origin(view: View, value: ValueId, step: Step, limit: int | None = None) -> ValueId:
    """Return the last input reached by `upstream`, or the value itself if there are no ops."""
    return [value, *(read for _, read in upstream(view, value, step, limit))][-1]


def first_input(kinds: Container[str]) -> Step:
    return lambda op: op.inputs[0] if op.kind in kinds else None


def multiples(view: View, *, signs: bool = False) -> Step:
    """Return a step through copies except Concat, and through products and quotients of a value and a constant.

    `signs`: also pass through Neg and c / x.
    """

    def step(op: Op) -> ValueId | None:
        if op.kind in COPIES:
            return op.inputs[0] if op.kind != "Concat" else None
        if op.kind not in SCALINGS and not (signs and op.kind == "Neg"):
            return None
        varying = [v for v in op.operands if view.constant(v) is None]
        return varying[0] if len(varying) == 1 and (op.kind != "Div" or signs or varying[0] == op.inputs[0]) else None

    return step


def casts_floats(view: View, op: Op) -> bool:
    ends = (op.inputs[0], op.outputs[0]) if op.kind in CASTS else ()
    return bool(ends) and all(v is not None and (t := view.dtype(v)) is not None and t.floating for v in ends)


def keeps_type(view: View, op: Op) -> bool:
    """True if the first input and the first result of an op have the same known type, as in a redundant Cast."""
    before, after = (view.dtype(v) for v in (op.inputs[0], op.outputs[0]))
    return before is not None and before is after


def exact(op: Op) -> bool:
    """True if an op on low values is exact in the low type. O(attributes)."""
    if op.kind in EXACT:
        return True
    if op.kind == "Clip":  # an omitted bound is the largest value of the type; one in an attribute may be any float32
        return len(op.inputs) == 3 and None not in op.inputs
    if op.kind == "Pad":  # an attribute may be any float32
        return op.signature is not None and op.signature.since >= FIRST_PAD_WITH_INPUTS
    if op.kind in SCATTERS:
        return text_attribute(op.node, "reduction", "none") in ("none", "max", "min")
    return False


# -- reductions --------------------------------------------------------------------------------------


def reduction_axes(view: View, op: Op) -> Sequence[int]:
    """Return the axes of a reduction; an empty list if it reduces all axes, or if the model computes them."""
    axes = view.array(op.inputs[1]) if len(op.inputs) > 1 else None
    return ints_attribute(op.node, "axes") if axes is None or axes.dtype.kind != "i" else axes.reshape(-1).tolist()


# -- walks -------------------------------------------------------------------------------------------


class Flow:
    """Walks along one table of operators, including into and out of bodies. O(visited values + their uses)."""

    def __init__(self, view: View, slots: Slots) -> None:
        self.view, self.slots, self._body_edges = view, slots, _body_edges(view)

    def through(self, op: Op) -> Sequence[int]:
        """Return the inputs connected to the op's result; none for an op that ends a walk."""
        return self.slots.get(op.kind, ())

    def sources(self, value: ValueId) -> Iterator[ValueId]:
        producer = self.view.producer(value)
        if producer is not None:
            for slot in self.through(producer):
                if slot >= len(producer.inputs):
                    break
                read = producer.inputs[slot]
                if read is not None:
                    yield read
        if value in self._body_edges:
            yield from self._body_edges.pred[value]

    def results(self, value: ValueId) -> Iterator[ValueId]:
        for use in self.view.uses[value]:
            op = self.view.ops[use.op]
            if use.slot in self.through(op):
                yield from op.results
        if value in self._body_edges:
            yield from self._body_edges.succ[value]

    def back(self, starts: Iterable[ValueId], enter: Callable[[ValueId], bool] = lambda _: True) -> set[ValueId]:
        return reach(starts, self.sources, enter)

    def forth(self, starts: Iterable[ValueId], enter: Callable[[ValueId], bool] = lambda _: True) -> set[ValueId]:
        return reach(starts, self.results, enter)

    def readers(self, values: Iterable[ValueId]) -> list[Op]:
        """Return the readers of these values that end a walk."""
        return [op for value in values for op in self.view.readers(value) if not self.through(op)]


def float32_ops(view: View, kinds: Container[str]) -> Iterator[Op]:
    return (op for op in view.of_kinds(kinds) if computes(view, op, (DType.FLOAT,)))


def computes(view: View, op: Op, dtypes: Collection[DType]) -> bool:
    return any(v.type is not None and v.type.dtype in dtypes for v in view.variables[op.id])


def reach(
    starts: Iterable[Node], near: Callable[[Node], Iterable[Node]], enter: Callable[[Node], bool] = lambda _: True
) -> set[Node]:
    """Return all nodes within reach of the starts by repeated steps to `near`.

    `enter`: True for a node that the walk may enter, including a start.
    """
    seen = set(filter(enter, starts))
    pending = list(seen)
    while pending:
        found = {node for node in near(pending.pop()) if node not in seen and enter(node)}
        seen |= found
        pending.extend(found)
    return seen


@once
def _body_edges(view: View) -> nx.DiGraph[ValueId]:
    """Return the edges into and out of bodies and between their iterations, from source to target."""
    edges: nx.DiGraph[ValueId] = nx.DiGraph()
    edges.add_edges_from(view.carried)
    for scope in view.scopes:
        op = view.ops[scope.owner] if scope.owner is not None else None
        if op is None or op.kind not in BODY_PORTS:
            continue
        owner_input, body_input, body_output = BODY_PORTS[op.kind]
        if op.kind == "Scan" and view.opset < FIRST_UNBATCHED_SCAN:
            owner_input = 1
        inputs = zip(op.inputs[owner_input:], scope.inputs[body_input:], strict=False)
        outputs = zip(scope.outputs[body_output:], op.outputs, strict=False)
        edges.add_edges_from((a, b) for a, b in (*inputs, *outputs) if a is not None and b is not None)
    return edges
