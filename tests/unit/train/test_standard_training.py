"""The standard's own training operators and training graphs, lowered and run on onnxruntime."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from functools import cache
from pathlib import Path

import numpy as np
import onnx
import onnx.parser
import pytest
from onnx import ModelProto, numpy_helper
from onnx.backend.test.case.test_case import TestCase
from onnx.backend.test.loader import load_model_tests

from amp_rewrite import GradientError, Model, ModelError
from amp_rewrite.train.interchange.training_ops import Algorithm, algorithms, lower_training_ops
from support.train.vjp_case import run_float32

BACKEND_CASES = (
    "test_adagrad",
    "test_adagrad_multiple",
    "test_adam",
    "test_adam_multiple",
    "test_gradient_of_add",
    "test_gradient_of_add_and_mul",
    "test_momentum",
    "test_momentum_multiple",
    "test_nesterov_momentum",
)


@cache
def backend_cases() -> dict[str, TestCase]:
    """The cases of onnx's own backend tests that hold training operators."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # onnx computes what it expects of others with overflows
        found = [*load_model_tests(kind="node"), *load_model_tests(kind="simple")]
    return {case.name: case for case in found if case.name in BACKEND_CASES}


def model_and_data(case: TestCase) -> tuple[ModelProto, list[tuple[list[np.ndarray], list[np.ndarray]]]]:
    if case.model is not None:
        return case.model, case.data_sets
    folder = Path(str(case.model_dir))
    sets = []
    for data in sorted(folder.glob("test_data_set_*")):
        sides = []
        for side in ("input", "output"):
            paths = sorted(data.glob(f"{side}_*.pb"), key=lambda p: int(p.stem.split("_")[1]))
            sides.append([numpy_helper.to_array(onnx.load_tensor(str(p))) for p in paths])
        sets.append((sides[0], sides[1]))
    return onnx.load(str(folder / "model.onnx")), sets


@pytest.mark.parametrize("name", BACKEND_CASES)
def test_onnx_backend_cases_pass_on_onnxruntime(name: str) -> None:
    case = backend_cases()[name]
    model, sets = model_and_data(case)
    lowered = lower_training_ops(model).to_proto()
    onnx.checker.check_model(lowered, full_check=True)
    assert {o.domain for o in lowered.opset_import} == {""}
    assert sets
    for inputs, expected in sets:
        feed = dict(zip([v.name for v in model.graph.input], inputs, strict=True))
        found = run_float32(lowered, feed, [v.name for v in model.graph.output])
        for mine, wanted in zip(found, expected, strict=True):
            np.testing.assert_allclose(mine, wanted, rtol=case.rtol, atol=case.atol)


def test_onnxruntime_itself_does_not_run_them() -> None:
    model, _ = model_and_data(backend_cases()["test_gradient_of_add"])
    with pytest.raises(Exception, match=r"ai\.onnx\.preview\.training:Gradient"):
        run_float32(model, {}, [])


HEADER = '<ir_version: 9, opset_import: ["": 20, "ai.onnx.preview.training": 1]>'


def run(text: str, **feed: object) -> list[list[float]]:
    """The outputs of a lowered graph, flat."""
    model = onnx.parser.parse_model(HEADER + text)
    arrays = {name: np.asarray(value, np.float32) for name, value in feed.items()}
    found = run_float32(lower_training_ops(model).to_proto(), arrays, [v.name for v in model.graph.output])
    return [np.ravel(f).tolist() for f in found]


def test_a_gradient_is_read_by_what_follows() -> None:
    text = """
    g (float[2] w, float r) => (float[2] new) {
      s = Mul (w, w)
      l = ReduceSum <keepdims = 0> (s)
      dw = ai.onnx.preview.training.Gradient <xs = ["w"], y = "l"> (w)
      step = Mul (dw, r)
      new = Sub (w, step)
    }"""
    assert run(text, w=[1, 2], r=0.25) == [[0.5, 1.0]]


def test_a_gradient_by_a_value_inside_the_graph() -> None:
    text = """
    g (float[2] w) => (float[2] dh) {
      h = Exp (w)
      s = Mul (h, h)
      l = ReduceSum <keepdims = 0> (s)
      dh = ai.onnx.preview.training.Gradient <xs = ["h"], y = "l"> (h)
    }"""
    assert run(text, w=[0, 0]) == [[2, 2]]


def test_a_gradient_at_another_value() -> None:
    text = """
    g (float[2] w, float[2] other, float[2] z) => (float[2] dw, float[2] l) {
      s = Mul (w, w)
      l = Mul (s, z)
      dw = ai.onnx.preview.training.Gradient <xs = ["w"], zs = ["z"], y = "l"> (other, z)
    }"""
    assert run(text, w=[1, 1], other=[3, 4], z=[1, 2]) == [[6, 16], [1, 2]]


def test_a_gradient_of_a_gradient() -> None:
    text = """
    g (float w) => (float ddw) {
      s = Mul (w, w)
      l = Mul (s, w)
      dw = ai.onnx.preview.training.Gradient <xs = ["w"], y = "l"> (w)
      ddw = ai.onnx.preview.training.Gradient <xs = ["w"], y = "dw"> (w)
    }"""
    assert run(text, w=2) == [[12]]


def test_an_output_that_is_left_out() -> None:
    text = """
    g (float a, float b) => (float db) {
      l = Mul (a, b)
      "", db = ai.onnx.preview.training.Gradient <xs = ["a", "b"], y = "l"> (a, b)
    }"""
    model = onnx.parser.parse_model(HEADER + text.replace('""', "unused"))
    model.graph.node[1].output[0] = ""
    found = run_float32(
        lower_training_ops(model).to_proto(), {n: np.array(v, "f") for n, v in (("a", 2), ("b", 3))}, ["db"]
    )
    assert found[0] == 2


def refusal(text: str) -> str:
    with pytest.raises((GradientError, ModelError)) as caught:
        lower_training_ops(onnx.parser.parse_model(HEADER + text))
    return str(caught.value)


def test_a_gradient_of_what_is_not_there() -> None:
    text = (
        """g (float a) => (float d) { l = Neg (a)  d = ai.onnx.preview.training.Gradient <xs = ["a"], y = "m"> (a) }"""
    )
    assert refusal(text) == "the model has no value 'm' that could be the loss; its outputs are 'd'"


def test_a_training_operator_in_a_body() -> None:
    text = """
    g (float a, bool c) => (float d) {
      d = If (c) <
        then_branch = t () => (float e) {
          l = Neg (a)
          e = ai.onnx.preview.training.Gradient <xs = ["a"], y = "l"> (a)
        },
        else_branch = f () => (float k) { k = Neg (a) }
      >
    }"""
    assert refusal(text) == "node '' (If) has a training operator in a body; move it out"


def test_an_optimizer_with_tensors_missing() -> None:
    text = (
        """g (float r, int64 t, float x, float h) => (float y) { y = ai.onnx.preview.training.Adagrad (r, t, x, h) }"""
    )
    assert refusal(text) == (
        "node '' (Adagrad) has 2 tensors and 1 outputs, not 3 and 2 for each parameter; the model is invalid"
    )


# -- training_info -------------------------------------------------------------------------------------------


def linear() -> ModelProto:
    """y = w·x with a training algorithm: w goes down the slope of (y − target)², a count goes up."""
    model = onnx.parser.parse_model(
        HEADER + "g (float[4] x) => (float[4] y) <float w = {0.0}> { y = Mul (w, x) }"
    )  # fmt: skip
    algorithm = onnx.parser.parse_graph("""
    step (float[4] target) => (float loss, float w_new, int64 n_new)
    <int64 n = {0}, int64 one = {1}, float rate = {0.25}> {
      d = Sub (y, target)
      s = Mul (d, d)
      loss = ReduceMean <keepdims = 0> (s)
      dw = ai.onnx.preview.training.Gradient <xs = ["w"], zs = ["x", "target"], y = "loss"> (w, x, target)
      move = Mul (rate, dw)
      w_new = Sub (w, move)
      n_new = Add (n, one)
    }""")
    first = onnx.parser.parse_graph("first () => (float w_first) { w_first = Constant <value_float = 3.0> () }")
    info = model.training_info.add()
    info.algorithm.CopyFrom(algorithm)
    info.initialization.CopyFrom(first)
    for binding, key, value in (
        (info.update_binding, "w", "w_new"),
        (info.update_binding, "n", "n_new"),
        (info.initialization_binding, "w", "w_first"),
    ):
        binding.add(key=key, value=value)
    return model


def state(algorithm: Algorithm) -> dict[str, np.ndarray]:
    assert algorithm.initialization is not None
    names = list(algorithm.initials.values())
    found = run_float32(algorithm.initialization.to_proto(), {}, names)
    return dict(zip(algorithm.initials, found, strict=True))


def test_a_training_algorithm_becomes_a_step_that_trains() -> None:
    (algorithm,) = algorithms(linear())
    now: dict[str, np.ndarray] = {**state(algorithm), "n": np.array(0, np.int64)}
    assert now["w"] == 3
    x = np.array([1, -1, 2, 0.5], "f")
    losses = []
    for _ in range(20):
        names = ["loss", *algorithm.updates.values()]
        loss, *new = run_float32(algorithm.step.to_proto(), {"x": x, "target": 2 * x, **now}, names)
        now = dict(zip(algorithm.updates, new, strict=True))
        losses.append(loss.item())
    assert losses[0] == pytest.approx(1.5625)
    assert losses == sorted(losses, reverse=True)
    assert now["n"] == 20
    assert now["w"] == pytest.approx(2, abs=1e-4)


def test_a_model_without_training_info_has_no_algorithms() -> None:
    model = linear()
    model.ClearField("training_info")
    assert algorithms(model) == ()


def test_the_model_that_is_given_stays_as_it_is() -> None:
    model = linear()
    before = model.SerializeToString()
    algorithms(Model(model))
    assert model.SerializeToString() == before


@pytest.mark.parametrize(
    ("key", "value", "fault"),
    [
        (
            "w",
            "v_new",
            "the update_binding of 'w' refers to 'v_new', which is not an output of its graph; correct the name",
        ),
        ("v", "w_new", "the update_binding of 'v' does not name an initializer; correct the name"),
    ],
)
def test_a_binding_that_does_not_fit(key: str, value: str, fault: str) -> None:
    model = linear()
    binding = model.training_info[0].update_binding[0]
    binding.key, binding.value = key, value
    with pytest.raises(ModelError) as caught:
        algorithms(model)
    assert str(caught.value) == f"training_info 0: {fault}"


# -- optimizers ------------------------------------------------------------------------------------------------


RATE, POWER, EPSILON = 0.25, 0.125, 0.0625
X, G, M, H = ([np.float32(v) for v in values] for values in ((2.0, -1.0), (0.5, -3.0), (0.75, 0.5), (0.25, 4.0)))


def adagrad(count: int, x: float, g: float, m: float, h: float) -> tuple[float, ...]:
    g, rate = g + POWER * x, RATE / (1 + count * 0.5)
    return x - rate * g / (np.sqrt(h + g * g) + EPSILON), h + g * g


def momentum(count: int, x: float, g: float, m: float, h: float) -> tuple[float, ...]:
    g = g + POWER * x
    m = 0.75 * m + (0.5 if count else 1) * g
    return x - RATE * m, m


def nesterov(count: int, x: float, g: float, m: float, h: float) -> tuple[float, ...]:
    _, m = momentum(count, x, g, m, h)
    return x - RATE * (g + POWER * x + 0.75 * m), m


def adam(count: int, x: float, g: float, m: float, h: float) -> tuple[float, ...]:
    g = g + POWER * x
    m, h = 0.75 * m + 0.25 * g, 0.5 * h + 0.5 * g * g
    rate = RATE * np.sqrt(1 - 0.5**count) / (1 - 0.75**count) if count else RATE
    return (1 - 0.375) * (x - rate * m / (np.sqrt(h) + EPSILON)), m, h


@pytest.mark.parametrize("count", [0, 3])
@pytest.mark.parametrize(
    ("op", "words", "formula", "state"),
    [
        ("Adagrad", f"norm_coefficient={POWER}, epsilon={EPSILON}, decay_factor=0.5", adagrad, "h"),
        ("Momentum", f'norm_coefficient={POWER}, alpha=0.75, beta=0.5, mode="standard"', momentum, "m"),
        ("Momentum", f'norm_coefficient={POWER}, alpha=0.75, beta=0.5, mode="nesterov"', nesterov, "m"),
        (
            "Adam",
            f"norm_coefficient={POWER}, norm_coefficient_post=0.375, alpha=0.75, beta=0.5, epsilon={EPSILON}",
            adam,
            "mh",
        ),
    ],
    ids=["Adagrad", "Momentum", "Nesterov", "Adam"],
)
def test_an_optimizer_computes_the_formula_of_the_standard(
    op: str, words: str, formula: Callable[..., tuple[float, ...]], state: str, count: int
) -> None:
    """Two parameters in one node, every attribute stated."""
    tensors = [f"{kind}{i}" for kind in f"xg{state}" for i in "12"]
    results = [f"new_{kind}{i}" for kind in f"x{state}" for i in "12"]
    text = f"""g (float r, int64 t, {", ".join(f"float {n}" for n in tensors)})
        => ({", ".join(f"float {n}" for n in results)}) {{
      {", ".join(results)} = ai.onnx.preview.training.{op} <{words}> (r, t, {", ".join(tensors)})
    }}"""
    values = {f"{kind}{i + 1}": v[i] for kind, v in zip("xgmh", (X, G, M, H), strict=True) for i in range(2)}
    feed = {"r": np.float32(RATE), "t": np.array(count), **{name: values[name] for name in tensors}}
    lowered = lower_training_ops(onnx.parser.parse_model(HEADER + text)).to_proto()
    found = run_float32(lowered, {name: np.asarray(value) for name, value in feed.items()}, results)
    expected = np.transpose([formula(count, *(v[i] for v in (X, G, M, H))) for i in range(2)])
    assert np.ravel(found) == pytest.approx(expected.ravel(), rel=1e-6)


def test_an_optimizer_with_tensors_for_half_a_parameter() -> None:
    text = """g (float r, int64 t, float x, float g, float h, float e) => (float y, float z) {
        y, z = ai.onnx.preview.training.Adagrad (r, t, x, g, h, e) }"""
    assert "has 4 tensors and 2 outputs, not 3 and 2 for each parameter" in refusal(text)
