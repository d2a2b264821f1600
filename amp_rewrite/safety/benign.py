"""Ops on the deny list that are harmless where they stand: what the list fears of their kind can not happen there.

They count as gray, so that they are lowered between two lowered ops and nowhere else.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from amp_rewrite.pin import Cluster
from amp_rewrite.safety.flow import COPIES, Flow, computes_float32, float32
from amp_rewrite.schema import attribute
from amp_rewrite.view import Op, OpId, ValueId, View


def benign(view: View, groups: Sequence[Cluster]) -> Mapping[OpId, str]:
    """The harmless ops, each with one line that says why. O(nodes), and the copies behind each global average."""
    taken = {op for group in groups for op in group.ops}
    found = dict(_cubes(view, groups))
    found.update((op.id, _AVERAGE) for op in view.ops if op.id not in taken and _averages_maps(view, op))
    return found


_CUBE = "the cube in a GELU: where it leaves the range the tanh around it is 1 or -1 already"
_AVERAGE = "a global average of feature maps: bounded by its input, and accumulated in float32, as GlobalAveragePool"


def _cubes(view: View, groups: Sequence[Cluster]) -> Iterator[tuple[OpId, str]]:
    """The Pow of tanh(c · (x + k · x³)) with positive k.

    Beyond |x| = 40 x³ becomes an infinity of x's own sign, whose tanh is ±1, as it is from |x| = 6 on in any case;
    below |x| = 0.004 it becomes 0 beside x.
    """
    for group in groups:
        for op in (view.ops[op_id] for op_id in group.ops if group.kind == "gelu_tanh"):
            scaled = _only_reader(view, op, "Mul") if op.kind == "Pow" and _number(view, op.inputs[1]) == 3 else None
            summed = _only_reader(view, scaled, "Add") if scaled is not None else None
            if scaled is None or summed is None or op.inputs[0] not in summed.inputs:
                continue
            factors = [number for value in scaled.inputs if (number := _number(view, value)) is not None]
            if len(factors) == 1 and factors[0] > 0:
                yield op.id, _CUBE


def _averages_maps(view: View, op: Op) -> bool:
    """Whether an op is the mean over the last two axes that a layer reads: not a mean that is subtracted, nor a
    variance, which need more digits than their input has."""
    if op.kind != "ReduceMean" or not computes_float32(view, op) or sorted(_axes(view, op)) not in ([-2, -1], [2, 3]):
        return False
    made_by = view.producer(op.inputs[0])
    if made_by is not None and (made_by.kind == "Pow" or (made_by.kind == "Mul" and len(set(made_by.inputs)) == 1)):
        return False
    result = op.outputs[0]
    copies = Flow.of(view, COPIES)
    reached = copies.forth({result: None}, float32(view)) if result is not None else {}
    readers = [view.ops[use.op] for value in reached for use in view.uses[value]]
    ends = [reader for reader in readers if not copies.through(reader)]
    return bool(ends) and all(reader.kind in _LAYERS for reader in ends) and view.yielded.isdisjoint(reached)


_LAYERS = ("Conv", "Gemm", "MatMul")


def _axes(view: View, op: Op) -> Sequence[int]:
    """The axes of a reduction, where they are stated or constant."""
    stated = attribute(op.node, "axes")
    if stated is not None:
        return list(stated.ints)
    tensor = view.constant(op.inputs[1]) if len(op.inputs) > 1 else None
    return [int(axis) for axis in view.model.array(tensor)] if tensor is not None and len(tensor.dims) == 1 else []


def _only_reader(view: View, op: Op, kind: str) -> Op | None:
    """The op of this kind that alone reads what an op gives."""
    result = op.outputs[0]
    readers = list(view.readers(result)) if result is not None and result not in view.yielded else []
    return readers[0] if len(readers) == 1 and readers[0].kind == kind else None


def _number(view: View, value: ValueId | None) -> float | None:
    """The one number that a constant holds."""
    tensor = view.constant(value)
    return float(view.model.array(tensor).item()) if tensor is not None and set(tensor.dims) <= {1} else None
