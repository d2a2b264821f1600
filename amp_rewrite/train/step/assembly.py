"""Parts shared by the training step and the model loss: policy, inputs, outputs, lowering."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from onnx import GraphProto, ValueInfoProto
from onnx.helper import make_attribute
from onnx.numpy_helper import from_array

from amp_rewrite.decide import reasons
from amp_rewrite.decide.reasons import Pin
from amp_rewrite.dtypes import DType
from amp_rewrite.errors import PolicyError, TrainingError
from amp_rewrite.files.casting import Array
from amp_rewrite.files.model import Model
from amp_rewrite.files.protos import clone, needed, refill
from amp_rewrite.ir.names import claimed
from amp_rewrite.ir.view import View
from amp_rewrite.pipeline.conversion import Draft, finish
from amp_rewrite.reports.report import Report
from amp_rewrite.rewrite.autodiff.builder import Builder
from amp_rewrite.rewrite.autodiff.gradients import backward, differentiable
from amp_rewrite.rewrite.autodiff.lowering.forms import at_gradient_opset
from amp_rewrite.rewrite.autodiff.lowering.random_numbers import with_random_state
from amp_rewrite.rewrite.builder import declared
from amp_rewrite.rewrite.passes.inline import inlined
from amp_rewrite.runtime.ports import input_ports
from amp_rewrite.settings.option import Painting
from amp_rewrite.settings.request import PAINTING, Request
from amp_rewrite.train.door import door, stated, whole_number
from amp_rewrite.train.objective import losses, parameters
from amp_rewrite.train.policy import Policy
from amp_rewrite.train.update.graph import REGION, Buffers

_REGIONS = {f"{REGION}/": reasons.UPDATE, f"{losses.REGION}/": reasons.LOSS}
"""Prefixes of nodes that stay float32, each with its rule."""


class ModelOptions(Painting, total=False):
    """Options for the model of a step, besides lists, level, target, safety, keep and lower of `convert`.

    Attributes:
        policy: by default that of the process.
        parameters: globs on initializers to train, see `parameters.trained`.
        freeze: globs on initializers to leave as they are, also on running statistics.
        training_mode: train statistics and drop.
        seed: of Dropout and random ops; equal seeds give equal bits.
        folder: where the external data of a ModelProto lies.
    """

    policy: str | Policy | None
    parameters: str | Sequence[str] | None
    freeze: str | Sequence[str]
    training_mode: bool
    seed: int
    folder: str | Path | None


@dataclass(frozen=True, eq=False)
class Subject:
    """A model with the choices for its training."""

    source: Model
    policy: Policy
    choice: parameters.ParameterGlobs
    training_mode: bool
    seed: int
    painting: Painting

    @classmethod
    def of(cls, model: object, options: ModelOptions, default: Callable[[], Policy]) -> Subject:
        """Load a model. `default`: the policy if the options name none.

        PolicyError for a policy that does not keep parameters and results in float32.
        """
        painting: Any = {name: value for name, value in options.items() if name in PAINTING}
        given = options.get("policy")
        if not isinstance(given, (str, Policy, type(None))):
            raise PolicyError(
                f"policy is {stated(given)}; use 'mixed_float16', 'mixed_bfloat16', 'float32' or a Policy"
            )
        policy = default() if given is None else Policy.of(given)
        if policy.param is not DType.FLOAT:
            raise PolicyError(
                f"policy {policy.name!r} does not keep parameters and results in float32, as a training step must;"
                " use mixed_float16, mixed_bfloat16 or float32"
            )
        source = Model.load(model, folder=options.get("folder"))
        module = parameters.module_of(source)
        choice = parameters.ParameterGlobs(options.get("parameters"), options.get("freeze", ()), module)
        seed, training_mode = whole_number("seed", options.get("seed", 0), 0), options.get("training_mode", False)
        if not isinstance(training_mode, bool):
            raise TrainingError(f"training_mode is {stated(training_mode)}; use True or False")
        return cls(source, policy, choice, training_mode, seed, painting)


@dataclass(frozen=True, eq=False)
class Prepared:
    """A model ready for `backward`: parameters, buffers and random state are inputs of the graph in `b`.

    `initial`: values of the parameters. `declared`: the outputs for loss and metrics. `random`: the input of the
    random state. `notes`: what was changed, for the report.
    """

    b: Builder
    aim: losses.Objective
    rows: tuple[parameters.ParameterRow, ...]
    initial: Mapping[str, Array]
    buffers: Buffers
    random: str | None
    notes: tuple[str, ...]

    @classmethod
    def of(cls, subject: Subject, loss: str) -> Prepared:
        """Append the loss to a model, and select its parameters; in training mode frozen running statistics stay."""
        source, choice, training_mode = subject.source, subject.choice, subject.training_mode
        at_opset, moved = at_gradient_opset(inlined(source))
        aim = losses.objective(in_training(at_opset, choice.freezes) if training_mode else at_opset, loss)
        statistics(aim.model.proto.graph)  # before all else
        rows = parameters.trained(View.of(aim.model), aim.loss, choice)
        names = [row.name for row in rows if row.role == parameters.TRAINED]
        stateful, random = with_random_state(aim.model)
        updated = statistics(stateful.proto.graph)
        ready = differentiable(stateful, aim.loss, names)
        tensors = {t.name: t for t in ready.proto.graph.initializer}
        initial = {name: ready.array(tensors[name]).copy() for name in names}
        buffers = {name: (new, ready.array(tensors[name]).copy()) for name, new in updated.items()}
        b = Builder.of(ready)
        for name in (*initial, *buffers):
            b.promote(name)
        notes = (*aim.notes, *moved, *parameters.module_notes(source, training_mode))
        return cls(Builder.of(b.model()), aim, rows, initial, buffers, random, notes)

    def gradients(self, seed: str) -> dict[str, str]:
        """Append the backward pass from a gradient of the loss; return the gradients by parameter."""
        return backward(self.b, {self.aim.loss: seed}, list(self.initial))

    def with_results(self, kept: Sequence[str]) -> Model:
        """Return the graph with the outputs loss and metrics, then existing ones."""
        return with_outputs(self.b.model(), outputs_of(self.aim), kept)


def outputs_of(aim: losses.Objective) -> list[ValueInfoProto]:
    return [declared(aim.loss, DType.FLOAT, aim.shape), *(declared(m, DType.FLOAT, ()) for m in aim.metrics)]


def with_outputs(model: Model, new: Sequence[ValueInfoProto], kept: Sequence[str]) -> Model:
    """Return the model with exactly these outputs in this order: new ones, then existing ones by name.

    Nodes that no output depends on are dropped, such as a Softmax whose logits the loss reads.
    """
    proto = clone(model.proto)
    existing = {v.name: v for v in proto.graph.output}
    refill(proto.graph, "output", [*new, *(existing[name] for name in kept)])
    refill(proto.graph, "node", needed(proto.graph.node, [v.name for v in proto.graph.output]))
    return replace(model, proto=proto)


def batch_of(model: Model, *others: str | None) -> tuple[str, ...]:
    """Return the inputs of a batch: all but others and those with a default."""
    taken = {*others, *(tensor.name for tensor in model.proto.graph.initializer)}
    return tuple(v.name for v in model.proto.graph.input if v.name not in taken)


def with_state(model: Model, names: Iterable[str]) -> Model:
    b = Builder.of(model)
    for name in names:
        b.promote(name)
    return b.model()


def with_values(model: Model, values: Mapping[str, Array]) -> Model:
    proto = clone(model.proto)
    for tensor in proto.graph.initializer:
        if tensor.name in values:
            array = np.ascontiguousarray(values[tensor.name]).reshape(tuple(tensor.dims))
            tensor.CopyFrom(from_array(array, tensor.name))
    return replace(model, proto=proto)


def lowered(whole: Model, policy: Policy, painting: Painting) -> tuple[Model, Report | None]:
    """Lower the graph under the policy and return it with the report; appended losses and the update stay float32.

    PolicyError for lowering options under a policy that lowers no op, and for nodes that must stay float32.
    """
    if policy.lowers is None:
        if painting:
            raise PolicyError(
                f"{', '.join(painting)} configures lowering, but policy {policy.name!r} lowers nothing; remove the"
                " options, or use mixed_float16"
            )
        return whole, None
    draft = Draft.of(whole, Request.of(to=policy.lowers, fuse="none", **painting))
    rules = {op.id: rule for op in draft.view.ops for region, rule in _REGIONS.items() if op.name.startswith(region)}
    pins = tuple(Pin(op, rule, None, "") for op, rule in rules.items())
    clash = next((op for op in rules if op in draft.lower), None)
    if clash is not None:
        raise PolicyError(
            f"lower {draft.lower[clash]!r} matches node {draft.view.ops[clash].name!r}, which a training step computes"
            " in float32; narrow the pattern"
        )
    converted = finish(draft, draft.paint(pins))
    return converted.result, converted.report


_STATISTICS = {1: 3, 2: 4}
"""Outputs of a BatchNormalization in training mode, each with the input that it updates."""


def in_training(model: Model, frozen: Callable[[str], bool]) -> Model:
    """Return the model with each BatchNormalization and Dropout of its main graph in training mode.

    A BatchNormalization then also outputs its new running statistics; one whose statistics are `frozen`, by name, stays
    as it is.
    """
    proto = clone(model.proto)
    taken = set(View.of(model).names)
    for node in (node for node in proto.graph.node if node.domain in ("", "ai.onnx")):
        if node.op_type == "Dropout":
            on = claimed("training", taken)
            proto.graph.initializer.append(from_array(np.array(True), on))
            node.input.extend([""] * (3 - len(node.input)))
            node.input[2] = on
        elif node.op_type == "BatchNormalization" and not any(frozen(node.input[i]) for i in _STATISTICS.values()):
            kept = [a for a in node.attribute if a.name != "training_mode"]
            refill(node, "attribute", [*kept, make_attribute("training_mode", 1)])
            for slot, source in _STATISTICS.items():
                if slot == len(node.output):
                    node.output.append(claimed(f"{node.input[source]}/next", taken))
    return replace(model, proto=proto)


def statistics(graph: GraphProto) -> dict[str, str]:
    """Return the running statistics updated in training: names of new values by initializer.

    TrainingError for an initializer that two BatchNormalizations update.
    """
    known = {tensor.name for tensor in graph.initializer}
    updated: dict[str, str] = {}
    for node in graph.node:
        if node.op_type != "BatchNormalization" or len(node.output) < 2:
            continue
        for slot, source in _STATISTICS.items():
            name = node.input[source]
            if name in updated:
                raise TrainingError(
                    f"two BatchNormalizations update the statistics {name!r}; export the model with separate ones"
                )
            if name in known and slot < len(node.output) and node.output[slot]:
                updated[name] = node.output[slot]
    return updated


def statistics_of(model: Model) -> list[str]:
    known = {tensor.name for tensor in model.proto.graph.initializer}
    norms = [node for node in model.proto.graph.node if node.op_type == "BatchNormalization"]
    return [name for node in norms for slot in _STATISTICS.values() if (name := node.input[slot]) in known]


@door()
def bind(model: object, values: Mapping[str, object], *, folder: str | Path | None = None) -> Model:
    """Return a new model with some inputs replaced by initializers.

    Exporters merge equal initializers and fold weights into others; parameters exported as inputs stay separate, each
    under its name.

    Args:
        model: as `Model.load` takes it; it is not changed.
        values: arrays by input name.
        folder: where the external data of a ModelProto lies.

    Returns:
        The model with fewer inputs.

    Raises:
        TrainingError: a name is not an input, or a value has another type or shape.

    Example:
        >>> import numpy as np
        >>> from amp_rewrite.train import bind
        >>> [v.name for v in bind("model.onnx", {"image": np.zeros((2, 1, 8, 8), np.float32)}).proto.graph.input]
        []
    """
    source = Model.load(model, folder=folder)
    ports = {port.name: port for port in input_ports(source)}
    proto = clone(source.proto)
    for name, value in values.items():
        if name not in ports:
            raise TrainingError(f"{name!r} is not an input of the model; its inputs are {', '.join(map(repr, ports))}")
        array, port = np.asarray(value), ports[name]
        if not port.admits(array.shape) or port.dtype is None or port.dtype.numpy != array.dtype:
            expected = f"{port.dtype.spelling if port.dtype else 'not a tensor'} {list(port.shape or ())}"
            actual = f"{array.dtype} {list(array.shape)}"
            raise TrainingError(f"the value of {name!r} is {actual}, but the input is {expected}; convert the value")
        proto.graph.initializer.append(from_array(np.ascontiguousarray(array).reshape(array.shape), name))
    refill(proto.graph, "input", [formal for formal in proto.graph.input if formal.name not in values])
    return replace(source, proto=proto)
