"""Data and results of a step: arrays of rows, batches and their checks, means over batches, predictions."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NoReturn

import numpy as np
from onnx import ModelProto

from amp_rewrite.errors import FeedError, TrainingError, count
from amp_rewrite.evidence.data.feed import Batch, Feed
from amp_rewrite.evidence.data.sources import NOT_FED, is_array
from amp_rewrite.files.casting import Array
from amp_rewrite.files.model import Model
from amp_rewrite.runtime.runner import Runner, SessionOptions
from amp_rewrite.train.arguments import quoted, to_array, whole_number
from amp_rewrite.train.keras.variables import ArrayLike
from amp_rewrite.train.objective.prediction import BINARY, CLASSES, PROBABILITIES, TargetInput
from amp_rewrite.train.step.assembly import with_state

_RANGES = {
    PROBABILITIES: (0.0, math.inf, "class probabilities must be at least 0"),
    BINARY: (0.0, 1.0, "binary targets must be from 0 (no) to 1 (yes)"),
}
"""Minimum and maximum target of each kind, and the range as text."""
_ROUNDING = 1e-5
"""Tolerance for targets that rounding moves outside their range."""


def batch_model(model: Model, batch: Iterable[str]) -> Model:
    """Return a model with only these inputs, for checking batches."""
    declared = {v.name: v for v in model.proto.graph.input}
    proto = ModelProto(ir_version=model.proto.ir_version, opset_import=model.proto.opset_import)
    proto.graph.input.extend(declared[name] for name in batch)
    return Model(proto)


def as_feed(data: object, declared: Model, target: TargetInput | None) -> Feed:
    """Return data as batches of a step. They may differ from pass to pass, and may contain NaN.

    Class indices may have a class axis of size 1. `declared`: the `batch_model` of the step.
    """
    axes = {}
    if target is not None and target.kind == CLASSES and target.axis is not None:
        axes = {target.name: target.axis}
    feed = Feed.of(data, declared, allow_nonfinite=True, allow_change=True, extra_axes=axes)
    unused = next((note for note in feed.notes if note.endswith(NOT_FED)), None)
    if unused is not None:
        raise FeedError(
            f"{unused.removesuffix(NOT_FED)}cannot be fed, because the model has no other input; pass row weights with"
            " sample_weight=NAME in the loss"
        )
    return feed


def converted_targets(target: TargetInput, values: Array) -> Array:
    """Convert targets to the type read by the loss: int32 or int64 class indices, or float32 numbers.

    TrainingError for class indices that are not whole numbers, for one number per class if the loss reads class
    indices, and vice versa.
    """
    name, classes = target.name, target.classes
    if values.dtype.kind not in "fiub" or not values.size:
        return values
    if target.kind != CLASSES:
        if target.kind == PROBABILITIES and values.dtype.kind in "iu" and values.ndim < 2:
            raise TrainingError(
                f"the targets {name!r} are class indices, but the loss takes one number per class; use"
                " sparse_categorical_crossentropy (cross_entropy), or pass np.eye(CLASSES)[targets]"
            )
        return values.astype(np.float32)
    if values.ndim > 1 and values.shape[-1] == classes != 1 and (values.sum(-1) == 1).all() and (values >= 0).all():
        raise TrainingError(
            f"the targets {name!r} have one number for each of {classes} classes, but the loss takes class indices; use"
            " categorical_crossentropy (categorical_cross_entropy), or pass targets.argmax(-1)"
        )
    invalid = values[values % 1 != 0]
    if invalid.size:
        raise TrainingError(
            f"the targets {name!r} contain {invalid.flat[0]:g}, but class indices must be whole numbers; round the"
            " targets, or use a regression loss such as mean_squared_error"
        )
    return values if values.dtype == np.int32 else values.astype(np.int64)


def check_batch(declared: Model, target: TargetInput | None, batch: Batch, number: int) -> None:
    """Check a batch: FeedError if a named dimension has two sizes, TrainingError if a target is out of range.

    The backward pass assumes that a named dimension has one size, and would be wrong otherwise. `declared`: the
    `batch_model` of the step. `number`: the number of the batch, for messages.
    """
    sizes: dict[str, tuple[int, str]] = {}
    for formal in declared.proto.graph.input:
        dims = formal.type.tensor_type.shape.dim
        for dim, size in zip(dims, batch[formal.name].shape, strict=False):
            before, where = sizes.setdefault(dim.dim_param, (size, formal.name)) if dim.dim_param else (size, "")
            if before != size:
                raise FeedError(
                    f"in batch {number}, dimension {dim.dim_param!r} has size {before} in {where!r} but {size} in"
                    f" {formal.name!r}; make the sizes equal, or export the model with two names for the dimensions"
                )
    if target is None:
        return
    values = batch[target.name]
    if target.kind in _RANGES:
        low, high, legal = _RANGES[target.kind]
        invalid = values[(values < low - _ROUNDING) | (values > high + _ROUNDING)]
        if invalid.size:
            raise TrainingError(
                f"input {target.name!r} of batch {number} has a {invalid.flat[0]:g}, but {legal}; correct the targets"
            )
    if target.classes is not None:
        invalid = values[((values < 0) | (values >= target.classes)) & (values != target.ignored)]
        if invalid.size:
            raise TrainingError(
                f"input {target.name!r} of batch {number} has class {int(invalid.flat[0])}, but the model has classes 0"
                f" to {target.classes - 1}; correct the targets"
            )


BATCH_SIZE = 32
"""Default number of rows per batch, as in Keras."""


def with_targets(x: object, y: object, names: Sequence[str]) -> object:
    """Combine inputs and targets in a mapping or a tuple; return the inputs if `y` is None.

    `names`: names of all batch inputs of a step. TrainingError for targets that are not arrays.
    """
    if y is None:
        return x
    targets = tuple(y) if isinstance(y, (tuple, list)) and all(map(is_array, y)) else (y,)
    if not isinstance(y, Mapping) and not all(map(is_array, targets)) and not to_array(y, "the target").ndim:
        raise TrainingError(f"targets must be an array, not {y!r}; call fit(x, y, epochs=…), or fit((x, y), epochs=…)")
    targets = tuple(to_array(one, "a target") for one in targets)
    if isinstance(x, Mapping):
        missing = [name for name in names if name not in x]
        return {**x, **(y if isinstance(y, Mapping) else dict(zip(missing, targets, strict=False)))}
    inputs = tuple(x) if isinstance(x, (tuple, list)) and all(map(is_array, x)) else (to_array(x, "the input"),)
    if isinstance(y, Mapping):
        return {**dict(zip([name for name in names if name not in y], inputs, strict=False)), **y}
    return (*inputs, *targets)


@dataclass(frozen=True, eq=False)
class Rows:
    """Arrays by name with one row per example, all of the same length.

    `batch_size`: rows per batch; the last batch may have fewer. `shuffle`: True for a new order of the rows in each
    epoch, drawn from `seed` and the number of the epoch. `seed`: None draws a random one.
    """

    arrays: Mapping[str, Array]
    batch_size: int = BATCH_SIZE
    shuffle: bool = False
    seed: int | None = None

    def __post_init__(self) -> None:
        whole_number("batch_size", self.batch_size, 1)
        if self.seed is None:
            object.__setattr__(self, "seed", int(np.random.default_rng().integers(2**31)))
        whole_number("seed", self.seed, 0)
        lengths = {name: a.shape[0] for name, a in self.arrays.items() if a.ndim}
        if len(set(lengths.values())) != 1:
            listed = ", ".join(f"{name} {length}" for name, length in lengths.items()) or "none has rows"
            raise FeedError(f"the arrays have different numbers of rows ({listed}); pass arrays of equal length")

    @classmethod
    def of(
        cls,
        data: object,
        names: Sequence[str],
        batch_size: int | None,
        shuffle: bool | None,
        seed: int | None = None,
        target: TargetInput | None = None,
    ) -> Rows | None:
        """Return the rows of a mapping of arrays, an array, or a tuple of arrays with these names.

        Data in any other form are already batches: the result is None, and `batch_size` must be None. FeedError for a
        wrong number of arrays, TrainingError for class indices of the `target` that are not whole numbers.
        """
        arrays = (data,) if is_array(data) else data
        if isinstance(arrays, tuple) and arrays and all(map(is_array, arrays)):
            if len(arrays) == len(names) - 1 and target is not None and target.name == names[-1]:
                raise FeedError(f"the targets {target.name!r} are missing; pass them after the inputs, as in fit(x, y)")
            if len(arrays) != len(names):
                raise FeedError(
                    f"the data is {count(len(arrays), 'array')}, but the inputs are {', '.join(map(repr, names))};"
                    " pass a tuple of arrays in this order, or a mapping from input names to arrays"
                )
            data = dict(zip(names, arrays, strict=True))
        if isinstance(data, Mapping):
            arrays = {str(name): to_array(value, f"the input {str(name)!r}") for name, value in data.items()}
            if target is not None and target.name in arrays:
                arrays[target.name] = converted_targets(target, arrays[target.name])
            return cls(arrays, BATCH_SIZE if batch_size is None else batch_size, shuffle is not False, seed)
        if batch_size is not None or shuffle:
            raise TrainingError(
                "batch_size and shuffle apply only to arrays, but these data are already batches; pass a mapping from"
                " input names to arrays, or omit both"
            )
        return None

    def __len__(self) -> int:
        return int(next(a.shape[0] for a in self.arrays.values() if a.ndim))

    @property
    def count(self) -> int:
        return -(-len(self) // self.batch_size)

    def batches(self, epoch: int) -> Iterator[dict[str, Array]]:
        order = np.random.default_rng([self.seed or 0, epoch]).permutation(len(self)) if self.shuffle else None
        for start in range(0, len(self), self.batch_size):
            end = start + self.batch_size
            part = slice(start, end) if order is None else order[start:end]
            yield {name: array[part] if array.ndim else array for name, array in self.arrays.items()}

    def split(self, share: float) -> tuple[Rows, Rows]:
        """Split off the last `share` of the rows, in order, for validation, as Keras does."""
        if not isinstance(share, (int, float)) or isinstance(share, bool) or not 0 < share < 1:
            raise TrainingError(f"validation_split must be a number above 0 and below 1, not {share!r}")
        at = len(self) - round(len(self) * share)
        if not 0 < at < len(self):
            raise TrainingError(f"validation_split={share} of {len(self)} rows leaves one part empty; pass more rows")
        first, last = (
            {n: a[part] if a.ndim else a for n, a in self.arrays.items()} for part in (slice(at), slice(at, None))
        )
        return replace(self, arrays=first), replace(self, arrays=last, shuffle=False)


class BatchMeans:
    """Running means of a loss and of metrics over batches.

    A batch is weighted by its number of rows. For class indices, ignored rows do not count, and the loss is weighted by
    the class weights of the others.
    """

    def __init__(self, loss: str, metrics: Sequence[str], target: TargetInput | None) -> None:
        self.rows = 0
        self._loss, self._target = loss, target
        self._sums = dict.fromkeys((loss, *metrics), 0.0)
        self._weights = self._sums.copy()

    def add(self, batch: Batch, results: Mapping[str, Array]) -> None:
        """Add the results of a batch; a batch with only ignored rows has no effect."""
        rows = max((array.shape[0] for array in batch.values() if array.ndim), default=1)
        self.rows += rows
        weight = counted = float(rows)
        if self._target is not None and self._target.kind == CLASSES:
            weight, counted = self._target.counts(batch[self._target.name])
        for name in self._sums:
            factor = weight if name == self._loss else counted
            if factor:
                self._sums[name] += results[name].item() * factor
                self._weights[name] += factor

    def scores(self, metrics: Sequence[str]) -> Scores:
        """Return the means, with these names for the metrics; NaN if all rows are ignored."""
        pairs = zip(self._sums.values(), self._weights.values(), strict=True)
        mean, *means = (total / weight if weight else math.nan for total, weight in pairs)
        return Scores(mean, dict(zip(metrics, means, strict=True)), self.rows)


@dataclass(frozen=True)
class Scores:
    """Means of loss and metrics over all rows of the data.

    A batch is weighted by the number of its rows that are not ignored. As in Keras, the object is also the sequence
    [loss, *metrics].

    Attributes:
        loss: the loss.
        metrics: metrics by name.
        rows: number of rows.
    """

    loss: float
    metrics: Mapping[str, float]
    rows: int

    @property
    def numbers(self) -> dict[str, float]:
        return {"loss": self.loss, **self.metrics}

    def __iter__(self) -> Iterator[float]:
        return iter(self.numbers.values())

    def __len__(self) -> int:
        return len(self.numbers)

    def __getitem__(self, index: int) -> float:
        return [*self.numbers.values()][index]


class HoldsSession:
    """Mixin for objects with an open session: they cannot be copied or pickled."""

    def __reduce__(self) -> NoReturn:
        raise TrainingError(
            f"a {type(self).__name__} cannot be copied or pickled, because it contains an open session; save its state"
            " with save(), and load it into a new one with load()"
        )


@dataclass(frozen=True, eq=False)
class Predictions(ArrayLike):
    """Outputs of a model. The object behaves like the array of one output; `predictions["NAME"]` selects another.

    Attributes:
        compute: function that returns the float32 arrays by name.
        names: names of all outputs.
        output: name of this output.
        source: network, inputs and weights of the predictions, for loss objects; None without a network.
    """

    compute: Callable[[], Mapping[str, Array]]
    names: tuple[str, ...]
    output: str
    source: object = None

    def __getitem__(self, key: Any) -> Any:
        """Return the predictions of another output by name, or index the array."""
        if not isinstance(key, str):
            return self.numpy()[key]
        if key not in self.names:
            raise TrainingError(f"the model has no output {key!r}; it has {', '.join(self.names)}")
        return replace(self, output=key)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        return getattr(self.numpy(), name)  # argmax, mean, reshape …

    def numpy(self) -> Array:
        return self.compute()[self.output]

    def __repr__(self) -> str:
        return repr(self.numpy())


def checked_inputs(source: Model, inputs: Sequence[str], batch: Mapping[str, Array]) -> Batch:
    """Return the model inputs in a batch, which may also have targets. FeedError for a wrong type or shape."""
    if not isinstance(batch, Mapping):
        raise TrainingError(f"the batch must be a mapping from input names to arrays, not {quoted(batch)}")
    missing = sorted(set(inputs) - batch.keys())
    if missing:
        raise TrainingError(f"the batch is missing the inputs {missing}; pass arrays for all inputs of the model")
    (checked,) = Feed.of([batch], batch_model(source, inputs), allow_nonfinite=True)
    return checked


@dataclass(frozen=True, eq=False)
class Predictor:
    """A model loaded for predictions. `inputs`: its inputs other than the weights."""

    source: Model
    runner: Runner
    inputs: tuple[str, ...]

    @classmethod
    def of(cls, source: Model, weights: Collection[str], options: SessionOptions) -> Predictor:
        runner = Runner.open(with_state(source, weights), options)
        return cls(source, runner, tuple(port.name for port in runner.inputs if port.name not in weights))

    def __call__(self, batch: Mapping[str, Array], weights: Mapping[str, Array]) -> dict[str, Array]:
        inputs = checked_inputs(self.source, self.inputs, batch)
        outputs = [v.name for v in self.source.proto.graph.output]
        ports = {port.name for port in self.runner.inputs}
        fed_weights = {name: array for name, array in weights.items() if name in ports}
        results = self.runner.run({**fed_weights, **inputs}, outputs)
        return {name: np.asarray(results[name]) for name in outputs}

    def rows(self, data: object, batch_size: int | None, weights: Mapping[str, Array]) -> Predictions:
        """Compute the outputs for all rows, concatenated along the first axis. Targets in the data are ignored."""
        inputs = data[: len(self.inputs)] if isinstance(data, tuple) else data
        rows = Rows.of(inputs, self.inputs, batch_size, False)
        feed = Feed.of(
            inputs if rows is None else lambda: rows.batches(0),
            batch_model(self.source, self.inputs),
            allow_nonfinite=True,
            allow_change=True,
        )
        parts = [self(batch, weights) for batch in feed]
        names = tuple(v.name for v in self.source.proto.graph.output)
        arrays = {name: np.concatenate([np.atleast_1d(part[name]) for part in parts]) for name in names}
        return Predictions(lambda: arrays, names, names[0])
