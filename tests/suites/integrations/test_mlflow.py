"""Converted models in MLflow's flavour for ONNX: saved, logged, loaded, with what says how they were made."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import pytest

import amp_rewrite
from amp_rewrite.settings.choices import METADATA_KEY
from suites.integrations.shipped import BERT, HALF, error, recorded, weight_types

pytest.importorskip("mlflow", reason="needs mlflow; make integrations sets it up")


NEEDS = ["onnxruntime"]
"""Stated, so that MLflow does not load the model in another process to find them out."""


@pytest.fixture
def half() -> amp_rewrite.Converted:
    return amp_rewrite.convert(BERT)


@pytest.fixture(autouse=True)
def tracking(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import mlflow

    monkeypatch.chdir(tmp_path)
    mlflow.set_tracking_uri(f"sqlite:///{tmp_path / 'mlflow.db'}")


@pytest.mark.parametrize("external", [True, False])
def test_a_saved_model_comes_back_equal_with_its_metadata(half: amp_rewrite.Converted, external: bool) -> None:
    import mlflow

    mlflow.onnx.save_model(half.model, "saved", pip_requirements=NEEDS, save_as_external_data=external)
    loaded = mlflow.onnx.load_model("saved")
    wanted = half.result.to_proto()  # MLflow has moved the weights out of the other one
    assert not amp_rewrite.diff(half, loaded).differs
    for before, after in zip(wanted.graph.initializer, loaded.graph.initializer, strict=True):
        np.testing.assert_array_equal(onnx.numpy_helper.to_array(after), onnx.numpy_helper.to_array(before))
    assert {p.key: p.value for p in loaded.metadata_props} == {p.key: p.value for p in wanted.metadata_props}
    assert METADATA_KEY in {p.key for p in loaded.metadata_props}


def test_a_logged_model_is_loaded_and_predicts_and_its_report_is_beside_it(half: amp_rewrite.Converted) -> None:
    import mlflow

    batch = recorded("input")
    with mlflow.start_run() as run:
        signature = mlflow.models.infer_signature(batch, recorded("output"))
        info = mlflow.onnx.log_model(
            half.model,
            name="bert",
            signature=signature,
            metadata={"precision": half.report.brief},
            pip_requirements=NEEDS,
        )
        mlflow.log_text(half.to_json(), "precision.json")
    assert weight_types(mlflow.onnx.load_model(info.model_uri)) >= {HALF}
    assert 0 < error(mlflow.pyfunc.load_model(info.model_uri).predict(batch)) < 1e-2
    assert mlflow.models.get_model_info(info.model_uri).metadata == {"precision": half.report.brief}
    text = mlflow.artifacts.load_text(f"runs:/{run.info.run_id}/precision.json")
    assert amp_rewrite.Report.from_json(text, "precision.json").to_json() == half.report.to_json()


def test_float16_inputs_are_float16_in_the_signature_that_mlflow_infers(half: amp_rewrite.Converted) -> None:
    """MLflow has no type of columns for float16, but tensors of any type of numpy."""
    import mlflow

    low = amp_rewrite.convert(BERT, io="low")
    outputs = {name: array.astype(np.float16) for name, array in recorded("output").items()}
    signature = mlflow.models.infer_signature(recorded("input"), outputs)
    mlflow.onnx.save_model(low.model, "saved", signature=signature, pip_requirements=NEEDS)
    stated = mlflow.models.get_model_info("saved").signature.outputs
    assert {str(spec.type) for spec in stated} == {"float16"}
    served = mlflow.pyfunc.load_model("saved").predict(recorded("input"))
    assert {array.dtype for array in served.values()} == {np.dtype(np.float16)}
    assert error(served) < 1e-2
    assert onnx.checker.check_model(mlflow.onnx.load_model("saved")) is None
