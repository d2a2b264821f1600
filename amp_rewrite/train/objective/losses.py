"""Objectives: a model with its loss, which is a value of the model or appended to it, with inputs for targets."""

from __future__ import annotations

from dataclasses import dataclass, replace

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
from amp_rewrite.train.objective.loss_text import parsed
from amp_rewrite.train.objective.prediction import CLASSES, Prediction, TargetInput

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
    target: TargetInput | None = None
    notes: tuple[str, ...] = ()
    weight: str = ""

    @property
    def scalars(self) -> tuple[str, ...]:
        """What a step computes besides the loss: metrics, then the weight."""
        return (*self.metrics, self.weight) if self.weight else self.metrics


def objective(model: Model, loss: str) -> Objective:
    """Return the model with its loss: the name of a value with one element, or a text.

    A text is LOSS(PREDICTION[, TARGET][, OPTION=VALUE, …]): "cross_entropy(logits, label, label_smoothing=0.1)".
    PREDICTION: a value of the model. TARGET: an input of the model, or the name of a new input, by default "targets".
    `formulas` has the losses.

    Cross entropies and kl_divergence take logits, or with from_logits=False probabilities. The result of a Softmax or
    Sigmoid is replaced by what goes into it.

    TrainingError for an unknown loss, option or value, a loss that is not a float32 scalar, and targets that do not
    fit.
    """
    if not isinstance(loss, str):
        raise TrainingError(
            f"the loss is {loss!r}, not text; use the name of a value, or text such as cross_entropy(LOGITS, TARGETS)"
        )
    b = Builder.of(inlined(model), region=REGION)
    options = {name: formula.options for name, formula in LOSSES.items()}
    call = None if b.known(loss) is not None else parsed(loss, lambda name: b.known(name) is not None, options)
    if call is None:
        shape, weight = _ones(b, loss), _weight(b, loss)
        return Objective(b.model(), loss, shape, target=_labels(b, bool(weight)), weight=weight)
    if b.known(call.prediction) is None:
        raise TrainingError(f"the model has no value {call.prediction!r}; {_outputs(b)}{_of_terms(call.prediction)}")
    dtype = b.dtype(call.prediction)
    if dtype is None or not dtype.floating:
        raise TrainingError(f"{call.prediction!r} is {type_name(dtype)}; use a floating prediction")
    formula, prediction = LOSSES[call.loss], Prediction(b, call)
    if formula.activation is not None:
        prediction.decide(formula.activation)
    made = formula.append(prediction)
    names = {name: b.fresh(name) for name in ("loss", *made.metrics)}
    for name, source in {"loss": made.value, **made.metrics}.items():
        b.append(onnx.helper.make_node("Identity", [source], [names[name]], name=b.fresh(f"{REGION}/{name}")))
    target = None if made.target is None else replace(made.target, prediction=call.prediction)
    metrics = tuple(names[metric] for metric in made.metrics)
    return Objective(b.model(), names["loss"], (), metrics, target, tuple(prediction.notes))


def _of_terms(name: str) -> str:
    """Return advice on a sum of losses; "" for the name of a value."""
    return "; a loss is one value or one formula, so compute sums in the model" if {*name} & {*"+*()"} else ""


def _weight(b: Builder, loss: str) -> str:
    """Append what a loss of the model's own divides by; "" where that is not known."""
    divisor = append_divisor(b, loss)
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
        raise TrainingError(
            f"the model has no value {name!r} that could be the loss; {_outputs(b)}, or use {losses}{_of_terms(name)}"
        )
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
