"""Shared parts of the training step and the model loss: options, loss and parameters, outputs, lowering."""

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
from amp_rewrite.train.arguments import checked_arguments, quoted, whole_number
from amp_rewrite.train.objective import losses, parameters
from amp_rewrite.train.policy import Policy
from amp_rewrite.train.update.graph import REGION, Buffers

_REGIONS = {f"{REGION}/": reasons.UPDATE, f"{losses.REGION}/": reasons.LOSS}
"""Rules for the report, by the name prefix of nodes that are kept in float32."""


class ModelOptions(Painting, total=False):
    """Options for the model of a step, in addition to `convert`'s lists, level, target, safety, keep and lower.

    Attributes:
        policy: a name or a Policy; by default the policy of the process.
        parameters: globs that match the initializers to train; see `objective.parameters.parameter_rows`.
        freeze: globs that match initializers to leave unchanged, including running statistics.
        training_mode: True updates running statistics and enables dropout.
        seed: seed of Dropout and random ops; equal seeds give identical bits.
        folder: folder of the external data of a ModelProto.
    """

    policy: str | Policy | None
    parameters: str | Sequence[str] | None
    freeze: str | Sequence[str]
    training_mode: bool
    seed: int
    folder: str | Path | None


@dataclass(frozen=True, eq=False)
class TrainingSource:
    """A loaded model with its training options."""

    model: Model
    policy: Policy
    globs: parameters.ParameterGlobs
    training_mode: bool
    seed: int
    painting: Painting

    @classmethod
    def of(cls, model: object, options: ModelOptions, default: Callable[[], Policy]) -> TrainingSource:
        """Load a model. `default` returns the policy if the options do not set one.

        PolicyError if the policy does not keep parameters and results in float32.
        """
        painting: Any = {name: value for name, value in options.items() if name in PAINTING}
        requested = options.get("policy")
        if not isinstance(requested, (str, Policy, type(None))):
            raise PolicyError(
                f"policy must be 'mixed_float16', 'mixed_bfloat16', 'float32' or a Policy, not {quoted(requested)}"
            )
        policy = default() if requested is None else Policy.of(requested)
        if policy.param is not DType.FLOAT:
            raise PolicyError(
                f"policy {policy.name!r} does not keep parameters and results in float32, as a training step must;"
                " use mixed_float16, mixed_bfloat16 or float32"
            )
        loaded = Model.load(model, folder=options.get("folder"))
        module = parameters.frozen_reasons(loaded)
        globs = parameters.ParameterGlobs(options.get("parameters"), options.get("freeze", ()), module)
        seed, training_mode = whole_number("seed", options.get("seed", 0), 0), options.get("training_mode", False)
        if not isinstance(training_mode, bool):
            raise TrainingError(f"training_mode must be True or False, not {quoted(training_mode)}")
        return cls(loaded, policy, globs, training_mode, seed, painting)


@dataclass(frozen=True, eq=False)
class Prepared:
    """A model ready for `backward`: parameters, buffers and random state are inputs of the graph in `builder`.

    `initial`: initial values of the trained parameters. `buffers`: the running statistics. `random`: the input with the
    random state. `notes`: changes to the model, for the report.
    """

    builder: Builder
    objective: losses.Objective
    rows: tuple[parameters.ParameterRow, ...]
    initial: Mapping[str, Array]
    buffers: Buffers
    random: str | None
    notes: tuple[str, ...]

    @classmethod
    def of(cls, source: TrainingSource, loss: str) -> Prepared:
        """Append the loss to a model and select its parameters; frozen running statistics are not updated."""
        globs, training_mode = source.globs, source.training_mode
        at_opset, change_notes = at_gradient_opset(inlined(source.model))
        objective = losses.objective(with_training_mode(at_opset, globs.freezes) if training_mode else at_opset, loss)
        updated_statistics(objective.model.proto.graph)  # raises early if two norms share them
        rows = parameters.parameter_rows(View.of(objective.model), objective.loss, globs)
        names = [row.name for row in rows if row.role == parameters.TRAINED]
        stateful, random = with_random_state(objective.model)
        updated = updated_statistics(stateful.proto.graph)
        ready = differentiable(stateful, objective.loss, names)
        tensors = {t.name: t for t in ready.proto.graph.initializer}
        initial = {name: ready.array(tensors[name]).copy() for name in names}
        buffers = {name: (new, ready.array(tensors[name]).copy()) for name, new in updated.items()}
        builder = Builder.of(ready)
        for name in (*initial, *buffers):
            builder.promote(name)
        notes = (*objective.notes, *change_notes, *parameters.module_notes(source.model, training_mode))
        return cls(Builder.of(builder.model()), objective, rows, initial, buffers, random, notes)

    def gradients(self, seed: str) -> dict[str, str]:
        """Append the backward pass from `seed`, the gradient of the loss; return the gradients by parameter."""
        return backward(self.builder, {self.objective.loss: seed}, list(self.initial))

    def with_results(self, names: Sequence[str]) -> Model:
        """Return the model with the loss and the metrics as outputs, followed by the existing outputs `names`."""
        return with_outputs(self.builder.model(), loss_outputs(self.objective), names)


def loss_outputs(objective: losses.Objective) -> list[ValueInfoProto]:
    metrics = (declared(name, DType.FLOAT, ()) for name in objective.metrics)
    return [declared(objective.loss, DType.FLOAT, objective.shape), *metrics]


def with_outputs(model: Model, new: Sequence[ValueInfoProto], names: Sequence[str]) -> Model:
    """Return the model with exactly these outputs: the new ones, then existing ones by name.

    Nodes that no output depends on are removed, for example a Softmax if the loss reads its logits.
    """
    proto = clone(model.proto)
    existing = {v.name: v for v in proto.graph.output}
    refill(proto.graph, "output", [*new, *(existing[name] for name in names)])
    refill(proto.graph, "node", needed(proto.graph.node, [v.name for v in proto.graph.output]))
    return replace(model, proto=proto)


def batch_inputs(model: Model, *others: str | None) -> tuple[str, ...]:
    """Return the names of the batch inputs: all inputs of the model except `others` and those with an initializer."""
    excluded = {*others, *(tensor.name for tensor in model.proto.graph.initializer)}
    return tuple(v.name for v in model.proto.graph.input if v.name not in excluded)


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
    """Lower the graph under the policy and return it with the report; the loss and the update are kept in float32.

    PolicyError for lowering options under a policy that lowers no op, and for a `lower` pattern that matches a node of
    the loss or the update.
    """
    if policy.lowers is None:
        if painting:
            raise PolicyError(
                f"policy {policy.name!r} lowers nothing, so {', '.join(painting)} would have no effect; remove the"
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
"""Output slots of a BatchNormalization in training mode, each with the slot of the input that it updates."""


def with_training_mode(model: Model, frozen: Callable[[str], bool]) -> Model:
    """Put each BatchNormalization and Dropout of the main graph into training mode.

    A BatchNormalization then also outputs its new running statistics. It is left unchanged if `frozen` is true for the
    name of one of its statistics.
    """
    proto = clone(model.proto)
    taken = set(View.of(model).names)
    for node in (node for node in proto.graph.node if node.domain in ("", "ai.onnx")):
        if node.op_type == "Dropout":
            switch = claimed("training", taken)
            proto.graph.initializer.append(from_array(np.array(True), switch))
            node.input.extend([""] * (3 - len(node.input)))
            node.input[2] = switch
        elif node.op_type == "BatchNormalization" and not any(frozen(node.input[i]) for i in _STATISTICS.values()):
            attributes = [a for a in node.attribute if a.name != "training_mode"]
            refill(node, "attribute", [*attributes, make_attribute("training_mode", 1)])
            for slot, source in _STATISTICS.items():
                if slot == len(node.output):
                    node.output.append(claimed(f"{node.input[source]}/next", taken))
    return replace(model, proto=proto)


def updated_statistics(graph: GraphProto) -> dict[str, str]:
    """Return the names of the updated running statistics, by initializer.

    TrainingError if two BatchNormalizations update the same initializer.
    """
    initializers = {tensor.name for tensor in graph.initializer}
    updated: dict[str, str] = {}
    for node in graph.node:
        if node.op_type != "BatchNormalization" or len(node.output) < 2:
            continue
        for slot, source in _STATISTICS.items():
            name = node.input[source]
            if name in updated:
                raise TrainingError(
                    f"two BatchNormalizations update the statistics {name!r}; export the model with separate statistics"
                )
            if name in initializers and slot < len(node.output) and node.output[slot]:
                updated[name] = node.output[slot]
    return updated


def statistics_names(model: Model) -> list[str]:
    initializers = {tensor.name for tensor in model.proto.graph.initializer}
    norms = [node for node in model.proto.graph.node if node.op_type == "BatchNormalization"]
    return [name for node in norms for slot in _STATISTICS.values() if (name := node.input[slot]) in initializers]


@checked_arguments()
def bind(model: object, values: Mapping[str, object], *, folder: str | Path | None = None) -> Model:
    """Replace inputs of a model with initializers.

    Exporters merge equal initializers and fold weights into others. Parameters that are exported as inputs are kept
    separate, under their own names; `bind` then turns them into initializers.

    Args:
        model: a model, as for `Model.load`; it is not changed.
        values: arrays by input name.
        folder: folder of the external data of a ModelProto.

    Returns:
        A new model without these inputs.

    Raises:
        TrainingError: a name is not an input, or a value's type or shape differs from the input's.

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
            needs = f"needs {port.dtype.spelling} {list(port.shape or ())}" if port.dtype else "is not a tensor"
            remedy = "convert or reshape the value" if port.dtype else "omit the value"
            actual = f"{array.dtype} {list(array.shape)}"
            raise TrainingError(f"the value of {name!r} is {actual}, but the input {needs}; {remedy}")
        proto.graph.initializer.append(from_array(np.ascontiguousarray(array).reshape(array.shape), name))
    refill(proto.graph, "input", [formal for formal in proto.graph.input if formal.name not in values])
    return replace(source, proto=proto)
