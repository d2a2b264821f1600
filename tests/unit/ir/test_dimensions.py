"""Dimensions by name, inferred through computed shapes, match real runs."""

from pathlib import Path

import numpy as np
import onnx.parser
import onnxruntime
import pytest

from amp_rewrite.files.model import Model
from amp_rewrite.ir.dims import (
    INVENTED_PREFIX,
    Dim,
    Dims,
    Size,
    is_nonnegative,
    minus,
    over,
    plus,
    product,
    renamed,
    times,
)
from amp_rewrite.ir.shapes import known_dims
from amp_rewrite.ir.view import MAIN, View
from support.paths import TESTS

MODELS = sorted((TESTS / "models").glob("*.onnx"))
NUMBERS = """int64 i0 = {0}, int64 i1 = {1}, int64[1] zero = {0}, int64[1] one = {1}, int64[1] two = {2},
    int64[1] most = {9223372036854775807}, int64[1] rest = {-1}, int64[1] eight = {8}, int64[2] ones = {1, 1},
    float[1,32] table = {""" + ",".join(["0"] * 32) + "}"  # fmt: skip
SHAPE = "s = Shape (x)  b = Gather (s, i0)  n = Gather (s, i1)  b1 = Unsqueeze (b, zero)  n1 = Unsqueeze (n, zero)  "
PAIR = "float[b,n,32] x, float[b,m,32] w"
ONE = "float[b,n,32] x, float[1,1] w"
X1 = "float[b,n,32] x, float[1,1] x1"
DOUBLE = ("b", times("n", 2), 16)
KEPT = """t = Concat <axis = 0> (b1, rest)  f = ConstantOfShape <value = int64[1] {1}> (two)  g = Mul (f, rest)
    h = Equal (t, g)  w = Where (h, f, t)  """
"""The exporters' spelling of -1 in an expansion, which keeps a dimension."""


def dims_by_name(model: onnx.ModelProto | Path) -> dict[str, Dims]:
    """Return the known dimensions of values in the main graph."""
    view = View.of(Model.load(model))
    known = known_dims(view)
    return {value.name: known[value.id] for value in view.values_of[MAIN] if value.id in known}


def followed(body: str, inputs: str = "float[b,n,32] x") -> Dims:
    """Return the dimensions of y; generated ones are "?"."""
    head = '<ir_version: 10, opset_import: ["": 18]>'
    model = onnx.parser.parse_model(f"{head} g ({inputs}) => (float y) <{NUMBERS}> {{ {body} }}")
    model.graph.output[0].type.tensor_type.ClearField("shape")
    found = dims_by_name(model)["y"]
    return tuple("?" if isinstance(d, str) and d.startswith(INVENTED_PREFIX) else d for d in found)


@pytest.mark.parametrize(
    ("body", "inputs", "expected"),
    [
        (SHAPE + "t = Concat <axis = 0> (b1, n1, rest, eight)  y = Reshape (x, t)", "", ("b", "n", 4, 8)),
        (SHAPE + "t = Concat <axis = 0> (n1, rest)  y = Reshape (x, t)", "", ("n", times("b", 32))),
        (SHAPE + "r = Range (i0, n, i1)  y = Cast <to = 1> (r)", "", ("n",)),
        (SHAPE + "r = Range (i1, n, i1)  y = Cast <to = 1> (r)", "", ("?",)),  # n may be 0
        (SHAPE + "y = Slice (table, zero, n1, one, one)", "", (1, "?")),
        (SHAPE + "p = Slice (table, zero, n1, one, one)  y = Add (w, p)", "float[b,n,32] x, float[b,n] w", ("b", "n")),
        ("y = Concat <axis = 1> (x, w)", PAIR, ("b", "?", 32)),
        ("c = Concat <axis = 1> (x, w)  d = Concat <axis = 1> (w, x)  y = Add (c, d)", PAIR, ("b", "?", 32)),
        ("y = Add (x, w)", "float[b,n,32] x, float[m,32] w", ("b", "?", 32)),
        ("t = Transpose <perm = [0, 2, 1]> (x)  y = MatMul (x, t)", "", ("b", "n", "n")),
        (SHAPE + "t = Concat <axis = 0> (b1, n1)  y = Expand (i, t)", "float[b,n,32] x, float[1,1] i", ("b", "n")),
        (SHAPE + KEPT + "y = Expand (u, w)", "float[b,n,32] x, float[1,7] u", ("b", 7)),
        (SHAPE + KEPT.replace("(f, rest)", "(f, two)") + "y = Expand (x1, w)", X1, ("?", "?")),
        ("y = Reshape (x, t)", "float[b,n,32] x, int64[2] t", ("?", "?")),
        (SHAPE + "m = Mul (n1, two)  t = Concat <axis = 0> (b1, m, rest)  y = Reshape (x, t)", "", DOUBLE),
        (SHAPE + "m = Div (n1, two)  t = Concat <axis = 0> (b1, m)  y = Expand (w, t)", ONE, ("b", "?")),
    ],
)  # fmt: skip
def test_a_dimension_keeps_its_name_through_computed_shapes(body: str, inputs: str, expected: tuple[Dim, ...]) -> None:
    assert followed(body, inputs or "float[b,n,32] x") == tuple("?" if d is None else d for d in expected)


MADE = SHAPE + "m = Mul (n1, two)  t = Concat <axis = 0> (b1, m, rest)  d = Reshape (x, t)  "
N2 = times("n", 2)


@pytest.mark.parametrize(
    ("body", "inputs", "expected"),
    [
        ("y = MatMul (d, w)", "float[16,m] w", ("b", N2, "m")),
        ("y = CumSum (d, i0)", "", ("b", N2, 16)),
        ("y = Slice (d, one, most, two)", "", ("b", N2, 15)),
        ("y = Concat <axis = -1> (d, d)", "", ("b", N2, 32)),
        ("z = Concat <axis = 0> (zero, m, rest)  y = Reshape (d, z)", "", ("b", N2, 16)),
        ("z = Concat <axis = 0> (zero, rest)  y = Reshape <allowzero = 1> (d, z)", "", (0, None)),
        ("z = Shape (d)  y = Expand (i1f, z)", "float i1f", ("b", N2, 16)),
        ("y = Relu (d)", "", ("b", N2, 16)),
    ],
)
def test_ops_propagate_dimensions_beyond_onnxs_inference(body: str, inputs: str, expected: tuple[Dim, ...]) -> None:
    assert followed(MADE + body, ", ".join(filter(None, ("float[b,n,32] x", inputs)))) == expected


def test_a_length_that_may_be_smaller_is_not_the_whole_axis() -> None:
    """32 positions cut at n are n only if the model then adds a value of length n."""
    cut = SHAPE + "p = Slice (table, zero, n1, one, one)  "
    assert followed(cut + "y = Add (p, w)", "float[b,n,32] x, float[1,1] w") == (1, "?")
    assert followed(cut + "y = Add (p, w)", "float[b,n,32] x, float[1,m] w") == (1, "?")


def test_an_alias_of_a_known_dimension_is_the_same_name() -> None:
    model = onnx.parser.parse_model(
        '<ir_version: 10, opset_import: ["": 18]> g (float[b,n] x) => (float[c,n] y, float[c,n] z) {'
        "h = Relu (x)  y = Relu (h)  z = LpNormalization (y) }"
    )
    found = dims_by_name(model)
    assert (found["y"], found["z"]) == (("b", "n"), ("b", "n"))


@pytest.mark.parametrize(
    ("shape", "expected"),
    [
        (plus("a", 0), "a"),
        (plus("a", "a"), times(2, "a")),
        (plus("a", "b"), None),
        (minus("a", "a"), 0),
        (times("a", times("b", 2)), times(times(2, "b"), "a")),
        (over(times("a", 12), times("a", 4)), 3),
        (over("a", 2), None),
        (over("a", 0), None),
        (product(("a", None)), None),
        (renamed(times("a", "b"), {"a": 3}), times("b", 3)),
        (str(times("a", 2)), "2*a"),
        (is_nonnegative(times("a", -1)), False),
        (times("a", "b"), Size(1, ("a", "b"))),
    ],
)
def test_equal_sizes_are_equal_however_they_were_computed(shape: object, expected: object) -> None:
    assert shape == expected


@pytest.mark.parametrize("path", MODELS, ids=lambda path: path.stem)
def test_inferred_dimensions_match_a_run(path: Path) -> None:
    """Check every dimension known by numbers and the inputs' names, in exported models."""
    model = onnx.load(path)
    found = dims_by_name(path)
    declared = {output.name for output in model.graph.output}
    results = [name for node in model.graph.node for name in node.output if name in found]
    model.graph.output.extend(onnx.ValueInfoProto(name=name) for name in results if name not in declared)
    with np.load(path.with_suffix(".npz")) as stored:
        feed = {key.removeprefix("input/"): stored[key] for key in stored.files if key.startswith("input/")}
    options = onnxruntime.SessionOptions()
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    session = onnxruntime.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])
    shapes = {name: np.shape(array) for name, array in zip(results, session.run(results, feed), strict=True)}
    sizes = {
        d.dim_param: size
        for formal in model.graph.input
        for d, size in zip(formal.type.tensor_type.shape.dim, feed[formal.name].shape, strict=True)
    }
    followed = {name: tuple(renamed(d, sizes) for d in found[name]) for name in results}
    wrong = {
        name: (followed[name], shapes[name])
        for name in results
        if any(isinstance(d, int) and d != size for d, size in zip(followed[name], shapes[name], strict=True))
    }
    assert wrong == {}
    assert any(isinstance(d, int) for dims in followed.values() for d in dims)
