"""Fusion of rotary position embeddings into onnxruntime's RotaryEmbedding.

Exporters multiply by cosines and sines with two equal halves, and the operator reads only one half. The ops or
constants that compute the tables must show that the halves are equal. The standard operator also reads halves.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache, partial

import numpy as np

from amp_rewrite.ir.attributes import int_attribute
from amp_rewrite.ir.dataflow import number, orders
from amp_rewrite.ir.dims import Dims
from amp_rewrite.ir.patterns.written_out import ENTRY, X, anything, direct_match, op
from amp_rewrite.ir.shapes import dims_of
from amp_rewrite.ir.versions import FIRST_AXES_INPUT
from amp_rewrite.ir.view import Op, OpId, ValueId, View
from amp_rewrite.rewrite.attention.layout import RANK, SWAP, head_split
from amp_rewrite.rewrite.builder import NewNodes
from amp_rewrite.rewrite.const_eval import numbers
from amp_rewrite.rewrite.equivalence import Trial, disagreement
from amp_rewrite.rewrite.reference import DOMAIN
from amp_rewrite.rewrite.replacement import Outcome, Replacement, as_outcome, fused_node, only_float32

KIND = "rotary_embedding"
_HALVES_PRESERVED = ("Cos", "Sin", "Cast", "Identity", "Unsqueeze")
"""Ops on halves: each half of their last axis is computed from the same half of their input."""
_MAX_STEPS = 16
_STANDARD = "RotaryEmbedding"


_HALF = op("Slice|Split", X)
_ROTATION = op(
    "Add",
    op("Mul", X, anything("cos")),
    op("Mul", op("Concat", op("Neg", _HALF), _HALF), anything("sin")),
)
"""x · cos + (−second half of x, first half of x) · sin. A trial verifies the choice of halves."""


@dataclass(frozen=True, slots=True)
class _Rotation:
    """A rotation: its ops, the last of them, and their operands.

    `standard`: it is the standard operator, which reads half of each table.
    """

    ops: tuple[OpId, ...]
    last: Op
    x: ValueId
    cos: ValueId
    sin: ValueId
    standard: bool = False


def rotations(view: View) -> Iterator[Outcome]:
    """Replace each rotation, written out or by the standard operator, or refuse it. O(Negs)."""
    halves_equal = cache(partial(_halves_equal, view))
    for anchor in view.of_kinds(("Neg", _STANDARD)) if view.opset >= FIRST_AXES_INPUT else ():
        rotation = _standard_rotation(anchor) if anchor.kind == _STANDARD else _written_out(view, anchor)
        if rotation is not None and only_float32(view, rotation.ops):
            yield as_outcome(KIND, rotation.last.id, _fused(view, rotation, halves_equal))


def _written_out(view: View, anchor: Op) -> _Rotation | None:
    match = direct_match(view, anchor, _ROTATION)
    if match is None:
        return None
    ops, values = tuple(sorted(match.ops)), match.values
    return _Rotation(ops, view.ops[ops[-1]], values[ENTRY], values["cos"], values["sin"])


def _standard_rotation(op: Op) -> _Rotation | None:
    """Return the rotation by a standard operator; None if it has position ids or rotates only some features."""
    unsupported = any(int_attribute(op.node, name, 0) for name in ("interleaved", "rotary_embedding_dim"))
    if unsupported or len(op.operands) != len(op.inputs) or len(op.inputs) != len(("x", "cos", "sin")):
        return None
    x, cos, sin = op.operands
    return _Rotation((op.id,), op, x, cos, sin, standard=True)


def _first_equal(view: View, value: ValueId) -> ValueId:
    """Return the first cosine or sine of the same angles, so that rotations share tables."""
    producer = view.producer(value)
    if producer is None or producer.kind not in ("Cos", "Sin"):
        return value
    equal = (op for op in view.of_kinds((producer.kind,)) if (op.inputs, op.scope) == (producer.inputs, producer.scope))
    return next((op.results[0] for op in equal), value)


def _fused(view: View, rotation: _Rotation, halves_equal: Callable[[ValueId, int], bool]) -> Replacement | str:
    shape, tables = dims_of(view, rotation.x), [dims_of(view, v) for v in (rotation.cos, rotation.sin)]
    heads, width = (shape[1], shape[3]) if len(shape) == RANK else (None, None)
    if not isinstance(width, int) or not isinstance(heads, int) or width % 2:
        return "the number and the width of its heads are not known"
    features = width // 2 if rotation.standard else width
    if any(not _is_table(table, (shape[2], features)) for table in tables):
        return "its cosines and sines are not known to have one value per position and feature, shared by all batches"
    if not rotation.standard and not all(halves_equal(value, width) for value in (rotation.cos, rotation.sin)):
        return "the two halves of its cosines and sines are not known to be equal"
    return _RotationWriter(view, rotation, heads, width, _packed_source(view, rotation)).replacement()


def _is_table(table: Dims, expected: Dims) -> bool:
    """True for a table of positions by features with the expected sizes; any other axes must have size 1."""
    if not 1 < len(table) <= RANK or table[-2] is None:
        return False
    return table[-2:] == expected and all(d == 1 for d in table[:-2])


def _halves_equal(view: View, value: ValueId, width: int) -> bool:
    """True if the first half of the last axis of a value equals the second."""
    for _ in range(_MAX_STEPS):
        dims, op = dims_of(view, value), view.producer(value)
        if dims[-1:] != (width,):
            return False
        if op is not None and op.kind == "Concat" and len(op.operands) == 2:
            return int_attribute(op.node, "axis", 0) in (-1, len(dims) - 1) and len(set(op.operands)) == 1
        source = None
        gathers_rows = op is not None and op.kind == "Gather" and not int_attribute(op.node, "axis", 0)
        if op is not None and (op.kind in _HALVES_PRESERVED or (gathers_rows and len(dims_of(view, op.inputs[0])) > 1)):
            source = op.inputs[0]
        elif op is not None and op.kind == "Mul":
            source = next((x for x, by in orders(op) if number(view, by, axes=1) is not None), None)
        if source is None:
            array = numbers(view, value)
            return array is not None and np.array_equal(array[..., : width // 2], array[..., width // 2 :])
        value = source
    return False


def _packed_source(view: View, rotation: _Rotation) -> ValueId | None:
    split = head_split(view, rotation.x)
    if split is None:
        return None
    before, after = (dims_of(view, value) for value in (split.inputs[0], split.outputs[0]))
    fits = len(before) == RANK - 1 and len(after) == RANK and before[:2] == after[:2] and None not in after
    return split.inputs[0] if fits else None


class _RotationWriter(NewNodes):
    """Writer of the nodes of one rotation. `packed`: tokens by features to rotate in place of separate heads."""

    def __init__(self, view: View, rotation: _Rotation, heads: int, width: int, packed: ValueId | None) -> None:
        super().__init__(view, rotation.last)
        self.rotation, self.heads, self.width, self.packed = rotation, heads, width, packed

    def replacement(self) -> Replacement | str:
        last, x = self.rotation.last, self.rotation.x if self.packed is None else self.packed
        (result,), attributes = last.node.output, {} if self.packed is None else {"num_heads": self.heads}
        first = self.constant("first_position", np.zeros(1, np.int64))
        tables = [self._table(value) for value in (self.rotation.cos, self.rotation.sin)]
        rotated = result if self.packed is None else self.name(f"{result}_rotated")
        inputs = [self.view.value_name(x), first, *tables]
        node = fused_node("RotaryEmbedding", last, inputs, [rotated], attributes, DOMAIN)
        if self.packed is not None:
            shape = self.constant(f"{result}_heads", np.array([0, 0, self.heads, self.width]))
            self.after("Reshape", (rotated, shape), self.name(f"{result}_apart"))
            self.after("Transpose", (self.name(f"{result}_apart"),), result, perm=SWAP)
        fusion = Replacement(KIND, self.rotation.ops, last.id, node, **self.parts())
        return disagreement(self.view, fusion, [self._trial(inputs[0])]) or fusion

    def _table(self, value: ValueId) -> str:
        """Add the first half of a table, with two axes; return its name."""
        half_name = name = self.view.value_name(_first_equal(self.view, value))
        half = self.width // 2
        if not self.rotation.standard:
            ends = [self.constant(f"{end}_of_{half}", np.array([at])) for end, at in (("start", 0), ("end", half))]
            half_name = self.before("Slice", (name, *ends, self.constant("last_axis", np.array([-1]))), f"{name}_half")
        shape = self.constant(f"rows_of_{half}", np.array([-1, half]))
        return self.before("Reshape", (half_name, shape), f"{name}_cache")

    def _trial(self, name: str) -> Trial:
        """Return a trial on small random operands; `name` is the value rotated by the node."""
        view, rotation, rng = self.view, self.rotation, np.random.default_rng(0)
        batch, tokens = 1 if rotation.standard else 2, 3
        x = rng.standard_normal((batch, self.heads, tokens, self.width))
        halves = rng.standard_normal((2, 1, tokens, self.width // 2))
        cos, sin = halves if rotation.standard else np.concatenate([halves, halves], axis=-1)
        operand = x if self.packed is None else x.swapaxes(1, 2).reshape(batch, tokens, -1)
        before = {view.value_name(v): array for v, array in ((rotation.x, x), (rotation.cos, cos), (rotation.sin, sin))}
        tables = ((rotation.cos, cos), (rotation.sin, sin))
        return Trial(before, {name: operand, **{view.value_name(_first_equal(view, v)): a for v, a in tables}})
