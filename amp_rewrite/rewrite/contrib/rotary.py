"""Rotations of queries and keys by their positions, as onnxruntime's RotaryEmbedding.

The operator reads half of what exporters multiply by, since cosines and sines of both halves are equal; that is proved
of the values themselves, whatever positions they were computed from. The standard's operator reads halves, too.
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
from amp_rewrite.rewrite.attention.layout import RANK, SWAP, split_behind
from amp_rewrite.rewrite.builder import Surroundings
from amp_rewrite.rewrite.const_eval import numbers
from amp_rewrite.rewrite.equivalence import Trial, disagreement
from amp_rewrite.rewrite.reference import DOMAIN
from amp_rewrite.rewrite.replacement import Outcome, Replacement, as_outcome, fused_node, only_float32

KIND = "rotary_embedding"
_KEEPING = ("Cos", "Sin", "Cast", "Identity", "Unsqueeze")
"""Ops of whose result each half is made of the same half of what they read, as long as its last axis stays."""
_MAX_STEPS = 16
_STANDARD = "RotaryEmbedding"


_HALF = op("Slice|Split", X)
_ROTATION = op(
    "Add",
    op("Mul", X, anything("cos")),
    op("Mul", op("Concat", op("Neg", _HALF), _HALF), anything("sin")),
)
"""x · cos + (−second half of x, first half of x) · sin. The halves are proved by trial."""


@dataclass(frozen=True, slots=True)
class _Rotation:
    """A rotation: its ops, the last of them, and their operands.

    `whole`: one op of the standard, which reads half of each table.
    """

    ops: tuple[OpId, ...]
    last: Op
    x: ValueId
    cos: ValueId
    sin: ValueId
    whole: bool = False


def rotations(view: View) -> Iterator[Outcome]:
    """Replace each rotation of heads, written out or the standard's, by one node, or refuse it. O(Negs)."""
    doubled = cache(partial(_doubled, view))
    for anchor in view.of_kinds(("Neg", _STANDARD)) if view.opset >= FIRST_AXES_INPUT else ():
        rotation = _standard(anchor) if anchor.kind == _STANDARD else _written_out(view, anchor)
        if rotation is not None and only_float32(view, rotation.ops):
            yield as_outcome(KIND, rotation.last.id, _rotated(view, rotation, doubled))


def _written_out(view: View, anchor: Op) -> _Rotation | None:
    match = direct_match(view, anchor, _ROTATION)
    if match is None:
        return None
    ops, read = tuple(sorted(match.ops)), match.values
    return _Rotation(ops, view.ops[ops[-1]], read[ENTRY], read["cos"], read["sin"])


def _standard(op: Op) -> _Rotation | None:
    """Return the rotation of all features by tables in the order of the tokens; None for another."""
    unlike = any(int_attribute(op.node, name, 0) for name in ("interleaved", "rotary_embedding_dim"))
    if unlike or len(op.operands) != len(op.inputs) or len(op.inputs) != len(("x", "cos", "sin")):
        return None
    x, cos, sin = op.operands
    return _Rotation((op.id,), op, x, cos, sin, whole=True)


def _first_alike(view: View, value: ValueId) -> ValueId:
    """Return the first value that is the cosine, or sine, of the same angles: rotations that share tables read it."""
    made = view.producer(value)
    if made is None or made.kind not in ("Cos", "Sin"):
        return value
    alike = (op for op in view.of_kinds((made.kind,)) if (op.inputs, op.scope) == (made.inputs, made.scope))
    return next((op.results[0] for op in alike), value)


def _rotated(view: View, rotation: _Rotation, doubled: Callable[[ValueId, int], bool]) -> Replacement | str:
    whole, tables = dims_of(view, rotation.x), [dims_of(view, v) for v in (rotation.cos, rotation.sin)]
    heads, width = (whole[1], whole[3]) if len(whole) == RANK else (None, None)
    if not isinstance(width, int) or not isinstance(heads, int) or width % 2:
        return "how many heads it has, and how wide they are, is not known"
    last = width // 2 if rotation.whole else width
    if any(not _stated(table, (whole[2], last)) for table in tables):
        return "its cosines and sines are not known to be one of each position and feature, for all batches"
    if not rotation.whole and not all(doubled(value, width) for value in (rotation.cos, rotation.sin)):
        return "both halves of its cosines and sines are not known to be equal"
    return _RotationWriter(view, rotation, heads, width, _split_from(view, rotation)).replacement()


def _stated(table: Dims, wanted: Dims) -> bool:
    """True for a table of positions by features: axes before are 1, and the positions are those of the heads."""
    return 1 < len(table) <= RANK and all(d == 1 for d in table[:-2]) and table[-2:] == wanted and table[-2] is not None


def _doubled(view: View, value: ValueId, width: int) -> bool:
    """True if the first half of the last axis of a value equals the second."""
    for _ in range(_MAX_STEPS):
        known, op = dims_of(view, value), view.producer(value)
        if known[-1:] != (width,):
            return False
        if op is not None and op.kind == "Concat" and len(op.operands) == 2:
            return int_attribute(op.node, "axis", 0) in (-1, len(known) - 1) and len(set(op.operands)) == 1
        source = None
        rows = op is not None and op.kind == "Gather" and not int_attribute(op.node, "axis", 0)
        if op is not None and (op.kind in _KEEPING or (rows and len(dims_of(view, op.inputs[0])) > 1)):
            source = op.inputs[0]
        elif op is not None and op.kind == "Mul":
            source = next((x for x, by in orders(op) if number(view, by, axes=1) is not None), None)
        if source is None:
            held = numbers(view, value)
            return held is not None and np.array_equal(held[..., : width // 2], held[..., width // 2 :])
        value = source
    return False


def _split_from(view: View, rotation: _Rotation) -> ValueId | None:
    split = split_behind(view, rotation.x)
    if split is None:
        return None
    before, after = (dims_of(view, value) for value in (split.inputs[0], split.outputs[0]))
    fits = len(before) == RANK - 1 and len(after) == RANK and before[:2] == after[:2] and None not in after
    return split.inputs[0] if fits else None


class _RotationWriter(Surroundings):
    """The nodes of one rotation. `packed`: tokens by features to rotate, instead of heads."""

    def __init__(self, view: View, rotation: _Rotation, heads: int, width: int, packed: ValueId | None) -> None:
        super().__init__(view, rotation.last)
        self.rotation, self.heads, self.width, self.packed = rotation, heads, width, packed

    def replacement(self) -> Replacement | str:
        last, x = self.rotation.last, self.rotation.x if self.packed is None else self.packed
        (result,), stated = last.node.output, {} if self.packed is None else {"num_heads": self.heads}
        first = self.constant("first_position", np.zeros(1, np.int64))
        tables = [self._table(value) for value in (self.rotation.cos, self.rotation.sin)]
        rotated = result if self.packed is None else self.name(f"{result}_rotated")
        reads = [self.view.value_name(x), first, *tables]
        node = fused_node("RotaryEmbedding", last, reads, [rotated], stated, DOMAIN)
        if self.packed is not None:
            shape = self.constant(f"{result}_heads", np.array([0, 0, self.heads, self.width]))
            self.after("Reshape", (rotated, shape), self.name(f"{result}_apart"))
            self.after("Transpose", (self.name(f"{result}_apart"),), result, perm=SWAP)
        fusion = Replacement(KIND, self.rotation.ops, last.id, node, **self.parts())
        return disagreement(self.view, fusion, [self._trial(reads[0])]) or fusion

    def _table(self, value: ValueId) -> str:
        """Return the first half of a table, with two axes."""
        cut = name = self.view.value_name(_first_alike(self.view, value))
        half = self.width // 2
        if not self.rotation.whole:
            ends = [self.constant(f"{word}_of_{half}", np.array([at])) for word, at in (("start", 0), ("end", half))]
            cut = self.before("Slice", (name, *ends, self.constant("last_axis", np.array([-1]))), f"{name}_half")
        return self.before("Reshape", (cut, self.constant(f"rows_of_{half}", np.array([-1, half]))), f"{name}_cache")

    def _trial(self, read: str) -> Trial:
        """Return small random operands; `read` is what the node rotates."""
        view, rotation, rng = self.view, self.rotation, np.random.default_rng(0)
        batch, tokens = 1 if rotation.whole else 2, 3
        x = rng.standard_normal((batch, self.heads, tokens, self.width))
        halves = rng.standard_normal((2, 1, tokens, self.width // 2))
        cos, sin = halves if rotation.whole else np.concatenate([halves, halves], axis=-1)
        whole = x if self.packed is None else x.swapaxes(1, 2).reshape(batch, tokens, -1)
        before = {view.value_name(v): array for v, array in ((rotation.x, x), (rotation.cos, cos), (rotation.sin, sin))}
        tables = ((rotation.cos, cos), (rotation.sin, sin))
        return Trial(before, {read: whole, **{view.value_name(_first_alike(view, v)): a for v, a in tables}})
