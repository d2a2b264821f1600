"""The standard's training operators and training graphs, lowered to basic operators.

ai.onnx.preview.training has Gradient, Adagrad, Adam and Momentum (onnx, docs/Operators-ml and the schemas' own text).
ModelProto.training_info has training algorithms as graphs (onnx.proto, TrainingInfoProto). The common runtimes execute
neither.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from onnx import GraphProto, NodeProto, TrainingInfoProto

from amp_rewrite.dtypes import DType
from amp_rewrite.errors import GradientError, ModelError
from amp_rewrite.files.model import Model
from amp_rewrite.files.protos import clone, refill
from amp_rewrite.ir.build import bodies
from amp_rewrite.ir.schema import attribute, float_attribute
from amp_rewrite.rewrite.apply import import_standard
from amp_rewrite.rewrite.autodiff.builder import Builder
from amp_rewrite.rewrite.autodiff.gradients import backward, differentiable

DOMAIN = "ai.onnx.preview.training"


def lower_training_ops(model: object, *, folder: str | Path | None = None) -> Model:
    """Return a new model with each Gradient, Adagrad, Adam and Momentum of the main graph lowered to basic operators.

    `model`: as `Model.load` takes it; it is not changed. Names of values, inputs and outputs stay. A Gradient of
    several numbers is that of their sum. A Gradient whose inputs differ from the values named in `xs` and `zs` is
    evaluated at its inputs. GradientError if a Gradient cannot be differentiated or is inside a body.
    """
    source = Model.load(model, folder=folder)
    proto = clone(source.proto)
    import_standard(proto)
    ready = replace(source, proto=proto)
    while (position := _first(ready.proto.graph)) is not None:
        ready = _LOWERED[ready.proto.graph.node[position].op_type](ready, position)
    refill(ready.proto, "opset_import", [o for o in ready.proto.opset_import if o.domain != DOMAIN])
    return ready


def _first(graph: GraphProto) -> int | None:
    """Position of the first operator to lower."""
    for position, node in enumerate(graph.node):
        if node.domain == DOMAIN:
            if node.op_type not in _LOWERED:
                raise GradientError(
                    f"node {node.name!r}: {DOMAIN} operator {node.op_type!r} is not supported; remove it"
                )
            return position
        for _, body in bodies(node):
            if _first(body) is not None:
                raise GradientError(
                    f"node {node.name!r} ({node.op_type}) has a training operator in a body; move it out"
                )
    return None


def _gradient(model: Model, position: int) -> Model:
    node = model.proto.graph.node[position]
    xs, zs, y = _words(node, "xs"), _words(node, "zs"), "".join(_words(node, "y"))
    if list(node.input) != [*xs, *zs]:
        return _at_other_values(model, position, dict(zip([*xs, *zs], node.input, strict=False)), y)
    ready = differentiable(model, y, xs)
    b = Builder.of(ready)
    position = next(i for i, n in enumerate(b.graph.node) if n.domain == DOMAIN)
    with b.instead_of(position):
        dtype = b.dtype(y)
        assert dtype is not None
        gradients = backward(b, {y: b.scalar(1.0, dtype)}, xs)
        for x, name in zip(xs, node.output, strict=False):
            if name:
                b.name(gradients[x], name)
    return b.model()


def _at_other_values(model: Model, position: int, values: Mapping[str, str], y: str) -> Model:
    """Copy the ops that lead to y onto the Gradient's own inputs, and let the Gradient refer to the copy."""
    b = Builder.of(model, region="at")
    with b.instead_of(position) as node:
        names = dict(values)
        for before in list(b.graph.node[:position]):
            if names.keys() & set(before.input) and not names.keys() & set(before.output):
                results = b.like(before, [names.get(i, i) for i in before.input])
                names.update(zip(before.output, results, strict=True))
        again = clone(node)
        for words in again.attribute:
            if words.name in ("xs", "zs"):
                words.strings[:] = [names[w.decode()].encode() for w in words.strings]
            elif words.name == "y":
                words.s = names.get(y, y).encode()
        b.append(again)
    return b.model()


def _words(node: NodeProto, name: str) -> list[str]:
    words = attribute(node, name)
    return [] if words is None else [w.decode() for w in words.strings or [words.s]]


@dataclass(frozen=True)
class _Update:
    """One optimizer node, its formulas over the tensors of one parameter."""

    b: Builder
    node: NodeProto
    dtype: DType

    def do(self, op_type: str, *inputs: str | float) -> str:
        """Append an op; numbers become constants of the parameter's type."""
        return self.b.op(op_type, *[i if isinstance(i, str) else self.b.scalar(i, self.dtype) for i in inputs])

    def number(self, name: str, default: float) -> float:
        return float_attribute(self.node, name, default)

    @property
    def rate(self) -> str:
        return self.b.cast(self.node.input[0], self.dtype)

    @property
    def count(self) -> str:
        """Number of updates so far, in the parameter's type."""
        return self.b.op("Cast", self.node.input[1], to=self.dtype.code)

    @property
    def begun(self) -> str:
        """Name of a bool: True after the first update."""
        return self.do("Greater", self.count, 0.0)

    def decayed(self, x: str, g: str) -> str:
        """Add the gradient of ½·norm_coefficient·|x|²."""
        return self.do("Add", self.do("Mul", x, self.number("norm_coefficient", 0.0)), g)


def _adagrad(u: _Update, x: str, g: str, h: str) -> tuple[str, str]:
    rate = u.do("Div", u.rate, u.do("Add", u.do("Mul", u.count, u.number("decay_factor", 0.0)), 1.0))
    g = u.decayed(x, g)
    new_h = u.do("Add", h, u.do("Mul", g, g))
    root = u.do("Add", u.do("Sqrt", new_h), u.number("epsilon", 1e-6))
    return u.do("Sub", x, u.do("Div", u.do("Mul", rate, g), root)), new_h


def _momentum(u: _Update, x: str, g: str, m: str) -> tuple[str, str]:
    alpha, mode = u.number("alpha", 0.0), attribute(u.node, "mode")
    g = u.decayed(x, g)
    beta = u.do("Where", u.begun, u.number("beta", 1.0), 1.0)
    new_m = u.do("Add", u.do("Mul", m, alpha), u.do("Mul", beta, g))
    nesterov = mode is not None and mode.s == b"nesterov"
    step = u.do("Add", g, u.do("Mul", new_m, alpha)) if nesterov else new_m
    return u.do("Sub", x, u.do("Mul", u.rate, step)), new_m


def _adam(u: _Update, x: str, g: str, m: str, h: str) -> tuple[str, str, str]:
    alpha, beta = u.number("alpha", 0.9), u.number("beta", 0.999)
    g = u.decayed(x, g)
    new_m = u.do("Add", u.do("Mul", m, alpha), u.do("Mul", g, 1 - alpha))
    new_h = u.do("Add", u.do("Mul", h, beta), u.do("Mul", u.do("Mul", g, g), 1 - beta))
    root = u.do("Add", u.do("Sqrt", new_h), u.number("epsilon", 1e-6))
    biases = [u.do("Sub", 1.0, u.do("Pow", decay, u.count)) for decay in (beta, alpha)]
    corrected = u.do("Div", u.do("Mul", u.rate, u.do("Sqrt", biases[0])), biases[1])
    rate = u.do("Where", u.begun, corrected, u.rate)
    new_x = u.do("Sub", x, u.do("Div", u.do("Mul", rate, new_m), root))
    return u.do("Mul", new_x, 1 - u.number("norm_coefficient_post", 0.0)), new_m, new_h


def _optimizer(formula: Callable[..., tuple[str, ...]], tensors: int) -> Callable[[Model, int], Model]:
    """Make the lowering of an operator with `tensors` inputs per parameter, grouped by kind."""

    def lower(model: Model, position: int) -> Model:
        b = Builder.of(model, region="update")
        with b.instead_of(position) as node:
            inputs, results = list(node.input[2:]), list(node.output)
            count = len(inputs) // tensors
            if count * tensors != len(inputs) or len(results) != count * (tensors - 1):
                raise ModelError(
                    f"node {node.name!r} ({node.op_type}) has {len(inputs)} tensors and {len(results)} outputs, not"
                    f" {tensors} and {tensors - 1} for each parameter; the model is invalid"
                )
            for i in range(count):
                mine = inputs[i::count]
                dtype = b.dtype(mine[0])
                if dtype is None:
                    raise GradientError(f"node {node.name!r} ({node.op_type}): the type of {mine[0]!r} is unknown")
                for name, source in zip(results[i::count], formula(_Update(b, node, dtype), *mine), strict=True):
                    if name:
                        b.name(source, name)
        return b.model()

    return lower


_LOWERED: Mapping[str, Callable[[Model, int], Model]] = {
    "Gradient": _gradient,
    "Adagrad": _optimizer(_adagrad, 3),
    "Momentum": _optimizer(_momentum, 3),
    "Adam": _optimizer(_adam, 4),
}


@dataclass(frozen=True)
class Algorithm:
    """One training algorithm of a model, runnable.

    `step`: one iteration, with the updated values as inputs under their own names. `updates`: by each such input the
    output with its next value. `initialization`: computes initial values; None if absent. `initials`: its outputs by
    input. The other inputs are those of the model and of the algorithm.
    """

    step: Model
    updates: Mapping[str, str]
    initialization: Model | None
    initials: Mapping[str, str]


def algorithms(model: object, *, folder: str | Path | None = None) -> tuple[Algorithm, ...]:
    """Return the training algorithms in a model's `training_info`, lowered, in order.

    The graph of a step is the model's, followed by the algorithm's (onnx.proto, TrainingInfoProto). ModelError for a
    binding to an unknown initializer or output; GradientError as in `lower_training_ops`.
    """
    source = Model.load(model, folder=folder)
    return tuple(_algorithm(source, i) for i in range(len(source.proto.training_info)))


def _algorithm(model: Model, index: int) -> Algorithm:
    info = model.proto.training_info[index]
    updates = {e.key: e.value for e in info.update_binding}
    initials = {e.key: e.value for e in info.initialization_binding}
    step = clone(model.proto)
    step.ClearField("training_info")
    for field in ("node", "input", "initializer", "output", "value_info", "sparse_initializer"):
        getattr(step.graph, field).extend(getattr(info.algorithm, field))
    _check_bindings(step.graph, info, index)
    state = list(dict.fromkeys([*updates, *initials]))
    b = Builder.of(lower_training_ops(replace(model, proto=step)))
    for name in state:
        b.promote(name)
    first = None
    if info.HasField("initialization"):
        first = replace(model, proto=clone(model.proto))
        first.proto.ClearField("training_info")
        first.proto.graph.CopyFrom(info.initialization)
    return Algorithm(b.model(), updates, first, initials)


def _check_bindings(graph: GraphProto, info: TrainingInfoProto, index: int) -> None:
    initializers = {t.name for t in graph.initializer}
    for kind, source in (("update", graph), ("initialization", info.initialization)):
        results = {v.name for v in source.output}
        for name, value in {e.key: e.value for e in getattr(info, f"{kind}_binding")}.items():
            where = f"training_info {index}: the {kind}_binding of {name!r}"
            if name not in initializers:
                raise ModelError(f"{where} does not name an initializer; correct the name")
            if value not in results:
                raise ModelError(f"{where} refers to {value!r}, which is not an output of its graph; correct the name")
