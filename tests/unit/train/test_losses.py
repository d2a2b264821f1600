"""Loss formulas against PyTorch: values and gradients, from logits and from probabilities."""

from typing import Any

import numpy as np
import onnx.parser
import pytest
from onnx.helper import make_tensor_value_info

from amp_rewrite.errors import TrainingError
from amp_rewrite.files.casting import Array
from amp_rewrite.files.model import Model
from amp_rewrite.rewrite.autodiff.gradients import gradients
from amp_rewrite.runtime.runner import Runner, SessionOptions
from amp_rewrite.train.objective.losses import Objective, objective
from amp_rewrite.train.step.step import training_step
from amp_rewrite.train.step.trainer import Trainer
from support.train.nets import F32, PLACE, mlp, parsed

RNG = np.random.default_rng(0)
ROWS, CLASSES = 6, 5
LABELS = np.array([0, 4, 2, 2, 1, 3])
IGNORED = np.array([0, -100, 2, 2, 1, 3])
SOFT = RNG.dirichlet(np.ones(CLASSES), ROWS).astype(F32)
WEIGHTS = [1, 2, 0.5, 0.25, 3]
HARD = np.eye(CLASSES, dtype=F32)[LABELS]
NUMBERS = RNG.normal(size=(ROWS, CLASSES)).astype(F32)
X = NUMBERS * 2
BITS = (NUMBERS > 0).astype(F32)
LOGITS, SOFTMAX, SIGMOID = "y = Identity (x)", "y = Softmax <axis = 1> (x)", "p = Sigmoid (x) y = Identity (p)"
FUNCTION = "y = own.Head (x)"
HEAD = '<domain: "own", opset_import: ["": 20]> Head (a) => (b) { b = Softmax (a) }'


def _aim(loss: str, body: str, shape: tuple[int, ...] = (ROWS, CLASSES)) -> Objective:
    dims = ",".join(map(str, shape))
    model = parsed(f"net (float[{dims}] x) => (float[{dims}] y) {{ {body} }} {HEAD if 'own.' in body else ''}")
    return objective(Model.load(model), loss)


def _computed(loss: str, body: str, x: Array, target: Array, **more: Array) -> tuple[Array, Array]:
    """The loss and its gradient with respect to x."""
    aim = _aim(loss, body, x.shape)
    aim.model.proto.graph.output.append(make_tensor_value_info(aim.loss, 1, []))
    runner = Runner.open(gradients(aim.model, aim.loss, "x"), SessionOptions(threads=1))
    out = runner.run({"x": x, "t": target, **more}, [aim.loss, "x_grad"])
    return np.asarray(out[aim.loss]), np.asarray(out["x_grad"])


def _check(loss: str, body: str, ours: Any, target: Array, x: Array, **more: Array) -> None:
    torch = pytest.importorskip("torch")
    value, gradient = _computed(loss, body, x, target, **more)
    variable = torch.tensor(x, requires_grad=True)
    expected = ours(torch.nn.functional, variable, torch.tensor(target))
    expected.backward()

    np.testing.assert_allclose(value, expected.item(), rtol=1e-6, atol=1e-7)
    np.testing.assert_allclose(gradient, variable.grad.numpy(), rtol=1e-5, atol=1e-7)


def _smoothed(f: Any, x: Any, t: Any) -> Any:
    return f.cross_entropy(x, t, weight=x.new_tensor(WEIGHTS), label_smoothing=0.1)


def _of_numbers(f: Any, x: Any, t: Any) -> Any:
    return f.binary_cross_entropy_with_logits(x, 0.8 * t + 0.1, pos_weight=x.new_tensor(3.0))


OPTIONS = f"class_weights={WEIGHTS}, ignore_index=-100, label_smoothing=0.1"
ON_THE_LAST = "ignore_index=-100, label_smoothing=0.1"
FAR = RNG.normal(size=(ROWS, CLASSES)).astype(F32) * 100
WORDS, NEXT = RNG.normal(size=(3, 4, CLASSES)).astype(F32), RNG.integers(0, CLASSES, (3, 4))
NEXT[1, 2:] = -100
NEAR = SOFT * F32(0.9) + F32(0.05)
LOSSES: list[tuple[str, str, Any, Array, Array]] = [
    # from logits, and from probabilities of a softmax or a sigmoid
    *(
        row
        for body in (LOGITS, FUNCTION)
        for row in (
            ("cross_entropy(y, t)", body, lambda f, x, t: f.cross_entropy(x, t), LABELS, X),
            (f"cross_entropy(y, t, {OPTIONS})", body, _smoothed, IGNORED, X),
            (f"categorical_cross_entropy(y, t, {OPTIONS.replace('ignore_index=-100, ', '')})", body, _smoothed, SOFT,
             X),
            ("kl_divergence(y, t)", body, lambda f, x, t: f.kl_div(x.log_softmax(1), t, reduction="batchmean"), HARD,
             X),
        )
    ),
    *(
        row
        for body in (LOGITS, SIGMOID)
        for row in (
            ("binary_cross_entropy(y, t)", body, lambda f, x, t: f.binary_cross_entropy_with_logits(x, t), BITS, X),
            ("binary_cross_entropy(y, t, pos_weight=3, label_smoothing=0.2)", body, _of_numbers, BITS, X),
        )
    ),
    # a probability of 0 from a softmax keeps its loss
    ("cross_entropy(y, t)", SOFTMAX, lambda f, x, t: f.cross_entropy(x, t), LABELS, FAR),
    # from_logits decides for values of unknown origin, and can keep a softmax
    ("cross_entropy(y, t, from_logits=False)", LOGITS, lambda f, x, t: f.nll_loss(x.log(), t), LABELS, SOFT),
    ("binary_cross_entropy(y, t, from_logits=False)", LOGITS, lambda f, x, t: f.binary_cross_entropy(x, t), BITS, NEAR),
    ("kl_divergence(y, t, from_logits=False)", LOGITS, lambda f, x, t: f.kl_div(x.log(), t, reduction="batchmean"),
     HARD, SOFT),
    ("cross_entropy(y, t, from_logits=True)", LOGITS, lambda f, x, t: f.cross_entropy(x, t), LABELS, SOFT),
    ("cross_entropy(y, t, from_logits=True)", SOFTMAX, lambda f, x, t: f.cross_entropy(x.softmax(1), t), LABELS, X),
    # regression
    ("mean_squared_error(y, t)", LOGITS, lambda f, x, t: f.mse_loss(x, t), SOFT, X),
    ("mean_absolute_error(y, t)", LOGITS, lambda f, x, t: f.l1_loss(x, t), SOFT, X),
    ("huber(y, t)", LOGITS, lambda f, x, t: f.huber_loss(x, t), SOFT, X),
    ("huber(y, t, delta=0.3)", LOGITS, lambda f, x, t: f.huber_loss(x, t, delta=0.3), SOFT, X),
    # classes on the last axis, as in language models
    *(
        (loss, body, lambda f, x, t: f.cross_entropy(x.transpose(1, 2), t, label_smoothing=0.1), NEXT, WORDS)
        for loss, body in (
            (f"cross_entropy(y, t, axis=-1, {ON_THE_LAST})", LOGITS),
            (f"cross_entropy(y, t, {ON_THE_LAST})", "y = Softmax <axis = -1> (x)"),
        )
    ),
]  # fmt: skip


@pytest.mark.torch
@pytest.mark.parametrize(("loss", "body", "ours", "target", "x"), LOSSES, ids=[f"{r[0]} of {r[1]}" for r in LOSSES])
def test_value_and_gradient_of_a_loss_match_torch(loss: str, body: str, ours: Any, target: Array, x: Array) -> None:
    _check(loss, body, ours, target, x)


OF_ROWS = np.array([0.5, 0, 1, 2, 0.25, 3], F32)


@pytest.mark.torch
@pytest.mark.parametrize(
    ("loss", "ours", "target"),
    [
        ("cross_entropy(y, t, {})", lambda f, x, t, w: f.cross_entropy(x, t, reduction="none") * w / ROWS, LABELS),
        (
            "cross_entropy(y, t, ignore_index=-100, label_smoothing=0.1, {})",
            lambda f, x, t, w: f.cross_entropy(x, t, label_smoothing=0.1, reduction="none") * w / 5,
            IGNORED,
        ),
        (
            "binary_cross_entropy(y, t, {})",
            lambda f, x, t, w: f.binary_cross_entropy_with_logits(x, t, reduction="none").mean(1) * w / ROWS,
            BITS,
        ),
        (
            "kl_divergence(y, t, {})",
            lambda f, x, t, w: f.kl_div(f.log_softmax(x, 1), t, reduction="none").sum(1) * w / ROWS,
            SOFT,
        ),
        ("huber(y, t, {})", lambda f, x, t, w: f.huber_loss(x, t, reduction="none").mean(1) * w / ROWS, SOFT),
    ],
)
def test_rows_are_weighted(loss: str, ours: Any, target: Array) -> None:
    def weighted(f: Any, x: Any, t: Any) -> Any:
        return ours(f, x, t, x.new_tensor(OF_ROWS)).sum()

    _check(loss.format("sample_weight=w"), LOGITS, weighted, target, X, w=OF_ROWS)


def test_a_probability_of_0_has_a_finite_loss() -> None:
    x = np.zeros((ROWS, CLASSES), F32)
    for loss, target in (("cross_entropy", LABELS), ("binary_cross_entropy", BITS), ("kl_divergence", SOFT)):
        value, gradient = _computed(f"{loss}(y, t, from_logits=False)", LOGITS, x, target)
        assert np.isfinite(value) and np.isfinite(gradient).all()


@pytest.mark.parametrize(
    ("loss", "body", "kind"), [("cross_entropy", SOFTMAX, "Softmax"), ("binary_cross_entropy", SIGMOID, "Sigmoid")]
)
def test_the_report_states_how_the_loss_reads_its_prediction(loss: str, body: str, kind: str) -> None:
    note = f"{loss} reads the logits 'x' in place of 'y', which a {kind} computes"
    assert _aim(f"{loss}(y, t)", body).notes == _aim(f"{loss}(y, t, from_logits=False)", body).notes == (note,)
    assert _aim(f"{loss}(y, t, from_logits=True)", body).notes == _aim(f"{loss}(y, t)", LOGITS).notes == ()


def test_only_the_ignored_class_may_be_out_of_range() -> None:
    step = training_step(mlp(), loss="cross_entropy(y, t, ignore_index=-100)", policy="float32")
    trainer = Trainer(step, **PLACE)
    assert trainer.fit([{"x": np.ones((2, 8), F32), "t": np.array([0, -100])}]).nonfinite == 0
    with pytest.raises(TrainingError, match="has class -1, but the model has classes 0 to 3"):
        trainer.fit([{"x": np.ones((2, 8), F32), "t": np.array([0, -1])}])


def test_training_by_probabilities_equals_training_by_logits() -> None:
    model = mlp()
    model.graph.node.append(onnx.helper.make_node("Softmax", ["y"], ["p"], axis=1))
    model.graph.output.append(make_tensor_value_info("p", 1, ["N", 4]))
    rng = np.random.default_rng(3)
    batches = [{"x": rng.normal(size=(8, 8)).astype(F32), "t": rng.integers(0, 4, 8)} for _ in range(5)]
    losses = [
        Trainer(training_step(model, loss=f"cross_entropy({name}, t)", policy="float32"), **PLACE).fit(batches).losses
        for name in ("p", "y")
    ]
    assert losses[0] == losses[1]
