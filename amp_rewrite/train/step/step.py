"""A training step as one ONNX model: batch and state in; loss, metrics and new state out. Its report, and its file."""

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
from amp_rewrite.train.door import door, stated, whole_number
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
from amp_rewrite.train.update.optimizers import named

_WIDTH = 60
"""Most characters of a name before its shape."""


def model_name(model: Model) -> str:
    """Return the name of a model for people: its file's, else its graph's."""
    return model.path.name if model.path is not None else model.proto.graph.name or "model"


@dataclass(frozen=True, repr=False)
class TrainingReport(Result):
    """The report of a training step: its parameters, its loss, and its conversion.

    Attributes:
        model: the model's name.
        loss: the loss as text.
        parameters: each float32 initializer with its role.
        notes: how the loss reads its prediction, and what else was changed to train the model.
        conversion: the type of each op; None under a policy that lowers nothing.

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
        """The ops of the conversion; none under policy float32."""
        return () if self.conversion is None else tuple(self.conversion.rows)

    @property
    def brief(self) -> str:
        """Model, loss, and number of trained parameters."""
        numbers = sum(row.size for row in self.trained)
        parameters = count(len(self.trained), "parameter")
        return f"{self.model}: trains {parameters} of {count(numbers, 'number')} by {self.loss}"

    def table(self) -> str:
        """Return the table of parameters and the notes as text."""
        lines = []
        for role, words in ((TRAINED, "trained"), (FROZEN, "not trained")):
            own = [row for row in self.parameters if row.role == role]
            if own:
                numbers = sum(row.size for row in own)
                lines.append(f"  {words}: {len(own)} of {count(numbers, 'number')}")
                width = min(max(len(row.name) for row in own), _WIDTH)
                lines += [f"    {row.name:<{width}}  {list(row.shape)!s:<14} {row.why}".rstrip() for row in own]
        lines += [f"  note: {note}" for note in self.notes]
        return "\n".join(lines) + "\n"

    def text(self, *, verbose: bool = False, command: str = "") -> str:
        """Return the table of parameters, and the summary of the conversion. Ends with a newline.

        Args:
            verbose: add every row of the conversion.
            command: the next step after the conversion.
        """
        converted = "" if self.conversion is None else "\n" + self.conversion.text(verbose=verbose, command=command)
        return f"{self.brief}\n{self.table()}{converted}"

    def to_json(self) -> str:
        """Return JSON: model, loss, notes, parameters, and the report of the conversion."""
        data = {
            "model": self.model,
            "loss": self.loss,
            "notes": self.notes,
            "parameters": [asdict(row) for row in self.parameters],
            "conversion": None if self.conversion is None else self.conversion.to_dict(),
        }
        return json.dumps(data, indent=2, ensure_ascii=False) + "\n"


_POLICY = "policy"  # the default for `loss_scale`: the policy's loss scale


@dataclass(frozen=True, eq=False)
class TrainingStep:
    """One training step; its fields name the inputs and outputs of `model`.

    Attributes:
        model: the step as one model.
        batch: inputs fed to every step.
        state: values carried from step to step, float32 and int64 under any policy.
        loss: a float32 scalar, not scaled.
        metrics: float32 scalars.
        finite: bool, all gradients of the step are finite.
        applied: bool, the step changed the parameters (with micro-batches only the last run can).
        learning_rate: the input for the rate; the optimizer's is its default in a step file.
        gradients: the float32 values that `finite` tests, by parameter, unscaled.
        target: the target of a loss given as text; of others, the classes of the model's own loss, if it shows them.
        optimizer: the optimizer's arithmetic.
        owner: the optimizer object that was given; it shows the state of the `Trainer`. None for a bare Optimizer.
        loss_scale: the loss scale.
        policy: the policy.
        micro_batches: runs per step.
        training_mode: True if statistics are trained.
        objective: the `loss` argument of `training_step`.
        fingerprint: identifies the model in checkpoints.
        forward: the trained model.
        report: what is trained and why, and the type of each op.
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
        """Return copies of the initial state by input name: the feeds of the first step besides batch and rate."""
        return {s.input: s.initial.copy() for s in self.state}

    def next_state(self, results: Mapping[str, Any]) -> dict[str, Array]:
        """Return the state by input name for the next step."""
        return {s.input: results[s.output] for s in self.state}

    def evaluation(self) -> tuple[Model, str, tuple[str, ...]]:
        """Return a model from batch and state to loss and metrics, with the names of both.

        It is the step itself. For a step in training mode it is the original model in float32, with running
        statistics and without dropout.
        """
        if not self.training_mode:
            return self.model, self.loss, self.metrics
        aim = losses.objective(at_gradient_opset(inlined(self.forward))[0], self.objective)
        at_state = assembly.with_state(aim.model, self._changed)
        return assembly.with_outputs(at_state, assembly.outputs_of(aim), ()), aim.loss, aim.metrics

    @property
    def _changed(self) -> tuple[str, ...]:
        return tuple(s.input for s in self.state if s.name.startswith(("parameter/", "buffer/")))

    def trained(self, state: Mapping[str, Array]) -> Model:
        """Return the trained model with the parameters and running statistics of a state."""
        return assembly.with_values(self.forward, {name: state[name] for name in self._changed})


@door(options=ModelOptions)
def training_step(
    model: object,
    *,
    loss: str,
    optimizer: Optimizer | StatefulOptimizer | str = "sgd",
    loss_scale: object = _POLICY,
    micro_batches: int = 1,
    **options: Unpack[ModelOptions],
) -> TrainingStep:
    """Build one model for a training step: forward pass, backward pass, update, and the loss scale's adjustment.

    The backward pass starts from the loss scale; the loss itself is not scaled. So gradients are scaled and, under a
    low policy, low. They are widened, unscaled, tested and applied in float32 to float32 parameters; each step casts
    one low copy of these (Micikevicius et al., Mixed Precision Training, 2018, section 3). With a dynamic scale, a
    step with nonfinite gradients changes only the scale, which it halves. With a fixed scale, or none, such a step is
    applied, and `finite` is False. Forward and backward pass are painted together.

    In training mode BatchNormalization uses batch statistics and updates the running ones, unless these are frozen by
    name, and Dropout drops; otherwise both behave as in the model. With micro-batches the last run makes the step, with
    the mean of their gradients.

    A process chooses a policy by `set_policy`, or by enabling or disabling the graph rewrite.

    Args:
        model: as `convert` takes it; it is not changed.
        loss: a float32 value with one element, or text: "cross_entropy(LOGITS, TARGETS)", see `losses.objective`.
        optimizer: an Optimizer, text such as "adam,lr=0.001", or an optimizer object, which brings its state.
        loss_scale: "dynamic", a number, None or a LossScale; by default the policy's ("dynamic" for mixed_float16).
        micro_batches: runs per step.
        **options: policy (by default that of sessions if the process chose one, else mixed_float16), parameters and
            freeze (globs on initializers to train, and to leave as they are), training_mode (train statistics and
            drop), seed (of Dropout and random ops), folder (of the external data of a ModelProto); and lists, level,
            target, safety, keep and lower of `convert`.

    Returns:
        The step, for a `Trainer`.

    Raises:
        TrainingError: the loss, a parameter or a target does not fit.
        GradientError: an op has no gradient rule.
        PolicyError: the policy does not keep parameters and results in float32.
        AmpRewriteError: as `convert` raises it.

    Example:
        >>> from amp_rewrite.train import SGD, training_step
        >>> step = training_step("model.onnx", loss="cross_entropy(probability, label)", optimizer=SGD(0.1))
        >>> step.batch
        ('image', 'label')
    """
    subject = assembly.Subject.of(model, options, policies.policy_of_steps)
    return step_of(subject, loss, optimizer, loss_scale, micro_batches)


def step_of(
    subject: assembly.Subject,
    loss: str,
    optimizer: Optimizer | StatefulOptimizer | str,
    loss_scale: object = _POLICY,
    micro_batches: int = 1,
) -> TrainingStep:
    """Build the step of a model; see `training_step`."""
    policy, source = subject.policy, subject.source
    owner = optimizer if isinstance(optimizer, StatefulOptimizer) else None
    if loss_scale == _POLICY:
        own = getattr(optimizer, "loss_scale", None)
        loss_scale = policy.loss_scale if own is None else own
    rule = named(optimizer) if isinstance(optimizer, str) else optimizer if owner is None else owner.rule
    if not isinstance(rule, Optimizer):
        raise TrainingError(f"not an optimizer: {stated(optimizer)}; pass an Optimizer such as SGD(0.1), or its name")
    scale = scales.get(loss_scale)
    if scale is not None and type(scale) not in (scales.FixedLossScale, scales.DynamicLossScale):
        raise TrainingError(
            f"{type(scale).__name__} is a loss scale of your own, but a training step computes its scale in the graph;"
            " use a DynamicLossScale or a number here, or a LossScaleOptimizer with it in a custom loop"
        )
    micro_batches = whole_number("micro_batches", micro_batches, 1)
    ready = assembly.Prepared.of(subject, loss)
    b, aim = ready.b, ready.aim
    scaling = Scaling.of(b, scale)
    gradients = ready.gradients(scaling.scale or b.scalar(1.0, DType.FLOAT))
    draws = None if ready.random is None else (ready.random, initial_random_state(subject.seed))
    update = append_update(b, ready.initial, gradients, rule, scaling, micro_batches, ready.buffers, draws)

    whole = ready.with_results((update.finite, update.applied, *(s.output for s in update.state)))
    result, report = assembly.lowered(whole, policy, subject.painting)
    notes = (*ready.notes, *_size_hints(result, policy.lowers))
    return TrainingStep(
        **vars(update),
        model=result,
        batch=assembly.batch_of(whole, update.learning_rate, *(s.input for s in update.state)),
        loss=aim.loss,
        metrics=aim.metrics,
        target=aim.target,
        optimizer=rule,
        owner=owner,
        loss_scale=scale,
        policy=policy,
        micro_batches=micro_batches,
        training_mode=subject.training_mode,
        objective=loss,
        fingerprint=fingerprint(source).graph,
        forward=source,
        report=TrainingReport(model_name(source), loss, ready.rows, notes, report),
    )


def _size_hints(model: Model, low: DType | None) -> tuple[str, ...]:
    """Return one sentence on the fixed dimensions of a lowered step besides multiples of 8; none without any."""
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
_LEFT_OUT = ("model", "forward", "report", "owner")
"""Fields of a step that the metadata lack, or spell in another way."""


@door()
def save_step(
    step: TrainingStep,
    path: str | Path,
    *,
    overwrite: bool = False,
    external_data: bool | None = None,
    progress: ByteProgress | None = None,
) -> None:
    """Write a step with its initial state, atomically; see `Model.save`.

    Args:
        step: the step.
        path: the file to write.
        overwrite: replace an existing file.
        external_data: as `Model.save` takes it.
        progress: called as `progress(done, total)` with bytes.

    Raises:
        TrainingError: the model has an IR version below 4, which has no default values.

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
    # the model may have been a step itself
    refill(proto, "metadata_props", [p for p in proto.metadata_props if p.key != KEY])
    described = {
        "version": VERSION,
        **{name: value for name, value in vars(step).items() if name not in _LEFT_OUT},
        "state": [[s.name, s.input, s.output] for s in step.state],
        "target": None if step.target is None else asdict(step.target),
        "optimizer": serialize(step.optimizer),
        "loss_scale": None if step.loss_scale is None else serialize(step.loss_scale),
        "policy": step.policy.name,
    }
    proto.metadata_props.add(key=KEY, value=json.dumps(described))
    replace(step.model, proto=proto).save(path, overwrite=overwrite, external_data=external_data, progress=progress)
