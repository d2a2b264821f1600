"""Sequences, maps and optionals as outputs: compared by position and key, and shown in few lines."""

import json
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import ModelProto, TensorProto, helper

from amp_rewrite import convert, repair, verify
from amp_rewrite.deploy.benchmark import bench
from amp_rewrite.deploy.session import Session
from amp_rewrite.errors import ModelError
from amp_rewrite.evidence.locate import locate
from amp_rewrite.evidence.metric import differences
from amp_rewrite.reports.evidence import Criterion, Difference
from support.paths import TESTS

CLASSIFIER = TESTS / "models" / "sklearn" / "mlp.onnx"
DATA = TESTS / "models" / "sklearn" / "data.npz"
NAMES = [{"cat": 0.25, "dog": 0.75}, {"cat": 0.5, "dog": 0.5}]


def found(a: Any, b: Any, **more: Any) -> dict[str, Difference]:
    return dict(differences(a, b, Criterion("scaled", 0.01), **more))


def test_maps_are_compared_by_key_and_sequences_of_them_as_matrices() -> None:
    other = [{"cat": 0.25, "dog": 0.72}, {"cat": 0.5, "dog": 0.5}]
    ((part, difference),) = found(NAMES, other).items()
    assert (part, difference.ok, difference.compared, difference.where) == ("", False, 4, (0, "dog"))
    assert (difference.reference, difference.candidate) == ("0.75", "0.72")
    assert difference.score == pytest.approx(0.04)  # 0.03 of 0.75, the largest value of all maps
    assert found(NAMES, NAMES)[""].ok
    (difference,) = found({1: 2.0, 2: 4.0}, {2: 5.0, 1: 2.0}).values()
    assert (difference.ok, difference.where) == (False, (2,))
    assert found({1: 2.0, 2: 4.0}, {2: 4.0, 1: 2.0})[""].ok


@pytest.mark.parametrize(
    ("a", "b", "because"),
    [
        (NAMES, [NAMES[0], {"cat": 0.5}], "the key 'dog' of map 1 is missing in the candidate"),
        (NAMES, [{"cat": 0.2}, {"cat": 0.5}], "the key 'dog' of map 0 (and 1 more) is missing in the candidate"),
        ([{1: 2.0}], [{1: 2.0, 2: 0.0}], "the key 2 of map 0 is missing in the reference"),
        ([{0: 1.0}], [{"0": 1.0}], "the key 0 of map 0 is missing in the candidate"),
        (NAMES, NAMES[:1], "the reference returns a sequence of 2, the candidate a sequence of 1"),
        (NAMES[:1], NAMES[0], "the reference returns a sequence of 1, the candidate a map"),
        (NAMES[0], np.ones(2), "the reference returns a map, the candidate a tensor"),
        (NAMES[0], None, "the reference returns a map, the candidate nothing"),
        ([NAMES[0]], [np.ones(2)], "the reference returns a map, the candidate a tensor"),
    ],
)
def test_different_keys_lengths_and_kinds_fail_with_a_reason(a: Any, b: Any, because: str) -> None:
    (difference,) = found(a, b).values()
    assert (difference.ok, difference.because) == (False, because)


def containers() -> ModelProto:
    """Build an empty optional, a full one, an empty sequence, one with two shapes, and a tensor."""
    tensor = helper.make_tensor_type_proto(TensorProto.FLOAT, [None])
    optional, sequence = helper.make_optional_type_proto(tensor), helper.make_sequence_type_proto(tensor)
    nodes = [
        helper.make_node("Optional", [], ["none"], type=tensor),
        helper.make_node("Optional", ["x"], ["some"]),
        helper.make_node("SequenceEmpty", [], ["empty"]),
        helper.make_node("SequenceConstruct", ["x", "y", "x"], ["pair"]),
        helper.make_node("Add", ["x", "x"], ["z"]),
    ]
    types = {"none": optional, "some": optional, "empty": sequence, "pair": sequence, "z": tensor}
    inputs = [helper.make_tensor_value_info(name, TensorProto.FLOAT, [None]) for name in "xy"]
    outputs = [helper.make_value_info(name, kind) for name, kind in types.items()]
    graph = helper.make_graph(nodes, "containers", inputs, outputs)
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)


FED = {"x": np.ones(3, np.float32), "y": np.full(5, 2, np.float32)}


def test_empty_sequences_and_optionals_are_equal() -> None:
    verdict = verify(containers(), containers(), FED, tolerance=0.0)
    assert verdict.ok and verdict.notes == ()


def test_a_classifier_agrees_with_itself_and_with_its_conversion() -> None:
    low = convert(CLASSIFIER)
    assert verify(CLASSIFIER, CLASSIFIER, DATA, rtol=0.0).ok
    verdict = verify(CLASSIFIER, low, DATA, tolerance=1e-2)
    assert verdict.ok and verdict.outputs == ("output_label", "output_probability")
    assert len(verdict.text().splitlines()) < 14
    (worst,) = [row for row in verdict.worst if row.output == "output_probability"]
    assert 0 < (worst.difference.score or 0) < 1e-2
    row = next(row for row in json.loads(verdict.to_json())["rows"] if row["output"] == "output_probability")
    assert row["where"] == list(worst.difference.where or ())
    assert not verify(CLASSIFIER, low, DATA, tolerance=1e-6).ok


def test_a_repair_of_a_classifier_pins_the_ops_behind_its_probabilities() -> None:
    assert repair(CLASSIFIER, DATA, tolerance=1e-2).regions == ()
    found = repair(CLASSIFIER, DATA, tolerance=2e-4)
    assert found.solved and found.regions
    assert verify(CLASSIFIER, found, DATA, tolerance=2e-4).ok


# -- local functions and declarations -----------------------------------------------------------------

HEAD = '<ir_version: 8, opset_import: ["" : 17, "l" : 1]>'
WIDE = (
    "k = Constant <value_floats = [60000.0]> () p = Mul (a, k) s = Constant <value_floats = [400.0]> () c = Mul (p, s)"
)
LOW = (
    "h = Cast <to = 10> (a) k = Constant <value = float16[1] {60000}> () p = Mul (h, k) q = Cast <to = 1> (p)"
    " s = Constant <value_floats = [400.0]> () c = Mul (q, s)"
)
BATCH = {"x": np.array([400, 1, 2, 3], np.float32)}


def calling(body: str, depth: int = 1) -> onnx.ModelProto:
    """Build a model that calls a function through other functions."""
    functions = [f"{{ c = l.f{i + 1} (a) }}" for i in range(depth - 1)] + [f"{{ {body} }}"]
    text = "".join(
        f'<opset_import: ["" : 17, "l" : 1], domain: "l"> f{i} (a) => (c) {f}\n' for i, f in enumerate(functions)
    )
    return onnx.parser.parse_model(f"{HEAD} g (float[4] x) => (float[4] y) {{ y = l.f0 (x) }}\n{text}")


def plain(body: str, declarations: str = "") -> onnx.ModelProto:
    return onnx.parser.parse_model(f"{HEAD} g (float[4] x) => (float[4] y) {declarations} {{ {body} }}")


@pytest.mark.parametrize("depth", [1, 2, 3])
def test_an_overflow_inside_a_function_is_noticed(depth: int) -> None:
    verdict = verify(calling(WIDE), calling(LOW, depth), BATCH, rtol=0.01, emulate=True)
    assert not verdict.ok and "float16 emulated" in verdict.candidate.as_
    assert "where the reference is finite" in verdict.because


def test_locate_names_the_op_inside_a_function() -> None:
    located = locate(calling(WIDE), calling(LOW, 2), BATCH)
    assert located.low == "float16"
    assert located.first_jump is not None and located.first_jump.kind == "Mul" and located.first_jump.overflows


MISDECLARED = {
    "an output": plain("h = Cast <to = 10> (x)  y = Exp (h)"),
    "a value": plain("h = Cast <to = 10> (x)  k = Exp (h)  y = Cast <to = 1> (k)", "<float[4] k>"),
    "an output of a function": calling("h = Cast <to = 10> (a)  c = Exp (h)"),
}


@pytest.mark.parametrize("measure", ["verify", "locate", "bench", "Session"])
@pytest.mark.parametrize("name", MISDECLARED)
def test_a_value_declared_as_another_type_is_refused(name: str, measure: str) -> None:
    reference, candidate, batch = plain("y = Exp (x)"), MISDECLARED[name], {"x": np.ones(4, np.float32)}
    with pytest.raises(ModelError, match=r"declared with the wrong type|Type Error|Type \(tensor"):
        if measure == "verify":
            verify(reference, candidate, batch, rtol=0.01, emulate=True)
        elif measure == "locate":
            locate(reference, candidate, batch)
        elif measure == "bench":
            bench([reference, candidate], batch, rounds=1, memory=False)
        else:
            Session(candidate)


def test_an_op_without_a_kernel_of_its_type_is_still_emulated() -> None:
    """The CPU has no bfloat16 kernel for it, so the emulation is used."""
    body = "h = Cast <to = 16> (x)  i = Erf (h)  y = Cast <to = 1> (i)"
    verdict = verify(plain("y = Erf (x)"), plain(body), BATCH, rtol=0.1, emulate=True)
    assert verdict.ok and "bfloat16 emulated" in verdict.candidate.as_
