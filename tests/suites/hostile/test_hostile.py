"""Broken or expensive models: each is refused with one clear line and exit code 2, quickly and in little memory."""

import random
from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import AttributeProto, GraphProto, ModelProto, TensorProto, helper

from amp_rewrite.errors import ModelError
from amp_rewrite.files.model import Model
from amp_rewrite.files.wire import head
from amp_rewrite.ir.dims import MAX_AXES
from amp_rewrite.ir.view import View
from amp_rewrite.pipeline.convert import convert
from amp_rewrite.rewrite.autodiff.builder import shapes_of
from suites.fuzz import mutate, targets
from suites.fuzz.cage import Cage
from suites.hostile.given import attempt, converting, sound
from support.paths import TESTS

FOUND = sorted((TESTS / "suites" / "fuzz" / "corpus").glob("*/*"))


def graph_of(words: str, *, opset: int = 21, functions: str = "") -> ModelProto:
    """Parse a model from float[2,4] x to y with these nodes, unchecked."""
    text = f"""<ir_version: 10, opset_import: ["" : {opset}, "local" : 1]>
    net (float[2,4] x, int64 n, bool b) => (float[2,4] y) {{ {words} }} {functions}"""
    return onnx.parser.parse_model(text)


# -- other files ------------------------------------------------------------------------------------------------

NO_MODEL = {
    "nothing": (b"", "is empty"),
    "text": (b"hello, I am not a model at all\n", "is not an ONNX model"),
    "a picture": (b"\x89PNG\r\n\x1a\n" + bytes(100), "is not an ONNX model"),
    "an endless varint": (b"\x08" + b"\xff" * 5000, "is not an ONNX model"),
    "a length of 2^62": (b"\x3a" + b"\x80" * 8 + b"\x40", "is not an ONNX model"),
    "a Git LFS pointer": (b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 1\n", "git lfs pull"),
}


@pytest.mark.parametrize("name", NO_MODEL)
def test_a_file_that_is_not_a_model_is_refused_in_one_line(cage: Cage, tmp_path: Path, name: str) -> None:
    content, fact = NO_MODEL[name]
    outcome = converting(cage, tmp_path, content)

    assert outcome.refused and fact in outcome.err, outcome


def test_a_model_truncated_anywhere_is_refused_or_read_as_a_shorter_one(tmp_path: Path) -> None:
    content, path = sound().SerializeToString(), tmp_path / "m.onnx"
    refused = 0

    for length in range(len(content)):
        path.write_bytes(content[:length])
        try:
            View.of(Model.load(path))
        except ModelError:
            refused += 1
    assert refused > len(content) / 2


# -- wrong numbers ----------------------------------------------------------------------------------------------


def with_tensor(**fields: object) -> ModelProto:
    model = sound()
    del model.graph.initializer[:]
    model.graph.initializer.append(TensorProto(name="w", **fields))  # type: ignore[arg-type]
    return model


LIES = {
    "10^12 elements in a few bytes": with_tensor(data_type=1, dims=[10**12], raw_data=bytes(48)),
    "2^62 elements": with_tensor(data_type=1, dims=[2**31, 2**31], raw_data=bytes(48)),
    "10^12 times 0 elements": with_tensor(data_type=1, dims=[10**12, 0], float_data=[1.0]),
    "a negative dim": with_tensor(data_type=1, dims=[-4, 3], raw_data=bytes(48)),
    "an unknown element type": with_tensor(data_type=99, dims=[4, 3], raw_data=bytes(48)),
    "no element type": with_tensor(dims=[4, 3], raw_data=bytes(48)),
    "too few bytes": with_tensor(data_type=1, dims=[4, 3], raw_data=bytes(47)),
    "too few floats": with_tensor(data_type=1, dims=[4, 3], float_data=[1.0]),
    "strings that are not UTF-8": with_tensor(data_type=8, dims=[4, 3], string_data=[b"\xff\xfe"] * 12),
}


@pytest.mark.parametrize("name", ["10^12 elements in a few bytes", "2^62 elements", "10^12 times 0 elements"])
def test_a_weight_with_wrong_dims_is_refused_without_much_memory(cage: Cage, tmp_path: Path, name: str) -> None:
    outcome = converting(cage, tmp_path, LIES[name], "--target", "onnx")

    assert outcome.refused, outcome
    assert outcome.peak < 300e6


@pytest.mark.parametrize("opset", [0, 10**6, -(2**63)])
def test_an_invalid_opset_is_refused(cage: Cage, tmp_path: Path, opset: int) -> None:
    model = sound()
    model.opset_import[0].version = opset

    assert converting(cage, tmp_path, model).refused


# -- invalid graphs ---------------------------------------------------------------------------------------------


def changed(change: Callable[[ModelProto], object]) -> ModelProto:
    model = sound()
    change(model)
    return model


def node(op_type: str, inputs: str, outputs: str = "y", **attributes: object) -> ModelProto:
    """Build a model with this last op."""
    model = sound()
    model.graph.node[1].CopyFrom(helper.make_node(op_type, inputs.split(), outputs.split(), **attributes))
    return model


def raw_node(op_type: str, inputs: str, *attributes: AttributeProto) -> ModelProto:
    model = node(op_type, inputs)
    model.graph.node[1].attribute.extend(attributes)
    return model


def mistyped(op_type: str, inputs: str, name: str, value: object) -> ModelProto:
    return raw_node(op_type, inputs, helper.make_attribute(name, value))


BODY = GraphProto(name="body")
INVALID: dict[str, ModelProto] = {
    "a cycle": graph_of("a = Add (x, c) c = Relu (a) y = Relu (c)"),
    "an output without a producer": graph_of("z = Relu (x)"),
    "a value defined twice": graph_of("y = Relu (x) y = Neg (x)"),
    "a body that reads its op's result": graph_of(
        "y = If (b) <then_branch = t () => (z) { z = Relu (q) }, else_branch = e () => (z) { z = Relu (x) }>"
        "q = Neg (y)"
    ),
    "two inputs of one name": changed(lambda m: m.graph.input.append(m.graph.input[0])),
    "two weights of one name": changed(
        lambda m: m.graph.initializer.append(TensorProto(name="w", data_type=1, dims=[1], float_data=[1]))
    ),
    "an op without a type": node("", "h"),
    "an op that does not exist": node("Relux", "h"),
    "an op of a later opset": graph_of("y = Gelu (x)", opset=19),
    "types that clash": graph_of("f = Cast <to = 1> (n) i = Cast <to = 7> (x) y = Add (f, i)"),
    "a type that the op does not allow": graph_of("i = Cast <to = 9> (x) y = Exp (i)"),
    "too few inputs": node("MatMul", "h"),
    "too many inputs": node("Relu", "h h"),
    "too many outputs": node("Relu", "h", "y z"),
    "no outputs": node("Relu", "h", ""),
    "a required input left out": raw_node("Add", "h"),
    "Scan of -1 inputs": raw_node(
        "Scan", "h", helper.make_attribute("num_scan_inputs", -1), helper.make_attribute("body", BODY)
    ),
    "Scan of 10^9 inputs": raw_node(
        "Scan", "h", helper.make_attribute("num_scan_inputs", 10**9), helper.make_attribute("body", BODY)
    ),
    "Cast to nothing": raw_node("Cast", "h"),
    "Cast to 99": node("Cast", "h", to=99),
    "Cast to text": mistyped("Cast", "h", "to", "FLOAT16"),
    "Constant without value": node("Constant", ""),
    "SequenceEmpty of strings": graph_of("s = SequenceEmpty <dtype = 8> () t = SequenceInsert (s, x) y = Relu (x)"),
    "SequenceEmpty of 77": graph_of("s = SequenceEmpty <dtype = 77> () t = SequenceInsert (s, x) y = Relu (x)"),
    "an attribute twice": raw_node(
        "Softmax", "h", helper.make_attribute("axis", 0), helper.make_attribute("axis", 1)
    ),
    "an attribute of another kind": mistyped("Softmax", "h", "axis", [1.0]),
    "a reference outside a function": raw_node(
        "Softmax", "h", AttributeProto(name="axis", type=AttributeProto.INT, ref_attr_name="a")
    ),
    "Einsum without equation": raw_node("Einsum", "h"),
    "a function that calls itself": graph_of(
        "y = local.f (x)", functions='<opset_import: ["" : 21, "local" : 1], domain: "local"> f (a) => (c) '
        "{ c = local.f (a) }",
    ),
    "functions that call each other": graph_of(
        "y = local.f (x)",
        functions='<opset_import: ["" : 21, "local" : 1], domain: "local"> f (a) => (c) { c = local.g (a) }'
        '<opset_import: ["" : 21, "local" : 1], domain: "local"> g (a) => (c) { c = local.f (a) }',
    ),
    "a function twice": graph_of(
        "y = local.f (x)",
        functions='<opset_import: ["" : 21], domain: "local"> f (a) => (c) { c = Relu (a) }'
        '<opset_import: ["" : 21], domain: "local"> f (a) => (c) { c = Neg (a) }',
    ),
}  # fmt: skip


ODD: dict[str, ModelProto] = {
    "Resize with only its data": node("Resize", "h"),
    "an empty graph": ModelProto(ir_version=10, graph=GraphProto(name="g"), opset_import=sound().opset_import),
    "a graph without outputs": changed(lambda m: m.graph.ClearField("output")),
    "a graph without a name": changed(lambda m: m.graph.ClearField("name")),
    "an output without a type": changed(lambda m: m.graph.output[0].ClearField("type")),
    "IR version 0": changed(lambda m: m.ClearField("ir_version")),
    "IR version 2^40": changed(lambda m: setattr(m, "ir_version", 2**40)),
    "a megabyte of string": changed(
        lambda m: m.graph.initializer.append(helper.make_tensor("s", TensorProto.STRING, [1], [b"a" * 2**20]))
    ),
    "a domain that is an escape sequence": changed(lambda m: setattr(m.graph.node[1], "domain", "\x1b[31m")),
}


@pytest.mark.parametrize("name", ODD)
def test_an_odd_model_is_either_refused_or_converted(cage: Cage, tmp_path: Path, name: str) -> None:
    outcome = converting(cage, tmp_path, ODD[name], "--target", "onnx", "--set", "level=lower-all")

    assert outcome.code == 0 or outcome.refused
    assert outcome.err.isprintable() or outcome.err.rstrip("\n").isprintable()


def nested(levels: int) -> ModelProto:
    """If in If in If …"""
    words = "z = Relu (x)"
    for _ in range(levels):
        words = f"z = If (b) <then_branch = t () => (z) {{ {words} }}, else_branch = e () => (z) {{ z = Relu (x) }}>"
    return graph_of(f"{words} y = MatMul (z, z)")


def test_bodies_nested_to_the_limit_of_protobuf_are_converted(cage: Cage, tmp_path: Path) -> None:
    assert converting(cage, tmp_path, nested(30), "--target", "onnx").code == 0


def deep_bytes(levels: int) -> bytes:
    """Build the same in wire format by hand: protobuf stops at 100 nested messages."""
    body = b""
    for _ in range(levels):
        graph = head(6, len(body)) + body  # AttributeProto.g
        node_ = head(5, len(graph)) + graph  # NodeProto.attribute
        body = head(1, len(node_)) + node_  # GraphProto.node
    return b"\x08\x0a" + head(7, len(body)) + body + head(8, 2) + b"\x10\x15"


@pytest.mark.parametrize("levels", [40, 30_000])
def test_bodies_nested_beyond_the_limit_of_protobuf_are_refused(cage: Cage, tmp_path: Path, levels: int) -> None:
    assert converting(cage, tmp_path, deep_bytes(levels)).refused


# -- unknown types and shapes -----------------------------------------------------------------------------------


@pytest.mark.parametrize("steps", ["", "c = Exp (b)  ", "d = Relu (b)  c = Exp (d)  "])
def test_readers_of_a_value_of_unknown_type_stay_float32(steps: str) -> None:
    text = f"""<ir_version: 8, opset_import: ["" : 17, "my" : 1]> g (float[8,8] x, float[8,8] w) => (float[8,8] y) {{
        a = MatMul (x, w)  b = my.Op (a)  {steps}y = MatMul ({"c" if steps else "b"}, w) }}"""
    model = convert(onnx.parser.parse_model(text)).model
    first, last = (node for node in model.graph.node if node.op_type == "MatMul")
    assert (first.input[0], last.input[0]) == ("x_float16", "c" if steps else "b_float16")


@pytest.mark.parametrize(("axes", "known"), [(MAX_AXES, True), (MAX_AXES + 1, False)])
def test_a_declared_shape_with_more_axes_than_numpy_supports_is_ignored(axes: int, known: bool) -> None:
    """A model of 300 bytes can declare 2^31 axes."""
    model = onnx.parser.parse_model(
        """<ir_version: 8, opset_import: ["" : 17]> g (float[8,8] x) => (float[8,8] y) <int64[2] size = {8,8}> {
           z = Reshape (x, size)  y = Add (x, z) }"""
    )
    model.graph.initializer[0].dims[0] = axes
    view = View.of(Model.load(model))
    assert [len(dims) for v, dims in shapes_of(view).items() if v is not None and view.value_name(v) == "z"] == [
        axes
    ] * known


# -- found by fuzzing -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("path", FOUND, ids=lambda path: f"{path.parent.name}/{path.name}")
def test_defects_found_by_fuzzing_stay_fixed(path: Path) -> None:
    target, content = targets.TARGETS[path.parent.name], path.read_bytes()
    if target not in (targets.model, targets.emulated):
        target(content)
        return
    for way in range(len(targets.WAYS)):
        target(content, way)


@pytest.mark.parametrize("seed", range(10))
def test_models_changed_at_random_are_refused_or_converted(seed: int) -> None:
    """A short, deterministic version of `tests/suites/fuzz`."""
    rng = random.Random(seed)
    seeds = [nested(2).SerializeToString(), sound().SerializeToString()]
    seeds += [path.read_bytes() for path in FOUND if path.parent.name == "model"]
    for _ in range(12):
        targets.model(mutate.mutated(rng.choice(seeds), rng))


# -- functions --------------------------------------------------------------------------------------------------

HEAD = '<ir_version: 10, opset_import: ["" : 21, "l" : 1]>'


def calling(levels: int, calls: int) -> ModelProto:
    """Build a model of functions that each call the next one several times."""
    chain = [" ".join(f"b{k} = l.f{i + 1} (a)" for k in range(calls)) + " c = Identity (b0)" for i in range(levels)]
    chain.append("c = Relu (a)")
    functions = "".join(
        f'<opset_import: ["" : 21, "l" : 1], domain: "l"> f{i} (a) => (c) {{ {b} }}\n' for i, b in enumerate(chain)
    )
    return onnx.parser.parse_model(f"{HEAD} g (float[2,4] x) => (float[2,4] y) {{ y = l.f0 (x) }}\n{functions}")


def test_functions_that_double_thirty_times_are_refused(cage: Cage, tmp_path: Path) -> None:
    model = calling(30, 2)
    assert model.ByteSize() < 5000

    outcome = converting(cage, tmp_path, model)
    assert outcome.refused and "inlining its local functions" in outcome.err and outcome.seconds < 5


def test_a_large_constant_in_a_function_called_often_is_refused() -> None:
    model = calling(4, 20)
    constant = model.functions[-1].node.add(op_type="Constant", output=["k"]).attribute.add(name="value", type=4)
    constant.t.CopyFrom(TensorProto(data_type=1, dims=[3000], raw_data=bytes(12_000)))

    with pytest.raises(ModelError, match="inlining its local functions"):
        Model.load(model)
    Model.load(calling(3, 20))


# -- constants --------------------------------------------------------------------------------------------------

VAST = "{1000000, 64000}"
FOLDED = {
    "ConstantOfShape": f"s = Constant <value = int64[2] {VAST}> () h = ConstantOfShape (s)",
    "Tile": f"r = Constant <value = int64[2] {VAST}> () h = Tile (w, r)",
    "Pad": "p = Constant <value = int64[4] {1000000, 0, 0, 64000}> () h = Pad (w, p)",
    "OneHot": "d = Constant <value_int = 1000000000> () v = Constant <value_floats = [0., 1.]> () h = OneHot (i, d, v)",
    "Concat": f"h = Concat <axis = 0> ({', '.join(['big'] * 2000)})",
    "Gather": "h = Gather (big, i)",
    "a product of columns and rows": "a = Add (col, row) h = Add (a, deep)",
    "StringConcat, doubling": 's0 = Constant <value_strings = ["aaaaaaaa"]> ()'
    + "".join(f" s{k + 1} = StringConcat (s{k}, s{k})" for k in range(40))
    + " e = Equal (s40, s0) h = Cast <to = 1> (e)",
    "RegexFullMatch": f's = Constant <value_strings = ["{"a" * 40}!"]> ()'
    + ' m = RegexFullMatch <pattern = "(a+)+b"> (s) h = Cast <to = 1> (m)',
    "HannWindow": "n = Constant <value_int = 1000000000000> () h = HannWindow (n)",
}  # fmt: skip


@pytest.mark.parametrize("name", FOLDED)
def test_constants_are_folded_only_into_small_results(cage: Cage, tmp_path: Path, name: str) -> None:
    weights = "float one = {1}, float[1,1] w = {1}, int64[3] i = {0, 0, 0}, float[64,64] big"
    weights += ", float[64,1,1] col, float[1,64,1] row, float[1,1,64] deep"
    model = onnx.parser.parse_model(
        f"{HEAD} g (float[?,?] x) => (float[?,?] y) <{weights}> {{ {FOLDED[name]} k = Add (h, w) y = Add (x, k) }}"
    )
    for info in model.graph.value_info:
        dims = [d.dim_value for d in info.type.tensor_type.shape.dim]
        model.graph.initializer.append(onnx.numpy_helper.from_array(np.ones(dims, np.float32), info.name))
    del model.graph.value_info[:]
    # A check would run the model and compute these constants.
    outcome = converting(cage, tmp_path, model, "--target", "onnx", "--set", "level=lower-all", "--no-check")

    assert outcome.seconds < 8


# -- dims -------------------------------------------------------------------------------------------------------


def with_dims(dims: list[int], place: str) -> ModelProto:
    """Build a small model that declares these dims for one value."""
    model = onnx.parser.parse_model(
        f"{HEAD} g (float[2,2] x) => (float[2,2] y) <float[2,2] w = {{1,2,3,4}}> {{ h = MatMul (x, w) y = Relu (h) }}"
    )
    if place == "large weight":
        model.graph.initializer[0].CopyFrom(TensorProto(name="w", data_type=1, dims=dims, raw_data=bytes(20_000)))
    else:
        formal = model.graph.input[0] if place == "input" else None
        if formal is None:
            formal = model.graph.value_info.add(name="h")
            formal.type.tensor_type.elem_type = 1
        formal.type.tensor_type.ClearField("shape")
        formal.type.tensor_type.shape.SetInParent()
        for dim in dims:
            formal.type.tensor_type.shape.dim.add(dim_value=dim)
    return model


DIMS = {
    "300 of 2^62": [2**62] * 300,
    "65 of 1": [1] * 65,
    "none between huge ones": [2**62, 0, 2**62],
    "least": [-(2**63), 2],
}


@pytest.mark.parametrize("place", ["input", "value", "large weight"])
@pytest.mark.parametrize("name", DIMS)
def test_impossible_dims_are_refused_or_ignored(cage: Cage, tmp_path: Path, name: str, place: str) -> None:
    model = with_dims(DIMS[name], place)
    converting(cage, tmp_path, model, "--opset", "auto", "--fuse", "contrib", "--target", "tensorrt")
    if place == "value":  # other commands read shapes like a conversion
        attempt(cage, tmp_path, "report", "m.onnx", "--json")
        if name == "300 of 2^62":
            attempt(cage, tmp_path, "doctor", "m.onnx")
