"""Gradients as a graph transform: the backward pass is appended to the model, in standard ONNX ops only."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from amp_rewrite.dtypes import DType
from amp_rewrite.errors import GradientError
from amp_rewrite.files.model import Model
from amp_rewrite.ir.nodes import MAIN, Op, Role, ValueId
from amp_rewrite.ir.schema import TENSOR
from amp_rewrite.ir.view import View
from amp_rewrite.rewrite.passes.inline import inlined
from amp_rewrite.train.batch_norm import spelled_out
from amp_rewrite.train.bodies import with_bodies
from amp_rewrite.train.builder import Builder
from amp_rewrite.train.paths import Paths, floating, paths
from amp_rewrite.train.recurrent import recurrent, stepwise
from amp_rewrite.train.vjp.row import Call, Joint, Refuse, Row, Stop
from amp_rewrite.train.vjp.table import VJPS


def gradients(model: object, loss: str, wrt: str | Sequence[str], *, folder: str | Path | None = None) -> Model:
    """A new model that also gives the gradient of a loss by each of `wrt`, one name or more.

    `model`: what `Model.load` takes; it is not changed. `loss` names any floating value of the main
    graph with one element; each of `wrt` an input or initializer of floating type. The model's outputs stay;
    after them stand the gradients, `<name>_grad` in the order of `wrt`, each of the type and shape of what
    it belongs to; zeros where the loss does not depend on it.

    Reverse accumulation (Griewank & Walther, Evaluating Derivatives, 2008, ch. 3): each op on the way from `wrt`
    to the loss passes its gradient by its row in `train.vjp.table`. The forward pass is as `differentiable`
    leaves it. Works at the model's opset, from 12 on.

    GradientError for a loss that is not one number or depends on none of `wrt`, a name that is not what it should
    be, and an op without a gradient, with the way through it. O(nodes + uses).
    """
    wrt = (wrt,) if isinstance(wrt, str) else wrt
    source = Model.load(model, folder=folder)
    _check_parameters(source, loss, wrt)
    ready = differentiable(source, loss, wrt)
    b = Builder.of(ready)
    dtype, shape = b.dtype(loss), b.shape(loss)
    assert dtype is not None
    if shape is None or any(dim != 1 for dim in shape):
        dims = "unknown" if shape is None else f"[{', '.join(str(d or '?') for d in shape)}]"
        raise GradientError(f"the loss {loss!r} is not one number, its shape is {dims}; reduce it to its mean or sum")
    found = backward(b, {loss: b.scalar(1.0, dtype)}, wrt)
    for name in dict.fromkeys(wrt):
        kind = b.dtype(name)
        assert kind is not None
        b.output(f"{name}_grad", kind, b.shape(name), source=found[name])
    return b.model()


def differentiable(model: Model, loss: str, wrt: Sequence[str]) -> Model:
    """The model in a form that `backward` can differentiate: it computes the same, under the same names.

    Local functions are inlined, BatchNormalization with the statistics of the batch is spelled out (no CUDA kernel
    of onnxruntime runs it), and on the way LSTM, GRU and RNN become a Scan, and ops that have no row but a function
    body in the standard are replaced by it. `loss` and `wrt` name floating values of the main graph. The errors are
    those of `gradients`.
    """
    ready = spelled_out(inlined(model, sorted({(f.domain, f.name) for f in model.proto.functions})))
    while True:
        view = View.of(ready)
        ids = {v.name: v.id for v in view.values if v.scope == MAIN}
        at = _loss(view, ids, loss)
        found = _paths(view, at, [_value(view, ids, name, "by which to differentiate") for name in wrt])
        missing = {op.op_type: op for op in found.ops if (op.domain, op.op_type) not in VJPS}
        stepped = {op.id for op in found.ops if recurrent(op)}
        if stepped:
            ready = stepwise(ready, stepped)
            continue
        for op in missing.values():
            if not _expandable(op):
                raise GradientError(
                    f"node {op.name!r} ({op.kind}) has no gradient here, and it lies on the way {found.through(op)};"
                    " replace the op, or leave out what is in front of it"
                )
        inside = {op.op_type for op in _inside(view, found.ops) if (op.domain, op.op_type) not in VJPS}
        if not missing and not inside:
            return ready
        ready = with_bodies(ready, missing.keys() | inside)


def backward(b: Builder, seeds: Mapping[str, str], wrt: Sequence[str]) -> dict[str, str]:
    """Append the backward pass to a builder; the name of the gradient of each of `wrt`.

    `seeds`: by the name of each value that is differentiated the name of its own gradient, of the value's type
    and a shape that broadcasts to the value's. 1 for a loss; a loss scale gives gradients that are scaled by it.
    `wrt` are any floating values of the builder's graph. Several uses of a value are added up by one Sum; what
    no seed reaches gets zeros. GradientError for an op without a gradient.
    """
    full = {n: seed if b.shape(n) == () else b.op("Expand", seed, b.shape_of(n)) for n, seed in seeds.items()}
    return _accumulated(b, full, wrt)


def _accumulated(b: Builder, arrived: Mapping[str, str], wrt: Sequence[str]) -> dict[str, str]:
    """The same from gradients that have the shapes of the values that they belong to."""
    view, ids = b.facts.view, b.facts.ids[b.scope]
    found = paths(view, b.scope, [ids[name] for name in arrived], [ids[name] for name in wrt], VJPS)
    arriving: dict[ValueId, list[str]] = {ids[name]: [gradient] for name, gradient in arrived.items()}
    positions = {op_id: i for i, op_id in enumerate(view.scopes[b.scope].ops)}
    for op in reversed(found.ops):
        grads = tuple(None if v is None else _total(b, arriving.get(v)) for v in op.outputs)
        if any(grads):
            for value, gradient in _partials(Call(b, op, positions[op.id], grads, _accumulated), found):
                arriving.setdefault(value, []).append(gradient)
    totals = {name: _total(b, arriving.get(ids[name])) for name in wrt}
    return {name: total or _zeros(b, name) for name, total in totals.items()}


def _partials(v: Call, found: Paths) -> list[tuple[ValueId, str]]:
    """The gradients of the inputs of one op that need one."""
    row = VJPS.get((v.op.domain, v.op.op_type))
    if row is None:
        raise v.error(f"no gradient here, and it lies on the way {found.through(v.op)}; replace the op")
    for slot, gradient in enumerate(v.gradients):
        if gradient is not None and slot >= row.outputs:
            raise v.error(
                f"no gradient through output {slot}, {v.op.node.output[slot]!r}, and it lies on the way"
                f" {found.through(v.op)}; compute it with other ops"
            )
    partials = []
    for slot in found.slots[v.op.id]:
        entry, value = row.entry(slot), v.op.inputs[slot]
        assert value is not None and not isinstance(entry, Stop)
        if isinstance(entry, Refuse):
            raise v.error(
                f"no gradient through input {slot}, {v.x(slot)!r}: {entry.because}; it lies on the way"
                f" {found.through(v.op)}"
            )
        if not isinstance(entry, Joint):
            partials.append((value, entry(v, slot)))
    return [*partials, *_together(v, row, found)]


def _together(v: Call, row: Row, found: Paths) -> list[tuple[ValueId, str]]:
    """The gradients that a row makes at once: of its joint inputs, and of what the op's bodies read from outside."""
    slots = [s for s in found.slots[v.op.id] if isinstance(row.entry(s), Joint)]
    captured = found.captured[v.op.id]
    if not slots and not captured:
        return []
    if row.together is None:
        raise v.error(f"no gradient through what its bodies read, on the way {found.through(v.op)}")
    names = [v.b.facts.view.value_name(c) for c in captured]
    values = [*[v.op.inputs[s] for s in slots], *captured]
    return [(value, g) for value, g in zip(values, row.together(v, slots, names), strict=True) if value is not None]


def _expandable(op: Op) -> bool:
    """Whether the standard says what an op computes in terms of others."""
    return not op.domain and op.signature is not None and op.signature.expandable


def _inside(view: View, ops: Sequence[Op]) -> Iterator[Op]:
    """The ops in the bodies of these that have floating results and a function body."""
    for op in ops:
        for body in op.bodies:
            mine = [view.ops[i] for i in view.scopes[body].ops]
            yield from (
                o for o in mine if _expandable(o) and any(v is not None and floating(view, v) for v in o.outputs)
            )
            yield from _inside(view, mine)


def _total(b: Builder, gradients: Sequence[str] | None) -> str | None:
    if not gradients:
        return None
    return gradients[0] if len(gradients) == 1 else b.op("Sum", *gradients)


def _zeros(b: Builder, name: str) -> str:
    dtype = b.dtype(name)
    assert dtype is not None
    return b.zeros_like(name, dtype)


def _paths(view: View, loss: ValueId, wrt: Sequence[ValueId]) -> Paths:
    found = paths(view, MAIN, [loss], wrt, VJPS)
    if loss not in found.reached:
        names = ", ".join(repr(view.value_name(v)) for v in wrt)
        raise GradientError(
            f"the loss {view.value_name(loss)!r} depends on none of {names} in a way that can be differentiated;"
            " name what it is computed from"
        )
    return found


def _loss(view: View, ids: Mapping[str, ValueId], name: str) -> ValueId:
    found = _value(view, ids, name, "that could be the loss")
    kind = view.types[found]
    if kind is None or kind.container != TENSOR or kind.dtype is None or not kind.dtype.floating:
        raise GradientError(f"the loss {name!r} is {kind or 'of unknown type'}; only floating numbers have gradients")
    return found


def _value(view: View, ids: Mapping[str, ValueId], name: str, purpose: str) -> ValueId:
    if name not in ids:
        outputs = ", ".join(repr(view.value_name(v)) for v in view.scopes[MAIN].outputs)
        raise GradientError(f"the model has no value {name!r} {purpose}; its outputs are {outputs}")
    return ids[name]


def _check_parameters(model: Model, loss: str, wrt: Sequence[str]) -> None:
    """GradientError for names that are not those of floating inputs or initializers."""
    if not wrt:
        raise GradientError(
            f"no names are given by which to differentiate {loss!r}; give those of inputs or initializers"
        )
    view = View.of(model)
    values = {v.name: v for v in view.values if v.scope == MAIN}
    for name in wrt:
        found = values.get(name)
        if found is None or found.role is Role.RESULT:
            fact = "names nothing in the main graph" if found is None else "is computed by a node"
            raise GradientError(f"{name!r} {fact}; gradients are by inputs and initializers, give the name of one")
        dtype = view.dtype(found.id)
        if dtype is None or not dtype.floating:
            kind = dtype.spelling if isinstance(dtype, DType) else "of unknown type"
            raise GradientError(f"{name!r} is {kind}; only floating inputs and initializers have gradients")
