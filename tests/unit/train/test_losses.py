"""Losses as text, each beside PyTorch: value and gradient, of logits and of probabilities."""

from __future__ import annotations

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
from amp_rewrite.train.objective.loss_text import terms
from amp_rewrite.train.objective.losses import Objective, objective
from amp_rewrite.train.step.step import training_step
from amp_rewrite.train.step.trainer import Trainer
from support.train.nets import F32, PLACE, mlp, parsed

RNG = np.random.default_rng(0)
ROWS, CLASSES = 6, 5
LABELS = np.array([0, 4, 2, 2, 1, 3])
IGNORED = np.array([0, -100, 2, 2, 1, 3])
SOFT = RNG.dirichlet(np.ones(CLASSES), ROWS).astype(F32)
HARD = np.eye(CLASSES, dtype=F32)[LABELS]
NUMBERS = RNG.normal(size=(ROWS, CLASSES)).astype(F32)
BITS = (NUMBERS > 0).astype(F32)
WEIGHTS = [1, 2, 0.5, 0.25, 3]
LOGITS, SOFTMAX, SIGMOID = "y = Identity (x)", "y = Softmax <axis = 1> (x)", "y = Sigmoid (x)"
WRITTEN_OUT = (
    "one = Constant <value_ints = [1]> () m = ReduceMax (x, one) d = Sub (x, m) e = Exp (d) s = ReduceSum (e, one)"
    " y = Div (e, s)"
)

HEAD = '<domain: "own", opset_import: ["": 20]> Head (a) => (b) { b = Softmax (a) }'


def _model(body: str, shape: tuple[int, ...] = (ROWS, CLASSES)) -> Model:
    dims = ",".join(map(str, shape))
    return Model.load(
        parsed(f"net (float[{dims}] x) => (float[{dims}] y) {{ {body} }} {HEAD if 'own.' in body else ''}")
    )


def _aim(loss: str, body: str, shape: tuple[int, ...] = (ROWS, CLASSES)) -> Objective:
    return objective(_model(body, shape), loss)


def _computed(loss: str, body: str, x: Array, target: Array | None, **more: Array) -> tuple[Array, Array]:
    """The loss and its gradient with respect to x."""
    aim = _aim(loss, body, x.shape)
    aim.model.proto.graph.output.append(make_tensor_value_info(aim.loss, 1, []))
    runner = Runner.open(gradients(aim.model, aim.loss, "x"), SessionOptions(threads=1))
    out = runner.run({"x": x, **({} if target is None else {"t": target}), **more}, [aim.loss, "x_grad"])
    return np.asarray(out[aim.loss]), np.asarray(out["x_grad"])


def _check(loss: str, body: str, ours: Any, target: Array | None, x: Array | None = None, **more: Array) -> None:
    torch = pytest.importorskip("torch")
    x = (NUMBERS * 2).astype(F32) if x is None else x
    value, gradient = _computed(loss, body, x, target, **more)
    variable = torch.tensor(x, requires_grad=True)
    expected = ours(torch.nn.functional, variable, None if target is None else torch.tensor(target))
    expected.backward()

    np.testing.assert_allclose(value, expected.item(), rtol=1e-6, atol=1e-7)
    np.testing.assert_allclose(gradient, variable.grad.numpy(), rtol=1e-5, atol=1e-7)


@pytest.mark.torch
@pytest.mark.parametrize("body", [LOGITS, SOFTMAX, WRITTEN_OUT, "a = Softmax <axis = 1> (x) y = Identity (a)"])
@pytest.mark.parametrize(
    ("loss", "ours", "target"),
    [
        ("cross_entropy(y, t)", lambda f, x, t: f.cross_entropy(x, t), LABELS),
        (
            f"cross_entropy(y, t, class_weights={WEIGHTS})",
            lambda f, x, t: f.cross_entropy(x, t, weight=x.new_tensor(WEIGHTS)),
            LABELS,
        ),
        ("cross_entropy(y, t, ignore_index=-100)", lambda f, x, t: f.cross_entropy(x, t), IGNORED),
        (
            "cross_entropy(y, t, label_smoothing=0.1)",
            lambda f, x, t: f.cross_entropy(x, t, label_smoothing=0.1),
            LABELS,
        ),
        (
            f"cross_entropy(y, t, class_weights={WEIGHTS}, ignore_index=-100, label_smoothing=0.1)",
            lambda f, x, t: f.cross_entropy(x, t, weight=x.new_tensor(WEIGHTS), label_smoothing=0.1),
            IGNORED,
        ),
        ("categorical_cross_entropy(y, t)", lambda f, x, t: f.cross_entropy(x, t), SOFT),
        (
            f"categorical_cross_entropy(y, t, class_weights={WEIGHTS}, label_smoothing=0.2)",
            lambda f, x, t: f.cross_entropy(x, t, weight=x.new_tensor(WEIGHTS), label_smoothing=0.2),
            SOFT,
        ),
        ("kl_divergence(y, t)", lambda f, x, t: f.kl_div(x.log_softmax(1), t, reduction="batchmean"), SOFT),
        ("kl_divergence(y, t)", lambda f, x, t: f.kl_div(x.log_softmax(1), t, reduction="batchmean"), HARD),
        (
            "kl_divergence(y, t, log_target=True)",
            lambda f, x, t: f.kl_div(x.log_softmax(1), t, reduction="batchmean", log_target=True),
            np.log(SOFT),
        ),
        ("0.5 * cross_entropy(y, t) * 3 / 2", lambda f, x, t: 0.75 * f.cross_entropy(x, t), LABELS),
    ],
)
def test_losses_of_classes_equal_torch_for_logits_and_for_probabilities(
    loss: str, ours: Any, target: Array, body: str
) -> None:
    _check(loss, body, ours, target)


MOVED = {
    "reshaped": "a = Softmax <axis = 1> (x) s = Constant <value_ints = [-1, 5]> () y = Reshape (a, s)",
    "transposed": "u = Transpose <perm = [1, 0]> (x) a = Softmax <axis = 0> (u) y = Transpose <perm = [1, 0]> (a)",
    "squeezed": "i = Constant <value_ints = [2]> () u = Unsqueeze (x, i) a = Softmax <axis = 1> (u) y = Squeeze (a, i)",
    "split": "a = Softmax <axis = 1> (x) b, c = Split <axis = 1, num_outputs = 2> (a) y = Concat <axis = 1> (b, c)",
    "by its logarithm": "a = LogSoftmax <axis = 1> (x) y = Exp (a)",
    "logarithms": "y = LogSoftmax <axis = 1> (x)",
    "by a reciprocal": "i = Constant <value_ints = [1]> () e = Exp (x) s = ReduceSum (e, i) r = Reciprocal (s)"
    " y = Mul (e, r)",
    "by a function": "y = own.Head (x)",
    "by a branch": "c = Constant <value = bool {1}> () y = If (c) <then_branch = one () => (float[6,5] p)"
    " { p = Softmax <axis = 1> (x) }, else_branch = two () => (float[6,5] q) { q = Sigmoid (x) }>",
    "with an epsilon": "a = Softmax <axis = 1> (x) e = Constant <value_float = 1e-9> () y = Add (a, e)",
    "not below an epsilon": "a = Softmax <axis = 1> (x) e = Constant <value_float = 1e-9> () y = Clip (a, e)",
    "of two": "a = Softmax <axis = 1> (x) b = Add (a, a) h = Constant <value_float = 0.5> () y = Mul (b, h)",
    "normalized": "a = Softmax <axis = 1> (x) i = Constant <value_ints = [1]> () s = ReduceSum (a, i) y = Div (a, s)",
    "chosen": "a = Softmax <axis = 1> (x) c = IsNaN (a) z = Constant <value_float = 0.0> () y = Where (c, z, a)",
    "dropped": "a = Softmax <axis = 1> (x) y = Dropout (a)",
}


@pytest.mark.torch
@pytest.mark.parametrize("body", MOVED.values(), ids=MOVED)
def test_probabilities_are_recognized_behind_moves_arithmetic_functions_and_branches(body: str) -> None:
    _check("cross_entropy(y, t)", body, lambda f, x, t: f.cross_entropy(x, t), LABELS)


@pytest.mark.torch
@pytest.mark.parametrize("how", ["reshaped", "transposed", "squeezed", "by its logarithm", "by a reciprocal"])
def test_moved_probabilities_of_0_keep_their_loss(how: str) -> None:
    far = RNG.normal(size=(ROWS, CLASSES)).astype(F32) * 100
    _check("cross_entropy(y, t)", MOVED[how], lambda f, x, t: f.cross_entropy(x, t), LABELS, far)


@pytest.mark.torch
@pytest.mark.parametrize(
    "mix",
    [
        "i = Constant <value_ints = [1]> () u = Unsqueeze (g, i) m = MatMul (u, p) y = Squeeze (m, i)",
        "i = Constant <value_ints = [2]> () u = Unsqueeze (g, i) m = Mul (u, p) j = Constant <value_ints = [1]> ()"
        " y = ReduceSum <keepdims = 0> (m, j)",
    ],
)
def test_a_mixture_of_probabilities_is_one(mix: str) -> None:
    torch = pytest.importorskip("torch")
    x = (RNG.normal(size=(ROWS, 3, 4)) * 2).astype(F32)
    model = parsed(
        f"""net (float[6,3,4] x) => (float[6,4] y) {{ l = Constant <value_ints = [2]> ()
        s = ReduceMax <keepdims = 0> (x, l) g = Softmax (s) p = Softmax (x) {mix} }}"""
    )
    aim = objective(Model.load(model), "cross_entropy(y, t)")
    aim.model.proto.graph.output.append(make_tensor_value_info(aim.loss, 1, []))
    found = Runner.open(aim.model, SessionOptions(threads=1)).run({"x": x, "t": LABELS % 4}, [aim.loss])
    gates = torch.tensor(x).amax(2).softmax(1)
    expected = torch.nn.functional.nll_loss(
        (gates[:, :, None] * torch.tensor(x).softmax(2)).sum(1).log(), torch.tensor(LABELS % 4)
    )
    assert float(found[aim.loss]) == pytest.approx(expected.item(), rel=1e-6)


def test_classes_are_found_where_moves_put_them() -> None:
    flat = "s = Constant <value_ints = [-1, 5]> () f = Reshape (x, s) a = Softmax (f)"
    back = "s2 = Constant <value_ints = [3, 4, 5]> () y = Reshape (a, s2)"
    aim = _aim("cross_entropy(y, t)", f"{flat} {back}", (3, 4, 5))
    assert aim.targets[0].axis == 2
    joined = "a = Softmax <axis = 1> (x) s = Constant <value_ints = [2, 3, 20]> () f = Reshape (a, s)"
    graph = f"net (float[2,3,4,5] x) => (float[2,20,3] y) {{ {joined} y = Transpose <perm = [0, 2, 1]> (f) }}"
    assert objective(Model.load(parsed(graph)), "cross_entropy(y, t)").targets[0].axis == 2


@pytest.mark.torch
@pytest.mark.parametrize("body", [LOGITS, SIGMOID, "s = Sigmoid (x) y = Log (s)"])
@pytest.mark.parametrize(
    ("loss", "ours"),
    [
        ("binary_cross_entropy(y, t)", lambda f, x, t: f.binary_cross_entropy_with_logits(x, t)),
        (
            "binary_cross_entropy(y, t, pos_weight=3)",
            lambda f, x, t: f.binary_cross_entropy_with_logits(x, t, pos_weight=x.new_tensor(3.0)),
        ),
        (
            "binary_cross_entropy(y, t, label_smoothing=0.2)",
            lambda f, x, t: f.binary_cross_entropy_with_logits(x, 0.8 * t + 0.1),
        ),
    ],
)
def test_the_binary_loss_equals_torch_for_logits_and_for_a_sigmoid(loss: str, ours: Any, body: str) -> None:
    _check(loss, body, ours, BITS)


@pytest.mark.torch
@pytest.mark.parametrize(
    ("loss", "ours", "target", "x"),
    [
        ("cross_entropy(y, t, from_logits=False)", lambda f, x, t: f.nll_loss(x.log(), t), LABELS, SOFT),
        (
            "binary_cross_entropy(y, t, from_logits=False)",
            lambda f, x, t: f.binary_cross_entropy(x, t),
            BITS,
            SOFT * F32(0.9) + F32(0.05),
        ),
        (
            "kl_divergence(y, t, from_logits=False)",
            lambda f, x, t: f.kl_div(x.log(), t, reduction="batchmean"),
            HARD,
            SOFT,
        ),
        ("cross_entropy(y, t, from_logits=True)", lambda f, x, t: f.cross_entropy(x, t), LABELS, SOFT),
    ],
)
def test_from_logits_decides_for_values_of_unknown_origin(loss: str, ours: Any, target: Array, x: Array) -> None:
    _check(loss, LOGITS, ours, target, x)


@pytest.mark.torch
def test_from_logits_keeps_a_softmax_that_is_meant() -> None:
    loss = "cross_entropy(y, t, from_logits=True)"
    _check(loss, SOFTMAX, lambda f, x, t: f.cross_entropy(x.softmax(1), t), LABELS)


@pytest.mark.torch
@pytest.mark.parametrize(
    ("loss", "ours", "target", "body"),
    [
        ("mean_squared_error(y, t)", lambda f, x, t: f.mse_loss(x, t), SOFT, LOGITS),
        ("mean_absolute_error(y, t)", lambda f, x, t: f.l1_loss(x, t), SOFT, LOGITS),
        ("huber(y, t)", lambda f, x, t: f.huber_loss(x, t), SOFT, LOGITS),
        ("huber(y, t, delta=0.3)", lambda f, x, t: f.huber_loss(x, t, delta=0.3), SOFT, LOGITS),
        (
            "cosine(y, t)",
            lambda f, x, t: f.cosine_embedding_loss(x, t, x.new_ones(ROWS)),
            SOFT,
            LOGITS,
        ),
        (
            "contrastive(z)",
            lambda f, x, t: 0.5 * sum(f.cross_entropy(s, _own_columns(x)) for s in (x @ x.tanh().T, x.tanh() @ x.T)),
            None,
            "y = Identity (x) h = Tanh (x) v = Transpose <perm = [1, 0]> (h) z = MatMul (x, v)",
        ),
        (
            "contrastive(y, z, temperature=0.1)",
            lambda f, x, t: 0.5 * sum(f.cross_entropy(s, _own_columns(x)) for s in _both(f, x, 0.1)),
            None,
            "y = Identity (x) z = Tanh (x)",
        ),
        (
            "0.5 * cross_entropy(y, t) + 2 * cross_entropy(z, t, label_smoothing=0.1) + 1e-1 * r",
            lambda f, x, t: (
                0.5 * f.cross_entropy(x, t)
                + 2 * f.cross_entropy(x.tanh(), t, label_smoothing=0.1)
                + 0.1 * (x * x).sum()
            ),
            LABELS,
            f"{SOFTMAX} z = Tanh (x) r = ReduceSumSquare <keepdims = 1> (x)",
        ),
        (
            "huber(y, t) - 0.5 * mean_squared_error(y, t) - r",
            lambda f, x, t: f.huber_loss(x, t) - 0.5 * f.mse_loss(x, t) - (x * x).sum(),
            SOFT,
            f"{LOGITS} r = ReduceSumSquare <keepdims = 0> (x)",
        ),
    ],
)
def test_losses_of_numbers_pairs_and_sums_equal_torch(loss: str, ours: Any, target: Array, body: str) -> None:
    _check(loss, body, ours, target)


def _own_columns(x: Any) -> Any:
    """Row i belongs to column i."""
    return x.new_tensor(range(len(x))).long()


def _both(f: Any, x: Any, temperature: float) -> tuple[Any, Any]:
    scores = f.normalize(x) @ f.normalize(x.tanh()).T / temperature
    return scores, scores.T


@pytest.mark.torch
@pytest.mark.parametrize(
    ("loss", "body"),
    [
        ("cross_entropy(y, t, axis=-1, ignore_index=-100, label_smoothing=0.1)", LOGITS),
        ("cross_entropy(y, t, ignore_index=-100, label_smoothing=0.1)", "y = Softmax <axis = -1> (x)"),
    ],
)
def test_classes_may_lie_on_the_last_axis_as_in_language_models(loss: str, body: str) -> None:
    x = RNG.normal(size=(3, 4, CLASSES)).astype(F32)
    labels = RNG.integers(0, CLASSES, (3, 4))
    labels[1, 2:] = -100
    _check(loss, body, lambda f, x, t: f.cross_entropy(x.transpose(1, 2), t, label_smoothing=0.1), labels, x)


OF_ROWS = np.array([0.5, 0, 1, 2, 0.25, 3], F32)


@pytest.mark.torch
@pytest.mark.parametrize(
    ("loss", "ours", "target"),
    [
        ("cross_entropy(y, t, {})", lambda f, x, t, w: f.cross_entropy(x, t, reduction="none") * w / ROWS, LABELS),
        (
            f"cross_entropy(y, t, class_weights={WEIGHTS}, ignore_index=-100, label_smoothing=0.1, {{}})",
            lambda f, x, t, w: (
                f.cross_entropy(x, t, weight=x.new_tensor(WEIGHTS), label_smoothing=0.1, reduction="none")
                * w
                / sum(WEIGHTS[c] for c in IGNORED if c >= 0)
            ),
            IGNORED,
        ),
        (
            "categorical_cross_entropy(y, t, {})",
            lambda f, x, t, w: f.cross_entropy(x, t, reduction="none") * w / ROWS,
            SOFT,
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
        (
            "mean_squared_error(y, t, {})",
            lambda f, x, t, w: f.mse_loss(x, t, reduction="none").mean(1) * w / ROWS,
            SOFT,
        ),
        (
            "mean_absolute_error(y, t, {})",
            lambda f, x, t, w: f.l1_loss(x, t, reduction="none").mean(1) * w / ROWS,
            SOFT,
        ),
        ("huber(y, t, {})", lambda f, x, t, w: f.huber_loss(x, t, reduction="none").mean(1) * w / ROWS, SOFT),
        ("cosine(y, t, {})", lambda f, x, t, w: (1 - f.cosine_similarity(x, t)) * w / ROWS, SOFT),
    ],
)
def test_rows_count_by_their_weights(loss: str, ours: Any, target: Array) -> None:
    def weighted(f: Any, x: Any, t: Any) -> Any:
        return ours(f, x, t, x.new_tensor(OF_ROWS)).sum()

    _check(loss.format("sample_weight=w"), LOGITS, weighted, target, w=OF_ROWS)


def test_a_probability_of_0_has_a_finite_loss() -> None:
    x = np.zeros((ROWS, CLASSES), F32)
    for loss, target in (("cross_entropy", LABELS), ("binary_cross_entropy", BITS), ("kl_divergence", SOFT)):
        value, gradient = _computed(f"{loss}(y, t, from_logits=False)", LOGITS, x, target)
        assert np.isfinite(value) and np.isfinite(gradient).all()


@pytest.mark.parametrize(
    ("loss", "body", "note"),
    [
        (
            "cross_entropy(y, t)",
            SOFTMAX,
            "cross_entropy reads the logits 'x' in place of 'y', which a Softmax computes",
        ),
        (
            "binary_cross_entropy(y, t)",
            SIGMOID,
            "binary_cross_entropy reads the logits 'x' in place of 'y', which a Sigmoid computes",
        ),
        (
            "cross_entropy(y, t)",
            "a = Softmax (x) b = Mul (a, a) y = Sqrt (b)",
            "cross_entropy takes 'y' for probabilities: it reads their logarithm",
        ),
        (
            "cross_entropy(y, t, from_logits=True)",
            SOFTMAX,
            "cross_entropy takes 'y' for logits, as from_logits=True says, although a Softmax computes it",
        ),
    ],
)
def test_the_report_tells_how_the_loss_reads_its_prediction(loss: str, body: str, note: str) -> None:
    assert _aim(loss, body).notes == (note,)


def test_of_logits_nothing_is_told() -> None:
    assert _aim("cross_entropy(y, t)", LOGITS).notes == ()


@pytest.mark.parametrize(
    ("loss", "body", "message"),
    [
        (
            "cross_entropy(y, t)",
            SIGMOID,
            "cross_entropy(y): a Sigmoid computes 'y', so its classes do not exclude each other; use"
            " binary_cross_entropy, or say from_logits=False to take it for probabilities",
        ),
        (
            "cross_entropy(y, t, axis=0)",
            SOFTMAX,
            "the Softmax of 'y' runs over axis 1, but the loss has axis=0; give the axis of the classes, or"
            " from_logits=True",
        ),
        (
            "cross_entropy(y, t, smoothing=0.1)",
            LOGITS,
            "cross_entropy has no option 'smoothing'; did you mean 'label_smoothing'?",
        ),
        (
            "cross_entropy(y, t, label_smoothing=1.5)",
            LOGITS,
            "label_smoothing=1.5 of the loss cross_entropy must be a number from 0 to less than 1; correct it",
        ),
        (
            "cross_entropy(y, t, class_weights=[1, 2])",
            LOGITS,
            "class_weights=[1, 2] of the loss cross_entropy must be a list of 5 numbers, one per class; correct it",
        ),
        (
            "huber(y, t, delta=big)",
            LOGITS,
            "delta=big of huber is neither a number nor a list of numbers, True or False; correct it",
        ),
        ("huber(y, t, delta=1, delta=2)", LOGITS, "huber sets delta twice; set it once"),
        (
            "contrastive(y)",
            LOGITS,
            "contrastive needs a square of similarities [batch, batch], or two embeddings; 'y' has shape [6, 5]",
        ),
        (
            "cross_entropy(y, t, sample_weight=0.5)",
            LOGITS,
            "sample_weight=0.5 of the loss cross_entropy must be the name of an input; correct it",
        ),
        (
            "binary_cross_entropy(y, t)",
            "y = LogSoftmax (x)",
            "binary_cross_entropy(y): 'y' is the logarithm of a Softmax; use cross_entropy, or say from_logits=True to"
            " take it for logits",
        ),
        (
            "kl_divergence(y, t, log_target=1)",
            LOGITS,
            "log_target=1 of the loss kl_divergence must be True or False; correct it",
        ),
        (
            "cross_entropy(y, t) / 0",
            LOGITS,
            "the loss 'cross_entropy(y, t) / 0' is multiplied or divided by 0; leave such a term out",
        ),
        ("", LOGITS, "the loss is empty; use the name of a value, or text such as cross_entropy(LOGITS, TARGETS)"),
    ],
)
def test_a_loss_that_makes_no_sense_is_refused_with_the_way_out(loss: str, body: str, message: str) -> None:
    with pytest.raises(TrainingError) as error:
        _aim(loss, body)
    assert str(error.value) == message


def test_a_sum_reports_its_parts_as_metrics() -> None:
    step = training_step(mlp(), loss="cross_entropy(y, t) + 0.5 * huber(h, goal)", policy="float32")
    batch = {"x": np.ones((2, 8), F32), "t": np.array([0, 1]), "goal": np.zeros((2, 16), F32)}
    scores = Trainer(step, **PLACE).evaluate([batch])

    assert step.metrics == ("accuracy", "cross_entropy", "huber")
    assert scores.loss == pytest.approx(scores.metrics["cross_entropy"] + 0.5 * scores.metrics["huber"], rel=1e-6)


def test_an_ignored_class_is_no_wrong_target_and_other_ones_are() -> None:
    step = training_step(mlp(), loss="cross_entropy(y, t, ignore_index=-100)", policy="float32")
    trainer = Trainer(step, **PLACE)
    assert trainer.fit([{"x": np.ones((2, 8), F32), "t": np.array([0, -100])}]).nonfinite == 0
    with pytest.raises(TrainingError, match="has class -1, but the model has classes 0 to 3"):
        trainer.fit([{"x": np.ones((2, 8), F32), "t": np.array([0, -1])}])


@pytest.mark.parametrize(
    ("loss", "number", "message"),
    [
        ("kl_divergence(y, t)", -1, "has -1, but its targets are shares of classes, at least 0; kl_divergence takes"),
        ("kl_divergence(y, t, log_target=True)", 0.5, "has 0.5, but its targets are logarithms of shares, at most 0;"),
        ("binary_cross_entropy(y, t)", -1, "has -1, but its targets are yes or no, from 0 to 1; write no as 0"),
    ],
)
def test_targets_outside_their_range_are_refused(loss: str, number: float, message: str) -> None:
    trainer = Trainer(training_step(mlp(), loss=loss, policy="float32"), **PLACE)
    targets = np.zeros((2, 4), F32)
    targets[1, 2] = number
    with pytest.raises(TrainingError) as error:
        trainer.evaluate([{"x": np.ones((2, 8), F32), "t": targets}])
    assert f"input 't' of batch 0 {message}" in str(error.value)


@pytest.mark.parametrize("loss", ["kl_divergence(y, t, log_target=True)", "binary_cross_entropy(y, t)"])
def test_targets_may_be_rounded_past_their_range(loss: str) -> None:
    trainer = Trainer(training_step(mlp(), loss=loss, policy="float32"), **PLACE)
    targets = np.full((2, 4), 1e-7 if "log" in loss else 1 + 1e-7, F32)
    assert np.isfinite(trainer.evaluate([{"x": np.ones((2, 8), F32), "t": targets}]).loss)


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


@pytest.mark.parametrize(
    ("name", "own"),
    [
        ("sparse_categorical_crossentropy", "cross_entropy"),
        ("categorical_crossentropy", "categorical_cross_entropy"),
        ("CrossEntropyLoss", "cross_entropy"),
        ("mse_loss", "mean_squared_error"),
        ("MAE", "mean_absolute_error"),
    ],
)
def test_names_of_losses_in_keras_and_pytorch_lead_to_those_here(name: str, own: str) -> None:
    with pytest.raises(TrainingError) as error:
        terms(f"{name}(y, t)", {"y"}.__contains__, {"cross_entropy": ()})
    assert str(error.value) == f"unknown loss {name!r}; it is {own} here"
