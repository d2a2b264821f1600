"""Values of losses by the formulas in numpy, and logits behind activations."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import onnx.parser
import pytest
from onnx.helper import make_tensor_value_info

from amp_rewrite.files.model import Model
from amp_rewrite.ir.view import View
from amp_rewrite.runtime.runner import Runner, SessionOptions
from amp_rewrite.settings.loss_scale import Array
from amp_rewrite.train.objective.losses import objective
from amp_rewrite.train.objective.prediction import activation
from support.train.nets import F32, parsed

RNG = np.random.default_rng(5)
ROWS, CLASSES = 6, 5
X = RNG.normal(size=(ROWS, CLASSES)).astype(F32) * 2
LABELS = np.array([0, 4, 2, 2, 1, 3])
IGNORED = np.array([0, -100, 2, 2, 1, 3])
SOFT = RNG.dirichlet(np.ones(CLASSES), ROWS).astype(F32)
BITS = (RNG.normal(size=(ROWS, CLASSES)) > 0).astype(F32)
ALIKE = np.ones(CLASSES)
OF_CLASSES = np.array([1, 2, 0.5, 0.25, 3])
OF_ROWS = np.array([0.5, 0, 1, 2, 0.25, 3], F32)


def _log_softmax(x: Array) -> Array:
    return x - np.log(np.exp(x).sum(1, keepdims=True))


def _cross_entropy(x: Array, t: Array, smoothing: float = 0.0, of_classes: Array = ALIKE) -> Array:
    """The loss of each row before the sum, divided by the weights of its classes."""
    log, kept = _log_softmax(x), t >= 0
    label = np.where(kept, t, 0)
    of_label = of_classes[label] * kept
    sure = -log[np.arange(len(t)), label] * of_label
    return ((1 - smoothing) * sure - smoothing / CLASSES * (log * of_classes).sum(1) * kept) / of_label.sum()


def _categorical(x: Array, t: Array, smoothing: float = 0.0, of_classes: Array = ALIKE) -> Array:
    return -(((1 - smoothing) * t + smoothing / CLASSES) * of_classes * _log_softmax(x)).sum(1) / ROWS


def _binary(x: Array, t: Array, smoothing: float = 0.0, positive: float = 1.0) -> Array:
    t, p = (1 - smoothing) * t + smoothing / 2, 1 / (1 + np.exp(-x))
    return -(positive * t * np.log(p) + (1 - t) * np.log(1 - p)).mean(1) / ROWS


def _divergence(x: Array, t: Array) -> Array:
    return (t * (np.log(t) - _log_softmax(x))).sum(1) / ROWS


def _huber(x: Array, t: Array, delta: float = 1.0) -> Array:
    far = np.abs(x - t)
    return np.where(far < delta, far**2 / 2, delta * (far - delta / 2)).mean(1) / ROWS


def _loss(loss: str, target: Array | None, body: str = "y = Identity (x)", **more: Array) -> float:
    model = Model.load(parsed(f"net (float[{ROWS},{CLASSES}] x) => (float[{ROWS},{CLASSES}] y) {{ {body} }}"))
    aim = objective(model, loss)
    aim.model.proto.graph.output.append(make_tensor_value_info(aim.loss, 1, []))
    feed = {"x": X, **({} if target is None else {"t": target}), **more}
    return float(np.asarray(Runner.open(aim.model, SessionOptions(threads=1)).run(feed, [aim.loss])[aim.loss]))


WEIGHTS = f"class_weights={OF_CLASSES.tolist()}"


@pytest.mark.parametrize("of_rows", [False, True])
@pytest.mark.parametrize(
    ("loss", "rows", "target"),
    [
        ("cross_entropy(y, t)", _cross_entropy, LABELS),
        ("cross_entropy(y, t, ignore_index=-100)", _cross_entropy, IGNORED),
        (
            f"cross_entropy(y, t, {WEIGHTS}, label_smoothing=0.1, ignore_index=-100)",
            lambda x, t: _cross_entropy(x, t, 0.1, OF_CLASSES),
            IGNORED,
        ),
        ("categorical_cross_entropy(y, t)", _categorical, SOFT),
        (
            f"categorical_cross_entropy(y, t, {WEIGHTS}, label_smoothing=0.2)",
            lambda x, t: _categorical(x, t, 0.2, OF_CLASSES),
            SOFT,
        ),
        ("binary_cross_entropy(y, t)", _binary, BITS),
        ("binary_cross_entropy(y, t, pos_weight=3.0)", lambda x, t: _binary(x, t, positive=3.0), BITS),
        ("binary_cross_entropy(y, t, label_smoothing=0.2)", lambda x, t: _binary(x, t, 0.2), BITS),
        ("kl_divergence(y, t)", _divergence, SOFT),
        ("mean_squared_error(y, t)", lambda x, t: ((x - t) ** 2).mean(1) / ROWS, SOFT),
        ("mean_absolute_error(y, t)", lambda x, t: np.abs(x - t).mean(1) / ROWS, SOFT),
        ("huber(y, t)", _huber, SOFT),
        ("huber(y, t, delta=0.3)", lambda x, t: _huber(x, t, 0.3), SOFT),
    ],
)
def test_losses_follow_their_formulas_with_and_without_weights_of_rows(
    loss: str, rows: Callable[..., Array], target: Array, of_rows: bool
) -> None:
    expected = (rows(X.astype(float), target) * (OF_ROWS if of_rows else 1)).sum()
    asked: dict[str, Any] = {"w": OF_ROWS} if of_rows else {}
    assert _loss(loss.replace(")", ", sample_weight=w)") if of_rows else loss, target, **asked) == pytest.approx(
        expected, rel=2e-6
    )


def test_a_softmax_is_read_through() -> None:
    body = "y = Softmax <axis = 1> (x)"
    assert _loss("cross_entropy(y, t)", LABELS, body) == pytest.approx(_cross_entropy(X, LABELS).sum(), rel=2e-6)


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        ("y = Softmax <axis = 1> (x)", ("Softmax", "x", 1)),
        ("y = Softmax <axis = 0> (x)", None),
        ("y = Softmax (x)", ("Softmax", "x", 1)),
        ("p = Sigmoid (x) q = Cast <to = 10> (p) r = Cast <to = 1> (q) y = Identity (r)", ("Sigmoid", "x", None)),
        ("y = Relu (x)", None),
        ("y = Identity (x)", None),
    ],
)
def test_logits_are_found_behind_activations(body: str, expected: tuple[object, ...] | None) -> None:
    text = f'<ir_version: 8, opset_import: ["": 11]> net (float[3,4] x) => (float[3,4] y) {{ {body} }}'
    view = View.of(Model.load(onnx.parser.parse_model(text)))
    (y,) = (value.id for value in view.values if value.name == "y")
    found = activation(view, y, {value.id: (3, 4) for value in view.values})
    assert (found and (found.kind, view.value_name(found.logits), found.axis)) == expected


@pytest.mark.parametrize(("axis", "expected"), [("", 2), ("<axis = 0>", 0), ("<axis = -2>", 1)])
def test_a_softmax_runs_over_one_axis_from_opset_13_on(axis: str, expected: int) -> None:
    text = (
        f'<ir_version: 8, opset_import: ["": 13]> net (float[3,4,5] x) => (float[3,4,5] y) {{ y = Softmax {axis} (x) }}'
    )
    view = View.of(Model.load(onnx.parser.parse_model(text)))
    (y,) = (value.id for value in view.values if value.name == "y")
    found = activation(view, y, {y: (3, 4, 5)})
    assert found is not None and found.axis == expected
    assert activation(view, y, {}) is None
