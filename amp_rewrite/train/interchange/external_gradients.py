"""Loss scaling for a graph with its own backward pass, as exported by PyTorch, JAX or another tool."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from onnx.helper import make_node, make_tensor_value_info
from onnx.numpy_helper import from_array

from amp_rewrite.dtypes import DType
from amp_rewrite.errors import TrainingError
from amp_rewrite.files.model import Model
from amp_rewrite.files.protos import clone, refill, rename
from amp_rewrite.ir.names import as_names, claimed
from amp_rewrite.ir.nodes import MAIN
from amp_rewrite.ir.view import ValueId, View
from amp_rewrite.rewrite.autodiff.builder import Builder
from amp_rewrite.train import loss_scale as scales
from amp_rewrite.train.arguments import checked_arguments
from amp_rewrite.train.loss_scale import LossScale
from amp_rewrite.train.update.graph import REGION, Scaling, StateVariable, append_unscaling


@dataclass(frozen=True, eq=False)
class ScaledGradients:
    """A graph with a scaled backward pass; its output gradients are unscaled float32 values.

    Attributes:
        model: the graph.
        grads: names of the gradient outputs, unchanged.
        finite: bool output, True if all gradients are finite; do not apply them if it is False.
        state: the inputs and outputs of a dynamic scale, `loss_scale` and `good_steps`; empty with a fixed scale.
    """

    model: Model
    grads: tuple[str, ...]
    finite: str
    state: tuple[StateVariable, ...]


@checked_arguments()
def scale_gradients(
    model: object,
    *,
    loss: str,
    grads: str | Sequence[str],
    seed: str,
    loss_scale: object = "dynamic",
    folder: str | Path | None = None,
) -> ScaledGradients:
    """Add loss scaling to a graph with a forward and a backward pass.

    The gradients are assumed to depend linearly on the seed; this is not checked. Convert the result with
    `keep=["amp.update/*"]`, so that unscaling stays in float32.

    Args:
        model: a model, as for `Model.load`; it is not changed.
        loss: name of the differentiated value.
        grads: names of the outputs with its gradients.
        seed: start of the backward pass, the gradient of the loss itself: an input or a constant 1.
        loss_scale: "dynamic", a number or a LossScale.
        folder: folder of the external data of a ModelProto.

    Returns:
        The graph, with the names of the added inputs and outputs.

    Raises:
        TrainingError: a name is unknown, a gradient is independent of the seed, the loss is not, or the scale is None.

    Example:
        >>> import amp_rewrite, onnx
        >>> head = '<ir_version: 10, opset_import: ["" : 20]> g (float[3] x, float seed) => (float s, float[3] d)'
        >>> body = "{ s = ReduceSumSquare <keepdims = 0> (x) twice = Add (x, x) d = Mul (twice, seed) }"
        >>> model = onnx.parser.parse_model(head + body)
        >>> amp_rewrite.train.scale_gradients(model, loss="s", grads="d", seed="seed").grads
        ('d',)
    """
    source = Model.load(model, folder=folder)
    rule = scales.get(loss_scale)
    if rule is None:
        raise TrainingError("loss_scale is None, so there is nothing to do; use 'dynamic', a number or a LossScale")
    grads = tuple(dict.fromkeys(as_names(grads)))
    view = View.of(source)
    main = {v.name: v.id for v in view.values if v.scope == MAIN}
    results = {view.value_name(v) for v in view.scopes[MAIN].outputs}
    unknown = [name for name in (loss, seed) if name not in main] + [name for name in grads if name not in results]
    if unknown or not grads:
        raise TrainingError(
            f"unknown or missing names: {', '.join(map(repr, unknown)) or 'grads'}; loss and seed must be values of the"
            f" main graph, and grads must be outputs: {', '.join(sorted(results))}"
        )
    start = main[seed]
    after = view.after(use.op for use in view.uses[start])
    reached = {start, *(value for op in after for value in view.ops[op].outputs)}
    if main[loss] in reached or not {main[name] for name in grads} <= reached:
        raise TrainingError(
            f"{seed!r} is not the seed: all gradients must depend on the seed, and the loss must not; name the value"
            " where the backward pass starts"
        )
    scaled, scale, inner = _scaled(view, start, rule, grads)
    b = Builder.of(scaled)
    good_steps = b.input("good_steps", DType.INT64, ()) if isinstance(rule, scales.DynamicLossScale) else None
    float32_grads = {grad: b.cast(name, DType.FLOAT) for grad, name in inner.items()}
    unscaled, finite, state = append_unscaling(b, float32_grads, Scaling(rule, scale, good_steps))
    outputs = {formal.name: formal for formal in b.graph.output}
    for grad, value in unscaled.items():
        b.name(value, grad)
        formal = outputs[inner[grad]]
        formal.name, formal.type.tensor_type.elem_type = grad, DType.FLOAT.code
    return ScaledGradients(b.model(), grads, finite, state)


def _scaled(view: View, start: ValueId, rule: LossScale, grads: Sequence[str]) -> tuple[Model, str, dict[str, str]]:
    proto = clone(view.model.proto)
    taken = set(view.names)
    scale = claimed("loss_scale", taken)
    if isinstance(rule, scales.DynamicLossScale):
        proto.graph.input.append(make_tensor_value_info(scale, DType.FLOAT.code, ()))
    else:
        proto.graph.initializer.append(from_array(rule(), scale))
    name = view.value_name(start)
    inner = {grad: claimed(f"{grad}/scaled", taken) for grad in grads}
    product = claimed(f"{name}/scaled", taken)
    rename(proto.graph, {name: product, **inner})
    for formal in proto.graph.input:
        formal.name = name if formal.name == product else formal.name
    nodes = list(proto.graph.node)
    for node in nodes:
        node.output[:] = [name if output == product else output for output in node.output]
    producer, dtype = view.values[start].producer, view.dtype(start)
    at = 0 if producer is None else view.scopes[MAIN].ops.index(producer) + 1
    factor, added = scale, []
    if dtype not in (None, DType.FLOAT):
        factor = claimed(f"{scale}/{dtype.spelling}", taken)
        added = [make_node("Cast", [scale], [factor], name=claimed(f"{REGION}/seed_scale", taken), to=dtype.code)]
    added.append(make_node("Mul", [name, factor], [product], name=claimed(f"{REGION}/seed", taken)))
    refill(proto.graph, "node", [*nodes[:at], *added, *nodes[at:]])
    return replace(view.model, proto=proto), scale, inner
