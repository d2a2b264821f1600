"""Fingerprints change with the computation and not with documentation."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnx.parser
import pytest
from onnx import ModelProto, numpy_helper

from amp_rewrite import DType, convert
from amp_rewrite.files.fingerprint import digest, fingerprint
from amp_rewrite.files.model import Model, baked, scaled
from support.paths import TESTS

LARGE = 1 << 15  # elements of a sampled tensor: 128 KiB


def net(strings: bytes = b"a") -> ModelProto:
    model = onnx.parser.parse_model("""<ir_version: 10, opset_import: ["": 21], producer_name: "p">
        g (float[2] x, string[1] s) => (float[2] y, bool[1] b) <float[2] w = {1, 2}> {
            [add] y = Add (x, w)
            b = Equal (s, t)
        }""")
    values = np.arange(LARGE, dtype=np.float32)
    model.graph.initializer.append(numpy_helper.from_array(values, "large"))
    model.graph.initializer.append(onnx.helper.make_tensor("t", onnx.TensorProto.STRING, [1], [strings]))
    return model


def poke(model: ModelProto, at: int) -> None:
    raw = bytearray(model.graph.initializer[1].raw_data)
    raw[at] ^= 1
    model.graph.initializer[1].raw_data = bytes(raw)


TALK: dict[str, Callable[[ModelProto], object]] = {
    "the docs of a weight": lambda m: setattr(m.graph.initializer[0], "doc_string", "d"),
    "the producer": lambda m: setattr(m, "producer_name", "q"),
    "metadata of an op": lambda m: m.graph.node[0].metadata_props.add(key="k", value="v"),
    "inferred types": lambda m: m.graph.value_info.add(name="y2"),
    "the last but one byte between samples": lambda m: poke(m, 4096),
}


@pytest.mark.parametrize("change", TALK.values(), ids=TALK)
def test_documentation_does_not_change_the_fingerprint(change: Callable[[ModelProto], object]) -> None:
    model = net()
    before = fingerprint(Model(net()))
    change(model)
    assert fingerprint(Model(model)) == before


MEANING: dict[str, tuple[bool, Callable[[ModelProto], object]]] = {
    "the name of an op": (False, lambda m: setattr(m.graph.node[0], "name", "b")),
    "an attribute": (False, lambda m: m.graph.node[0].attribute.append(onnx.helper.make_attribute("k", 1))),
    "the name of a weight": (True, lambda m: setattr(m.graph.initializer[0], "name", "v")),
    "a small weight": (True, lambda m: m.graph.initializer[0].float_data.__setitem__(0, 3.0)),
    "the last byte of a large weight": (True, lambda m: poke(m, 4 * LARGE - 1)),
    "a byte of the second sample": (True, lambda m: poke(m, (4 * LARGE - 4096) // 15)),
    "a text": (True, lambda m: m.graph.initializer[2].string_data.__setitem__(0, b"c")),
}


@pytest.mark.parametrize(("weights", "change"), MEANING.values(), ids=MEANING)
def test_computation_changes_the_fingerprint(weights: bool, change: Callable[[ModelProto], object]) -> None:
    model = net()
    before = fingerprint(Model(net()))
    change(model)
    after = fingerprint(Model(model))
    assert after != before
    assert (after.weights != before.weights) == weights


@pytest.mark.parametrize("external", [False, True])
@pytest.mark.parametrize("name", ["cnn_external_dynamo22", "if_dynamo20"])
def test_a_converted_model_has_the_digest_of_its_future_file(name: str, tmp_path: Path, external: bool) -> None:
    path = TESTS / "models" / f"{name}.onnx"
    result = convert(path).result
    result.save(tmp_path / "out.onnx", external_data=external)

    assert digest(result) == digest(Model.load(tmp_path / "out.onnx"))
    assert digest(result) != digest(Model.load(path))


@pytest.mark.parametrize("kind", [DType.FLOAT, DType.FLOAT16])
def test_a_scaled_weight_has_the_digest_of_its_future_file(kind: DType, tmp_path: Path) -> None:
    onnx.save(net(), tmp_path / "m.onnx")
    model = Model.load(tmp_path / "m.onnx")
    large = model.proto.graph.initializer[1]
    shifted = scaled(large, 3, name="large", model=model)
    large.CopyFrom(baked(shifted, kind, model=model))
    model.save(tmp_path / "out.onnx")
    read = Model.load(tmp_path / "out.onnx")
    assert (digest(model), fingerprint(model)) == (digest(read), fingerprint(read))
    assert digest(model) != digest(Model.load(tmp_path / "m.onnx"))
