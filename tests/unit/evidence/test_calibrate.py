"""Calibrating whole models: the same numbers as from dumped activations, shards, half models, and what is refused."""

from dataclasses import replace

import numpy as np
import onnx
import onnx.parser
import pytest
from numpy.typing import NDArray

from amp_rewrite import DType, Feed, Model, View, calibrate, convert, emulate
from amp_rewrite.evidence.ranges import Range, key
from amp_rewrite.files.casting import Fit
from amp_rewrite.runtime.runner import Runner, SessionOptions
from support.corpus import EXPORTED, KINDS
from support.paths import ROOT, TESTS

BATCHES = {name: ROOT / name.replace(".onnx", ".npz") for name in EXPORTED}
NET = onnx.parser.parse_model("""
    <ir_version: 10, opset_import: ["" : 20]>
    net (float[n,2] x) => (float[n,2] y) <float[2,2] w = {1, 0.5, -2, 1e-6}> { h = MatMul (x, w) y = Exp (h) }
""")
ONE, TWO = ({"x": np.float32([[1, 2]])}, {"x": np.float32([[3e4, 0], [0, -1e-3]])})


def batch_of(name: str) -> dict[str, NDArray[np.float32]]:
    with np.load(BATCHES[name]) as stored:
        return {key: stored[f"input/{key}"] for key in (k[6:] for k in stored.files if k.startswith("input/"))}


def dumped(view: View, batch: dict[str, NDArray[np.float32]], to: DType) -> dict[str, Range]:
    """The ranges of all floating tensors of the main graph, from their values themselves."""
    proto = onnx.ModelProto()
    proto.CopyFrom(view.model.proto)
    given = {out.name for out in proto.graph.output}
    wanted = {v.name: t.dtype for v, t in zip(view.values, view.types, strict=True) if not v.scope and _float(t)}
    for name, dtype in wanted.items():
        if name not in given:
            proto.graph.output.append(onnx.helper.make_tensor_value_info(name, dtype.code, None))
    found = Runner.open(replace(view.model, proto=proto), SessionOptions(optimized=False)).run(batch, list(wanted))
    return {n: Range().merge(Fit.of([np.asarray(array).reshape(-1)], to)) for n, array in found.items()}


def _float(found: object) -> bool:
    return found is not None and found.container == "tensor" and found.dtype is not None and found.dtype.floating  # type: ignore[attr-defined]


@pytest.mark.parametrize("name", [f"tests/models/{name}.onnx" for name in KINDS])
def test_the_ranges_are_those_of_the_activations_themselves(name: str) -> None:
    path = ROOT / name
    batch = batch_of(name)
    found = calibrate(path, batch)
    view = View.of(Model.load(path))
    expected = dumped(view, batch, DType.FLOAT16)
    assert {k: r for k, r in found.values.items() if ":" not in k or k in expected} == expected
    assert found.untapped == {}


def test_constants_count_once_per_batch() -> None:
    one = calibrate(NET, ONE).values["w"]
    assert one == Range(4, absmax=2.0, absmin=float(np.float32(1e-6)), subnormal=1)
    assert calibrate(NET, [ONE, TWO]).values["w"] == one.merge(one)


FUNCTIONS = """
    <ir_version: 10, opset_import: ["" : 20]>
    net (float[n,2] x) => (float[n,2] y, float[n,2] z) <float[2,2] w = {1, 0.5, -2, 1}> {
        a = MatMul (x, w)
        b = Mish (a)
        c = MatMul (b, w)
        d = Selu (c)
        e = MatMul (d, w)
        f = Elu (e)
        y = MatMul (f, w)
        g = Mish (e)
        z = MatMul (g, w)
    }
"""


def test_a_conversion_finds_what_is_inside_of_the_standards_functions() -> None:
    """What the runtime computes as a function body is painted as one, and has ranges of its own."""
    batch = {"x": np.float32([[1, 2], [-3, 4]])}
    ranges = calibrate(onnx.parser.parse_model(FUNCTIONS), batch)
    for lists in ({}, {"deny": ["Elu"]}, {"deny": ["Mish"]}, {"deny": ["Selu", "Mish"]}):
        found = convert(onnx.parser.parse_model(FUNCTIONS), ranges=ranges, lists=lists)
        assert not [f for f in found.report.findings if f.kind == "unseen"], lists
        view = found.view
        measured = {view.value_name(v.id): ranges.of(view, v.id) for v in view.values}
        held = dumped(view, batch, DType.FLOAT16)
        inside = [name for name in held if "/" in name and view.constant(_value(view, name)) is None]
        assert {name: measured[name] for name in inside} == {name: held[name] for name in inside}
        assert bool(inside) == ("Mish" not in lists.get("deny", []))


def _value(view: View, name: str) -> int:
    return next(v.id for v in view.values if v.name == name)


# -- models that are half already ----------------------------------------------------------------------------


@pytest.mark.parametrize(("to", "io"), [("float16", "keep"), ("bfloat16", "low")])
@pytest.mark.parametrize("name", ["if_ts13", "loop_dynamo21", "gpt2_dynamo18"])
def test_a_half_model_is_measured_in_its_widened_twin(name: str, to: str, io: str) -> None:
    batch = batch_of(f"tests/models/{name}.onnx")
    half = convert(TESTS / "models" / f"{name}.onnx", to=to, io=io, target="onnx").result
    found = calibrate(half, batch, to=to)
    twin = View.of(emulate(half, rounding=False, io="float32"))
    fed = next(iter(Feed.of(batch, twin.model)))
    expected = dumped(twin, fed, DType.parse(to))
    assert {k: r for k, r in found.values.items() if ":" not in k or k in expected} == expected
    view = View.of(half)
    assert [key(view, v.id) for v in view.values if _float(view.types[v.id]) and found.of(view, v.id) is None] == []


def test_what_overflows_in_a_half_model_is_seen_with_its_true_size() -> None:
    model = onnx.parser.parse_model("""
        <ir_version: 10, opset_import: ["" : 20]>
        g (float16[n] x) => (float16[n] y) {
            a = Constant <value_float = 300.0> ()
            b = Cast <to = 10> (a)
            h = Mul (x, b)
            y = Div (h, b)
        }
    """)
    found = calibrate(model, {"x": np.float16([1000])})
    assert (found.values["h"].absmax, found.values["h"].overflow) == (300_000.0, 1)
    assert found.values["y"].absmax == 1000.0
