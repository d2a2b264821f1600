"""The prediction of a loss: its logits or probabilities in float32, its options and its targets."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from amp_rewrite.dtypes import DType
from amp_rewrite.errors import TrainingError
from amp_rewrite.files.casting import Array
from amp_rewrite.ir.attributes import int_attribute
from amp_rewrite.ir.patterns.written_out import before_casts
from amp_rewrite.rewrite.autodiff.builder import Builder, Shape

DEFAULT_TARGET = "targets"
CLASSES, PROBABILITIES = "classes", "shares of classes"
BINARY, NUMBERS = "yes or no", "numbers"
"""Kinds of targets: class indices, class probabilities, independent zeros and ones, and other numbers."""
_MIN_PROBABILITY = 1e-12
"""Minimum of a probability in a logarithm."""


@dataclass(frozen=True, slots=True)
class TargetInput:
    """The input with the targets of a loss.

    `classes`: number of classes, for class indices. `ignored`: class index of ignored rows. `kind`: one of the kinds
    above. `axis`: the class axis of the prediction. `class_weights`: the weight of each class in the mean.
    """

    name: str
    classes: int | None = None
    ignored: int | None = None
    kind: str = NUMBERS
    axis: int | None = None
    class_weights: tuple[float, ...] | None = None

    def counts(self, classes: Array) -> tuple[float, float]:
        """Return the sum of class weights over the rows that are not ignored, and the number of these rows."""
        counted = classes[classes != self.ignored]
        if self.class_weights is None:
            return float(counted.size), float(counted.size)
        return float(np.array(self.class_weights, np.float32)[counted].sum(dtype=np.float64)), float(counted.size)


@dataclass(slots=True)
class Prediction:
    """The prediction in a loss formula, with the builder of the loss.

    `name`: the prediction named in the formula. `target_name`: the target named in the formula, if any. `x`: the
    prediction in float32, as logits or probabilities. `softmax`: the axis of the Softmax that reads the logits `x`.
    `permutation`: moves the class axis to axis 1. `notes`: sentences for the report.
    """

    b: Builder
    loss: str
    name: str
    target_name: str | None
    options: Mapping[str, object]
    notes: list[str] = field(default_factory=list)
    x: str = ""
    logits: bool = True
    softmax: int | None = None
    permutation: list[int] = field(default_factory=list)
    target: TargetInput | None = None

    def __post_init__(self) -> None:
        self.x = self.b.cast(self.name, DType.FLOAT)

    @property
    def one(self) -> str:
        return self.b.scalar(1.0, DType.FLOAT)

    # -- logits and probabilities ----------------------------------------------------------------------

    def find_logits(self, kind: str) -> None:
        """Determine whether the prediction consists of logits; use the input of a Softmax or Sigmoid in its place."""
        view, value, from_logits = self.b.view, self.b.original(self.name), self.option("from_logits")
        assert value is not None
        computed, _ = before_casts(view, value.id)
        op, rank = view.producer(computed), len(self.b.shapes.get(computed, ()))
        activation = op is not None and (op.kind == "Sigmoid" or (op.kind == "Softmax" and rank > 0))
        if op is not None and activation and op.kind == kind and not from_logits:
            assert op.inputs[0] is not None
            self.softmax = int_attribute(op.node, "axis", -1) % rank if kind == "Softmax" else None
            logits = view.value_name(op.inputs[0])
            self.x = self.b.cast(logits, DType.FLOAT)
            self.notes.append(
                f"{self.loss} reads the logits {logits!r} in place of {self.name!r}, which a {kind} computes"
            )
            return
        if from_logits is None and activation and kind == "Softmax":
            raise TrainingError(
                f"{self.loss}({self.name}): a Sigmoid computes {self.name!r}, so its classes are not mutually"
                " exclusive; use binary_cross_entropy, or pass from_logits=False to use its values as probabilities"
            )
        self.logits = not activation if from_logits is None else bool(from_logits)

    def logarithms(self, axis: int) -> str:
        return self.b.op("LogSoftmax", self.x, axis=axis) if self.logits else self.clamped_log(self.x)

    def clamped_log(self, x: str) -> str:
        """Append the logarithm of numbers clamped to at least 1e-12."""
        return self.b.op("Log", self.b.op("Max", x, self.b.scalar(_MIN_PROBABILITY, DType.FLOAT)))

    # -- shapes ----------------------------------------------------------------------------------------

    def shape(self) -> Shape:
        shape = self.b.shape(self.name)
        if shape is None:
            raise TrainingError(
                f"the rank of the prediction {self.name!r} is unknown; declare the shapes of the model's inputs"
            )
        return shape

    def axis(self, default: int) -> int:
        rank = len(self.shape())
        axis: int = self.options.get("axis", default)  # type: ignore[assignment]
        if not _is_whole(axis) or not -rank <= axis < rank:
            raise self._option_error("axis", axis, f"an axis of {self.name!r}, which has rank {rank}")
        return axis % rank

    def class_axis(self, *, last: bool = False) -> int:
        """Return the class axis: the Softmax's, the option's, or by default axis 1 or the last axis."""
        axis = self.axis(-1 if last else 1)
        if self.softmax is None:
            return axis
        if "axis" in self.options and axis != self.softmax:
            raise TrainingError(
                f"the Softmax of {self.name!r} runs over axis {self.softmax}, but the loss has axis={axis}; pass"
                " the axis of the classes, or from_logits=True"
            )
        return self.softmax

    def move_class_axis(self) -> Shape:
        """Move the class axis of the prediction to axis 1; return the new shape."""
        shape = self.b.shape(self.name)
        if shape is None or len(shape) < 2:
            dims = "an unknown shape" if shape is None else f"shape {list(shape)}"
            raise TrainingError(f"{self.loss} needs logits [batch, classes, …], but {self.name!r} has {dims}")
        axis = self.class_axis()
        self.permutation = [a for a in range(len(shape)) if a != axis]
        self.permutation.insert(1 if axis else 0, axis)
        self.x = self.permuted(self.x)
        return tuple(shape[a] for a in self.permutation)

    def permuted(self, x: str) -> str:
        return x if self.permutation == sorted(self.permutation) else self.b.op("Transpose", x, perm=self.permutation)

    def times_classes(self, x: str, weights: Sequence[float] | None) -> str:
        """Multiply a value, with classes on axis 1, by the class weights."""
        if weights is None:
            return x
        shape = [1, -1, *[1] * (len(self.shape()) - 2)]
        return self.b.op("Mul", x, self.b.constant(np.array(weights, np.float32).reshape(shape)))

    def mean(self, terms: str, rank: int | None = None) -> str:
        """Append the mean of numbers, weighted by row. `rank`: the rank of `terms`, by default the prediction's."""
        weighted = self.weighted(terms, len(self.shape()) if rank is None else rank)
        return self.b.reduce("ReduceMean", weighted, None, keepdims=False)

    def times(self, x: str, factor: float) -> str:
        return x if factor == 1 else self.b.op("Mul", x, self.b.scalar(factor, DType.FLOAT))

    # -- targets ---------------------------------------------------------------------------------------

    def targets(self, shape: Shape, *dtypes: DType, **fields: Any) -> str:
        """Return the target input, and append it if it is new. TrainingError for a wrong type or shape.

        `fields`: fields of `TargetInput`.
        """
        name = self._input("target", self.target_name or DEFAULT_TARGET, shape, dtypes)
        self.target = TargetInput(name, **fields)
        return name

    def weighted(self, terms: str, rank: int) -> str:
        """Multiply a value of this rank by the weights of its rows, if the formula has `sample_weight`."""
        name = self.option("sample_weight")
        if name is None:
            return terms
        weights = self._input("weight", name, (self.shape()[0],), (DType.FLOAT,))
        return self.b.op("Mul", terms, self.b.reshape(weights, [-1, *[1] * (rank - 1)]))

    def _input(self, what: str, name: str, shape: Shape, kinds: Sequence[DType]) -> str:
        b = self.b
        if b.original(name) is None:
            return b.input(name, kinds[0], shape)
        if all(formal.name != name for formal in b.graph.input):
            raise TrainingError(
                f"the {what} {name!r} is a value of the model, but not an input; use an input or a new name"
            )
        dtype, declared = b.dtype(name), b.shape(name)
        if dtype not in kinds:
            kind = dtype.spelling if dtype else "of unknown type"
            raise TrainingError(f"the {what} {name!r} is {kind}, not {kinds[0].spelling}; use a new name")
        if declared is not None and not (len(declared) == len(shape) and all(map(_agree, declared, shape))):
            raise TrainingError(
                f"the {what} {name!r} is an input of shape {list(declared)}, but this loss needs {list(shape)}; use"
                " another input, or a new name"
            )
        return name

    def mask(self, labels: str, ignored: int | None) -> str:
        """Append a float32 mask with the shape of the labels: 0 for ignored rows, 1 for the others."""
        b = self.b
        if ignored is None:
            mask = b.op("Equal", labels, labels)
        else:
            mask = b.op("Not", b.op("Equal", labels, b.scalar(ignored, b.dtype(labels) or DType.INT64)))
        return b.op("Cast", mask, to=DType.FLOAT.code)

    # -- options ---------------------------------------------------------------------------------------

    def option(self, name: str) -> Any:
        """Return the value of an option, or its default. TrainingError for an illegal value."""
        is_legal, description, default = _OPTIONS[name]
        value = self.options.get(name, default)
        if value is not default and not is_legal(value):
            raise self._option_error(name, value, description)
        return value

    def class_weights(self, count: int | None) -> tuple[float, ...] | None:
        """Return one number per class; None without the option."""
        value = self.option("class_weights")
        if value is not None and count is not None and len(value) != count:
            raise self._option_error("class_weights", value, f"a list of {count} numbers, one per class")
        return None if value is None else tuple(map(float, value))

    def known_classes(self, count: int | None) -> int:
        """Return the number of classes. TrainingError if it is not declared."""
        if count is None:
            raise TrainingError(
                f"label_smoothing needs the number of classes, but the shape of {self.name!r} does not specify it;"
                " declare the shape in the model"
            )
        return count

    def _option_error(self, name: str, value: object, legal: str) -> TrainingError:
        return TrainingError(f"{name} of the loss {self.loss} must be {legal}, not {value!r}")


def _is_whole(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_nonnegative(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and 0 <= value <= DType.FLOAT.max


_OPTIONS: Mapping[str, tuple[Callable[[Any], bool], str, Any]] = {
    "from_logits": (lambda v: isinstance(v, bool), "True or False", None),
    "ignore_index": (_is_whole, "a whole number", None),
    "label_smoothing": (lambda v: _is_nonnegative(v) and v < 1, "a number from 0 to less than 1", 0.0),
    **dict.fromkeys(("delta", "pos_weight"), (lambda v: _is_nonnegative(v) and v > 0, "a finite number above 0", 1.0)),
    "class_weights": (
        lambda v: isinstance(v, (list, tuple)) and all(map(_is_nonnegative, v)) and any(v),
        "a list of numbers ≥ 0, not all 0",
        None,
    ),
    "sample_weight": (lambda v: isinstance(v, str), "the name of an input", None),
}
"""Loss options: a test of the value, the legal values as text, and the default."""


def _agree(dim: int | str | None, other: int | str | None) -> bool:
    return dim == other or isinstance(dim, str) or isinstance(other, str)
