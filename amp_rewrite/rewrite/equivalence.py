"""Proof that a fused node computes what the ops that it replaces compute: onnx's reference runs both on numbers.

Everything is run in float64 on the model's own constants, so that the two may differ only where the mathematics does,
or where a constant of the node was rounded to float32. Differences are measured in roundoffs of float32.
onnxruntime's own operators are run by their formulas (`reference`).
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence

import numpy as np
import onnx
import onnx.helper
from onnx import AttributeProto, NodeProto, TensorProto
from onnx.numpy_helper import to_array

from amp_rewrite.dtypes import DType
from amp_rewrite.files.casting import Array
from amp_rewrite.files.protos import clone
from amp_rewrite.ir.dataflow import casts_floats, confined
from amp_rewrite.ir.sizes import MOST_AXES
from amp_rewrite.ir.view import Op, OpId, ValueId, View
from amp_rewrite.rewrite.reference import Arrays, run
from amp_rewrite.rewrite.replacement import Replacement, outside

UNIT = 2.0**-24
"""The unit roundoff of float32 (IEEE 754-2019, table 3.5: 24 digits, to nearest)."""
ROUNDINGS = 4
"""Constants rounded to float32 that any of the formulas has, at most: √2, √(2/π), 0.044715 and one factor; an error of
UNIT in one of them moves the result by no more than UNIT of its magnitude."""

SPREADS = (1.0, 1e-3, 30.0)
"""Deviations of random inputs: usual, so small that an epsilon decides, and far out."""


def mismatch(before: Sequence[Array] | str, after: Sequence[Array] | str, magnitudes: Sequence[Array]) -> str | None:
    """Return how two runs differ, if by more than ROUNDINGS · UNIT of a result's magnitude; None if they agree."""
    if isinstance(before, str) or isinstance(after, str):
        return before if isinstance(before, str) else str(after)
    for a, b, magnitude in zip(before, after, magnitudes, strict=True):
        if a.shape != b.shape:
            return f"its shape would be {list(b.shape)} instead of {list(a.shape)}"
        bound = ROUNDINGS * UNIT * np.abs(magnitude)
        if not bool((np.abs(a - b) <= bound).all()):  # a NaN is within no bound
            worst = float(np.abs(a - b).max())
            words = f"{worst:.1e}" if math.isfinite(worst) else "more than any bound"
            return f"on random inputs the results differ by up to {words}"
    return None


def node_mismatch(
    view: View,
    ops: Collection[OpId],
    node: NodeProto,
    tried: Mapping[ValueId, tuple[int, ...]],
    opsets: Mapping[str, int],
    *,
    elementwise: bool = False,
) -> str | None:
    """Return how the results of a node differ from those of the ops on random inputs; None if they agree.

    `tried`: a shape for every value that the ops read and that is not a constant, and for constants whose numbers do
    not matter. `opsets`: those of the node. `elementwise`: the node is an activation of the sum of what is tried.
    """
    if any(len(shape) > MOST_AXES for shape in tried.values()):
        return f"it has more than {MOST_AXES} axes, so it cannot be tried"
    constants = {
        view.value_name(value): double(array)
        for value in outside(view, ops)
        if value not in tried and (array := view.array(value)) is not None
    }
    shapes = {view.value_name(value): shape for value, shape in tried.items()}
    settings = (tuple(sorted(view.opsets.items())), tuple(sorted(opsets.items())), elementwise)

    def tested() -> str | None:
        return _node_mismatch(view, ops, node, shapes, constants, opsets, elementwise)

    return once_proved([*plain_nodes(view, ops), node], [*constants.items(), *shapes.items()], settings, tested)


def _node_mismatch(
    view: View,
    ops: Collection[OpId],
    node: NodeProto,
    shapes: Mapping[str, tuple[int, ...]],
    constants: Arrays,
    opsets: Mapping[str, int],
    elementwise: bool,
) -> str | None:
    rng = np.random.default_rng(0)
    feeds = [
        {name: spread * (rng.standard_normal(shape) + 0.5) for name, shape in shapes.items()} for spread in SPREADS
    ]
    read = [{name: array for name, array in {**constants, **feed}.items() if name in node.input} for feed in feeds]
    for name in filter(None, node.output):
        after = run([node], name, read, opsets)
        results = after if not isinstance(after, str) else ()
        magnitudes = [
            gate_magnitude(sum(feed.values(), np.zeros(())), y) if elementwise else np.array(np.abs(y).max())
            for feed, y in zip(feeds, results, strict=False)
        ]
        why = mismatch(runs_of(view, ops, name, feeds), after, magnitudes)
        if why is not None:
            return why
    return None


_PROVED: set[bytes] = set()
_MOST_PROVED = 4096


def once_proved(
    nodes: Iterable[NodeProto], given: Iterable[tuple[str, object]], settings: object, test: Callable[[], str | None]
) -> str | None:
    """Return the result of a test, None if it passes; a passed test of the same nodes is not run again.

    The layers of a model differ in the names of values alone. `given`: names, and what is known of them.
    """
    places: dict[str, int] = {"": 0}
    digest = hashlib.blake2b(repr(settings).encode(), digest_size=16)
    for node in nodes:
        if any(a.type in (AttributeProto.GRAPH, AttributeProto.GRAPHS) for a in node.attribute):
            return test()
        ports = [[places.setdefault(name, len(places)) for name in side] for side in (node.input, node.output)]
        digest.update(repr((node.domain, node.op_type, ports)).encode())
        digest.update(b"".join(sorted(a.SerializeToString(deterministic=True) for a in node.attribute)))
    for name, held in given:
        content = held.tobytes() if isinstance(held, np.ndarray) else b""
        stated = (held.dtype.str, held.shape) if isinstance(held, np.ndarray) else held
        digest.update(repr((places.get(name), stated)).encode() + content)
    key = digest.digest()
    if key in _PROVED:
        return None
    why = test()
    if why is None:
        if len(_PROVED) == _MOST_PROVED:
            _PROVED.clear()
        _PROVED.add(key)
    return why


def disagreement(view: View, fusion: Replacement, before: Arrays, after: Arrays | None = None) -> str | None:
    """Return how the nodes of a fusion differ from its ops on small operands; None if both agree.

    `before`: what the ops read, other than constants. `after`: what the nodes read instead, or in another layout.
    """
    named = {view.value_name(value): value for value in outside(view, fusion.ops)}
    reads = {name for node in fusion.nodes for name in node.input}
    own = {weight.name: double(to_array(weight)) for weight in fusion.weights}
    held = {name: double(a) for name, v in named.items() if name not in before and (a := view.array(v)) is not None}
    fed = {**held, **own, **before, **(after or {})}
    fed = {name: array for name, array in fed.items() if name in reads}
    made = (value for op in fusion.ops for value in view.ops[op].results)
    results = [view.value_name(value) for value in made if not confined(view, value, fusion.ops)]

    def tested() -> str | None:
        for result in results:
            found = runs_of(view, fusion.ops, result, [before])
            magnitude = np.abs(found[0]).max() if not isinstance(found, str) else 0
            why = mismatch(found, run(fusion.nodes, result, [fed], view.opsets), [np.array(magnitude)])
            if why is not None:
                return why
        return None

    given = [*held.items(), *before.items(), *fed.items()]
    nodes = [*plain_nodes(view, fusion.ops), *fusion.nodes]
    return once_proved(nodes, given, tuple(sorted(view.opsets.items())), tested)


def trial_shape(rank: int, *last: int) -> tuple[int, ...]:
    """Return a shape of that rank with the end `last`: of the axes before, up to four have size 2, others 1."""
    before = max(rank - len(last), 0)
    return (*[1] * (before - _WIDE), *[2] * min(before, _WIDE), *last)


_WIDE = 4
"""The most axes of more than one element: arrays do not grow with the rank."""


def gate_magnitude(x: Array, y: Array) -> Array:
    """Return the larger of |x| and |y|: an error of a gate, at most 1, is an error of x times as much."""
    magnitude: Array = np.maximum(np.abs(x), np.abs(y))
    return magnitude


def runs_of(view: View, ops: Collection[OpId], result: str, feeds: Sequence[Arrays]) -> list[Array] | str:
    """Run ops of a view in float64; return `result` for each feed, or why they cannot be run.

    A feed names every value that the ops read and that is not a constant. A constant that it names is not read.
    """
    constants: dict[str, Array] = {}
    for value in dict.fromkeys(value for op in ops for value in view.ops[op].operands):
        name = view.value_name(value)
        if name not in feeds[0] and (array := view.array(value)) is not None:
            constants[name] = double(array)
    return run(plain_nodes(view, ops), result, [{**constants, **feed} for feed in feeds], view.opsets)


def plain_nodes(view: View, ops: Iterable[OpId]) -> list[NodeProto]:
    """Return the nodes of ops for a run in float64."""
    return [_plain(view, view.ops[op]) for op in ops if view.ops[op].kind != "Constant"]


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
