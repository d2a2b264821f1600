"""Proof that a fused node computes what the ops that it replaces compute: onnx's reference runs both on numbers.

Everything is run in float64 on the model's own constants, so that the two may differ only where the mathematics does,
or where a constant of the node was rounded to float32. Differences are measured in roundoffs of float32.
onnxruntime's own operators are run by their formulas (`reference`).
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import onnx
import onnx.helper
from onnx import AttributeProto, NodeProto, TensorProto
from onnx.numpy_helper import to_array

from amp_rewrite.dtypes import DType
from amp_rewrite.files.casting import Array
from amp_rewrite.files.protos import clone
from amp_rewrite.ir.dataflow import casts_floats, confined
from amp_rewrite.ir.sizes import MAX_AXES
from amp_rewrite.ir.view import Op, OpId, ValueId, View
from amp_rewrite.rewrite.reference import Arrays, run
from amp_rewrite.rewrite.replacement import Replacement

UNIT = 2.0**-24
"""The unit roundoff of float32 (IEEE 754-2019, table 3.5: 24 digits, to nearest)."""
ROUNDINGS = 4
"""Constants rounded to float32 that any of the formulas has, at most: √2, √(2/π), 0.044715 and one factor; an error of
UNIT in one of them moves the result by no more than UNIT of its magnitude."""
SPREADS = (1.0, 1e-3, 30.0)
"""Deviations of random inputs: usual, so small that an epsilon decides, and far out."""


@dataclass(frozen=True, slots=True)
class Trial:
    """Feeds of the ops and of the nodes in their place, and the magnitude of a result: by default its largest."""

    before: Arrays
    after: Arrays
    magnitude: float | None = None


def drawn(view: View, shapes: Mapping[ValueId, tuple[int, ...]]) -> list[Trial]:
    """Return trials on random numbers of these shapes, the same for ops and nodes; none if numpy has no such rank."""
    if any(len(shape) > MAX_AXES for shape in shapes.values()):
        return []
    rng = np.random.default_rng(0)
    feeds = (
        {view.value_name(v): spread * (rng.standard_normal(shape) + 0.5) for v, shape in shapes.items()}
        for spread in SPREADS
    )
    return [Trial(feed, feed) for feed in feeds]


def disagreement(
    view: View, fusion: Replacement, trials: Sequence[Trial], opsets: Mapping[str, int] | None = None
) -> str | None:
    """Return how the nodes of a fusion differ from its ops; None if both agree on all results that others read.

    Constants that no feed names are those of the model. `opsets`: those of the nodes, by default the model's.
    """
    fed = trials[0].after if trials else {}
    own = {weight.name: double(to_array(weight)) for weight in fusion.weights if weight.name not in fed}
    made = (value for op in fusion.ops for value in view.ops[op].results)
    results = [view.value_name(value) for value in made if not confined(view, value, fusion.ops)]
    known = [Trial(each.before, {**own, **each.after}, each.magnitude) for each in trials]
    return differing(view, fusion.ops, fusion.nodes, {name: name for name in results}, known, opsets=opsets)


def differing(
    view: View,
    ops: Collection[OpId],
    nodes: Sequence[NodeProto],
    results: Mapping[str, str],
    trials: Sequence[Trial],
    *,
    laid: Callable[[Array], Array] = np.asarray,
    opsets: Mapping[str, int] | None = None,
) -> str | None:
    """Return how nodes differ from ops in any trial; None if they agree.

    `results`: those of the ops, each with its name among the nodes. `laid`: the result of the ops as the nodes have it.
    """
    if not trials:
        return "it cannot be tried: its axes are too many, or its attributes do not fit"
    read = {view.value_name(v): v for op in sorted(ops) for v in view.ops[op].operands}
    constants = {
        name: double(array)
        for name, v in read.items()
        if name not in trials[0].before and (array := view.array(v)) is not None
    }
    reads = {name for node in nodes for name in node.input}
    before = [{**constants, **each.before} for each in trials]
    after = [{n: a for n, a in {**constants, **each.before, **each.after}.items() if n in reads} for each in trials]
    plain, versions = plain_nodes(view, ops), opsets or view.opsets

    def tested() -> str | None:
        for old, new in results.items():
            found = run(plain, old, before, view.opsets)
            found = found if isinstance(found, str) else [laid(array) for array in found]
            magnitudes = [each.magnitude for each in trials]
            why = mismatch(found, run(nodes, new, after, versions), magnitudes)
            if why is not None:
                return why
        return None

    settings = sorted(view.opsets.items()), sorted(versions.items()), [each.magnitude for each in trials], len(plain)
    key = _digest([*plain, *nodes], [*before, *after], results, settings)
    why = None if key in _PROVED else tested()
    if why is None and key is not None:
        _PROVED.add(key)
    return why


def mismatch(
    before: Sequence[Array] | str, after: Sequence[Array] | str, magnitudes: Sequence[float | None]
) -> str | None:
    """Return how two runs differ, if by more than ROUNDINGS · UNIT of a result's magnitude; None if they agree."""
    if isinstance(before, str) or isinstance(after, str):
        return before if isinstance(before, str) else str(after)
    for a, b, magnitude in zip(before, after, magnitudes, strict=True):
        if a.shape != b.shape:
            return f"its shape would be {list(b.shape)} instead of {list(a.shape)}"
        bound = ROUNDINGS * UNIT * (float(np.abs(a).max(initial=0)) if magnitude is None else magnitude)
        if not bool((np.abs(a - b) <= bound).all()):  # a NaN is within no bound
            worst = float(np.abs(a - b).max())
            words = f"{worst:.1e}" if math.isfinite(worst) else "more than any bound"
            return f"on random inputs the results differ by up to {words}"
    return None


_PROVED: set[bytes] = set()
"""Proofs that passed: the layers of a model differ in the names of values alone, and are proved once."""


def _digest(
    nodes: Iterable[NodeProto], feeds: Iterable[Arrays], results: Mapping[str, str], settings: object
) -> bytes | None:
    """Return a digest of what is run, with places instead of names; None for nodes with bodies."""
    places: dict[str, int] = {"": 0}
    digest = hashlib.blake2b(repr(settings).encode(), digest_size=16)
    for node in nodes:
        if any(a.type in (AttributeProto.GRAPH, AttributeProto.GRAPHS) for a in node.attribute):
            return None
        ports = [[places.setdefault(name, len(places)) for name in side] for side in (node.input, node.output)]
        digest.update(repr((node.domain, node.op_type, ports)).encode())
        digest.update(b"".join(sorted(a.SerializeToString(deterministic=True) for a in node.attribute)))
    digest.update(repr([(places.get(old), places.get(new)) for old, new in results.items()]).encode())
    for name, array in (pair for feed in feeds for pair in feed.items()):
        digest.update(repr((places.get(name), array.dtype.str, array.shape)).encode() + array.tobytes())
    return digest.digest()


def trial_shape(rank: int, *last: int) -> tuple[int, ...]:
    """Return a shape of that rank with the end `last`: of the axes before, up to four have size 2, others 1."""
    before = max(rank - len(last), 0)
    return (*[1] * (before - _WIDE), *[2] * min(before, _WIDE), *last)


_WIDE = 4
"""The most axes of more than one element: arrays do not grow with the rank."""


def plain_nodes(view: View, ops: Iterable[OpId]) -> list[NodeProto]:
    """Return the nodes of ops for a run in float64."""
    return [_plain(view, view.ops[op]) for op in sorted(ops) if view.ops[op].kind != "Constant"]


def _plain(view: View, op: Op) -> NodeProto:
    node = clone(op.node)
    if op.kind == "Cast" and casts_floats(view, op):
        node.op_type = "Identity"
        del node.attribute[:]
    elif op.kind == "Cast" and view.dtype(op.outputs[0]) is DType.FLOAT:
        del node.attribute[:]
        node.attribute.append(onnx.helper.make_attribute("to", TensorProto.DOUBLE))
    return node


def double(array: Array) -> Array:
    """Return the numbers, floats in float64."""
    return array.astype(np.float64) if array.dtype.kind == "f" or array.dtype == DType.BFLOAT16.numpy else array
