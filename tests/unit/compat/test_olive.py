"""Olive's pass on stubs of Olive's classes: parameters, checks and output.

tests/suites/integrations/test_olive.py runs workflows of the real Olive if it is installed.
"""

import logging
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum
from importlib import import_module
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any, get_args

import numpy as np
import onnx.parser
import pytest

import amp_rewrite
from amp_rewrite.settings.request import KEYWORDS
from support.paths import ROOT

CNN = ROOT / "examples" / "models" / "digits_cnn.onnx"
OURS = "amp_rewrite.compat.olive"


class Category(Enum):
    NONE = "none"
    DATA = "data"
    PATH = "path"


@dataclass
class Param:
    type_: Any
    default_value: Any = None
    category: Category = Category.NONE
    description: str | None = None
    search_defaults: Any = None


@dataclass
class Handler:
    model_path: str
    onnx_file_name: str | None = None


class Config:
    """The parameters from a workflow; Olive fills in the others."""

    def __init__(self, **given: Any) -> None:
        self.given = given

    def model_dump(self) -> dict[str, Any]:
        return {**dict.fromkeys((*KEYWORDS, "data", "tolerance", "ranges", "headroom", "external_data")), **self.given}


def resolved(path: str, name: str) -> str:
    return path if path.endswith(".onnx") else str(Path(path, name))


STAND_INS = {
    "olive": {},
    "olive.common": {},
    "olive.common.config_utils": {"ParamCategory": Category},
    "olive.hardware": {},
    "olive.hardware.accelerator": {"AcceleratorSpec": SimpleNamespace},
    "olive.model": {"ONNXModelHandler": Handler},
    "olive.model.utils": {"resolve_onnx_path": resolved},
    "olive.passes": {"Pass": object},
    "olive.passes.pass_config": {"BasePassConfig": Config, "PassConfigParam": Param},
    "olive.search": {},
    "olive.search.search_parameter": {"Categorical": list},
}


@pytest.fixture
def olive(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """Import the pass's module."""
    for name, contents in STAND_INS.items():
        module = ModuleType(name)
        vars(module).update(contents)
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.delitem(sys.modules, OURS, raising=False)
    yield import_module(OURS)
    sys.modules.pop(OURS, None)


def parameters(olive: Any, provider: str = "CPUExecutionProvider") -> dict[str, Param]:
    return olive.AmpRewrite._default_config(SimpleNamespace(execution_provider=provider))


def run(olive: Any, source: Path, out: Path, **given: Any) -> Handler:
    return olive.AmpRewrite()._run_for_config(Handler(str(source)), Config(**given), str(out))


def test_parameters_and_defaults_match_convert_plus_the_provider(olive: Any) -> None:
    config = parameters(olive)
    assert set(config) == {*KEYWORDS, "data", "tolerance", "ranges", "headroom", "external_data"}
    assert (config["data"].category, config["ranges"].category) == (Category.DATA, Category.PATH)
    assert (config["tolerance"].type_, config["external_data"].type_, config["to"].type_) == (float, bool, str)
    assert {str, Path} == set(get_args(config["data"].type_)) == set(get_args(config["ranges"].type_))
    assert str in get_args(config["keep"].type_)
    assert {int, str} == set(get_args(config["opset"].type_))
    assert all(param.description and "`" not in param.description for param in config.values())
    found = {name: parameters(olive, f"{name}ExecutionProvider")["target"].default_value for name in ("CPU", "QNN")}
    assert found == {"CPU": KEYWORDS["target"].default, "QNN": "qnn"}
    config = parameters(olive)
    assert {name: config[name].default_value for name in KEYWORDS} == {
        **{name: None if row.environment else row.default or None for name, row in KEYWORDS.items()},
        "fuse": "basic",
    }
    assert config["headroom"].default_value == 2.0
    assert {name: param.search_defaults for name, param in config.items() if param.search_defaults} == {
        "level": ["default", "tensor-cores-only", "treat-gray-as-deny"]
    }


@pytest.mark.parametrize(
    ("parameters", "words"),
    [
        ({"to": "int3"}, "int3"),
        ({"tolerance": 0.01}, "a tolerance requires data to measure errors on; also set data"),
        ({"to": "bfloat16", "keep": ["op=Softmax"]}, None),
        ({"data": "batches.npz"}, None),
    ],
)
def test_options_that_do_not_fit_together_are_refused_with_the_reason(
    olive: Any, caplog: pytest.LogCaptureFixture, parameters: dict[str, Any], words: str | None
) -> None:
    with caplog.at_level(logging.ERROR, logger="olive.passes.amp_rewrite"):
        assert olive.AmpRewrite.validate_config(Config(**parameters), None) is (words is None)
    assert caplog.text == "" if words is None else words in caplog.text


def test_the_pass_writes_the_model_of_convert_and_names_its_file(
    olive: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO, logger="olive.passes.amp_rewrite"):
        handler = run(olive, CNN, tmp_path, keep=["op=Gemm"])
    expected = amp_rewrite.convert(CNN, keep=["op=Gemm"])
    assert handler == Handler(str(tmp_path / CNN.name))
    assert onnx.load(handler.model_path) == expected.model
    assert f"AmpRewrite: {expected.report.brief}" in caplog.text
    assert run(olive, CNN, tmp_path) == handler  # again, replacing the file
    assert onnx.load(handler.model_path) == amp_rewrite.convert(CNN).model


def test_external_weights_return_the_folder_and_the_name(olive: Any, tmp_path: Path) -> None:
    handler = run(olive, CNN, tmp_path / "half.onnx", external_data=True)
    assert handler == Handler(str(tmp_path), "half.onnx")
    assert {path.name for path in tmp_path.iterdir()} == {"half.onnx", "half.onnx.data"}
    assert onnx.load(tmp_path / "half.onnx").graph.node == amp_rewrite.convert(CNN).model.graph.node


@pytest.fixture
def overflowing(tmp_path: Path) -> tuple[Path, Path]:
    """Write a model with a product that overflows float16 on its data, and the data."""
    rng = np.random.default_rng(0)
    model = onnx.parser.parse_model(
        '<ir_version: 10, opset_import: ["" : 21]> g (float[2,64] x) => (float[2,64] y) <float s = {0.0001}>'
        " { h = MatMul(x, w) y = Mul(h, s) }"
    )
    weight = rng.normal(size=(64, 64)).astype(np.float32)
    model.graph.initializer.append(onnx.numpy_helper.from_array(weight, "w"))
    onnx.save(model, tmp_path / "model.onnx")
    np.savez(tmp_path / "batch.npz", x=rng.normal(size=(2, 64)).astype(np.float32) * 1e4)
    return tmp_path / "model.onnx", tmp_path / "batch.npz"


def test_data_guards_and_a_tolerance_repairs(
    olive: Any, overflowing: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source, data = overflowing
    guarded = run(olive, source, tmp_path / "guarded.onnx", data=str(data))
    assert onnx.load(guarded.model_path) == amp_rewrite.convert(source, data=str(data)).model
    assert onnx.load(guarded.model_path) != amp_rewrite.convert(source).model
    calls: list[tuple[Any, ...]] = []
    solved = SimpleNamespace(solved=True, converted=amp_rewrite.convert(source, data=str(data)))
    monkeypatch.setattr(olive, "repair", lambda *given, **named: calls.append((given, named)) or solved)
    repaired = run(olive, source, tmp_path / "repaired.onnx", data=str(data), tolerance=1e-2, headroom=4.0)
    assert calls == [((source, str(data)), {"tolerance": 1e-2, "headroom": 4.0})]
    assert onnx.load(repaired.model_path) == solved.converted.model
