"""Microsoft Olive workflows with this package's pass and with Olive's own passes."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import onnx
import pytest

import amp_rewrite
from suites.integrations.shipped import BERT, HALF, error_of, weight_types
from support.paths import ROOT

pytest.importorskip("olive", reason="needs olive-ai; make integrations sets it up")

CNN = ROOT / "examples" / "models" / "digits_cnn.onnx"
OUTLIER = ROOT / "examples" / "outlier"
HERE = {"type": "LocalSystem", "accelerators": [{"device": "cpu", "execution_providers": ["CPUExecutionProvider"]}]}


@pytest.fixture(autouse=True)
def quiet(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OLIVE_DISABLE_TELEMETRY", "1")


def workflow(model: Path, folder: Path, *passes: dict[str, Any], **more: Any) -> dict[str, Any]:
    return {
        "input_model": {"type": "OnnxModel", "model_path": str(model)},
        "systems": {"here": HERE},
        "target": "here",
        "host": "here",
        "passes": {f"step{number}": step for number, step in enumerate(passes)},
        "output_dir": str(folder / "out"),
        "cache_dir": str(folder / "cache"),
        **more,
    }


def package_config() -> dict[str, Any]:
    """Return Olive's package configuration with the pass added as in docs/how-to/pipelines.md."""
    import olive

    config: dict[str, Any] = json.loads(Path(olive.__file__).with_name("olive_config.json").read_text("utf-8"))
    config["passes"]["AmpRewrite"] = {
        "module_path": "amp_rewrite.compat.olive.AmpRewrite",
        "supported_providers": ["*"],
        "supported_accelerators": ["*"],
        "supported_precisions": ["fp16", "bf16"],
    }
    return config


def run(config: dict[str, Any]) -> Any:
    import olive

    return olive.run(config, package_config=package_config())


def result(folder: Path) -> onnx.ModelProto:
    return onnx.load(folder / "out" / "model.onnx")


def test_olives_command_runs_the_pass_from_a_package_configuration(tmp_path: Path) -> None:
    steps = ({"type": "OnnxPeepholeOptimizer"}, {"type": "AmpRewrite", "keep": ["op=Softmax"]})
    (tmp_path / "run.json").write_text(json.dumps(workflow(BERT, tmp_path, *steps)), "utf-8")
    (tmp_path / "package.json").write_text(json.dumps(package_config()), "utf-8")
    words = ["olive", "run", "--run-config", "run.json", "--package-config", "package.json"]
    subprocess.run([sys.executable, "-m", *words], cwd=tmp_path, check=True, env=dict(os.environ))
    half = result(tmp_path)
    assert HALF in weight_types(half)
    assert 0 < error_of(half) < 1e-2


@pytest.mark.parametrize("before", [True, False])
def test_the_pass_works_beside_olives_own_and_is_as_accurate(tmp_path: Path, before: bool) -> None:
    peephole, into = {"type": "OnnxPeepholeOptimizer"}, {"type": "AmpRewrite"}
    run(workflow(BERT, tmp_path / "ours", *((peephole, into) if before else (into, peephole))))
    run(workflow(BERT, tmp_path / "theirs", peephole, {"type": "OnnxFloatToFloat16", "keep_io_types": True}))
    ours, theirs = result(tmp_path / "ours"), result(tmp_path / "theirs")
    assert weight_types(theirs) == {HALF}
    assert HALF in weight_types(ours)
    assert error_of(ours) < 1.5 * error_of(theirs)


def test_converting_after_olives_own_pass_changes_no_half_precision_op(tmp_path: Path) -> None:
    run(workflow(BERT, tmp_path, {"type": "OnnxFloatToFloat16", "keep_io_types": True}, {"type": "AmpRewrite"}))
    assert weight_types(result(tmp_path)) == {HALF}
    assert error_of(result(tmp_path)) < 1e-2


def test_data_and_a_tolerance_repair_a_model_that_overflows(tmp_path: Path) -> None:
    step = {"type": "AmpRewrite", "data": str(OUTLIER / "batches.npz"), "tolerance": 1e-2}
    run(workflow(OUTLIER / "model.onnx", tmp_path, step))
    repaired = tmp_path / "out" / "model.onnx"
    assert amp_rewrite.verify(OUTLIER / "model.onnx", repaired, OUTLIER / "batches.npz", tolerance=1e-2)
    plain = amp_rewrite.convert(OUTLIER / "model.onnx").result
    assert not amp_rewrite.verify(OUTLIER / "model.onnx", plain, OUTLIER / "batches.npz", tolerance=1e-2)


def test_an_unreachable_tolerance_gives_no_model_and_a_message(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    step = {"type": "AmpRewrite", "data": str(OUTLIER / "batches.npz"), "tolerance": 1e-12, "io": "low"}
    run(workflow(OUTLIER / "model.onnx", tmp_path, step))
    assert "no choice of ops in float32 brings the outputs within 1e-12" in caplog.text
    assert not list((tmp_path / "out").rglob("*.onnx"))


def test_external_weights_are_written_along(tmp_path: Path) -> None:
    run(workflow(CNN, tmp_path, {"type": "AmpRewrite", "external_data": True}))
    (model,) = (tmp_path / "out").rglob("*.onnx")
    assert model.with_name("digits_cnn.onnx.data").stat().st_size > model.stat().st_size
    assert weight_types(onnx.load(model)) == {HALF}
    run(
        workflow(
            CNN, tmp_path / "both", {"type": "AmpRewrite", "external_data": True}, {"type": "OnnxPeepholeOptimizer"}
        )
    )
    (model,) = (tmp_path / "both" / "out").rglob("*.onnx")
    assert weight_types(onnx.load(model)) == {HALF}


def test_a_search_tries_the_workflows_levels_and_types(tmp_path: Path) -> None:
    fuse = {"olive_parameter_type": "SearchParameter", "type": "Categorical", "support": ["basic", "none"]}
    data = {
        "name": "random",
        "type": "DummyDataContainer",
        "load_dataset_config": {"input_shapes": [[1, 1, 8, 8]], "input_names": ["image"], "input_types": ["float32"]},
    }
    measure = {
        "type": "OnnxEvaluator",
        "metrics": [{"name": "time", "type": "latency", "sub_types": [{"name": "avg"}], "data_config": "random"}],
    }
    run(
        workflow(
            CNN,
            tmp_path,
            {"type": "AmpRewrite", "fuse": fuse},
            data_configs=[data],
            evaluators={"time": measure},
            evaluator="time",
            search_strategy={"execution_order": "joint", "sampler": "sequential", "max_samples": 6},
        )
    )
    footprint = json.loads((tmp_path / "out" / "footprint.json").read_text("utf-8"))
    tried = [node["pass_run_config"] for node in footprint.values() if node.get("from_pass") == "amprewrite"]
    assert {config["fuse"] for config in tried} == {"basic", "none"}
    assert {config["level"] for config in tried} == {"default", "tensor-cores-only", "treat-gray-as-deny"}


def test_the_parameters_match_converts_options_and_others_are_refused(tmp_path: Path) -> None:
    from olive.hardware.accelerator import AcceleratorSpec

    from amp_rewrite.compat.olive import AmpRewrite
    from amp_rewrite.settings.request import KEYWORDS

    here = AcceleratorSpec("cpu", "CPUExecutionProvider")
    assert KEYWORDS.keys() <= AmpRewrite.default_config(here).keys()
    assert (
        AmpRewrite.default_config(AcceleratorSpec("gpu", "DmlExecutionProvider"))["target"].default_value == "directml"
    )

    def legal(**config: Any) -> bool:
        return AmpRewrite.validate_config(AmpRewrite.generate_config(here, config, disable_search=True), here)

    assert legal(to="bfloat16", keep=["op=Softmax"], data="x.npz", tolerance=1e-2)
    assert not legal(to="int3")
    assert not legal(tolerance=1e-2)
