"""Verification of fusions: onnx's reference evaluator runs a fused node and the ops it replaces on random inputs.

Both run in float64 with the model's own constants, so they can differ only in their mathematics, or if a constant of
the node was rounded to float32. Differences are measured in unit roundoffs of float32. onnxruntime's own operators run
by their formulas (`reference`).
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
from amp_rewrite.ir.dims import MAX_AXES
from amp_rewrite.ir.view import Op, OpId, ValueId, View
from amp_rewrite.rewrite.reference import Arrays, run
from amp_rewrite.rewrite.replacement import Replacement

UNIT = 2.0**-24
"""The unit roundoff of float32 (IEEE 754-2019, table 3.5: 24 digits, to nearest)."""
ROUNDINGS = 4
"""Maximum number of constants rounded to float32 in one formula: √2, √(2/π), 0.044715 and one factor. An error of UNIT
in one of them changes the result by at most UNIT of its magnitude."""
SPREADS = (1.0, 1e-3, 30.0)
"""Standard deviations of random inputs: typical, small enough for an epsilon to dominate, and large."""


@dataclass(frozen=True, slots=True)
class Trial:
    """Feeds for the ops and for their replacement, and the magnitude of the result, by default its maximum."""

    before: Arrays
    after: Arrays
    magnitude: float | None = None


def random_trials(view: View, shapes: Mapping[ValueId, tuple[int, ...]]) -> list[Trial]:
    """Return trials with random inputs of these shapes; an empty list if a rank is too high for numpy."""
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
    """Return how the nodes of a fusion differ from its ops; None if they agree on all results with other readers.

    Constants that are not in a feed come from the model. `opsets` are the opsets of the nodes, by default the model's.
    """
    feed = trials[0].after if trials else {}
    weights = {weight.name: as_float64(to_array(weight)) for weight in fusion.weights if weight.name not in feed}
    values = (value for op in fusion.ops for value in view.ops[op].results)
    results = [view.value_name(value) for value in values if not confined(view, value, fusion.ops)]
    weighted = [Trial(each.before, {**weights, **each.after}, each.magnitude) for each in trials]
    return difference(view, fusion.ops, fusion.nodes, {name: name for name in results}, weighted, opsets=opsets)


def difference(
    view: View,
    ops: Collection[OpId],
    nodes: Sequence[NodeProto],
    results: Mapping[str, str],
    trials: Sequence[Trial],
    *,
    layout: Callable[[Array], Array] = np.asarray,
    opsets: Mapping[str, int] | None = None,
) -> str | None:
    """Return how nodes differ from ops in any trial; None if they agree.

    `results` maps the results of the ops to the results of the nodes. `layout` converts a result of the ops to the
    layout of the nodes' result.
    """
    if not trials:
        return "it cannot be tried, because it has too many axes, or attributes that do not match its operands"
    read_values = {view.value_name(v): v for op in sorted(ops) for v in view.ops[op].operands}
    constants = {
        name: as_float64(array)
        for name, v in read_values.items()
        if name not in trials[0].before and (array := view.array(v)) is not None
    }
    read_names = {name for node in nodes for name in node.input}
    before = [{**constants, **trial.before} for trial in trials]
    feeds = [{**constants, **trial.before, **trial.after} for trial in trials]
    after = [{name: array for name, array in feed.items() if name in read_names} for feed in feeds]
    plain, versions = float64_nodes(view, ops), opsets or view.opsets

    def compare() -> str | None:
        for old, new in results.items():
            expected = run(plain, old, before, view.opsets)
            expected = expected if isinstance(expected, str) else [layout(array) for array in expected]
            magnitudes = [trial.magnitude for trial in trials]
            reason = mismatch(expected, run(nodes, new, after, versions), magnitudes)
            if reason is not None:
                return reason
        return None

    settings = sorted(view.opsets.items()), sorted(versions.items()), [trial.magnitude for trial in trials], len(plain)
    key = _digest([*plain, *nodes], [*before, *after], results, settings)
    reason = None if key in _VERIFIED else compare()
    if reason is None and key is not None:
        _VERIFIED.add(key)
    return reason


def mismatch(
    before: Sequence[Array] | str, after: Sequence[Array] | str, magnitudes: Sequence[float | None]
) -> str | None:
    """Return how two runs differ by more than ROUNDINGS · UNIT of the result's magnitude; None if they agree."""
    if isinstance(before, str) or isinstance(after, str):
        return before if isinstance(before, str) else str(after)
    for expected, actual, magnitude in zip(before, after, magnitudes, strict=True):
        if expected.shape != actual.shape:
            return f"its shape would be {list(actual.shape)}, not {list(expected.shape)}"
        bound = ROUNDINGS * UNIT * (float(np.abs(expected).max(initial=0)) if magnitude is None else magnitude)
        if not bool((np.abs(expected - actual) <= bound).all()):  # false for NaN
            worst = float(np.abs(expected - actual).max())
            amount = f"by up to {worst:.1e}" if math.isfinite(worst) else "in NaN or infinite elements"
            return f"on random inputs the results differ {amount}"
    return None


_VERIFIED: set[bytes] = set()
"""Digests of successful comparisons, to compare layers with equal ops but other names only once."""


def _digest(
    nodes: Iterable[NodeProto], feeds: Iterable[Arrays], results: Mapping[str, str], settings: object
) -> bytes | None:
    """Return a digest of nodes and feeds, with numbers in place of names; None if a node has bodies."""
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
    """Return a shape of this rank ending in `last`; up to four of the leading axes have size 2, the others 1."""
    leading = max(rank - len(last), 0)
    return (*[1] * (leading - _MAX_WIDE_AXES), *[2] * min(leading, _MAX_WIDE_AXES), *last)


_MAX_WIDE_AXES = 4
"""Maximum number of leading axes of size 2, to limit the size of arrays of any rank."""


def float64_nodes(view: View, ops: Iterable[OpId]) -> list[NodeProto]:
    """Return the nodes of ops, changed to run in float64."""
    return [_float64_node(view, view.ops[op]) for op in sorted(ops) if view.ops[op].kind != "Constant"]


def _float64_node(view: View, op: Op) -> NodeProto:
    node = clone(op.node)
    if op.kind == "Cast" and casts_floats(view, op):
        node.op_type = "Identity"
        del node.attribute[:]
    elif op.kind == "Cast" and view.dtype(op.outputs[0]) is DType.FLOAT:
        del node.attribute[:]
        node.attribute.append(onnx.helper.make_attribute("to", TensorProto.DOUBLE))
    return node


def as_float64(array: Array) -> Array:
    return array.astype(np.float64) if array.dtype.kind == "f" or array.dtype == DType.BFLOAT16.numpy else array
