"""Clusters (normalizations, softmaxes and activations written out op by op), and integer ops between quantizers."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field

from amp_rewrite.dtypes import DType
from amp_rewrite.ir.dataflow import Flow, exposed
from amp_rewrite.ir.op_classes import DEQUANTIZES, KEEP_SCALE, LAYERS, PRODUCTS, QUANTIZERS, QUANTIZES
from amp_rewrite.ir.view import Op, OpId, ValueId, View, once

ANCHORS = frozenset(("Sqrt", "Pow", "ReduceL2", "ReduceMax", "Erf", "Tanh"))
"""Each cluster contains one of these ops."""


@dataclass(frozen=True, slots=True)
class Cluster:
    """The ops of one computation ("layer_normalization", "softmax" …), painted in the same color.

    `entry`: the value that is normalized or activated, before any Cast at the start of the cluster. `tail`: the scale
    Mul and bias Add at the end of a normalization and the Casts between them, which are also in `ops`. Onnxruntime
    fuses a decomposed normalization into one node with the input `entry`, looking through Casts, and then rejects the
    model unless scale and bias have the type of that input. `values`: the captured values of the pattern by name.
    """

    kind: str
    ops: tuple[OpId, ...]
    entry: ValueId
    tail: tuple[OpId, ...]
    values: Mapping[str, ValueId] = field(compare=False, repr=False)


@once
def clusters(view: View, dtypes: Collection[DType] = (DType.FLOAT,)) -> tuple[Cluster, ...]:
    """Return the disjoint clusters of a model in these types, in order of their first ops. O(nodes)."""
    if ANCHORS.isdisjoint(view.by_kind):
        return ()
    from amp_rewrite.ir.patterns.written_out import find_clusters  # late: many models have no decomposed norms

    found = (Cluster(*each) for each in find_clusters(view, dtypes))
    return tuple(sorted(found, key=lambda cluster: cluster.ops))


@once
def snakes(view: View) -> frozenset[OpId]:
    """Return the sines in snake activations x + sin²(a·x)/a, as opposed to sines of positions."""
    sines = view.of_kinds(("Sin",))
    if not sines:
        return frozenset()
    from amp_rewrite.ir.patterns.written_out import is_snake

    return frozenset(op.id for op in sines if is_snake(view, op))


# -- ops on integers -------------------------------------------------------------------------------

_WEIGHTED = LAYERS | PRODUCTS
"""Ops that may end an integer region, since they also have integer kernels with float results."""


def integer_ops(view: View) -> frozenset[OpId]:
    """Return the ops that runtimes compute on integers, and the copies between these and their quantizers."""
    decoded = {v for op in view.of_kinds(DEQUANTIZES) if (v := op.outputs[0]) is not None}
    if not decoded:
        return frozenset()
    for copy in view.of_kinds(KEEP_SCALE):
        if copy.outputs[0] is not None and _decoded(view, copy, decoded):
            decoded.add(copy.outputs[0])
    encoded: set[ValueId] = set()
    for maker in reversed(view.ops):
        encoded.update(value for value in maker.results if _encoded(view, value, encoded))
    computed = [op for op in view.ops if _computes_on_integers(view, op, decoded, encoded)]
    flow = Flow(view, KEEP_SCALE)
    before = flow.back((v for op in computed for v in op.operands), decoded.__contains__)
    after = flow.forth((v for op in computed for v in op.results), encoded.__contains__)
    adjacent = [op for value in after for op in view.readers(value)]
    adjacent += [op for value in before if (op := view.producer(value)) is not None]
    return frozenset(op.id for op in (*computed, *(copy for copy in adjacent if flow.through(copy))))


def _decoded(view: View, op: Op, decoded: Collection[ValueId]) -> bool:
    inputs = [v for v in op.inputs if v is not None and view.dtype(v) is DType.FLOAT]
    varying = inputs[:2] if op.kind in _WEIGHTED else [v for v in inputs if view.constant(v) is None]
    return bool(varying) and all(v in decoded for v in varying)


def _encoded(view: View, value: ValueId, encoded: Collection[ValueId]) -> bool:
    if view.dtype(value) is not DType.FLOAT or not view.uses[value] or exposed(view, value):
        return False
    for use in view.uses[value]:
        op = view.ops[use.op]
        copied = use.slot in KEEP_SCALE.get(op.kind, ()) and op.outputs[0] in encoded
        if not copied and (op.kind not in QUANTIZES or use.slot):
            return False
    return True


def _computes_on_integers(view: View, op: Op, decoded: Collection[ValueId], encoded: Collection[ValueId]) -> bool:
    if op.kind in QUANTIZERS or op.signature is None or op.bodies:
        return False
    results = [v for v in op.outputs if v is not None and view.dtype(v) is DType.FLOAT]
    ends = op.kind in _WEIGHTED or (bool(results) and all(v in encoded for v in results))
    return ends and _decoded(view, op, decoded)
