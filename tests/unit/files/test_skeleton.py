"""Skeletons: light, but equivalent for onnx's checker and shape inference."""

import onnx
import pytest
from onnx import TensorProto, numpy_helper, parser, shape_inference

from amp_rewrite.files import wire
from amp_rewrite.files.model import Model
from support.weights import model, scatter, values


def inferred(proto: onnx.ModelProto) -> dict[str, onnx.TypeProto]:
    found = shape_inference.infer_shapes(proto, strict_mode=True, check_type=True, data_prop=True)
    return {v.name: v.type for v in [*found.graph.value_info, *found.graph.output]}


def test_heavy_tensors_are_removed_from_everywhere(tmp_path):
    scatter(model(), tmp_path / "m.onnx")
    for found in (Model.load(tmp_path / "m.onnx"), Model.load(model())):
        light = found.skeleton()
        assert max(t.ByteSize() for t in wire.tensors(light) if t.data_type != TensorProto.STRING) < 1 << 14
        assert not any(t.data_location for t in wire.tensors(light))
        onnx.checker.check_model(light, full_check=True)
        assert inferred(light).items() >= inferred(found.to_proto()).items()


@pytest.mark.parametrize(("opset", "ir"), [(7, 3), (9, 4), (10, 5), (11, 6), (13, 7), (21, 10)])
def test_bodies_of_every_opset_pass_the_checker(opset, ir):
    inputs, body = (", float[200,200] w", "w") if ir < 4 else ("", "body")  # there, initializers are inputs
    proto = parser.parse_model(
        f"""<ir_version: {ir}, opset_import: ["" : {opset}]>
        g (float[2,200] x, bool c{inputs}) => (float[A,B] y) {{
          a = MatMul (x, w)
          y = If (c) <then_branch = t () => (float[A,B] p) {{ p = MatMul (a, {body}) }},
                      else_branch = e () => (float[A,B] q) {{ k = Constant () q = MatMul (a, k) }}>
        }}"""
    )
    proto.graph.initializer.append(numpy_helper.from_array(values(200, 200), "w"))
    then, other = (a.g for a in proto.graph.node[-1].attribute)
    if ir >= 4:
        then.initializer.append(numpy_helper.from_array(values(200, 200), "body"))
    constant = other.node[0].attribute.add(name="value", type=onnx.AttributeProto.TENSOR)
    constant.t.CopyFrom(numpy_helper.from_array(values(200, 200)))
    found = Model.load(proto).skeleton()
    onnx.checker.check_model(found, full_check=True)
    assert inferred(found) == inferred(proto)
    assert not any(t.data_location for t in wire.tensors(found))


def test_a_wrong_type_is_still_noticed():
    proto = model()
    heavy = next(t for t in proto.graph.initializer if t.name == "heavy")
    heavy.CopyFrom(numpy_helper.from_array(values(65, 64).astype("float16"), "heavy"))
    with pytest.raises(shape_inference.InferenceError):
        inferred(Model.load(proto).skeleton())


def test_tensor_attributes_of_other_ops_become_zeros(tmp_path):
    proto = parser.parse_model(
        '<ir_version: 10, opset_import: ["" : 17, "own" : 1]> g (float[N] x) => (float[N] y) { y = own.Table (x) }'
    )
    table = proto.graph.node[0].attribute.add(name="table", type=onnx.AttributeProto.TENSOR)
    table.t.CopyFrom(numpy_helper.from_array(values(100, 100)))
    onnx.save_model(proto, tmp_path / "m.onnx")
    found = Model.load(tmp_path / "m.onnx").skeleton()
    onnx.checker.check_model(found, full_check=True)
    assert found.graph.node[0].attribute[0].t.raw_data == bytes(40_000)


@pytest.mark.parametrize(
    ("op", "stands_in"),
    [
        ("EyeLike <dtype = 10>", "Cast 10"),
        ("EyeLike", "Identity"),
        ("EyeLike <dtype: int = @dtype>", "EyeLike"),
        ("RegexFullMatch", "Cast 9"),
        ("ai.onnx.ml.LabelEncoder <values_tensor = int32[1] {1}>", "Cast 6"),
        ("ai.onnx.ml.LabelEncoder <keys_floats = [1.0], values_floats = [1.0]>", "Cast 1"),
        ("ai.onnx.ml.LabelEncoder <keys_int64s = [1], values_int64s = [1]>", "Cast 7"),
        ('ai.onnx.ml.LabelEncoder <classes_strings = ["a"]>', "LabelEncoder"),
        ("com.microsoft.EyeLike", "EyeLike"),
        ("LabelEncoder <values_floats = [1.0]>", "LabelEncoder"),
    ],
)
def test_a_cast_replaces_ops_whose_inference_crashes(op, stands_in):
    function = f"""<domain: "own", opset_import: ["" : 21, "ai.onnx.ml" : 4, "com.microsoft" : 1]>
        f <dtype> (x) => (y) {{ t = Relu (x) y = {op} (t) }}"""
    proto = parser.parse_model(
        f"""<ir_version: 10, opset_import: ["" : 21, "own" : 1, "ai.onnx.ml" : 4]>
        g (float[2,2] x, bool c) => (y) {{
          y = If (c) <then_branch = t () => (p) {{ p = own.f <dtype = 1> (x) }}, else_branch = e () => (q) {{
            q = {op.replace(" <dtype: int = @dtype>", "")} (x) }}> }}
        {function}"""
    )
    node = Model.load(proto).skeleton().functions[0].node[1]
    assert " ".join([node.op_type, *(str(a.i) for a in node.attribute if a.name == "to")]) == stands_in
    if "@" not in op:
        (inside,) = Model.load(proto).skeleton().graph.node[0].attribute[1].g.node
        assert (inside.op_type, inside.attribute) == (node.op_type, node.attribute)
