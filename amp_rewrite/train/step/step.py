"""A training step as one ONNX model, from batch and state to loss, metrics and new state, with its report and file."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Unpack

import numpy as np
from onnx.numpy_helper import from_array

from amp_rewrite.dtypes import DType
from amp_rewrite.errors import TrainingError, count
from amp_rewrite.files.casting import Array
from amp_rewrite.files.fingerprint import fingerprint
from amp_rewrite.files.model import Model
from amp_rewrite.files.protos import clone, refill
from amp_rewrite.files.store import ByteProgress
from amp_rewrite.ir.versions import FIRST_IR_WITH_FREE_INITIALIZERS
from amp_rewrite.ir.view import View
from amp_rewrite.reports.report import Report
from amp_rewrite.reports.result import Result
from amp_rewrite.reports.rows import Row
from amp_rewrite.reports.work import ALIGNED, better_size, misaligned
from amp_rewrite.rewrite.autodiff.lowering.forms import at_gradient_opset
from amp_rewrite.rewrite.autodiff.lowering.random_numbers import initial_random_state
from amp_rewrite.rewrite.passes.inline import inlined
from amp_rewrite.train import loss_scale as scales
from amp_rewrite.train import policy as policies
from amp_rewrite.train.arguments import checked_arguments, quoted, whole_number
from amp_rewrite.train.keras.optimizer import StatefulOptimizer
from amp_rewrite.train.loss_scale import LossScale, serialize
from amp_rewrite.train.objective import losses
from amp_rewrite.train.objective.parameters import FROZEN, TRAINED, ParameterRow
from amp_rewrite.train.objective.prediction import TargetInput
from amp_rewrite.train.policy import Policy
from amp_rewrite.train.step import assembly
from amp_rewrite.train.step.assembly import ModelOptions
from amp_rewrite.train.update.graph import Scaling, StateVariable, append_update
from amp_rewrite.train.update.optimizer import Optimizer
from amp_rewrite.train.update.optimizers import parse_optimizer

_MAX_WIDTH = 60
"""Maximum width of the name column."""


def model_name(model: Model) -> str:
    """Return the name of a model's file, or of its graph, for reports."""
    return model.path.name if model.path is not None else model.proto.graph.name or "model"


@dataclass(frozen=True, repr=False)
class TrainingReport(Result):
    """The report of a training step: its parameters, its loss and its conversion.

    Attributes:
        model: name of the model.
        loss: the `loss` argument of `training_step`.
        parameters: the float32 initializers, each with its role.
        notes: how the loss reads its prediction, and other changes to the model.
        conversion: the report of the conversion; None if the policy lowers nothing.

    Example:
        >>> from amp_rewrite.train import training_step
        >>> step = training_step("model.onnx", loss="cross_entropy(probability, label)", policy="float32")
        >>> step.report.notes
        ("cross_entropy reads the logits 'linear_2' in place of 'probability', which a Softmax computes",)
        >>> [row.name for row in step.report.trained][:2]
        ['first.weight', 'first.bias']
    """

    model: str
    loss: str
    parameters: tuple[ParameterRow, ...]
    notes: tuple[str, ...]
    conversion: Report | None

    @property
    def trained(self) -> tuple[ParameterRow, ...]:
        """The trained parameters."""
        return tuple(row for row in self.parameters if row.role == TRAINED)

    @property
    def rows(self) -> tuple[Row, ...]:
        """The ops of the conversion; empty under policy float32."""
        return () if self.conversion is None else tuple(self.conversion.rows)

    @property
    def brief(self) -> str:
        """Model, loss and number of trained parameters, in one line."""
        elements = sum(row.size for row in self.trained)
        parameters = count(len(self.trained), "parameter")
        return f"{self.model}: trains {parameters} ({count(elements, 'element')}) to minimize {self.loss}"

    def table(self) -> str:
        """Return the parameters as a table with the notes below it."""
        lines = []
        for role, heading in ((TRAINED, "trained"), (FROZEN, "not trained")):
            rows = [row for row in self.parameters if row.role == role]
            if rows:
                elements = sum(row.size for row in rows)
                lines.append(f"  {heading}: {len(rows)} ({count(elements, 'element')})")
                width = min(max(len(row.name) for row in rows), _MAX_WIDTH)
                lines += [f"    {row.name:<{width}}  {list(row.shape)!s:<14} {row.why}".rstrip() for row in rows]
        lines += [f"  note: {note}" for note in self.notes]
        return "\n".join(lines) + "\n"

    def text(self, *, verbose: bool = False, command: str = "") -> str:
        """Return the table of parameters and the summary of the conversion. Ends with a newline.

        Args:
            verbose: add every row of the conversion.
            command: the command to suggest as the next step.
        """
        converted = "" if self.conversion is None else "\n" + self.conversion.text(verbose=verbose, command=command)
        return f"{self.brief}\n{self.table()}{converted}"

    def to_json(self) -> str:
        """Return model, loss, notes, parameters and the report of the conversion as JSON."""
        data = {
            "model": self.model,
            "loss": self.loss,
            "notes": self.notes,
            "parameters": [asdict(row) for row in self.parameters],
            "conversion": None if self.conversion is None else self.conversion.to_dict(),
        }
        return json.dumps(data, indent=2, ensure_ascii=False) + "\n"


_POLICY = "policy"  # default of `loss_scale`: the policy's


@dataclass(frozen=True, eq=False)
class TrainingStep:
    """One training step; its fields name the inputs and outputs of `model`.

    Attributes:
        model: the whole step as one model.
        batch: inputs with the batch.
        state: values carried from step to step, float32 and int64 under any policy.
        loss: output with the unscaled loss, a float32 scalar.
        metrics: outputs with the metrics, float32 scalars.
        finite: bool output, True if all gradients of the step are finite.
        applied: bool output, True if the step changed the parameters (with micro-batches, only in the last run).
        learning_rate: float32 scalar input with the rate; a step file has the optimizer's rate as its default.
        gradients: the unscaled float32 gradients that `finite` tests, by parameter.
        target: the input with the targets, if a formula or the model's own loss has one.
        optimizer: the optimizer's arithmetic and hyperparameters.
        owner: the `StatefulOptimizer` passed to `training_step`, which shares its state with the `Trainer`, or None.
        loss_scale: the loss scale, or None.
        policy: the policy.
        micro_batches: runs per step.
        training_mode: True if running statistics are updated and dropout is on.
        objective: the `loss` argument of `training_step`.
        fingerprint: identifies the model in checkpoints.
        forward: the original model.
        report: which parameters are trained and why, and the type of each op.
    """

    model: Model
    batch: tuple[str, ...]
    state: tuple[StateVariable, ...]
    loss: str
    metrics: tuple[str, ...]
    finite: str
    applied: str
    learning_rate: str
    gradients: Mapping[str, str]
    target: TargetInput | None
    optimizer: Optimizer
    owner: StatefulOptimizer | None
    loss_scale: LossScale | None
    policy: Policy
    micro_batches: int
    training_mode: bool
    objective: str
    fingerprint: str
    forward: Model
    report: TrainingReport

    @property
    def parameters(self) -> tuple[str, ...]:
        """Names of the trained initializers."""
        return tuple(s.input for s in self.state if s.name.startswith("parameter/"))

    @property
    def lowered(self) -> bool:
        """True if the policy computes in a low type."""
        return self.policy.lowers is not None

    def initial_state(self) -> dict[str, Array]:
        """Return copies of the initial state by input name, to feed with the first batch and a learning rate."""
        return {s.input: s.initial.copy() for s in self.state}

    def next_state(self, results: Mapping[str, Any]) -> dict[str, Array]:
        """Return the state for the next step by input name, from the results of a run by output name."""
        return {s.input: results[s.output] for s in self.state}

    def evaluation(self) -> tuple[Model, str, tuple[str, ...]]:
        """Return a model from batch and state to loss and metrics, with the names of the loss and the metrics.

        It is the step itself, or in training mode the original float32 model with its loss, in evaluation mode.
        """
        if not self.training_mode:
            return self.model, self.loss, self.metrics
        objective = losses.objective(at_gradient_opset(inlined(self.forward))[0], self.objective)
        model = assembly.with_state(objective.model, self._updated)
        return assembly.with_outputs(model, assembly.loss_outputs(objective), ()), objective.loss, objective.metrics

    @property
    def _updated(self) -> tuple[str, ...]:
        return tuple(s.input for s in self.state if s.name.startswith(("parameter/", "buffer/")))

    def trained(self, state: Mapping[str, Array]) -> Model:
        """Return the original model with the parameters and running statistics of a state (by input name)."""
        return assembly.with_values(self.forward, {name: state[name] for name in self._updated})


@checked_arguments(options=ModelOptions)
def training_step(
    model: object,
    *,
    loss: str,
    optimizer: Optimizer | StatefulOptimizer | str = "sgd",
    loss_scale: object = _POLICY,
    micro_batches: int = 1,
    **options: Unpack[ModelOptions],
) -> TrainingStep:
    """Build one model for a training step: forward pass, backward pass, update and adjustment of the loss scale.

    The method follows Micikevicius et al., *Mixed Precision Training* (2018), section 3. The backward pass starts
    from the loss scale, so gradients are scaled; the loss itself is not. The step casts the float32 parameters to the
    low type once. The gradients are cast back to float32, unscaled, tested and applied in float32. With a dynamic
    scale, a step with nonfinite gradients changes only the scale, which it halves. With a fixed scale, or none, such a
    step is applied, and `finite` is False. One conversion decides the types of both passes together.

    In training mode, BatchNormalization uses batch statistics and updates the running ones, unless they are frozen by
    name, and Dropout is active. Otherwise both run as in the model. With micro-batches, the last run takes the step
    with the mean of all gradients.

    A process chooses a policy with `set_policy`, or by enabling or disabling the graph rewrite.

    Args:
        model: a model, as for `convert`; it is not changed.
        loss: name of a float32 value with one element, or a formula: "cross_entropy(LOGITS, TARGETS)"; see
            `losses.objective`.
        optimizer: an Optimizer, text such as "adam,lr=0.001", or a `StatefulOptimizer`, which keeps its state.
        loss_scale: "dynamic", a number, None or a LossScale; by default the policy's ("dynamic" for mixed_float16).
        micro_batches: runs per step.
        **options: policy (by default that of sessions if the process chose one, otherwise mixed_float16); parameters
            and freeze (globs that match initializers to train, or not to train); training_mode (True updates running
            statistics and enables dropout); seed (of Dropout and random ops); folder (of the external data of a
            ModelProto); and lists, level, target, safety, keep and lower of `convert`.

    Returns:
        The step, for a `Trainer`.

    Raises:
        TrainingError: the loss, a parameter or a target is invalid.
        GradientError: an op has no gradient rule.
        PolicyError: the policy does not keep parameters and results in float32.
        AmpRewriteError: as for `convert`.

    Example:
        >>> from amp_rewrite.train import SGD, training_step
        >>> step = training_step("model.onnx", loss="cross_entropy(probability, label)", optimizer=SGD(0.1))
        >>> step.batch
        ('image', 'label')
    """
    source = assembly.TrainingSource.of(model, options, policies.policy_of_steps)
    return build_step(source, loss, optimizer, loss_scale, micro_batches)


def build_step(
    source: assembly.TrainingSource,
    loss: str,
    optimizer: Optimizer | StatefulOptimizer | str,
    loss_scale: object = _POLICY,
    micro_batches: int = 1,
) -> TrainingStep:
    """Build the training step of a model; see `training_step`."""
    policy, model = source.policy, source.model
    owner = optimizer if isinstance(optimizer, StatefulOptimizer) else None
    if loss_scale == _POLICY:
        scale_of_optimizer = getattr(optimizer, "loss_scale", None)
        loss_scale = policy.loss_scale if scale_of_optimizer is None else scale_of_optimizer
    rule = parse_optimizer(optimizer) if isinstance(optimizer, str) else optimizer if owner is None else owner.rule
    if not isinstance(rule, Optimizer):
        raise TrainingError(f"{quoted(optimizer)} is not an optimizer; pass an Optimizer such as SGD(0.1), or its name")
    scale = scales.get(loss_scale)
    if scale is not None and type(scale) not in (scales.FixedLossScale, scales.DynamicLossScale):
        raise TrainingError(
            f"{type(scale).__name__} is a custom loss scale, but a training step computes its scale in the graph; use a"
            " DynamicLossScale or a number, or a LossScaleOptimizer in a custom loop"
        )
    micro_batches = whole_number("micro_batches", micro_batches, 1)
    prepared = assembly.Prepared.of(source, loss)
    b, objective = prepared.builder, prepared.objective
    scaling = Scaling.of(b, scale)
    gradients = prepared.gradients(scaling.scale or b.scalar(1.0, DType.FLOAT))
    draws = None if prepared.random is None else (prepared.random, initial_random_state(source.seed))
    update = append_update(b, prepared.initial, gradients, rule, scaling, micro_batches, prepared.buffers, draws)

    whole = prepared.with_results((update.finite, update.applied, *(s.output for s in update.state)))
    result, report = assembly.lowered(whole, policy, source.painting)
    notes = (*prepared.notes, *_size_hints(result, policy.lowers))
    return TrainingStep(
        **vars(update),
        model=result,
        batch=assembly.batch_inputs(whole, update.learning_rate, *(s.input for s in update.state)),
        loss=objective.loss,
        metrics=objective.metrics,
        target=objective.target,
        optimizer=rule,
        owner=owner,
        loss_scale=scale,
        policy=policy,
        micro_batches=micro_batches,
        training_mode=source.training_mode,
        objective=loss,
        fingerprint=fingerprint(model).graph,
        forward=model,
        report=TrainingReport(model_name(model), loss, prepared.rows, notes, report),
    )


def _size_hints(model: Model, low: DType | None) -> tuple[str, ...]:
    """Return a note on the fixed dimensions of lowered products that are not multiples of 8, if any."""
    sizes = [] if low is None else sorted({size for _, _, size in misaligned(View.of(model), low)})
    if low is None or not sizes:
        return ()
    pads = ", ".join(f"{size} (pad to {better_size(size)})" for size in sizes[:4])
    more = f" and {len(sizes) - 4} more" if len(sizes) > 4 else ""
    return (
        f"products in {low.spelling} have dimensions that are not multiples of {ALIGNED}: {pads}{more}; tensor cores"
        f" run best on multiples of {ALIGNED}, and below 256 on powers of two",
    )


KEY = "amp_rewrite.training_step"
VERSION = 1
_NOT_SAVED = ("model", "forward", "report", "owner")
"""Fields of a step that are not in the metadata of its file."""


@checked_arguments()
def save_step(
    step: TrainingStep,
    path: str | Path,
    *,
    overwrite: bool = False,
    external_data: bool | None = None,
    progress: ByteProgress | None = None,
) -> None:
    """Write a step and its initial state to an ONNX file, atomically; see `Model.save`.

    Args:
        step: the step.
        path: the file to write.
        overwrite: True replaces an existing file.
        external_data: as for `Model.save`.
        progress: called as `progress(done, total)` with bytes.

    Raises:
        TrainingError: the model has an IR version below 4, in which inputs cannot have default values.

    Example:
        >>> from amp_rewrite.train import save_step, training_step
        >>> save_step(training_step("model.onnx", loss="cross_entropy(probability, label)"), "step.onnx")
    """
    if step.model.proto.ir_version < FIRST_IR_WITH_FREE_INITIALIZERS:
        raise TrainingError(
            f"the model has IR version {step.model.proto.ir_version}, in which inputs cannot have default values; raise"
            f" it to {FIRST_IR_WITH_FREE_INITIALIZERS}"
        )
    proto = clone(step.model.proto)
    rate = np.array(step.optimizer.rate_at(next(int(v.initial) for v in step.state if v.name == "step")), np.float32)
    defaults = {**step.initial_state(), step.learning_rate: rate}
    proto.graph.initializer.extend(from_array(array, name) for name, array in defaults.items())
    # the model may itself be a saved step
    refill(proto, "metadata_props", [p for p in proto.metadata_props if p.key != KEY])
    metadata = {
        "version": VERSION,
        **{name: value for name, value in vars(step).items() if name not in _NOT_SAVED},
        "state": [[s.name, s.input, s.output] for s in step.state],
        "target": None if step.target is None else asdict(step.target),
        "optimizer": serialize(step.optimizer),
        "loss_scale": None if step.loss_scale is None else serialize(step.loss_scale),
        "policy": step.policy.name,
    }
    proto.metadata_props.add(key=KEY, value=json.dumps(metadata))
    replace(step.model, proto=proto).save(path, overwrite=overwrite, external_data=external_data, progress=progress)
