"""Metrics as text: METRIC(PREDICTION, TARGET, OPTION=VALUE, …), spelled as losses are."""

from __future__ import annotations

import inspect
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from amp_rewrite.errors import TrainingError, advice
from amp_rewrite.train.metrics.classification import AUC, Accuracy, ClassMetric, F1Score, Perplexity, TopKAccuracy
from amp_rewrite.train.metrics.metric import Metric
from amp_rewrite.train.metrics.regression import MeanAbsoluteError, MeanSquaredError
from amp_rewrite.train.objective.loss_text import terms
from amp_rewrite.train.objective.prediction import TargetInput

METRICS: Mapping[str, type[Metric]] = {
    c.NAME: c for c in (Accuracy, TopKAccuracy, AUC, F1Score, MeanAbsoluteError, MeanSquaredError, Perplexity)
}
"""Metric classes by name."""


def metrics_of(
    given: Sequence[Metric | str], outputs: Collection[str], targets: Sequence[TargetInput] = ()
) -> tuple[Metric, ...]:
    """Return the metrics, reset. TrainingError for an unknown one, an unknown output, and for two of one name.

    `outputs`: names of the outputs of the model. `targets`: those of the loss.
    """
    if isinstance(given, (str, Metric)):
        given = (given,)
    made = tuple(_parsed(one, outputs) if isinstance(one, str) else one for one in given)
    for place, metric in enumerate(made):
        if not isinstance(metric, Metric):
            raise TrainingError(f"not a metric: {metric!r}; pass a Metric, or text such as accuracy(OUTPUT, TARGET)")
        if metric.prediction not in outputs:
            hint = advice(metric.prediction, outputs, f"its outputs are {', '.join(outputs)}")
            raise TrainingError(
                f"the metric {metric.name!r} reads {metric.prediction!r}, not an output of the model; {hint}"
            )
        if metric.name in [other.name for other in made[:place]]:
            raise TrainingError(f"two metrics are named {metric.name!r}; give one of them another name=")
        metric.reset()
        if isinstance(metric, ClassMetric):
            metric.follow(next((target for target in targets if target.name == metric.target), None))
    return made


def _parsed(text: str, outputs: Collection[str]) -> Metric:
    options = {
        name: [p for p in inspect.signature(c).parameters if p not in ("prediction", "target")]
        for name, c in METRICS.items()
    }
    if text.partition("(")[0].strip() not in METRICS:
        hint = advice(text.partition("(")[0].strip(), METRICS, f"use one of {', '.join(METRICS)}")
        raise TrainingError(f"unknown metric {text!r}; {hint}")
    (term,) = terms(text, outputs.__contains__, options)
    if not term.loss:
        raise TrainingError(f"the metric {text!r} lacks what it reads; write {text}(OUTPUT, TARGET)")
    given: dict[str, Any] = {name: value for name, value in term.options.items() if name in options[term.loss]}
    return METRICS[term.loss](term.prediction, *(() if term.target is None else (term.target,)), **given)
