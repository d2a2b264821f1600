"""Objectives: a model with its loss, which is a value of the model or appended to it, with inputs for targets."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import onnx.helper

from amp_rewrite.dtypes import DType
from amp_rewrite.errors import TrainingError
from amp_rewrite.files.model import Model
from amp_rewrite.ir.op_classes import LABEL_LOSSES
from amp_rewrite.ir.schema import TENSOR
from amp_rewrite.rewrite.autodiff.builder import Builder
from amp_rewrite.rewrite.autodiff.facts import Shape
from amp_rewrite.rewrite.passes.inline import inlined
from amp_rewrite.train.objective.divisor import append_divisor
from amp_rewrite.train.objective.formulas import LOSSES
from amp_rewrite.train.objective.loss_text import LossTerm, terms
from amp_rewrite.train.objective.prediction import CLASSES, AppendedLoss, Prediction, TargetInput

REGION = "amp.loss"


@dataclass(frozen=True)
class Objective:
    """A model that contains its loss: names of the loss and of the metrics, all float32.

    Metrics are scalars. The loss has one element: its `shape` is () or all ones. `weight`: a float32 scalar, what a
    loss of the model's own divides by, if that is known. `notes`: sentences for the report.
    """

    model: Model
    loss: str
    shape: tuple[int, ...] = ()
    metrics: tuple[str, ...] = ()
    targets: tuple[TargetInput, ...] = ()
    notes: tuple[str, ...] = ()
    weight: str = ""

    @property
    def scalars(self) -> tuple[str, ...]:
        """What a step computes besides the loss: metrics, then the weight."""
        return (*self.metrics, self.weight) if self.weight else self.metrics


def objective(model: Model, loss: str) -> Objective:
    """Return the model with its loss: the name of a value with one element, or a text.

    A text is LOSS(PREDICTION[, TARGET][, OPTION=VALUE, …]), or a sum of such terms and of values, each perhaps times
    a number: "cross_entropy(logits, label, label_smoothing=0.1) + 0.5 * aux_loss". PREDICTION: a value of the model.
    TARGET: an input of the model, or the name of a new input, by default "targets". `formulas` has the losses.

    Cross entropies and kl_divergence take logits or probabilities: the result of a Softmax or Sigmoid is replaced by
    what goes into it, and other values in [0, 1] are taken for probabilities. from_logits=True or False decides.

    TrainingError for an unknown loss, option or value, a loss that is not a float32 scalar, and targets that do not
    fit.
    """
    if not isinstance(loss, str):
        raise TrainingError(
            f"the loss is {loss!r}, not text; use the name of a value, or text such as cross_entropy(LOGITS, TARGETS)"
        )
    b = Builder.of(inlined(model), region=REGION)
    summed = terms(loss, lambda name: b.known(name) is not None, {name: f.options for name, f in LOSSES.items()})
    if len(summed) == 1 and not summed[0].loss and summed[0].factor == 1:
        shape, weight = _ones(b, loss), _weight(b, (loss,))
        labels = _labels(b, bool(weight))
        return Objective(b.model(), loss, shape, targets=() if labels is None else (labels,), weight=weight)
    notes: list[str] = []
    computed = _appended(b, summed, notes)
    metrics = {name: value for one in reversed(computed) for name, value in one.metrics.items()}
    if len(summed) > 1:
        metrics.update({term.loss: one.value for term, one in zip(summed, computed, strict=True) if term.loss})
    own = [term.prediction for term in summed if not term.loss]
    weight = _weight(b, own) if len(own) == len(summed) else ""
    names = {name: b.fresh(name) for name in ("loss", *metrics)}
    for name, source in {"loss": _sum(b, summed, computed), **metrics}.items():
        b.append(onnx.helper.make_node("Identity", [source], [names[name]], name=b.fresh(f"{REGION}/{name}")))
    targets = tuple(dict.fromkeys(one.target for one in computed if one.target is not None))
    return Objective(b.model(), names["loss"], (), tuple(names[m] for m in metrics), targets, tuple(notes), weight)


def _appended(b: Builder, summed: Sequence[LossTerm], notes: list[str]) -> list[AppendedLoss]:
    """Append the terms of a loss."""
    declared: dict[str, DType] = {}
    computed = []
    for term in summed:
        if not term.loss:
            scalar = b.reshape(term.prediction, []) if _ones(b, term.prediction) != () else term.prediction
            computed.append(AppendedLoss(scalar, {}, None))
            continue
        dtype = b.dtype(term.prediction)
        if b.known(term.prediction) is None:
            raise TrainingError(f"the model has no value {term.prediction!r}; {_outputs(b)}")
        if dtype is None or not dtype.floating:
            raise TrainingError(f"{term.prediction!r} is {type_name(dtype)}; use a floating prediction")
        formula, prediction = LOSSES[term.loss], Prediction(b, term, declared, notes)
        if formula.activation is not None:
            prediction.decide(formula.activation)
        computed.append(formula.append(prediction))
    return computed


def _sum(b: Builder, summed: Sequence[LossTerm], computed: Sequence[AppendedLoss]) -> str:
    parts = [
        one.value if term.factor == 1 else b.op("Mul", one.value, b.scalar(term.factor, DType.FLOAT))
        for term, one in zip(summed, computed, strict=True)
    ]
    return parts[0] if len(parts) == 1 else b.op("Sum", *parts)


def _weight(b: Builder, losses: Sequence[str]) -> str:
    """Append what a sum of the model's own losses divides by; "" where that is not known."""
    divisor = append_divisor(b, losses)
    if divisor is None:
        return ""
    name = b.fresh("weight")
    b.append(onnx.helper.make_node("Identity", [divisor], [name], name=b.fresh(f"{REGION}/weight")))
    return name


def _labels(b: Builder, counted: bool) -> TargetInput | None:
    """The input with the classes of the model's own loss; None without one, and with several.

    `counted`: a batch weighs what counts; else there is none with an ignored class, either.

    The input is checked, because a class out of range makes onnxruntime's CPU kernel fail without naming the input,
    and other kernels read outside the array.
    """
    inputs = {formal.name for formal in b.graph.input} - {tensor.name for tensor in b.graph.initializer}
    losses = [n for n in b.graph.node if n.op_type in LABEL_LOSSES and not n.domain and n.input[1] in inputs]
    ignored = next((a.i for a in losses[0].attribute if a.name == "ignore_index"), None) if len(losses) == 1 else None
    if len(losses) != 1 or (ignored is not None and not counted):
        return None
    shape = b.shape(losses[0].input[0])
    classes = shape[1] if shape is not None and len(shape) > 1 else None
    count = classes if isinstance(classes, int) else None
    return TargetInput(losses[0].input[1], count, ignored, kind=CLASSES, axis=1)


def _ones(b: Builder, name: str) -> tuple[int, ...]:
    """Return the shape of a loss that is a value of the model. TrainingError unless it is one float32 number."""
    value = b.known(name)
    if value is None:
        losses = ", ".join(f"{n}(…)" for n in LOSSES)
        raise TrainingError(f"the model has no value {name!r} that could be the loss; {_outputs(b)}, or use {losses}")
    kind = b.facts.view.types[value.id]
    if kind is None or kind.container != TENSOR or kind.dtype is not DType.FLOAT:
        what = type_name(kind.dtype if kind else None)
        raise TrainingError(f"the loss {name!r} is {what}, but a training step needs a float32 loss; cast it")
    shape = b.shape(name)
    if shape is None or any(dim != 1 for dim in shape):
        raise TrainingError(
            f"the loss {name!r} has {_dims(shape)}, but a loss is one number; reduce it to its mean first"
        )
    return (1,) * len(shape)


def type_name(dtype: DType | None) -> str:
    """Return the type as messages spell it."""
    return dtype.spelling if dtype else "of unknown type"


def _dims(shape: Shape | None) -> str:
    return "an unknown shape" if shape is None else f"shape {list(shape)}"


def _outputs(b: Builder) -> str:
    return "its outputs are " + ", ".join(repr(v.name) for v in b.graph.output)
