"""The base of metrics, and metrics of your own: a function of all rows, or an ONNX model."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import ClassVar

import numpy as np

from amp_rewrite.errors import TrainingError
from amp_rewrite.files.casting import Array
from amp_rewrite.files.model import Model
from amp_rewrite.runtime.runner import CPU, Runner, SessionOptions


@dataclass(eq=False)
class Metric:
    """Base of metrics. `evaluate` calls `reset`, `update` for each batch, and `result`.

    A metric of your own derives from it and gives the three methods.

    Args:
        prediction: an output of the model.
        target: an array of the batch.
        name: under which the result is found; by default that of the class in texts.
    """

    NAME: ClassVar[str] = "metric"
    prediction: str
    target: str = "targets"
    name: str = field(default="", kw_only=True)

    def __post_init__(self) -> None:
        self.name = self.name or self.NAME
        self.reset()

    def reset(self) -> None:
        """Forget all rows."""

    def update(self, targets: Array, predictions: Array) -> None:
        """Add the rows of a batch."""
        raise NotImplementedError

    def result(self) -> float:
        """Return the metric of all rows since `reset`."""
        raise NotImplementedError

    def take(self, values: Mapping[str, Array]) -> None:
        """Add the rows of a batch, from its arrays and the outputs of the model by name.

        Raises:
            TrainingError: the prediction or the target is not among them.
        """
        for name in (self.target, self.prediction):
            if name not in values:
                known = ", ".join(values)
                raise TrainingError(f"the metric {self.name!r} reads {name!r}, but batch and model have {known}")
        self.update(np.asarray(values[self.target]), np.asarray(values[self.prediction]))


class Means(Metric):
    """Base of metrics that are a mean: subclasses add sums and counts."""

    def reset(self) -> None:
        self.total, self.count = 0.0, 0.0

    def add(self, values: Array) -> None:
        """Add the values of some elements."""
        self.total += float(np.sum(values, dtype=np.float64))
        self.count += values.size

    def result(self) -> float:
        return self.total / self.count if self.count else float("nan")


class OfAllRows(Metric):
    """Base of metrics that are computed from all rows at once: subclasses keep those of a batch, and give `compute`."""

    def reset(self) -> None:
        self._rows: list[tuple[Array, Array]] = []

    def keep(self, targets: Array, predictions: Array) -> None:
        """Keep copies of the rows of a batch."""
        self._rows.append((np.array(targets), np.array(predictions)))

    def compute(self, targets: Array, predictions: Array) -> float:
        """Return the metric of these rows."""
        raise NotImplementedError

    def result(self) -> float:
        if not self._rows:
            return float("nan")
        targets, predictions = (np.concatenate(part) for part in zip(*self._rows, strict=True))
        return self.compute(targets, predictions)


class FunctionMetric(OfAllRows):
    """A function of the targets and predictions of all rows, such as those of scikit-learn.

    Args:
        function: called as function(targets, predictions) with the rows of all batches, joined.
        name: by default the function's.

    Example:
        >>> import numpy as np
        >>> from amp_rewrite.train import FunctionMetric
        >>> metric = FunctionMetric(lambda targets, rows: np.max(abs(targets - rows)), "y", "t", name="worst")
        >>> metric.update(np.array([1.0, 2.0]), np.array([1.5, 2.0]))
        >>> metric.result()
        0.5
    """

    def __init__(
        self, function: Callable[[Array, Array], float], prediction: str, target: str = "targets", *, name: str = ""
    ) -> None:
        self.function = function
        super().__init__(prediction, target, name=name or getattr(function, "__name__", type(function).__name__))

    def update(self, targets: Array, predictions: Array) -> None:
        self.keep(targets, predictions)

    def compute(self, targets: Array, predictions: Array) -> float:
        return float(self.function(targets, predictions))


class OnnxMetric(Means):
    """A metric computed by an ONNX model, averaged over the rows of batches.

    The model has the inputs "targets" and "predictions" and one output, a number that is the mean over its rows.

    Args:
        model: as `convert` takes it.
        name: by default that of the output.

    Raises:
        TrainingError: the model has other inputs or outputs.
    """

    def __init__(self, model: object, prediction: str, target: str = "targets", *, name: str = "") -> None:
        self._runner = Runner.open(Model.load(model), SessionOptions(providers=(CPU,), threads=1))
        inputs, outputs = ([port.name for port in ports] for ports in (self._runner.inputs, self._runner.outputs))
        if set(inputs) != {"targets", "predictions"} or len(outputs) != 1:
            raise TrainingError(
                f"the model of a metric has the inputs {inputs} and outputs {outputs}; it needs the inputs 'targets'"
                " and 'predictions', and one output"
            )
        super().__init__(prediction, target, name=name or outputs[0])

    def update(self, targets: Array, predictions: Array) -> None:
        found = self._runner.run({"targets": targets, "predictions": predictions})
        self.total += np.asarray(next(iter(found.values()))).item() * len(targets)
        self.count += len(targets)
