"""Norms, softmax and GELU that are written out op by op, where their numbers are those that a bound holds for."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace

import numpy as np

from amp_rewrite.decide.bounds import activations, norms
from amp_rewrite.decide.bounds.elementwise import has_upper_end
from amp_rewrite.decide.bounds.state import Axes, Sizes, State, box, lengths
from amp_rewrite.dtypes import DType
from amp_rewrite.files.casting import Array
from amp_rewrite.ir.attributes import int_attribute
from amp_rewrite.ir.dataflow import axes_of, casts_floats, number
from amp_rewrite.ir.patterns.clusters import Cluster, clusters
from amp_rewrite.ir.view import Op, OpId, ValueId, View

_ROUNDINGS = 4
"""More than the roundings of a square, its mean, the sum with an epsilon and the root add to a quotient."""
_MEANS = ("ReduceMean", "GlobalAveragePool")
_SUMS = ("ReduceSum", "ReduceL2")
_PLACES = np.concatenate([np.linspace(-6, 6, 49), [-40.0, 40.0]])
_FUNCTIONS: Mapping[str, Callable[..., Array]] = {
    "Add": np.add,
    "Div": np.divide,
    "Erf": activations.erf,
    "Mul": np.multiply,
    "Pow": np.power,
    "Tanh": np.tanh,
}

States = Callable[[ValueId], State]


def ends(view: View) -> Mapping[OpId, Cluster]:
    """Return the clusters by the op that makes their result, without scale and bias."""
    found: dict[OpId, Cluster] = {}
    for cluster in clusters(view, (DType.FLOAT, DType.FLOAT16, DType.BFLOAT16, DType.DOUBLE)):
        core = [op for op in cluster.ops if op not in cluster.tail]
        if core and cluster.entry is not None:
            found[core[-1]] = cluster
    return found


def written(view: View, cluster: Cluster, states: States, dims: Sizes, unit: float) -> State | None:
    """Return the state of a cluster's result, without scale and bias; None if no theorem is about its numbers.

    `dims`: those of the entry; `unit`: the rounding of a result.
    """
    assert cluster.entry is not None
    core = [view.ops[op] for op in cluster.ops if op not in cluster.tail]
    if cluster.kind.startswith("gelu"):
        entry = states(cluster.entry)
        known = not entry.fills and _is_gelu(view, cluster.entry, core)
        return activations.bell(entry, activations.GELU_LEAST, activations.gelu) if known else None
    reductions = [op for op in core if op.kind in (*_MEANS, *_SUMS, "ReduceMax")]
    if not reductions or dims is None or not all(_keeps_axes(op) for op in reductions):
        return None
    last = reductions[-1]
    axes = _axes(view, last, dims)
    if not axes:
        return None
    if cluster.kind == "softmax":
        sizes = lengths(dims, axes[-1:])
        terms = sizes[0] if sizes else None
        return norms.softmax(axes[0] if len(axes) == 1 else None, terms, fills=states(cluster.entry).fills)
    made = {value for op in core for value in op.results}
    if not all(
        _fits_a_norm(view, op, op.id < last.id, lambda v: v in made or _is_positive(view, v, states)) for op in core
    ):
        return None
    if last.kind in _SUMS:
        return box(-1.0 - 16 * unit, 1.0 + 16 * unit, "a part of its norm")
    state = norms.unit(dims, axes, _ROUNDINGS * unit)
    return replace(state, why=f"{cluster.kind.replace('_', ' ')}: {state.why}")


def _keeps_axes(reduction: Op) -> bool:
    """True if the result lines up with what is reduced."""
    return reduction.kind == "GlobalAveragePool" or bool(int_attribute(reduction.node, "keepdims", 1))


def _axes(view: View, reduction: Op, dims: Sizes) -> Axes:
    rank = len(dims or ())
    if reduction.kind == "GlobalAveragePool":
        return tuple(range(2 - rank, 0))
    return tuple(sorted({axis % rank - rank for axis in axes_of(view, reduction)}))


def _fits_a_norm(view: View, op: Op, before: bool, is_positive: Callable[[ValueId | None], bool]) -> bool:
    """True if an op of a norm computes what the theorem says: squares `before` the mean, a root and a guard behind it.

    A guard may only make the divisor larger, a numerator only the quotient smaller.
    """
    if op.kind == "Pow":
        power = number(view, op.inputs[1])
        return power == 2 if before else power in (0.5, -0.5)
    if op.kind == "Clip":
        return not has_upper_end(op)
    if op.kind == "Add":
        return all(map(is_positive, op.inputs))
    if op.kind == "Div":
        numerator = view.array(op.inputs[0])
        return numerator is None or bool((np.abs(numerator) <= 1).all())
    return True


def _is_positive(view: View, value: ValueId | None, states: States) -> bool:
    """True if a guard is at least 0, in any type."""
    if value is None:
        return False
    held = view.array(value)
    if held is not None:
        return bool((held >= 0).all())
    state = states(value)
    return not state.fills and bool((state.lo >= 0).all())


def _is_gelu(view: View, entry: ValueId, core: list[Op]) -> bool:
    """True if the ops compute GELU in one of its forms, tried in some places."""
    known: dict[ValueId | None, Array] = {entry: _PLACES}
    for op in core:
        operands = [known[v] if v in known else number(view, v) for v in op.inputs]
        function = _FUNCTIONS.get(op.kind)
        if any(operand is None for operand in operands):
            return False
        if casts_floats(view, op):
            known[op.outputs[0]] = np.asarray(operands[0])
        elif function is None:
            return False
        else:
            with np.errstate(all="ignore"):
                known[op.outputs[0]] = np.asarray(function(*operands))
    result = known[core[-1].outputs[0]]
    return bool(np.allclose(result, activations.gelu(_PLACES), rtol=0, atol=_NEAR))


_NEAR = 1e-3
"""The form with tanh differs from that with erf by 5e-4."""
