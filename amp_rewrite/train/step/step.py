"""A whole training step as one ONNX model: batch and state in, loss, metrics and new state out."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Unpack

from onnx.numpy_helper import from_array

from amp_rewrite.errors import TrainingError
from amp_rewrite.files.fingerprint import fingerprint
from amp_rewrite.files.model import Model
from amp_rewrite.files.protos import clone
from amp_rewrite.ir.nodes import MAIN
from amp_rewrite.ir.view import View
from amp_rewrite.reports.report import Report
from amp_rewrite.settings.options import Painting
from amp_rewrite.settings.policy import Policy
from amp_rewrite.train import loss_scale as scales
from amp_rewrite.train import losses, optimizers
from amp_rewrite.train.assembly import declared_scalar, lowered, policy_of, with_inputs, with_outputs
from amp_rewrite.train.builder import Builder
from amp_rewrite.train.gradients import backward
from amp_rewrite.train.keras.optimizer import StatefulOptimizer
from amp_rewrite.train.loss_scale import Array, LossScale
from amp_rewrite.train.losses import Objective, Target
from amp_rewrite.train.parameters import trained
from amp_rewrite.train.step.update import Scaling, StateVariable, Update, append_update
from amp_rewrite.train.training_mode import in_training

_POLICY = "policy"  # stands for the loss scale that goes with the policy


@dataclass(frozen=True, eq=False)
class TrainingStep:
    """One training step. `model` takes the batch, the state and the learning rate, and gives what is named here.

    `batch`: the inputs that every step is fed. `state`: what goes round, in float32 and int64 whatever the policy.
    `loss` and `metrics`: float32 scalars; the loss is not scaled. `finite`: whether all gradients of the step were;
    `applied`: whether it changed anything (with micro-batches only the last of a step does). `learning_rate`: the
    input of that name, `optimizer.learning_rate` its usual value. `objective`: the loss as it was asked for.
    `fingerprint`: what checkpoints know the model by; `forward`: the model that is trained, None for a step that was
    read from a file without it. `report`: why each
    op has its type; None under a policy that lowers nothing, and for a step from a file.
    """

    model: Model
    batch: tuple[str, ...]
    state: tuple[StateVariable, ...]
    loss: str
    metrics: tuple[str, ...]
    finite: str
    applied: str
    learning_rate: str
    target: Target | None
    optimizer: optimizers.Optimizer
    loss_scale: LossScale | None
    policy: Policy
    micro_batches: int
    training_mode: bool
    objective: str
    fingerprint: str
    forward: Model | None
    report: Report | None

    @property
    def parameters(self) -> tuple[str, ...]:
        """The names of the initializers that are trained."""
        return tuple(s.input for s in self.state if s.name.startswith("parameter/"))

    @property
    def shared(self) -> tuple[str, ...]:
        """Parameters that several ops read: tied on purpose, or merged by an exporter because they were equal."""
        view = View.of(self._forward())
        readers = {v.name: {use.op for use in view.uses[v.id]} for v in view.values if v.scope == MAIN}
        return tuple(name for name in self.parameters if len(readers[name]) > 1)

    @property
    def lowered(self) -> bool:
        """Whether anything may be computed in a low type."""
        return self.policy.lowers is not None

    def initial_state(self) -> dict[str, Array]:
        """What to feed the first step besides batch and learning rate, by input name; copies."""
        return {s.input: s.initial.copy() for s in self.state}

    def next_state(self, results: Mapping[str, Any]) -> dict[str, Array]:
        """What to feed the next step, from the outputs of one."""
        return {s.input: results[s.output] for s in self.state}

    def evaluation(self) -> tuple[Model, str, tuple[str, ...]]:
        """A model that gives loss and metrics alone and takes batch and state, with their names there.

        That is the step itself; but for a step in training mode the model as it is, in float32: with running
        statistics and without dropout. TrainingError for such a step from a file that was read without that model.
        """
        if not self.training_mode:
            return self.model, self.loss, self.metrics
        aim = losses.objective(self._forward(), self.objective)
        b = Builder.of(aim.model)
        for name in self._weights():
            b.promote(name)
        told = [declared_scalar(aim.loss, aim.shape), *map(declared_scalar, aim.metrics)]
        return with_outputs(b.model(), told, ()), aim.loss, aim.metrics

    def _forward(self) -> Model:
        if self.forward is None:
            raise TrainingError("the step came from a file without the model that it trains; load it with `forward`")
        return self.forward

    def _weights(self) -> tuple[str, ...]:
        """The initializers of the model that a step changes."""
        return tuple(s.input for s in self.state if s.name.startswith(("parameter/", "buffer/")))

    def trained(self, state: Mapping[str, Array]) -> Model:
        """The model that was trained, with the parameters and running statistics of a state in its initializers.

        TrainingError for a step from a file that was read without that model.
        """
        return with_initializers(self._forward(), {name: state[name] for name in self._weights()})


def training_step(
    model: object,
    *,
    loss: str,
    optimizer: optimizers.Optimizer | StatefulOptimizer | str = "sgd",
    loss_scale: object = _POLICY,
    policy: str | Policy | None = None,
    parameters: str | Sequence[str] | None = None,
    freeze: str | Sequence[str] = (),
    micro_batches: int = 1,
    training_mode: bool = False,
    folder: str | Path | None = None,
    **painting: Unpack[Painting],
) -> TrainingStep:
    """One model that makes a training step: forward, backward, update, and the loss scale's adjustment.

    `model`: as `convert` takes it; it is not changed. `loss`: the name of a float32 value with one element, or
    "cross_entropy(LOGITS, TARGETS)" and the like, see `losses.objective`. `optimizer`: an Optimizer or its spelling,
    "adam,lr=0.001". `loss_scale`: "dynamic", a number, None or a LossScale; by default the policy's, which is
    "dynamic" for mixed_float16. `policy`: by default that of the process if one was set, else mixed_float16.
    `parameters`, `freeze`: globs on initializers, see `parameters.trained`. Of `micro_batches` runs the last
    makes the step, with the mean of their gradients. `training_mode`: each BatchNormalization takes the statistics
    of the batch and moves the running ones, each Dropout drops; otherwise they do what the model says.
    `painting`: lists, level, target, safety, keep, lower, gray_follows_allow, as `convert` takes them.

    The backward pass starts from the loss scale (the loss itself stays unscaled), so gradients come out scaled and,
    under a low policy, low; they are widened, unscaled, tested and applied in float32 to float32 parameters,
    of which each step casts one low copy (Micikevicius et al., Mixed Precision Training, 2018, section 3). A step
    whose gradients are not finite leaves all state as it was and halves a dynamic scale; with a fixed scale, or
    none, it is applied, and `finite` says so. One pass paints forward and backward together.

    TrainingError and GradientError for a loss, parameter or target that does not fit; PolicyError for a policy
    that does not keep parameters and results in float32; and the errors of `convert`.
    """
    chosen = policy_of(policy)
    rule, scale = _rule_and_scale(optimizer, loss_scale, chosen)
    if not isinstance(micro_batches, int) or micro_batches < 1:
        raise TrainingError(f"micro_batches is {micro_batches!r}; a step has at least 1")
    source = Model.load(model, folder=folder)
    aim = losses.objective(in_training(source) if training_mode else source, loss)
    names = trained(View.of(aim.model), aim.loss, parameters, freeze)
    whole, made = _unpainted(aim, names, rule, scale, micro_batches)
    result, report = lowered(whole, chosen, painting)
    return TrainingStep(
        model=result,
        batch=_batch(whole, made),
        state=made.state,
        loss=aim.loss,
        metrics=aim.metrics,
        finite=made.finite,
        applied=made.applied,
        learning_rate=made.learning_rate,
        target=aim.target,
        optimizer=rule,
        loss_scale=scale,
        policy=chosen,
        micro_batches=micro_batches,
        training_mode=training_mode,
        objective=loss,
        fingerprint=fingerprint(source).graph,
        forward=source,
        report=report,
    )


def _rule_and_scale(
    optimizer: optimizers.Optimizer | StatefulOptimizer | str, loss_scale: object, policy: Policy
) -> tuple[optimizers.Optimizer, LossScale | None]:
    """The optimizer, and the loss scale: the one given, else the one around the optimizer, else the policy's."""
    around = None
    if isinstance(optimizer, StatefulOptimizer):
        around = getattr(optimizer, "loss_scale", None)
        optimizer = optimizer.rule
    rule = optimizers.named(optimizer) if isinstance(optimizer, str) else optimizer
    if not isinstance(rule, optimizers.Optimizer):
        raise TrainingError(f"not an optimizer: {optimizer!r}; give an Optimizer such as SGD(0.1), or its name")
    if loss_scale == _POLICY:
        loss_scale = around if around is not None else policy.loss_scale
    return rule, scales.get(loss_scale)


def _unpainted(
    aim: Objective, names: Sequence[str], rule: optimizers.Optimizer, scale: LossScale | None, micro_batches: int
) -> tuple[Model, Update]:
    """The whole step in float32: loss, metrics, flags and new state are its outputs."""
    ready, initial, buffers = with_inputs(aim.model, aim.loss, names)
    b = Builder.of(ready)
    scaling = Scaling.of(b, scale)
    gradients = backward(b, {aim.loss: scaling.seed(b)}, names)
    made = append_update(b, initial, gradients, rule, scaling, micro_batches=micro_batches, buffers=buffers)
    told = [declared_scalar(aim.loss, aim.shape), *map(declared_scalar, aim.metrics)]
    return with_outputs(b.model(), told, (made.finite, made.applied, *(s.output for s in made.state))), made


def _batch(whole: Model, made: Update) -> tuple[str, ...]:
    """The inputs that are neither state nor the learning rate, nor have a value already."""
    taken = {s.input for s in made.state} | {made.learning_rate}
    taken |= {t.name for t in whole.proto.graph.initializer}
    return tuple(v.name for v in whole.proto.graph.input if v.name not in taken)


def with_initializers(model: Model, values: Mapping[str, Array]) -> Model:
    """The model with other values in some initializers."""
    proto = clone(model.proto)
    for tensor in proto.graph.initializer:
        if tensor.name in values:
            tensor.CopyFrom(from_array(values[tensor.name], tensor.name))
    return replace(model, proto=proto)
