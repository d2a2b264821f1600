"""Sequences, maps and optionals as outputs: compared by place and key, and shown in few lines."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest
from onnx import ModelProto, TensorProto, helper

from amp_rewrite import convert, repair, verify
from amp_rewrite.evidence.metric import differences
from amp_rewrite.reports.evidence import Criterion, Difference
from support.paths import TESTS

CLASSIFIER = TESTS / "models" / "sklearn" / "mlp.onnx"
DATA = TESTS / "models" / "sklearn" / "data.npz"
NAMES = [{"cat": 0.25, "dog": 0.75}, {"cat": 0.5, "dog": 0.5}]


def found(a: Any, b: Any, **more: Any) -> dict[str, Difference]:
    return dict(differences(a, b, Criterion("scaled", 0.01), **more))


# -- maps --------------------------------------------------------------------------------------------------


def test_a_sequence_of_maps_is_judged_as_the_matrix_of_its_values() -> None:
    other = [{"cat": 0.25, "dog": 0.72}, {"cat": 0.5, "dog": 0.5}]
    ((part, difference),) = found(NAMES, other).items()
    assert (part, difference.ok, difference.compared, difference.where) == ("", False, 4, (0, "dog"))
    assert (difference.reference, difference.candidate) == ("0.75", "0.72")
    assert difference.score == pytest.approx(0.04)  # 0.03 of 0.75, the largest value of all maps
    assert found(NAMES, NAMES)[""].ok


def test_a_map_alone_is_judged_by_key_in_any_order() -> None:
    (difference,) = found({1: 2.0, 2: 4.0}, {2: 5.0, 1: 2.0}).values()
    assert (difference.ok, difference.where) == (False, (2,))
    assert found({1: 2.0, 2: 4.0}, {2: 4.0, 1: 2.0})[""].ok


@pytest.mark.parametrize(
    ("a", "b", "because"),
    [
        (NAMES, [NAMES[0], {"cat": 0.5}], "the key 'dog' of map 1 is missing here"),
        (NAMES, [{"cat": 0.2}, {"cat": 0.5}], "the key 'dog' of map 0 (and 1 more) is missing here"),
        ([{1: 2.0}], [{1: 2.0, 2: 0.0}], "the key 2 of map 0 is missing in the reference"),
        ([{0: 1.0}], [{"0": 1.0}], "the key 0 of map 0 is missing here"),
        (NAMES, NAMES[:1], "the reference gives a sequence of 2, the candidate a sequence of 1"),
        (NAMES[:1], NAMES[0], "the reference gives a sequence of 1, the candidate a map"),
        (NAMES[0], np.ones(2), "the reference gives a map, the candidate a tensor"),
        (NAMES[0], None, "the reference gives a map, the candidate nothing"),
        ([NAMES[0]], [np.ones(2)], "the reference gives a map, the candidate a tensor"),
    ],
)
def test_other_keys_lengths_and_kinds_fail_and_say_so(a: Any, b: Any, because: str) -> None:
    (difference,) = found(a, b).values()
    assert (difference.ok, difference.because) == (False, because)


# -- sequences and optionals ------------------------------------------------------------------------------


def containers() -> ModelProto:
    """An empty optional, a full one, an empty sequence, a sequence of two shapes, and a tensor."""
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


# -- a classifier with ZipMap -----------------------------------------------------------------------------


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


def test_a_repair_of_a_classifier_pins_what_its_probabilities_need() -> None:
    assert repair(CLASSIFIER, DATA, tolerance=1e-2).regions == ()
    found = repair(CLASSIFIER, DATA, tolerance=2e-4)
    assert found.solved and found.regions
    assert verify(CLASSIFIER, found, DATA, tolerance=2e-4).ok
