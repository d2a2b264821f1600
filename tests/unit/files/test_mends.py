"""Files that onnxruntime opens but onnx's checker refuses."""

from collections.abc import Callable, Mapping, Sequence

import numpy as np
import onnx.parser
import onnxruntime
import pytest
from onnx import GraphProto, ModelProto, NodeProto, TensorProto, ValueInfoProto, helper

import amp_rewrite
from amp_rewrite import Model, ModelError
from amp_rewrite.files.mends import mended

WEIGHT = np.random.default_rng(0).standard_normal((16, 16)).astype(np.float32) / 4
X = np.random.default_rng(1).standard_normal((4, 16)).astype(np.float32)
PLAIN = "h = MatMul (x, w) r = Relu (h) y = MatMul (r, w)"
BRANCHES = (
    "h = MatMul (x, w) m = ReduceMax <keepdims = 0> (h) o = Constant <value_float = 0.0> () c = Greater (m, o)"
    " y = If (c) <then_branch = t () => (float[4,16] a) { a = MatMul (h, w) },"
    " else_branch = e () => (float[4,16] b) { b = Relu (h) }>"
)
CALL = "h = l.f (x, w) y = MatMul (h, w)"
FUNCTION = '<domain: "l", opset_import: ["": 17]> f (a, b) => (c) { c = MatMul (a, b) }'
Edit = Callable[[ModelProto], object]


def model(edit: Edit, words: str = PLAIN, *, opset: int = 17, ir: int = 8, function: str = "") -> ModelProto:
    local = ', "l": 1' if function else ""
    out = onnx.parser.parse_model(
        f'<ir_version: {ir}, opset_import: ["": {opset}{local}]>'
        f" g (float[4,16] x) => (float[4,16] y) {{ {words} }} {function}"
    )
    out.graph.initializer.append(onnx.numpy_helper.from_array(WEIGHT, "w"))
    edit(out)
    return out


def spelled(proto: ModelProto) -> None:
    for node in proto.graph.node:
        node.domain = "ai.onnx"


def formal(value: ValueInfoProto, *, shape: bool = True) -> None:
    value.type.tensor_type.ClearField("shape") if shape else value.ClearField("type")


def tensor(name: str, values: object) -> TensorProto:
    return onnx.numpy_helper.from_array(np.asarray(values, np.float32), name)


def hold(proto: ModelProto, name: str, values: object = WEIGHT) -> None:
    proto.graph.initializer.append(tensor(name, values))


def declare(proto: ModelProto, name: str, *dims: int) -> None:
    proto.graph.value_info.append(helper.make_tensor_value_info(name, 1, dims))


def state(value: ValueInfoProto, *dims: int) -> None:
    value.CopyFrom(helper.make_tensor_value_info(value.name, 1, dims))


def old(proto: ModelProto, *, listed: bool = False) -> None:
    proto.ir_version = 3
    if listed:
        hold(proto, "v")
        proto.graph.input.append(helper.make_tensor_value_info("v", 1, [16, 16]))
        proto.graph.node[-1].input[1] = "v"


def branch(proto: ModelProto) -> GraphProto:
    return proto.graph.node[-1].attribute[0].g


def foreign(node: NodeProto, op_type: str, domain: str, **attributes: object) -> None:
    """Append an op with the same input and output."""
    node.CopyFrom(helper.make_node(op_type, node.input[:1], node.output, domain=domain, **attributes))


def by_bytes(proto: ModelProto, before: bytes, after: bytes) -> None:
    serialized = proto.SerializeToString()
    assert serialized.count(before) == 1
    proto.ParseFromString(serialized.replace(before, after))


def renamed(proto: ModelProto, name: str) -> None:
    proto.graph.node[0].output[0] = proto.graph.node[1].input[0] = name


def uncalled(proto: ModelProto) -> None:
    proto.graph.node[0].CopyFrom(helper.make_node("MatMul", ["x", "w"], ["h"]))
    proto.functions[0].node[0].op_type = "Nonsense"


NOT_IMPORTED = "which is not imported; an import of opset 1 is added"
MENDED: Sequence[tuple[str, ModelProto]] = (
    ("it is now named 'graph'", model(lambda m: m.graph.ClearField("name"))),
    (r"its name is not UTF-8; it is now '\\xff'", model(lambda m: by_bytes(m, b"\x12\x01g", b"\x12\x01\xff"))),
    ("the output has no shape", model(lambda m: formal(m.graph.output[0]))),
    ("the output has no type", model(lambda m: formal(m.graph.output[0], shape=False))),
    ("the input has no shape", model(lambda m: formal(m.graph.input[0]))),
    ("IR version 3 requires an input for", model(old, opset=9)),  # initializers that are not inputs
    ("IR version 3 requires an input for", model(lambda m: old(m, listed=True), opset=9)),  # some of them are
    ("IR version 0 requires an input for", model(lambda m: setattr(m, "ir_version", 0))),
    ("it is now ''", model(spelled)),
    ("it is now ''", model(lambda m: (spelled(m), setattr(m.opset_import[0], "domain", "ai.onnx")))),
    (f"com.microsoft, {NOT_IMPORTED}", model(lambda m: foreign(m.graph.node[1], "Gelu", "com.microsoft"))),
    (f"com.microsoft, {NOT_IMPORTED}", model(lambda m: foreign(branch(m).node[0], "Gelu", "com.microsoft"), BRANCHES)),
    (
        f"ai.onnx.ml, {NOT_IMPORTED}",
        model(lambda m: foreign(m.graph.node[1], "Scaler", "ai.onnx.ml", offset=[0.0], scale=[2.0])),
    ),
    ("appears twice, with the same values", model(lambda m: hold(m, "w"))),
    (  # in another field of values
        "appears twice, with the same values",
        model(lambda m: m.graph.initializer.append(helper.make_tensor("w", 1, [16, 16], WEIGHT.ravel()))),
    ),
    ("value_info contradicts the declaration of the input", model(lambda m: declare(m, "x", 5, 16))),
    ("not in topological order", model(lambda m: m.graph.node.reverse())),
    ("bodies repeat initializers", model(lambda m: branch(m).initializer.append(tensor("w", WEIGHT)), BRANCHES)),
    ("the last entry is kept", model(lambda m: [m.metadata_props.add(key="k", value=v) for v in "ab"])),
    ("foo opset 0, which no node uses", model(lambda m: m.opset_import.add(domain="foo", version=0))),
    ("an initializer has no name", model(lambda m: hold(m, "", [1]))),
)
UNCHECKED: Mapping[str, ModelProto] = {
    "value_info of another shape": model(lambda m: declare(m, "h", 4, 17)),
    "an output of another shape": model(lambda m: state(m.graph.output[0], 4, 17)),
    "an initializer of another shape in value_info": model(lambda m: declare(m, "w", 2, 2)),
    "a dim of 0": model(lambda m: declare(m, "h", 0, 16)),
    "a branch output of another shape": model(lambda m: state(branch(m).output[0], 4, 17), BRANCHES),
    "a Constant of two values": model(
        lambda m: m.graph.node[0].attribute.append(helper.make_attribute("value_int", 3)),
        "o = Constant <value_float = 1.0> () a = Add (x, o) h = MatMul (a, w) y = MatMul (h, w)",
    ),
    "a dim of -1": model(lambda m: setattr(m.graph.input[0].type.tensor_type.shape.dim[0], "dim_value", -1)),
    "GroupNormalization of opset 18": model(
        lambda m: hold(m, "s", [2, 3]),
        "h = MatMul (x, w) o = Constant <value_ints = [4, 4, 4]> () u = Reshape (h, o)"
        " n = GroupNormalization <num_groups = 2> (u, s, s)"
        " p = Constant <value_ints = [4, 16]> () q = Reshape (n, p) y = MatMul (q, w)",
        opset=18,
    ),
}
OVERLOOKED: Mapping[str, ModelProto] = {
    "an import of ai.onnx": model(lambda m: setattr(m.opset_import[0], "domain", "ai.onnx")),
    "an opset imported twice": model(lambda m: m.opset_import.add(domain="", version=17)),
    "value_info twice": model(lambda m: [declare(m, "h", 4, 16) for _ in range(2)]),
    "value_info without a type": model(lambda m: m.graph.value_info.add(name="h")),
    "an output twice": model(lambda m: m.graph.output.append(m.graph.output[0])),
    "two fields of values": model(lambda m: m.graph.initializer[0].float_data.append(1.0)),
    "docs that are not UTF-8": model(
        lambda m: (setattr(m.graph, "doc_string", "QQ"), by_bytes(m, b"\x02QQ", b"\x02\xffQ"))
    ),
    "docs of a weight that are not UTF-8": model(
        lambda m: (setattr(m.graph.initializer[0], "doc_string", "QQ"), by_bytes(m, b"\x02QQ", b"\x02\xffQ"))
    ),
    "a dim's name that is not UTF-8": model(
        lambda m: (
            setattr(m.graph.output[0].type.tensor_type.shape.dim[0], "dim_param", "QQ"),
            by_bytes(m, b"\x02QQ", b"\x02\xffQ"),
        )
    ),
    "metadata of a conversion that are not UTF-8": model(
        lambda m: (m.metadata_props.add(key="amp_rewrite", value="QQ"), by_bytes(m, b"\x02QQ", b"\x02\xffQ"))
    ),
    "a branch output without a type": model(lambda m: branch(m).output[0].ClearField("type"), BRANCHES),
    "a function of another opset": model(
        lambda m: setattr(m.functions[0].opset_import[0], "version", 13), CALL, function=FUNCTION
    ),
    "an uncalled function of an unknown op": model(uncalled, CALL, function=FUNCTION),
    "an annotation of a scale that is not there": model(
        lambda m: m.graph.quantization_annotation.add(tensor_name="h").quant_parameter_tensor_names.add(
            key="SCALE_TENSOR", value="nothing"
        )
    ),
    "a value name with NUL": model(lambda m: renamed(m, "a\0b")),
    "an output that is an initializer": model(lambda m: state(m.graph.output.add(name="w"), 16, 16)),
    "an output that is an input": model(lambda m: m.graph.output.append(m.graph.input[0])),
    "a field that onnx does not know": model(lambda m: m.MergeFromString(b"\xfa\x7f\x03abc")),
    "text that is not UTF-8, unread": model(
        lambda m: m.graph.initializer.add(name="u", data_type=8, dims=[1], string_data=[b"\xff"])
    ),
    "an omitted output": model(lambda m: m.graph.node[1].output.append(""), PLAIN.replace("Relu", "Dropout")),
}
REFUSED: Sequence[tuple[str, ModelProto]] = (
    ("imports ai.onnx opsets 17 and 13", model(lambda m: m.opset_import.add(domain="", version=13))),
    ("imports no ai.onnx opset", model(lambda m: setattr(m.opset_import[0], "domain", "com.microsoft"))),
    ("'w' appears twice, with different values", model(lambda m: hold(m, "w", np.eye(16)))),
    ("runtimes disagree", model(lambda m: branch(m).initializer.append(tensor("w", np.eye(16))), BRANCHES)),
    ("'h' is defined twice", model(lambda m: hold(m, "h", 0.0), PLAIN.replace("MatMul (x, w)", "Neg (x)", 1))),
    ("tensor name: u", model(lambda m: m.graph.initializer.add(name="u", data_type=1, dims=[3]))),  # without values
    ("segments", model(lambda m: setattr(m.graph.initializer[0].segment, "end", 0))),
    (
        "not UTF-8",
        model(lambda m: by_bytes(m, b"\x02QQ", b"\x02\xffQ"), PLAIN.replace("r = Relu", "QQ = Neg (h) r = Relu")),
    ),
    (
        "'utf-8' codec can't decode byte 0xff",
        model(lambda m: by_bytes(m, b"\x02QQ", b"\x02\xffQ"), PLAIN + " [QQ] z = Constant <value = float {1.0}> ()"),
    ),
)


def run(proto: ModelProto) -> np.ndarray:
    session = onnxruntime.InferenceSession(proto.SerializeToString(), providers=["CPUExecutionProvider"])
    return session.run(["y"], {"x": X})[0]


def outcome(source: ModelProto) -> tuple[float, list[tuple[str, str]]]:
    """Return the conversion's error, relative to the largest value, and its findings."""
    converted = amp_rewrite.convert(source)
    before, after = (run(m) for m in (source, converted.model))
    return float(abs(before - after).max() / abs(before).max()), [
        (f.kind, f.message) for f in converted.report.findings
    ]


@pytest.mark.parametrize(("words", "source"), MENDED)
def test_an_unambiguous_defect_is_corrected_with_a_finding(words: str, source: ModelProto) -> None:
    before = source.SerializeToString()
    error, findings = outcome(source)
    assert error < 1e-2 and source.SerializeToString() == before
    assert [message for kind, message in findings if kind == "mended" and words in message]


@pytest.mark.parametrize("name", UNCHECKED)
def test_a_model_that_onnx_cannot_check_is_converted_and_reported(name: str) -> None:
    error, findings = outcome(UNCHECKED[name])
    assert error < 1e-2 and "unchecked" in dict(findings)


@pytest.mark.parametrize("name", OVERLOOKED)
def test_a_harmless_defect_changes_nothing(name: str) -> None:
    error, findings = outcome(OVERLOOKED[name])
    assert error < 1e-2 and not {"mended", "unchecked"} & dict(findings).keys()


@pytest.mark.parametrize(("words", "source"), REFUSED)
def test_an_ambiguous_defect_is_refused(words: str, source: ModelProto) -> None:
    with pytest.raises(ModelError, match=words):
        amp_rewrite.convert(source)


def test_heavy_initializers_of_one_name_are_compared_in_their_file(tmp_path) -> None:
    heavy = np.ones((128, 128), np.float32)
    source = model(lambda m: m.graph.initializer.extend([tensor("k", heavy), tensor("k", heavy)]))
    (tmp_path / "m.onnx").write_bytes(source.SerializeToString())
    assert [t.name for t in Model.load(tmp_path / "m.onnx").proto.graph.initializer] == ["w", "k"]
    source.graph.initializer[-1].CopyFrom(tensor("k", 2 * heavy))
    (tmp_path / "m.onnx").write_bytes(source.SerializeToString())
    with pytest.raises(ModelError, match="'k' appears twice, with different values"):
        Model.load(tmp_path / "m.onnx")


def test_a_sound_model_is_neither_copied_nor_changed() -> None:
    sound = model(lambda m: None)
    assert mended(sound, owned=False) == (sound, ()) and Model.load(sound).proto is sound


def test_a_plugin_in_the_default_domain_is_accepted_only_for_tensorrt() -> None:
    source = model(lambda m: setattr(m.graph.node[1], "op_type", "YoloLayer_TRT"))
    with pytest.raises(ModelError, match=r"does not know the operator 'YoloLayer_TRT'.*set the target to tensorrt"):
        amp_rewrite.convert(source)
    converted = amp_rewrite.convert(source, target="tensorrt")
    assert [(r.op, r.dtype) for r in converted.report.rows] == [
        ("MatMul", "float16"),
        ("YoloLayer_TRT", "float32"),
        ("MatMul", "float16"),
    ]
    assert {("plugin", "YoloLayer_TRT"), ("unchecked", "YoloLayer_TRT")} <= {
        (f.kind, f.subject) for f in converted.report.findings
    }
    plugin = next(node for node in converted.model.graph.node if node.op_type == "YoloLayer_TRT")
    assert plugin.input[0] != "h" and plugin.output[0] == "r" and not plugin.domain


def test_a_type_known_only_from_readers_is_not_a_conversion_error() -> None:
    source = onnx.parser.parse_model(
        '<ir_version: 8, opset_import: ["": 17, "e": 1]> g (float[8,8] x) => (float[8,8] y)'
        " { a = MatMul (x, x) k = e.Thing (a) b = MatMul (k, k) y = MatMul (b, x) }"
    )
    assert not [f for f in amp_rewrite.convert(source).report.findings if f.kind == "mended"]


HIDING = (
    "n = Constant <value_int = 2> () c = Constant <value = bool {1}> ()"
    " y = Loop (n, c, x) <body = b (int64 i, bool on, float[4,16] w) => (bool on, float[4,16] v)"
    " { v = If (on) <then_branch = t () => (float[16,16] a) { a = Neg (w) },"
    " else_branch = e () => (float[16,16] z) { z = Abs (w) }> }>"
)
RETURNED = (
    "o = Constant <value = bool {1}> () k = If (o) <then_branch = t () => (float[16,16] w) { q = Neg (x) },"
    " else_branch = e () => (float[16,16] z) { z = Abs (w) }> y = MatMul (x, k)"
)


def inner(proto: ModelProto) -> GraphProto:
    return proto.graph.node[2].attribute[0].g.node[0].attribute[0].g


@pytest.mark.parametrize(
    "source",
    [
        model(lambda m: inner(m).initializer.append(tensor("w", WEIGHT)), HIDING),
        model(lambda m: m.graph.node[1].attribute[0].g.initializer.append(tensor("w", WEIGHT)), RETURNED),
    ],
    ids=["a name in between hides it", "the branch returns it"],
)
def test_an_initializer_needed_by_a_body_stays(source: ModelProto) -> None:
    before = source.SerializeToString()
    assert mended(source, owned=False)[0].SerializeToString() == before
