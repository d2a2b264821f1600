"""The standard's own training operators and training graphs, in plain operators that every runtime has.

ai.onnx.preview.training has Gradient, Adagrad, Adam and Momentum (onnx, docs/Operators-ml and the schemas' own text),
and ModelProto.training_info holds training algorithms as graphs (onnx.proto, TrainingInfoProto). No runtime of note
executes them as they are.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import onnx.helper
from onnx import GraphProto, ModelProto, NodeProto

from amp_rewrite.dtypes import DType
from amp_rewrite.errors import GradientError, ModelError
from amp_rewrite.files.model import Model
from amp_rewrite.files.protos import clone, refill
from amp_rewrite.ir.build import bodies
from amp_rewrite.ir.schema import attribute, float_attribute
from amp_rewrite.rewrite.apply import import_standard
from amp_rewrite.train.builder import Builder
from amp_rewrite.train.gradients import backward, differentiable

DOMAIN = "ai.onnx.preview.training"


def lower_training_ops(model: object, *, folder: str | Path | None = None) -> Model:
    """A new model in which each Gradient, Adagrad, Adam and Momentum of the main graph is plain operators.

    `model`: what `Model.load` takes; it is not changed. Names of values, inputs and outputs stay. A
    Gradient of several numbers is that of their sum; one whose inputs are other values than `xs` and `zs` name is
    taken there. GradientError for a Gradient of what cannot be differentiated, or inside a body.
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
    """Where the first operator to lower stands."""
    for position, node in enumerate(graph.node):
        if node.domain == DOMAIN:
            if node.op_type not in _LOWERED:
                raise GradientError(
                    f"node {node.name!r}: {DOMAIN} has no {node.op_type!r} that is known here; remove it"
                )
            return position
        for _, body in bodies(node):
            if _first(body) is not None:
                raise GradientError(
                    f"node {node.name!r} ({node.op_type}) has a training operator in a body; move it out"
                )
    return None


# -- Gradient ------------------------------------------------------------------------------------------------


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
        found = backward(b, {y: b.scalar(1.0, dtype)}, xs)
        for x, name in zip(xs, node.output, strict=False):
            if name:
                b.name(found[x], name)
    return b.model()


def _at_other_values(model: Model, position: int, values: Mapping[str, str], y: str) -> Model:
    """The same Gradient of a copy of what leads to y, computed from the values that it is given."""
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
    found = attribute(node, name)
    if found is None:
        return []
    return [w.decode() for w in (found.strings or [found.s])]


# -- optimizers ----------------------------------------------------------------------------------------------


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
        """How many updates there were, as a number of the parameter's type."""
        return self.b.op("Cast", self.node.input[1], to=self.dtype.code)

    @property
    def begun(self) -> str:
        """Whether this is not the first update."""
        return self.do("Greater", self.count, 0.0)

    def decayed(self, x: str, g: str) -> str:
        """The gradient with that of ½·norm_coefficient·|x|² added."""
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


_Formula = Callable[..., tuple[str, ...]]


def _optimizer(formula: _Formula, tensors: int) -> Callable[[Model, int], Model]:
    """The lowering of an operator that reads `tensors` per parameter, all of one kind before those of the next."""

    def lower(model: Model, position: int) -> Model:
        b = Builder.of(model, region="update")
        with b.instead_of(position) as node:
            given, results = list(node.input[2:]), list(node.output)
            count = len(given) // tensors
            if count * tensors != len(given) or len(results) != count * (tensors - 1):
                raise ModelError(
                    f"node {node.name!r} ({node.op_type}) has {len(given)} tensors and {len(results)} outputs, not"
                    f" {tensors} and {tensors - 1} for each parameter; the model is invalid"
                )
            for i in range(count):
                mine = given[i::count]
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


# -- training_info -------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Algorithm:
    """One training algorithm of a model, runnable.

    `step` computes one iteration: what is updated is an input, under its own name; `updates` has by the name of
    each such input the output that holds its next value. `initialization` computes first values, None if there is
    none; `initials` has the output by the input. The other inputs are those of the model and of the algorithm.
    """

    step: Model
    updates: Mapping[str, str]
    initialization: Model | None
    initials: Mapping[str, str]


def algorithms(model: object, *, folder: str | Path | None = None) -> tuple[Algorithm, ...]:
    """The training algorithms that a model holds in `training_info`, lowered, in their order.

    The graph of a step is the model's, followed by the algorithm's (onnx.proto, TrainingInfoProto). ModelError
    where a binding names no initializer or no output; GradientError as from `lower_training_ops`.
    """
    source = Model.load(model, folder=folder)
    return tuple(_algorithm(source, i) for i in range(len(source.proto.training_info)))


def _algorithm(model: Model, index: int) -> Algorithm:
    info = model.proto.training_info[index]
    updates = {e.key: e.value for e in info.update_binding}
    initials = {e.key: e.value for e in info.initialization_binding}
    step = _without_training(model.proto)
    for field in ("node", "input", "initializer", "output", "value_info", "sparse_initializer"):
        getattr(step.graph, field).extend(getattr(info.algorithm, field))
    _check_bindings(step.graph, updates, initials, info.initialization, index)
    state = list(dict.fromkeys([*updates, *initials]))
    b = Builder.of(lower_training_ops(replace(model, proto=step)))
    for name in state:
        b.promote(name)
    first = None
    if info.HasField("initialization"):
        first = _without_training(model.proto)
        first.graph.CopyFrom(info.initialization)
    return Algorithm(b.model(), updates, None if first is None else replace(model, proto=first), initials)


def _without_training(proto: ModelProto) -> ModelProto:
    out = clone(proto)
    out.ClearField("training_info")
    return out


def _check_bindings(
    graph: GraphProto, updates: Mapping[str, str], initials: Mapping[str, str], first: GraphProto, index: int
) -> None:
    initializers, outputs = {t.name for t in graph.initializer}, _names(graph.output)
    for kind, bound, results in (("update", updates, outputs), ("initialization", initials, _names(first.output))):
        for name, value in bound.items():
            where = f"training_info {index}: the {kind}_binding of {name!r}"
            if name not in initializers:
                raise ModelError(f"{where} is of no initializer; correct the name")
            if value not in results:
                raise ModelError(f"{where} is to {value!r}, which is no output of its graph; correct the name")


def _names(values: Iterable[onnx.ValueInfoProto]) -> set[str]:
    return {v.name for v in values}
