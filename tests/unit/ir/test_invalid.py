"""Refusals of invalid graphs, including those of the hostile suite, and sorting of unsorted graphs."""

import random
from collections import Counter
from pathlib import Path

import numpy as np
import onnx.parser
import pytest
from onnx import AttributeProto, GraphProto, ModelProto, TensorProto, helper

import amp_rewrite
from amp_rewrite import ModelError, View, convert
from amp_rewrite.files.model import Model
from amp_rewrite.files.protos import all_graphs, refill
from amp_rewrite.ir.schema import signature
from amp_rewrite.ir.view import in_order
from suites.hostile.test_hostile import INVALID, LIES
from support.corpus import exported, text_model

UNMADE = (
    "which no earlier node produces: the graph has a cycle, is unsorted, or is missing an input; export the model again"
)
SAID = {
    "a cycle": f"node 'Add_0' (Add) reads 'c', {UNMADE}",
    "an input that nothing makes": f"node 'Add_0' (Add) reads 'nothing', {UNMADE}",
    "an output that nothing makes": "graph 'main': no node produces output 'y'; export the model again",
    "a value made twice": "graph 'main': value 'y' is defined twice; rename one of the two",
    "a value that has an input's name": "graph 'main': value 'x' is defined twice; rename one of the two",
    "a body that reads what comes later": f"node 'If_0/then_branch/Relu_0' (Relu) reads 'q', {UNMADE}",
    "two inputs of one name": "graph 'main': value 'x' is defined twice; rename one of the two",
    "types that clash": "node 'Add_2' (Add): inputs 0 and 1 must have the same element type, "
    "but they are float32 and int64; correct it, or export the model again",
    "a type that the op does not take": "node 'Exp_1' (Exp): input 0 is bool, which version 13 of Exp does not allow; "
    "export the model again",
    "too few inputs": "node 'MatMul_1' (MatMul) is missing input 1; add it",
    "too many inputs": "node 'Relu_1' (Relu) violates its schema: Node with schema(::Relu:14) has input size 2 not in"
    " range [min=1, max=1]; correct it, or export the model again",
    "Scan of -1 inputs": "node 'Scan_1' (Scan) scans -1 of its 1 inputs; correct num_scan_inputs",
    "Cast to nothing": "node 'Cast_1' (Cast) violates its schema: Required attribute 'to' is missing; correct it, or"
    " export the model again",
    "Cast to 99": "node 'y' (Cast) has to=99, which is not an element type; export the model again",
    "Constant without value": "node 'Constant_1' (Constant) does not contain a value; export the model again",
    "SequenceEmpty of strings": "node 'SequenceInsert_1' (SequenceInsert): inputs 0 and 1 must have the same element "
    "type, but they are seq(string) and float32; correct it, or export the model again",
    "a reference outside a function": "node 'Softmax_1' (Softmax) takes 'axis' from an attribute of a "
    "function, but is not in a function; set its value",
    "an unknown element type": "tensor 'w' has the unknown element type 99; upgrade amp-rewrite",
    "no element type": "initializer 'w' has no element type; export the model again",
}


@pytest.mark.parametrize("name", [*INVALID, *LIES])
def test_an_invalid_model_is_refused_with_the_fault_and_its_place(name: str) -> None:
    with pytest.raises(ModelError) as error:
        convert({**INVALID, **LIES}[name], target="onnx", level="lower-all")
    assert str(error.value) == SAID.get(name, str(error.value))


@pytest.mark.parametrize("scale", ["nan", "inf", "-2.0", "0.0", "1e38"])
def test_a_scale_that_does_not_divide_a_size_is_refused(scale: str) -> None:
    """onnx infers a negative size from such a scale, and a Slice of it crashes the process."""
    model = onnx.parser.parse_model(
        """<ir_version: 8, opset_import: ["": 17]> g (float[1,1,8,8] x) => (float[1,1,1,8] y) {
            z = Resize (x, , scales)
            y = Slice (z, at, end, axis)
        }"""
    )
    constants = {"at": np.array([0]), "end": np.array([1]), "axis": np.array([2])}
    constants["scales"] = np.array([1, 1, float(scale), 1], np.float32)
    model.graph.initializer.extend(onnx.numpy_helper.from_array(array, name) for name, array in constants.items())
    with pytest.raises(ModelError, match=r"node 'Resize_0' \(Resize\) has the scale .*; use a positive number"):
        convert(model)


def changed(words: str = "y = Relu (x)", **fields: object) -> ModelProto:
    head = '<ir_version: 10, opset_import: ["": 21, "my": 1]>'
    model = onnx.parser.parse_model(f"{head} g (float[2] x, bool c, int64 n) => (float[2] y) {{ {words} }}")
    for name, value in fields.items():
        getattr(model, name).extend(value) if isinstance(value, list) else setattr(model, name, value)
    return model


def owner(op_type: str, inputs: str, **bodies: object) -> ModelProto:
    """Build a model of one op; a body of None becomes a graph attribute without a graph."""
    model = changed()
    model.graph.node[0].CopyFrom(helper.make_node(op_type, inputs.split(), ["y"], op_type))
    for name, body in bodies.items():
        empty = AttributeProto(name=name, type=AttributeProto.GRAPH)
        model.graph.node[0].attribute.append(empty if body is None else helper.make_attribute(name, body))
    return model


def importing(*opsets: tuple[str, int], words: str = "y = Relu (x)") -> ModelProto:
    model = changed(words)

    del model.opset_import[:]
    model.opset_import.extend(helper.make_opsetid(*opset) for opset in opsets)
    return model


def fed(code: int | None) -> ModelProto:
    """Build a model with this element type for its input; None: no type."""
    model = changed()
    model.graph.input[0].ClearField("type")
    if code is not None:
        model.graph.input[0].type.tensor_type.elem_type = code
    return model


def left_out() -> ModelProto:
    model = changed("a = Add (x, x) y = Add (a, x)")
    model.graph.node[1].input[0] = ""
    return model


BRANCH = GraphProto(name="b", output=[helper.make_tensor_value_info("z", TensorProto.FLOAT, [2])])
BRANCH.node.append(helper.make_node("Relu", ["x"], ["z"]))
SHADOWING = GraphProto()
SHADOWING.CopyFrom(BRANCH)
SHADOWING.initializer.append(helper.make_tensor("x", TensorProto.FLOAT, [2], [1, 2]))
REFUSED = [
    (
        owner("If", "c", then_branch=BRANCH),
        "node 'If' (If) violates its schema: Required attribute 'else_branch' is miss",
    ),
    (
        owner("If", "c", then_branch=BRANCH, else_branch=None),
        "has the attribute 'else_branch' without a value; export the model again",
    ),
    (owner("If", "c", then_branch=BRANCH, else_branch=1), "Mismatched attribute type in 'If : else_branch'. Expected"),
    (
        owner("If", "c", then_branch=SHADOWING, else_branch=BRANCH),
        "graph 'If/then_branch/': initializer 'x' shadows a value of the outer graph, and runtimes disagree",
    ),
    (left_out(), "is missing input 0; add it"),
    (importing(("", 0)), "the model imports ai.onnx opset 0, but onnx"),
    (
        importing(("", 21), ("my", 0), words="y = my.F (x)"),
        "the model imports my opset 0, which does not exist; correct it",
    ),
    (importing(("", 21), ("ai.onnx", 20)), "the model imports ai.onnx opsets 21 and 20; keep one"),
    (fed(None), "input 'x' has no element type; declare one, or export the model again"),
    (fed(0), "input 'x' has no element type; declare one"),
    (fed(99), "input 'x' has the unknown element type 99; declare one, or export the model again"),
]


@pytest.mark.parametrize(("model", "message"), REFUSED, ids=[message for _, message in REFUSED])
def test_models_that_onnx_accepts_or_crashes_on_are_refused(model: ModelProto, message: str) -> None:
    with pytest.raises(ModelError) as error:
        View.of(Model.load(model))
    assert message in str(error.value)


@pytest.mark.parametrize(("op_type", "needed"), [("QuickGelu", (0,)), ("MoE", (0, 1, 2, 4))])
def test_an_operator_of_the_runtime_also_needs_its_inputs(op_type: str, needed: tuple[int, ...]) -> None:
    schema = signature("com.microsoft", op_type, 1)
    assert schema is not None and schema.required == needed
    model = changed("y = com.microsoft.F ()")
    model.graph.node[0].op_type = op_type
    with pytest.raises(ModelError, match="is missing input 0; add it"):
        View.of(Model.load(model))


def test_the_graph_of_a_view_has_an_edge_from_each_op_to_those_that_need_it() -> None:
    words = """[first] a = Relu (x)
        [pick] b = If (c) <then_branch = t () => (float[2] p) { [inner] p = Neg (a) },
                           else_branch = e () => (float[2] q) { [same] q = Identity (x) }>
        [last] y = Add (a, b)"""
    view = View.of(Model.load(changed(words)))
    graph, value = view.graph, {v.name: v.id for v in view.values}
    names = {op.id: op.name for op in view.ops}
    assert list(graph) == [op.id for op in view.ops]
    assert {(names[a], names[b]): key for a, b, key in graph.edges(keys=True)} == {
        ("first", "inner"): (value["a"], 0),
        ("inner", "pick"): (value["p"], None),
        ("same", "pick"): (value["q"], None),
        ("first", "last"): (value["a"], 0),
        ("pick", "last"): (value["b"], 1),
    }


def test_edges_between_iterations_are_marked_and_not_in_the_flow() -> None:
    words = """trips = Constant <value = int64 {3}> ()
        y = Loop (trips, c, x) <body = b (int64 i, bool k, float[2] s) => (bool on, float[2] t) {
            on = Identity (k)  [step] a = Neg (s)  [hand] t = Relu (a) }>"""
    view = View.of(Model.load(changed(words)))
    names = {op.id: op.name for op in view.ops}
    carried = {(names[a], names[b]) for a, b, marked in view.graph.edges(data="carried") if marked}
    assert ("hand", "step") in carried
    assert ("hand", "step") not in {(names[a], names[b]) for a, b in view.flow.edges()}
    (hand,) = (op for op, name in names.items() if name == "hand")
    assert {names[op] for op in view.before([hand])} == {"step", "hand"}


@pytest.mark.parametrize(
    ("node", "least"),
    [
        ("y = If (c) <then_branch = a () => () { }, else_branch = b () => () { }>", 1),
        ("y = Loop (n, c, x) <body = b (int64 i, bool k, float[2] s) => (bool k) { }>", 2),
    ],
)
def test_a_body_with_fewer_outputs_than_its_op_needs_is_refused(node: str, least: int) -> None:
    text = f'<ir_version: 8, opset_import: ["": 17]> g (bool c, int64 n, float[2] x) => (float[2] y) {{ {node} }}'
    with pytest.raises(ModelError, match=rf"too few outputs in its \w+ \({least - 1} instead of {least}\); export"):
        View.of(Model(onnx.parser.parse_model(text)))


NAMES = ("if_ts13", "loop_ts16", "bert_ts13", "vit_dynamo22")
TEXTS = ("captures", "if_in_loop", "local_function", "same_names_in_branches")


def shuffled(model: ModelProto, seed: int = 3) -> ModelProto:
    """Shuffle the nodes of each graph and function, with the last one first."""
    mixed, rng = ModelProto(), random.Random(seed)
    mixed.CopyFrom(model)
    for holder in (*all_graphs(mixed.graph), *mixed.functions):
        first, *rest = reversed(holder.node)
        rng.shuffle(rest)
        refill(holder, "node", [first, *rest])
    return mixed


def decided(model: ModelProto) -> Counter[tuple[str, str, str | None]]:
    return Counter((row.op, row.dtype, row.rule) for row in amp_rewrite.convert(model).report.rows)


@pytest.mark.parametrize("name", [*NAMES, *TEXTS])
def test_a_shuffled_model_is_converted_like_the_sorted_one(name: str) -> None:
    model = exported(f"tests/models/{name}.onnx") if name in NAMES else text_model(name)
    mixed = shuffled(model)
    with pytest.raises(onnx.checker.ValidationError, match="topologically sorted"):
        onnx.checker.check_model(mixed)
    assert decided(mixed) == decided(model)
    result = amp_rewrite.convert(mixed)
    onnx.checker.check_model(result.model)
    assert [f.subject for f in result.report.findings if f.kind == "mended"] == ["model"]
    assert "mended" not in {finding.kind for finding in amp_rewrite.convert(model).report.findings}


def test_sorted_nodes_keep_their_order() -> None:
    model = exported("tests/models/bert_ts13.onnx")
    assert in_order(model) == model
    assert View.of(loaded := Model.load(model)).model is loaded


def test_an_unsorted_model_with_nothing_to_lower_is_returned_sorted(tmp_path: Path) -> None:
    head = '<ir_version: 8, opset_import: ["": 17]>'
    model = onnx.parser.parse_model(f"{head} g (float[2] x) => (float[2] y) {{ y = Exp (a)  a = Exp (x) }}")
    result = amp_rewrite.convert(model)
    assert [node.output[0] for node in result.model.graph.node] == ["a", "y"]
    result.save(tmp_path / "out.onnx")
    onnx.checker.check_model(tmp_path / "out.onnx")
