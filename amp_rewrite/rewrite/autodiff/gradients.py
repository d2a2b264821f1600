"""Gradients as a graph transform: append the backward pass to the model in standard ONNX ops."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from amp_rewrite.errors import GradientError
from amp_rewrite.files.model import Model
from amp_rewrite.ir.names import as_names
from amp_rewrite.ir.nodes import MAIN, Op, Role, ValueId
from amp_rewrite.ir.schema import TENSOR
from amp_rewrite.ir.view import View
from amp_rewrite.rewrite.autodiff.builder import Builder
from amp_rewrite.rewrite.autodiff.lowering.forms import at_gradient_opset, has_body, in_training, with_bodies
from amp_rewrite.rewrite.autodiff.vjp import convolution, elementwise, linear, looping, movement, reduction
from amp_rewrite.rewrite.autodiff.vjp.rule import Call, Joint, Paths, Rows, Stop, is_floating, nested_scopes, paths
from amp_rewrite.rewrite.passes.inline import inlined

VJPS: Rows = {**convolution.ROWS, **elementwise.ROWS, **linear.ROWS, **looping.ROWS, **movement.ROWS, **reduction.ROWS}
"""The table of VJPs; `vjp.rule` explains how to write a row."""


def gradients(model: object, loss: str, wrt: str | Sequence[str], *, folder: str | Path | None = None) -> Model:
    """Return a new model with the gradients of a loss as additional outputs.

    The gradients follow the model's outputs as `<name>_grad`, in the order of `wrt`, each with the type and shape of
    its variable. A gradient is zero if the loss does not depend on the variable.

    The method is reverse accumulation (Griewank & Walther, Evaluating Derivatives, 2008, ch. 3), with the rules of
    `rewrite.autodiff.vjp` for the ops on the paths from `wrt` to the loss. The forward pass is rewritten as in
    `differentiable`, and a model of a lower opset is converted to opset 16. O(nodes + uses).

    Args:
        model: the model, in any form that `Model.load` accepts; it is not changed.
        loss: a floating-point value of the main graph with one element.
        wrt: the name or names of floating-point inputs or initializers.
        folder: the folder of a ModelProto's external data.

    Returns:
        The model with the gradients as additional outputs.

    Raises:
        GradientError: a name is invalid, the loss does not depend on `wrt`, or an op on the path has no rule.

    Example:
        >>> import amp_rewrite, onnx
        >>> head, body = '<ir_version: 10, opset_import: ["" : 20]>', "s = ReduceSumSquare <keepdims = 0> (x)"
        >>> squares = onnx.parser.parse_model(f"{head} g (float[3] x) => (float s) {{ {body} }}")
        >>> model = amp_rewrite.gradients(squares, "s", "x")
        >>> [output.name for output in model.proto.graph.output]
        ['s', 'x_grad']
    """
    wrt = as_names(wrt)
    source, _ = at_gradient_opset(inlined(Model.load(model, folder=folder)))
    _check_parameters(source, loss, wrt)
    prepared = differentiable(source, loss, wrt)
    b = Builder.of(prepared)
    shape = b.shape(loss)
    if shape is None or any(dim != 1 for dim in shape):
        dims = "unknown" if shape is None else f"[{', '.join(str(d or '?') for d in shape)}]"
        raise GradientError(f"the loss {loss!r} must have one element, but its shape is {dims}; take its mean or sum")
    gradient_of = backward(b, {loss: b.scalar(1.0, b.element_type(loss))}, wrt)
    for name in dict.fromkeys(wrt):
        b.output(f"{name}_grad", b.element_type(name), b.shape(name), source=gradient_of[name])
    return b.model()


def differentiable(model: Model, loss: str, wrt: Sequence[str]) -> Model:
    """Return an equivalent model for `backward`, with the same value names.

    Local functions are inlined. An op without a gradient rule on a path to the loss is replaced by its function body,
    from `lowering` or the ONNX standard, as is every BatchNormalization with batch statistics. `loss` and `wrt` name
    floating-point values of the main graph. Raises the same errors as `gradients`.
    """
    current = inlined(model)
    while True:
        view = View.of(current)
        ids = {v.name: v.id for v in view.values if v.scope == MAIN}
        if loss not in ids:
            outputs = ", ".join(repr(view.value_name(v)) for v in view.scopes[MAIN].outputs)
            raise GradientError(f"the model has no value {loss!r} to use as the loss; its outputs are {outputs}")
        target = ids[loss]
        vtype = view.types[target]
        if vtype is None or vtype.container != TENSOR or vtype.dtype is None or not vtype.dtype.floating:
            raise GradientError(
                f"the loss {loss!r} is {vtype or 'of unknown type'}, but must be a floating-point tensor; cast it"
            )
        route = paths(view, MAIN, [target], [ids[name] for name in wrt], VJPS)
        if target not in route.reached:
            raise GradientError(
                f"the loss {loss!r} has no differentiable path from {', '.join(map(repr, wrt))}; name inputs or"
                " initializers on which it depends"
            )
        replaced = {op.id for op in view.ops if in_training(op)}
        for op in route.ops:
            if _replaceable(view, op):
                replaced.add(op.id)
            elif op.kind not in VJPS:
                raise GradientError(
                    f"node {op.name!r} ({op.kind}) has no gradient rule, but it lies on the path {route.through(op)};"
                    " replace the op, or freeze the parameters upstream of it"
                )
        for body in nested_scopes(view, [body for op in route.ops for body in op.bodies]):
            replaced.update(i for i in view.scopes[body].ops if _replaceable(view, view.ops[i]))
        if not replaced:
            return current
        current = with_bodies(view, replaced)


def _replaceable(view: View, op: Op) -> bool:
    return op.kind not in VJPS and has_body(op) and any(is_floating(view, v) for v in op.results)


def backward(b: Builder, seeds: Mapping[str, str], wrt: Sequence[str]) -> dict[str, str]:
    """Append the backward pass to a builder; return the names of the gradients by the names in `wrt`.

    `seeds` maps each differentiated value to the name of its gradient, which has the value's type and broadcasts to the
    value's shape. The seed of a loss is 1, or the loss scale for scaled gradients. `wrt` names floating-point values of
    the graph. One Sum adds the gradients of several uses, and a value without a path to a seed gets zeros. Raises
    GradientError for an op without a gradient rule.
    """
    expanded = {n: seed if b.shape(n) == () else b.op("Expand", seed, b.shape_of(n)) for n, seed in seeds.items()}
    return _accumulate(b, expanded, wrt)


def _accumulate(b: Builder, seeds: Mapping[str, str], wrt: Sequence[str]) -> dict[str, str]:
    """Append the backward pass from seeds with the shapes of their values."""
    view, ids = b.view, b.ids
    route = paths(view, b.scope, [ids[name] for name in seeds], [ids[name] for name in wrt], VJPS)
    pending: dict[ValueId, list[str]] = {ids[name]: [gradient] for name, gradient in seeds.items()}
    positions = {op_id: i for i, op_id in enumerate(view.scopes[b.scope].ops)}
    for op in reversed(route.ops):
        grads = tuple(None if v is None else _sum(b, pending.get(v)) for v in op.outputs)
        if any(grads):
            for value, gradient in _partials(Call(b, op, positions[op.id], grads, _accumulate), route):
                pending.setdefault(value, []).append(gradient)
    totals = {name: _sum(b, pending.get(ids[name])) for name in wrt}
    return {name: total or b.zeros_like(name, b.element_type(name)) for name, total in totals.items()}


def _partials(v: Call, route: Paths) -> list[tuple[ValueId, str]]:
    """Append the gradients of an op's inputs and captured values, for those on a path to `wrt`."""
    row = VJPS.get(v.op.kind)
    if row is None:
        raise v.error(f"it has no gradient rule, but lies on the path {route.through(v.op)}; replace the op")
    for slot, gradient in enumerate(v.gradients):
        if gradient is not None and slot >= row.outputs:
            raise v.error(
                f"its output {slot}, {v.op.node.output[slot]!r}, has no gradient rule, but lies on the path"
                f" {route.through(v.op)}; compute it with other ops"
            )
    partials, joint, captured = list[tuple[ValueId, str]](), list[tuple[int, ValueId]](), route.captured[v.op.id]
    for slot in route.slots[v.op.id]:
        entry, value = row.entry(slot), v.op.inputs[slot]
        assert value is not None and not isinstance(entry, Stop)
        if isinstance(entry, Joint):
            joint.append((slot, value))
        else:
            partials.append((value, entry(v, slot)))
    if joint or captured:
        assert row.joint_rule is not None
        gradients_in_order = row.joint_rule(v, [slot for slot, _ in joint], [v.b.view.value_name(c) for c in captured])
        partials += zip([*[value for _, value in joint], *captured], gradients_in_order, strict=True)
    return partials


def _sum(b: Builder, gradients: Sequence[str] | None) -> str | None:
    """Append the sum of the gradients of several uses, without their Expands unless all have one."""
    if not gradients:
        return None
    if len(gradients) == 1:
        return gradients[0]
    compact = [b.unexpanded(g) for g in gradients]
    return b.op("Sum", *(gradients if all(c != g for c, g in zip(compact, gradients, strict=True)) else compact))


def _check_parameters(model: Model, loss: str, wrt: Sequence[str]) -> None:
    """Raise GradientError unless `wrt` names floating-point inputs or initializers."""
    view = View.of(model)
    leaves = [v for v in view.values if v.scope == MAIN and v.role is not Role.RESULT]
    valid = {v.name for v in leaves if (dtype := view.dtype(v.id)) is not None and dtype.floating}
    invalid = [name for name in wrt if name not in valid]
    if invalid or not wrt:
        raise GradientError(
            f"cannot differentiate {loss!r} with respect to {', '.join(map(repr, invalid)) or 'nothing'}; name"
            " floating-point inputs or initializers of the main graph"
        )
