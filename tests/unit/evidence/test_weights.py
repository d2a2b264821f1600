"""What baking loses, weight by weight, and pending casts that become nodes."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import onnx.parser
import pytest
from onnx import numpy_helper

import amp_rewrite
from amp_rewrite.dtypes import DType
from amp_rewrite.errors import PolicyError
from amp_rewrite.evidence.instrument import lazy_weights
from amp_rewrite.evidence.instrument.lazy_weights import casting_in_graph, opening
from amp_rewrite.evidence.weights import WeightFit, check_weights, weights_text
from amp_rewrite.files.fit import Fit
from amp_rewrite.files.model import Model
from amp_rewrite.files.tensors import is_stub, source
from amp_rewrite.ir.view import View
from amp_rewrite.runtime.runner import Runner


def model(**weights: np.ndarray) -> onnx.ModelProto:
    """y = x + every weight, each of which broadcasts to x."""
    nodes, last = [], "x"
    for name in weights:
        nodes.append(onnx.helper.make_node("Add", [last, name], [f"s_{name}"]))
        last = f"s_{name}"
    nodes.append(onnx.helper.make_node("Identity", [last], ["y"]))
    x, y = (onnx.helper.make_tensor_value_info(n, onnx.TensorProto.FLOAT, ["N", "M"]) for n in "xy")
    tensors = [numpy_helper.from_array(np.asarray(w), n) for n, w in weights.items()]
    graph = onnx.helper.make_graph(nodes, "g", [x], [y], tensors)
    return onnx.helper.make_model(graph, ir_version=10, opset_imports=[onnx.helper.make_opsetid("", 20)])


FITS = np.float32([1, -2, 0.5])
# 1e-9 becomes 0, 70000 becomes 65504, 1e-6 a subnormal: 17 * 2^-24.
LOSES = np.float32([1e-9, 70000, 1e-6, 4])


def test_what_a_weight_loses_is_counted_and_the_worst_comes_first() -> None:
    found = check_weights(model(fits=FITS, tiny=np.float32([1e-9, 1]), loses=LOSES), "float16")
    assert [w.name for w in found] == ["loses", "tiny", "fits"]
    worst = found[0]
    assert worst.fit == Fit(count=4, absmax=70000.0, absmin=np.float32(1e-9).item(), overflow=1, flushed=1, subnormal=1)
    assert (worst.dtype, worst.shape, worst.max_rel, worst.flushed) == ("float32", (4,), 1.0, 0.25)
    # The saturated value alone: the others lose 2^-24 at most.
    assert worst.error == pytest.approx((70000 - 65504) / 70000, rel=1e-6)
    assert found[2] == WeightFit("fits", "", "float32", (3,), 0.0, 0.0, Fit(3, 0, 2.0, 0.5))


def test_the_largest_relative_error_is_that_of_the_value_that_rounds_worst() -> None:
    value = np.float32(1 + 2**-11)  # halfway between 1 and the next float16
    (found,) = check_weights(model(w=np.array([value, 2.0], np.float32)), "float16")
    assert found.max_rel == pytest.approx(2**-11 / (1 + 2**-11), rel=1e-12)


def test_bfloat16_loses_digits_and_no_range() -> None:
    (found,) = check_weights(model(loses=LOSES), DType.BFLOAT16)
    assert (found.fit.overflow, found.fit.flushed, found.fit.subnormal) == (0, 0, 0)
    assert 0 < found.max_rel <= 2**-8


def test_infinities_and_nan_are_counted_and_spoil_nothing() -> None:
    (found,) = check_weights(model(w=np.float32([np.inf, np.nan, 1])), "float16")
    assert (found.fit.nonfinite, found.max_rel, found.error) == (2, 0.0, 0.0)


def test_low_weights_and_integers_are_left_out_and_empty_weights_lose_nothing() -> None:
    proto = onnx.parser.parse_model(
        '<ir_version: 10, opset_import: ["": 20]> g (float16[2] x) => (float16[2] y)'
        " <float16[2] h = {1, 2}, int64[1] i = {0}> { g = Gather (x, i) y = Add (h, g) }"
    )
    assert check_weights(proto, "float16") == ()
    (found,) = check_weights(model(e=np.zeros((0, 1), np.float32)), "float16")
    assert found == WeightFit("e", "", "float32", (0, 1), 0.0, 0.0, Fit())
    assert found.flushed == 0.0


def test_constants_in_bodies_are_weights_too_and_say_where_they_are() -> None:
    proto = onnx.parser.parse_model(
        '<ir_version: 10, opset_import: ["": 20]> g (float[2] x, bool c) => (float[2] y) {'
        " [pick] y = If (c) <then_branch = t () => (float[2] u)"
        " {k = Constant <value = float {1e-9}> () u = Mul (x, k)},"
        " else_branch = e () => (float[2] v) {v = Neg (x)}> }"
    )
    (found,) = check_weights(proto, "float16")
    assert (found.name, found.scope, found.shape, found.flushed) == ("k", "pick/then_branch/", (), 1.0)


def test_of_a_conversion_those_alone_that_were_baked_can_be_asked_for() -> None:
    weight = np.linspace(-1, 1, 64, dtype=np.float32).reshape(8, 8)
    proto = onnx.parser.parse_model(
        '<ir_version: 10, opset_import: ["": 20]> g (float[2,8] x) => (float[2,8] y)'
        " <float e = {1e-9}> { h = MatMul (x, w) s = Add (h, e) l = Exp (s) y = Log (l) }"
    )
    proto.graph.initializer.append(numpy_helper.from_array(weight, "w"))
    converted = amp_rewrite.convert(proto, keep=["op=Add"])
    baked = [bake.value for bake in converted.plan.bakes]
    assert [w.name for w in check_weights(converted.view, "float16")] == ["e", "w"]
    assert [w.name for w in check_weights(converted.view, "float16", values=baked)] == ["w"]


def test_only_low_types_are_asked_about() -> None:
    with pytest.raises(PolicyError) as refused:
        check_weights(model(w=FITS), "float32")
    assert str(refused.value) == "cannot lower to float32; use float16 or bfloat16"


def test_the_table_shows_the_worst_first_and_how_many_lose_less() -> None:
    found = check_weights(model(fits=FITS, tiny=np.float32([1e-9, 1]), loses=LOSES), "float16")
    assert weights_text(found, "float16", limit=2) == (
        "3 weights to float16: 2 with values that saturate or become 0\n"
        "  weight  shape  error  max rel  saturated  to zero  subnormal  absmax\n"
        "  loses   [4]    0.064        1          1     25 %          1   7e+04\n"
        "  tiny    [2]    1e-09        1          -     50 %          -       1\n"
        "  … and 1 more weight\n"
    )
    assert weights_text((), "float16") == "0 weights to float16: 0 with values that saturate or become 0\n"


# -- pending casts that become nodes -----------------------------------------------------------------------

HEAVY = np.random.default_rng(3).standard_normal((1, 8192)).astype(np.float32)  # 32 KiB: left in its file
SPREAD = {"x": np.zeros((1, 8192), np.float32)}


@pytest.fixture
def heavy(tmp_path: Path) -> Path:
    onnx.save(model(w=HEAVY), tmp_path / "heavy.onnx")
    return tmp_path / "heavy.onnx"


def pending(proto: Model) -> list[str]:
    stubs = [t for t in proto.proto.graph.initializer if is_stub(t)]
    return [t.name for t in stubs if source(t).dtype.code != t.data_type]


def test_a_pending_cast_becomes_a_node_and_gives_the_same(heavy: Path) -> None:
    low = amp_rewrite.convert(heavy, lower=["*"], io="low").result
    graph = casting_in_graph(low)
    assert (pending(low), pending(graph), [n.op_type for n in graph.proto.graph.node][:1]) == (["w"], [], ["Cast"])
    (expected,) = (np.asarray(v) for v in Runner.open(low).run({"x": SPREAD["x"].astype(np.float16)}).values())
    (found,) = (np.asarray(v) for v in Runner.open(graph).run({"x": SPREAD["x"].astype(np.float16)}).values())
    assert expected.dtype == np.float16
    assert np.array_equal(expected, found)
    assert View.of(graph).dtype(0) is DType.FLOAT16  # type: ignore[arg-type]


def test_a_weight_that_saturates_keeps_its_pending_cast(tmp_path: Path) -> None:
    large = HEAVY.copy()
    large[0, 0] = 1e6
    onnx.save(model(w=large), tmp_path / "large.onnx")
    low = amp_rewrite.convert(tmp_path / "large.onnx", lower=["*"], safety="none").result
    assert (pending(low), pending(casting_in_graph(low))) == (["w"], ["w"])


def test_a_model_without_pending_casts_stays_as_it_is(heavy: Path) -> None:
    loaded = Model.load(heavy)
    assert casting_in_graph(loaded).proto == loaded.proto


def test_a_model_below_a_quarter_of_the_memory_opens_with_cast_nodes(
    heavy: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    low = amp_rewrite.convert(heavy, lower=["*"], io="low").result
    for memory, casts in ((4 * low.nbytes, True), (4 * low.nbytes - 1, False)):
        monkeypatch.setattr(lazy_weights, "main_memory", lambda memory=memory: memory)
        assert (opening(low) is not low) is casts
