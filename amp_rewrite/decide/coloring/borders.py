"""Safety rules on the border between the types: ops that no lowered product needs in the low type.

They run when the colors have spread and the border is placed, and only take ops back to float32. What they decide
depends on the colors of an op's neighbours; the safety rules in `decide/hazards/` read the model alone.
"""

from __future__ import annotations

from functools import cache, partial

from amp_rewrite.decide import reasons
from amp_rewrite.decide.coloring.paint_state import PaintState
from amp_rewrite.decide.hazards.rule import Rule, rule
from amp_rewrite.decide.hazards.steps import LARGE
from amp_rewrite.decide.union_find import UnionFind
from amp_rewrite.ir.dataflow import dependents, first_input_of, only_reader, orders, origin
from amp_rewrite.ir.exact_ops import exact
from amp_rewrite.ir.op_classes import (
    CASTS,
    COPIES,
    HEAVY,
    PAIR_SUMS,
    POOLS,
    REDUCTIONS,
    SCALINGS,
    SOFTMAXES,
    SUMS,
    TENSOR_CORE_STEP,
)
from amp_rewrite.ir.patterns.clusters import Cluster
from amp_rewrite.ir.view import Op, OpId, ValueId
from amp_rewrite.settings.choices import Level

_SPREAD_LEVELS = (Level.LOWER_ALL, Level.UNSAFE_FORCE_ALL)
"""Levels at which the user asks for low ops wherever the type has a kernel."""

_copied = first_input_of(COPIES)


# -- facts about the border --------------------------------------------------------------------------------------------


def _movable(state: PaintState) -> list[int]:
    """Return the low vertices that may become float32, in order."""
    return sorted(state.low.keys() - state.held)


def _products(state: PaintState) -> list[int]:
    """Return the low products, in order."""
    return [v for v in state.of_kinds(HEAVY) if v in state.low]


def _varying(state: PaintState, v: int) -> list[ValueId]:
    """Return the values that a vertex reads, without constants and copies of these."""
    read, view = dict.fromkeys(state.ports(v)[0]), state.view
    return [value for value in read if view.constant(origin(view, value, _copied)) is None]


def _low(state: PaintState, value: ValueId) -> bool:
    """True if a value is made, or fed, in the low type."""
    if value in state.options.low_inputs or state.maker(value) in state.low:
        return True
    dtype = state.view.dtype(value)
    return dtype is not None and dtype.low and not state.made_upcast(value)


def _leaves_floats(state: PaintState, op: Op) -> bool:
    """True for a Cast to a type that is not floating."""
    dtype = state.view.dtype(op.outputs[0]) if op.kind in CASTS and op.outputs[0] is not None else None
    return dtype is not None and not dtype.floating


def _to_float32(state: PaintState, v: int, note: str) -> None:
    del state.low[v]
    state.denied[v] = state.high(reasons.NO_GAIN, None, note)


# -- tiny products -----------------------------------------------------------------------------------------------------


def tiny_products(state: PaintState) -> None:
    """Keep connected low ops in float32 if all their products sum fewer than 8 terms."""
    products = _products(state)
    large = [v for v in products if v not in state.tiny]
    if len(large) == len(products):
        return
    sets = UnionFind(state.low)
    for v in state.low:
        sets.join((v, *(source for source in state.vertices.sources[v] if source in state.low)))
    clustered = (op for cluster in state.hazards.clusters if cluster.kind == "softmax" for op in cluster.ops)
    softmaxes = [*state.of_ops(clustered), *state.of_kinds(SOFTMAXES)]
    sequences = (v for cluster in state.vertices.clusters for v in cluster)
    other = {sets.root(v) for v in (*large, *softmaxes, *sequences) if v in state.low}
    tiny = {sets.root(v) for v in products} - other
    for v in _movable(state) if tiny else ():
        if sets.root(v) in tiny:
            note = f"its products sum fewer than {TENSOR_CORE_STEP} terms, and float32 spares the Casts"
            _to_float32(state, v, note)


# -- values that no product made ---------------------------------------------------------------------------------------


def raw_values(state: PaintState) -> None:
    """Keep clear ops, sums and products of raw values in float32 where a reader needs float32."""
    raw, made, computed = set[int](), set(state.low), cache(partial(_behind_products, state))
    for v in _movable(state):
        op = state.op(v)
        if (op.kind != "Concat" and not made.isdisjoint(state.vertices.sources[v])) or op.kind in HEAVY:
            continue
        if not state.clear(v) and op.kind not in PAIR_SUMS | {"Mul"}:
            continue
        read = _varying(state, v)
        of_raw = [state.maker(r) in raw or not (_low(state, r) or r in computed()) for r in read]
        if of_raw and (any(of_raw) if op.kind == "Concat" else all(of_raw)):
            raw.add(v)
            made.remove(v)
    for v in sorted(raw, reverse=True):
        if _leaves_floats(state, state.op(v)) or any(state.needed_in_float32(made) for made in state.ports(v)[1]):
            _to_float32(state, v, "no product made what it reads, and not all its readers are low")


def _behind_products(state: PaintState) -> set[ValueId]:
    """Return the values that are computed from the result of a low product, in either type."""
    behind = dependents(state.view, {state.vertices.all[v].op for v in _products(state)})
    return {value for op_id in behind for value in state.view.ops[op_id].results}


# -- behind the last product -------------------------------------------------------------------------------------------


def last_product(state: PaintState) -> None:
    """Keep ops behind the last lowered product in float32, unless they are exact or spare a Cast."""
    before, rounded = _before_products(state), dict[int, int]()
    groups = {op: cluster for cluster in state.hazards.clusters for op in cluster.ops}
    for v in _movable(state):
        op = state.op(v)
        if op.id in before:
            continue
        read = _varying(state, v)
        if not read:
            continue
        low = [value for value in read if _low(state, value)]
        steps = max((rounded.get(maker, 0) for value in low if (maker := state.maker(value)) is not None), default=0)
        group = groups.get(op.id)
        high = len(read) - len(low)  # as many Casts in front of a low op, and one behind it
        follows = len(low) > high + 1 if high else bool(low)
        if op.kind in HEAVY or (follows and (exact(op) or op.kind in COPIES or _is_bias(state, op))):
            rounded[v] = steps
        elif group is not None and group.entry not in read and low:
            rounded[v] = steps  # the first op decides for all
        elif low and steps == 0 and _on_a_branch(state, group.ops[-1] if group is not None else op.id):
            rounded[v] = steps
        elif low and _spares_casts(state, op, group, len(low), steps):
            rounded[v] = steps + 1
        else:
            _to_float32(state, v, "no lowered product reads what it computes")


def _before_products(state: PaintState) -> set[OpId]:
    """Return the ops that a low product depends on, and ops whose bodies contain such a product.

    What the user lowers, ops and outputs, counts as a product.
    """
    view = state.view
    products = {state.vertices.all[v].op for v in _products(state)} | state.options.lower.keys()
    before = set[OpId]()
    for op_id in products:
        while (owner := view.scopes[view.ops[op_id].scope].owner) is not None and owner not in before:
            before.add(owner)
            op_id = owner
    wanted: set[ValueId | None] = {*state.options.low_inputs}
    for op in reversed(view.ops):  # a body's ops come before the op that owns it
        if op.id in before or not wanted.isdisjoint(op.outputs):
            before.add(op.id)
            for body in op.bodies:
                wanted.update(view.scopes[body].outputs)
        elif op.id not in products:
            continue
        wanted.update(op.inputs)
    return before


def _is_bias(state: PaintState, op: Op) -> bool:
    """True if an op adds a moderate constant to the result of a low product: its bias."""
    for value, constant in orders(op) if op.kind in PAIR_SUMS else ():
        constant = origin(state.view, constant, _copied)
        if state.view.constant(constant) is not None:
            maker = state.view.producer(origin(state.view, value, _copied))
            fit = state.view.fit(constant, state.to)
            return maker is not None and maker.kind in HEAVY and fit.absmax <= LARGE[state.to] and not fit.nonfinite
    return False


def _spares_casts(state: PaintState, op: Op, group: Cluster | None, operands: int, steps: int) -> bool:
    """True if an op would take more Casts, or larger ones, in float32; or is the norm behind such a sum."""
    if steps == 0 and group is None and (operands > 1 or op.kind in REDUCTIONS or op.kind in POOLS):
        return True
    if not any((dtype := state.view.dtype(value)) is not None and dtype.floating for value in op.results):
        return True
    norm = group.kind.endswith("normalization") if group is not None else op.kind.endswith("Normalization")
    summed = state.view.producer(group.entry if group is not None else op.inputs[0])
    return norm and steps == 1 and summed is not None and summed.kind in SUMS


def _on_a_branch(state: PaintState, op_id: OpId) -> bool:
    """True if an op scales or normalizes a branch: its result is for the sum of two low values alone."""
    op = state.view.ops[op_id]
    total = only_reader(state.view, op.outputs[0], *PAIR_SUMS)
    scales = op.kind in SCALINGS or op.kind.endswith("Normalization")
    return scales and total is not None and all(_low(state, value) for value in total.operands)


@rule(
    reasons.NO_GAIN,
    "An op rounds in the low type only for a product that gains from it.",
    cases=("last_product", "tiny_product", "raw"),
)
def no_gain(state: PaintState) -> None:
    """Keep low ops in float32 that no lowered product needs in the low type. O(nodes + uses).

    What it protects: Parts of a model whose products all sum fewer than 8 terms, as boxes and points times a matrix of
        3 or 4 columns; attention is left alone, and so is a tiny product next to a larger one. Raw values, which come
        from inputs through ops on the clear list, Add, Sub and Mul, where a reader needs float32, and caches with a
        float32 output. All behind the last lowered product but exact ops, such as Relu and Reshape, and a single op
        that joins two low values or reduces one, the scale or norm of a branch before such a sum, the norm behind it,
        and a quantizer: float32 would cost more Casts, or larger ones. What leads to an op or output that the user
        lowers is left alone, too.
    Why: Low types make products faster: tensor cores multiply in steps of 8. Where no such product follows, nothing is
        left to gain, and each op rounds again. An op that only moves raw values costs the same in either type; a Cast
        in front of it rounds 100003 to 99968 for a reader of the exact number, too.
    Example: Viterbi scores of a tagger: hundreds of Adds, after which the float16 spacing is as large as a score.
        Pixels = points · homography. Split of a row into features for a layer and an id that is cast to int64.
    How to override: `--io low` or `--io 'NAME=float16'` for inputs and outputs that shall be low; `--lower` with the
        name of a product.
    Source: PyTorch's autocast, which rounds the results of products and leaves sums in the wider type; NVIDIA, "Deep
        Learning Performance Documentation", requirements to use tensor cores; IEEE 754 binary16 has 11 significant
        bits, bfloat16 has 8.
    """
    tiny_products(state)
    raw_values(state)
    last_product(state)


RULES: tuple[Rule[[PaintState], None], ...] = (no_gain,)
"""The rules on the border."""


def hold_borders(state: PaintState) -> None:
    """Run the rules where safety rules are on, unless the level lowers ops wherever it can."""
    if state.hazards.guarded and state.options.level not in _SPREAD_LEVELS:
        no_gain(state)
