"""Bounds hold under unusual attributes, spellings and masks, and in every operator that onnx itself tests."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import onnxruntime
import pytest

from amp_rewrite.decide.bounds.walk import Walk
from amp_rewrite.dtypes import DType
from amp_rewrite.errors import AmpRewriteError
from amp_rewrite.files.model import Model
from amp_rewrite.ir.view import View
from support.bound_check import Probe, exceeded
from support.bound_rows import Row
from support.one_op import Case, cases

RNG = np.random.default_rng(0)
X = RNG.standard_normal((8, 8))
UNEVEN = X * np.array([1, 0.01, 100, 1e-3, 1, 1, 1, 1.0])[:, None]
LAST = np.array([-1])
EPSILON = np.float32(1e-6)
FEEDS = [{"x": X}, {"x": UNEVEN}, {"x": 1e-4 * X}, {"x": np.eye(8)}]
ROOT = "s = Mul (x, x) v = ReduceMean <keepdims = 1> (s, a) e = Add (v, eps)"
CENTERED = "m = ReduceMean <keepdims = 1> (x, a) d = Sub (x, m) s = Mul (d, d)"


def _norm(body: str, **constants: Any) -> Row:
    return Row("float[8,8] x", body, FEEDS, constants={"a": LAST, "eps": EPSILON, **constants})


def _mask(body: str, **constants: Any) -> Row:
    """Sigmoids beside the fill of a mask, or two axes more."""
    feed = {"x": X[None, None], "c": X[None, None] > 0}
    hidden = f"f = Constant <value_float = -1e30> () t = Sigmoid (x) m = Where (c, t, f) {body}"
    return Row("float[1,1,8,8] x, bool[1,1,8,8] c", hidden, [feed], constants=constants)


def _range(low: float, high: float, body: str, opset: int = 21, **constants: Any) -> Row:
    x = np.linspace(low, high, 64).reshape(8, 8)
    return Row("float[8,8] x", body, [{"x": x}], {"x": (low, high)}, constants, opset)


def _gelu(inside: float, one: float, outside: float) -> Row:
    body = "d = Div (x, i) e = Erf (d) o = Add (e, j) m = Mul (x, o) y = Mul (m, k)"
    return _range(-6, 6, body, i=np.float32(inside), j=np.float32(one), k=np.float32(outside))


FUNCTIONS = ("BatchNormalization", "Celu", "Elu", "Floor", "GlobalAveragePool", "GlobalMaxPool", "HardSigmoid", "Selu")
HELD = np.full(1, 0.5)
MASKS = {
    **{kind: _mask(f"y = {kind} (m)") for kind in FUNCTIONS[1:]},
    **{kind: _mask(f"y = {kind} (m)") for kind in ("Abs", "LogSoftmax", "Neg", "Round", "Sign", "Softplus", "Sqrt")},
    "AveragePool": _mask("y = AveragePool <kernel_shape = [2, 2]> (m)"),
    "BatchNormalization": _mask("y = BatchNormalization (m, h, h, h, h)", h=HELD),
    "Clip": _mask("y = Clip (m, h)", h=np.float32(-10)),
    "LeakyRelu": _mask("y = LeakyRelu <alpha = 1e-30> (m)"),
    "Mean": _mask("y = Mean (m, t)"),
    "Pow": _mask("y = Pow (m, h)", h=np.float32(1)),
    "PRelu": _mask("y = PRelu (m, h)", h=HELD),
    "ReduceSum": _mask("y = ReduceSum (m, a)", a=LAST),
    "Resize": _mask('y = Resize <mode = "linear"> (m, , s)', s=np.array([1.0, 1, 2, 2])),
}
NORMS = {
    "axes of mean and variance": _norm(
        f"{CENTERED} v = ReduceMean <keepdims = 1> (s, b) e = Add (v, eps) r = Sqrt (e) y = Div (d, r)", b=np.array([0])
    ),
    "a mean without its axis": _norm(f"{ROOT.replace('keepdims = 1', 'keepdims = 0')} r = Sqrt (e) y = Div (x, r)"),
    "another root": _norm(f"{ROOT} r = Pow (e, p) y = Div (x, r)", p=np.float32(0.25)),
    "no root": _norm(f"{ROOT} r = Pow (e, p) y = Mul (x, r)", p=np.float32(-1)),
    "a numerator": _norm(f"{ROOT} r = Sqrt (e) i = Div (five, r) y = Mul (x, i)", five=np.float32(5)),
    "a guard from above": _norm(f"{ROOT} h = Clip (e, eps, top) r = Sqrt (h) y = Div (x, r)", top=np.float32(1e-3)),
    "a negative guard": _norm(
        f"{CENTERED} v = ReduceMean <keepdims = 1> (s, a) e = Add (v, less) r = Sqrt (e) y = Div (d, r)",
        less=np.float32(-1e-9),
    ),
    "a length without its axis": _norm("n = ReduceL2 <keepdims = 0> (x, a) e = Clip (n, eps) y = Div (x, e)"),
    "a length from above": _norm("n = ReduceL2 (x, a) e = Clip (n, eps, top) y = Div (x, e)", top=np.float32(1e-3)),
    "a softmax without its axis": _norm(
        "m = ReduceMax (x, a) d = Sub (x, m) e = Exp (d) s = ReduceSum <keepdims = 0> (e, a) y = Div (e, s)"
    ),
    "a mean of maps": Row(
        "float[1,8,8,4] x",
        "s = Mul (x, x) v = GlobalAveragePool (s) e = Add (v, eps) r = Sqrt (e) y = Div (x, r)",
        [{"x": feed["x"][None, :, :, None] * np.ones(4)} for feed in FEEDS],
        constants={"eps": EPSILON},
    ),
    "a computed guard": Row(
        "float[8,8] x, float eps",
        f"{ROOT} r = Sqrt (e) y = Div (x, r)",
        [{"x": X, "eps": -0.5 * np.square(X).mean(-1).min()}],
        constants={"a": LAST},
    ),
    "a computed power": Row(
        "float[8,8] x, float two",
        f"{ROOT.replace('Mul (x, x)', 'Pow (x, two)')} r = Sqrt (e) y = Div (x, r)",
        [{"x": 30 * X, "two": np.float32(0.5)}],
        constants={"a": LAST, "eps": EPSILON},
    ),
    **{f"GELU of {n}": _gelu(*n) for n in ((1.4142, 1, 5.0), (14, 1, 0.5), (1.4142, 3, 0.5), (-1.4142, 1, 0.5))},
}
SHARES = {
    "a sum from above": ("s = ReduceSum (x, a) d = Clip (s, eps, top) y = Div (x, d)", {"top": np.float32(0.5)}),
    "whole sums": ("s = ReduceSum (x, a) i = Cast <to = 6> (s) d = Cast <to = 1> (i) y = Div (x, d)", {}),
}
PAST = {"p": np.ones((1, 2, 4, 16)), "n": np.array([3], np.int32), "t": np.array(4, np.int32)}
OTHERS = {
    **{
        name: Row(
            "float[8,8] x",
            body,
            [{"x": np.full((8, 8), 0.19)}],
            {"x": (0.0, 5.0)},
            {"a": LAST, "eps": EPSILON, **more},
        )
        for name, (body, more) in SHARES.items()
    },
    "shares of another sum": Row(
        "float[4,1,8] x",
        "s = ReduceSum <keepdims = 0> (x, a) d = Unsqueeze (s, z) y = Div (x, d)",
        [{"x": np.abs(X[:4, None]) * np.array([0.01, 1, 2, 5])[:, None, None]}],
        {"x": (0.0, 50.0)},
        {"a": LAST, "z": np.array([0])},
    ),
    "to bool": _range(4, 6, "i = Cast <to = 9> (x) y = Cast <to = 1> (i)"),
    "to 8 bits": _range(299, 301, "j = Cast <to = 7> (x) i = Cast <to = 3> (j) y = Cast <to = 1> (i)"),
    "to a type that saturates": _range(899, 901, "i = Cast <to = 17> (x) y = Cast <to = 1> (i)"),
    "a softmax along one element": Row(
        "float[2,N] x, bool[2,S] c",
        "t = Softmax (x) z = Where (c, t, o) y = ReduceSum <keepdims = 1> (z, a)",
        [{"x": np.ones((2, 1)), "c": np.ones((2, 8), bool)}],
        constants={"a": LAST, "o": np.float32(0)},
    ),
    "a constant cache": Row(
        "float[1,1,64] q, float[1,1,32] x",
        "v = Tanh (x) y, pk, pv = com.microsoft.GroupQueryAttention <num_heads = 4, kv_num_heads = 2>"
        " (q, x, v, p, w, n, t)",
        [{"q": np.ones((1, 1, 64)), "x": np.ones((1, 1, 32))}],
        constants={**PAST, "w": np.full((1, 2, 4, 16), 50.0)},
    ),
    "a rotation of a part": Row(
        "float[1,2,3,8] x",
        "y = RotaryEmbedding <rotary_embedding_dim = 4> (x, c, c)",
        [{"x": np.ones((1, 2, 3, 8))}],
        {"x": (-1.0, 1.0)},
        {"c": np.full((1, 3, 2), 0.1)},
        23,
    ),
    "gates that are negative": Row(
        "float[20,1,4] x",
        'h, y = GRU <hidden_size = 4, activations = ["Tanh", "Tanh"]> (x, w, r)',
        [{"x": np.ones((20, 1, 4))}],
        constants={"w": np.concatenate([np.full((1, 4, 4), -9), np.ones((1, 8, 4))], 1), "r": np.ones((1, 12, 4))},
    ),
    "a window of padding": Row(
        "float[1,1,1] x",
        "y = MaxPool <kernel_shape = [2], dilations = [2], pads = [1, 1]> (x)",
        [{"x": np.full((1, 1, 1), 5.5)}],
        {"x": (5.0, 6.0)},
    ),
    "cubic weights, some left out": Row(
        "float[1,1,4,4] x",
        'y = Resize <mode = "cubic", exclude_outside = 1, cubic_coeff_a = -2.0> (x, , s)',
        [{"x": RNG.choice([-1.0, 1.0], (1, 1, 4, 4))} for _ in range(50)],
        {"x": (-1.0, 1.0)},
        {"s": np.array([1, 1, 1.3, 1.7])},
    ),
}
ROWS: Mapping[str, Row] = {
    **{f"a mask before {kind}": row for kind, row in MASKS.items()},
    **{f"a norm with {name}": row for name, row in NORMS.items()},
    **OTHERS,
}


@pytest.mark.parametrize("name", ROWS)
def test_no_run_exceeds_a_bound_of_an_unusual_model(name: str) -> None:
    row = ROWS[name]
    probe = row.probe()
    for feed in row.fed():
        assert probe.violations(feed) == []


def test_usual_norms_keep_their_bound() -> None:
    """Or the tests above would compare nothing."""
    usual = _norm(f"{ROOT} r = Sqrt (e) y = Div (x, r)"), _gelu(1.4142, 1, 0.5)
    assert [row.probe().states["y"].lo.min() > -3 for row in usual] == [True, True]


@pytest.mark.parametrize("attributes", ["", "dilations = [2]", "pads = [1, 2]", "output_padding = [2]"])
def test_places_that_fewer_taps_of_a_transposed_convolution_reach_are_told_apart(attributes: str) -> None:
    """The walk that proves an overflow from below follows maps of one number from place to place."""
    body = f"y = ConvTranspose <strides = [3]{', ' * bool(attributes)}{attributes}> (x, w)"
    row = Row("float[1,2,5] x", body, [{"x": np.ones((1, 2, 5))}], constants={"w": np.full((2, 1, 4), 0.5)})
    model, (feed,) = row.model(), row.fed()
    ((_, values), _) = Probe(model).values(feed)
    view = View.of(Model.load(model))
    walk = Walk.of(view, DType.FLOAT, {"x": (1.0, 1.0)}, spatial=True)
    state = walk.state(view.scopes[0].outputs[0])
    assert exceeded(state, values["y"].astype(np.float64)) == ""
    assert state.least == pytest.approx(values["y"].max(), rel=1e-5)


def test_no_operator_of_onnx_exceeds_its_bound() -> None:
    """The ranges of inputs are those of the numbers that they are fed."""
    compared, wrong = 0, []
    for case in cases():
        found = _compared(case)
        compared += len(found)
        wrong += [(case.name, fault) for fault in found if fault]
    assert not wrong
    assert compared > 200


def _compared(case: Case) -> list[str]:
    """What exceeds a bound, for each result that has one; nothing without a kernel for CPUs."""
    fed = {name: a for name, a in case.feeds.items() if isinstance(a, np.ndarray) and a.dtype.kind in "fiu" and a.size}
    given = {name: (float(a.min()), float(a.max())) for name, a in fed.items() if np.isfinite(a).all()}
    options = onnxruntime.SessionOptions()
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    options.log_severity_level = 4
    try:
        view = View.of(Model.load(case.model))
        session = onnxruntime.InferenceSession(
            case.model.SerializeToString(), options, providers=["CPUExecutionProvider"]
        )
        results = session.run(None, dict(case.feeds))
    except (AmpRewriteError, RuntimeError, *_ERRORS):
        return []
    walk, ids = Walk.of(view, DType.FLOAT16, given), {value.name: value.id for value in view.values}
    pairs = [(walk.state(ids[port.name]), a) for port, a in zip(session.get_outputs(), results, strict=True)]
    finite = [(s, np.asarray(a, np.float64)) for s, a in pairs if isinstance(a, np.ndarray) and a.dtype.kind in "fiub"]
    return [exceeded(state, a) for state, a in finite if state.known and not state.fills and np.isfinite(a).all()]


_ERRORS = tuple(
    error
    for name in ("Fail", "InvalidArgument", "InvalidGraph", "NotImplemented", "RuntimeException")
    if (error := getattr(onnxruntime.capi.onnxruntime_pybind11_state, name, None)) is not None
)
