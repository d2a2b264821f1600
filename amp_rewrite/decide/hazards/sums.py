"""Sums that run over many terms, step by step or spelled as products."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import partial
from itertools import chain, islice

import numpy as np

from amp_rewrite.decide import reasons
from amp_rewrite.decide.flops import summed_length, summed_terms
from amp_rewrite.decide.hazards.means import weighted_means
from amp_rewrite.decide.hazards.rule import HeldOp, rule
from amp_rewrite.decide.hazards.steps import described, scaled_by
from amp_rewrite.dtypes import DType
from amp_rewrite.ir.dataflow import Flow, computes_float32, float32, float32_ops, makers, orders, scalings, trail
from amp_rewrite.ir.op_classes import (
    ALL,
    COPIES,
    HEAVY,
    LAYERS,
    PAIR_SUMS,
    PRODUCTS,
    REDUCTIONS,
    SCALINGS,
    SELECTIONS,
    SUMS,
)
from amp_rewrite.ir.shapes.onnx_shapes import declared_dims, shape_of
from amp_rewrite.ir.view import Op, OpId, ValueId, View
from amp_rewrite.settings.choices import Target

_SUMS = {**dict.fromkeys(SUMS, ALL), "Sub": (0,)}
_SMALL = 2.0**-4
_LEAST = 4
"""Small steps in a row, at least."""
MOST_TERMS = 128
"""Terms of all sums of a model that stay in float16, together: they add at most 3.5e-3 to the error of outputs."""
_SUMMING = LAYERS | {"Einsum", "GlobalAveragePool"}


@rule(
    reasons.RUNNING_SUM,
    "A sum that runs over many terms is computed in float32.",
    cases=("accumulators", "small_step", "disguise", "weighted_mean"),
)
def running_sums(view: View, to: DType) -> Iterator[HeldOp]:
    """Hold the additions to a state, products that are sums, and sums that are divided last. O(nodes + uses).

    What it protects: Counters and running sums that a Loop or Scan carries in a float state; one that is multiplied or
        passes through a layer does not accumulate. Unrolled, four or more steps a·x + c·f(x) in a row, where c is one
        small number, f contains a product and a is 1 or nearly 1: a vector of small factors is a layer scale. CumSum
        and ReduceMean, spelled as a product with a triangle of ones or a matrix of 1/n, unless other products read it;
        a triangle that masks is not meant. In float16, both sums of a weighted mean Σ w·v / Σ w that are long or of
        unknown length, where the weights come from a layer; weights of at most 1 that are summed up once are left
        alone.
    Why: A term below half the spacing of the sum is lost. A float16 counter stalls at 2048, a bfloat16 counter at 256;
        at 10 the spacing is 0.008 and 0.06. A running sum is read by differences, a mean by deviations: both are small
        beside it. Positive weights do not cancel: a mean is no larger than its terms, but the sums that it divides grow
        with their number, beyond 65504.
    Example: A Loop that adds a step to a float state; x = x + 0.01 · tanh(x · W), 32 times; a moving average,
        y = 0.99 · y + 0.01 · h; windows as differences of running sums; LayerNorm by products; linear attention,
        φ(q)·(φ(k)ᵀ·v) / (φ(q)·Σφ(k)).
    How to override: `--lower 'op=Add'`, `--lower 'op=MatMul'` or the name of the op.
    Source: N. Higham, "Accuracy and Stability of Numerical Algorithms", 2002, section 4; IEEE 754 binary16 has 11
        significant bits, bfloat16 has 8; CumSum and ReduceMean are on the deny list; A. Katharopoulos
        et al., "Transformers are RNNs", 2020; H. Cai et al., "EfficientViT", 2023, whose code computes it in float32.
    """
    yield from accumulators(view)
    yield from small_steps(view)
    yield from disguises(view, to)
    yield from weighted_means(view, to)


def accumulators(view: View) -> Iterator[HeldOp]:
    """Hold the sums by which the state of a body gets from its start to its end. O(values) for each state."""
    flow, seen = Flow.of(view, {**COPIES, **SELECTIONS, **REDUCTIONS, **_SUMS}), set[ValueId]()
    for out, into in view.carried:
        owner = view.scopes[view.values[into].scope].owner
        if owner is None or out in seen:
            continue
        cycle = flow.back({out: owner}, flow.forth({into: owner}, partial(_before, view, owner)).__contains__)
        seen.update(cycle)
        for op_id in makers(view, cycle):
            if view.ops[op_id].kind in _SUMS:
                yield HeldOp(op_id, owner, f"sums up over {described(view, owner)}")


def _before(view: View, owner: OpId, value: ValueId) -> bool:
    """True for a float32 value that no op from an owner of bodies on makes: the ops of a body come before its owner."""
    made_by = view.values[value].producer
    return view.dtype(value) is DType.FLOAT and (made_by is None or made_by < owner)


def small_steps(view: View) -> Iterator[HeldOp]:
    """Hold sums a·x + c·f(x) in a row, where c is one small number, f contains a product and a is nearly 1."""
    steps: dict[ValueId, tuple[list[Op], Op | None, int]] = {}
    moved = {op.outputs[0]: value for op in view.of_kinds(SCALINGS) if (value := _moved(view, op)) is not None}
    learned: set[ValueId] = set()
    for op in view.ops if len(moved) >= _LEAST else ():
        if op.kind in HEAVY or not learned.isdisjoint(op.inputs):
            learned.update(op.results)
        if op.kind not in PAIR_SUMS or not computes_float32(view, op):
            continue
        for state, step in islice(orders(op), 2 if op.kind == "Add" else 1):
            if op.outputs[0] is not None and moved.get(step) in learned:
                passed, start = trail(view, state, partial(_kept, view))
                before, _, length = steps.get(start, ((), None, 0)) if start is not None else ((), None, 0)
                decays = [scaling for scaling in passed if scaling.kind in SCALINGS]
                steps[op.outputs[0]] = [op, *decays], before[0] if before else None, length + 1
                learned.discard(op.outputs[0])  # a product counts from state to state
                break
    chained: set[OpId] = set()
    for (op, *decays), last, length in reversed(steps.values()):
        if length >= _LEAST or op.id in chained:
            before_id = last.id if last is not None else None
            chained.update((op.id,) if before_id is None else (op.id, before_id))
            for held in (op, *decays):
                yield HeldOp(held.id, before_id, "moves a state by a small step, as ops before and after it")


def _kept(view: View, op: Op) -> ValueId | None:
    """Return the state before a copy, or before a product or quotient with a number that is nearly 1."""
    if op.kind in COPIES:
        return op.inputs[0] if op.kind != "Concat" else None
    scaled = scalings(view, op) if op.kind in SCALINGS else ()
    return next((state for state, size in scaled if abs(size - 1) < _SMALL), None)


def _moved(view: View, op: Op) -> ValueId | None:
    """Return f of a step c·f with a small number, or a number that is an input, for c."""
    small = (moved for moved, size in scaled_by(view, op) if abs(size) < _SMALL)
    fed = (moved for moved, factor in orders(op) if op.kind == "Mul" and _is_fed_number(view, factor))
    return next(chain(small, fed), None)


def _is_fed_number(view: View, value: ValueId) -> bool:
    """True if a value is an input of the model with a single element."""
    if not view.values[value].public:
        return False
    formals = (formal for formal in view.model.proto.graph.input if formal.name == view.value_name(value))
    return any(dims is not None and all(dim == 1 for dim in dims) for dims in map(declared_dims, formals))


def disguises(view: View, to: DType) -> Iterator[HeldOp]:
    """Hold products with a triangle of ones or a matrix of 1/n, unless other products alone read them."""
    pairs = ((op.id, _disguised(view, op, slot, to)) for op in view.of_kinds(PRODUCTS) for slot in (0, 1))
    copies = Flow.of(view, COPIES)
    for op_id, name in {op_id: name for op_id, name in pairs if name}.items():
        reached = copies.forth(dict.fromkeys(view.ops[op_id].results), float32(view))
        readers = [reader.kind in HEAVY for reader in copies.readers(reached)]
        if not (readers and all(readers) and view.yielded.isdisjoint(reached)):
            yield HeldOp(op_id, None, f"a {name} by a product")


def _disguised(view: View, op: Op, slot: int, to: DType) -> str:
    """Return "running sum" for a triangle of ones, "mean" for a matrix of 1/n, n terms; else an empty string."""
    value = op.inputs[slot] if slot < len(op.inputs) else None
    tensor = view.constant(value)
    if tensor is None or value is None or len(tensor.dims) < 2 or max(tensor.dims[-2:]) < 3:
        return ""
    fit, (rows, columns) = view.fit(value, to), tensor.dims[-2:]
    if fit.absmax != fit.absmin or fit.nonfinite:
        return ""
    lengths = (rows, columns) if op.kind == "Einsum" else (summed_length(op, slot, tuple(tensor.dims)),)
    mean = np.float32(fit.absmax) in [np.float32(1 / length) for length in lengths if length]
    elements = view.array(value) if mean or (fit.absmax == 1 and rows == columns) else None
    if elements is None:
        return ""
    if mean:
        return "mean" if (elements == elements.flat[0]).all() else ""
    ones = np.tri(rows, dtype=elements.dtype)
    return "running sum" if any((elements == t).all() for t in (ones, ones.T)) else ""


@rule(reasons.LONG_SUM, "The longest sums of products are computed in float32.", target=Target.WEBGPU.value)
def long_sums(view: View, to: DType) -> Iterator[HeldOp]:
    """Hold products and pools, the longest first, until the others add up 128 terms in all. O(nodes log nodes).

    What it protects: MatMul, Gemm, Conv, ConvTranspose and Einsum, whose shaders on WebGPU add one product after
        another in float16, and pools over a whole image, whose sum overflows where the mean does not.
    Why: Each addition rounds, so the error of a sum grows like the root of its terms: measured on the device, it is 4
        times that of one rounding at 36 terms, 19 times at 768. The errors of all sums add up likewise. On 28 exported
        models and 3 others, what they add to the error of the outputs is at most 3.1e-4 times the root of all terms. A
        free dimension counts as 128.
    Example: The feed-forward layers of a transformer, over 768 and 3072 terms.
    How to override: `--lower 'op=MatMul'`, then compare on the device with `amp-rewrite verify`.
    Source: Measured, docs/evidence/webgpu.md; Higham, Accuracy and Stability of Numerical Algorithms, section 4.2.
    """
    terms = terms_of(view)
    left = sum(terms.values())
    for op in sorted(terms, key=lambda op: (-terms[op], -op)):
        if left <= MOST_TERMS:
            return
        left -= terms[op]
        note = f"adds up {terms[op]} terms; in float16, all such sums of a model may have {MOST_TERMS} on this target"
        yield HeldOp(op, None, note)


def terms_of(view: View) -> Mapping[OpId, int]:
    """Return the number of terms that each result of a float32 product or global pool adds up. O(nodes)."""
    sums = float32_ops(view, _SUMMING)
    return {op.id: summed_terms(op, [shape_of(view, value) for value in op.inputs]) for op in sums}
