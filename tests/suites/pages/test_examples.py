"""The examples run and print the documented results."""

import re
import sys

import onnx
import pytest

from support.commands import output_of, run
from support.paths import ROOT

EXAMPLES = ROOT / "examples"
MODELS = EXAMPLES / "models"


# Models


@pytest.mark.parametrize("name", ["digits_mlp", "digits_cnn", "digits_vit"])
def test_a_demo_model_is_small_valid_float32_and_does_not_name_its_build_machine(name: str) -> None:
    path = MODELS / f"{name}.onnx"
    model = onnx.load(path)
    onnx.checker.check_model(model, full_check=True)
    assert path.stat().st_size < 1_000_000
    assert {tensor.data_type for tensor in model.graph.initializer} <= {onnx.TensorProto.FLOAT, onnx.TensorProto.INT64}
    assert model.graph.input[0].type.tensor_type.shape.dim[0].dim_param == "batch"
    text = str(model)
    assert [word for word in ("metadata_props", "doc_string", "site-packages", ".py") if word in text] == []


def test_the_demo_prints_the_rows_of_the_readme_and_the_accuracy_of_all_versions() -> None:
    """A missing tool has a dash."""
    printed = output_of(sys.executable, EXAMPLES / "demo.py", "llama_outlier", cwd=ROOT)
    shown = cells((ROOT / "README.md").read_text("utf-8"))
    of_readme, of_demo = (next(row for row in rows if row[0].startswith("Llama")) for rows in (shown, cells(printed)))
    assert all(cell in (expected, "–") for cell, expected in zip(of_demo, of_readme, strict=True))
    assert of_demo[-2:] == of_readme[-2:]
    accuracies = [[float(cell.rstrip("%")) for cell in row[2:5]] for row in cells(printed) if row[-1].isdigit()]
    assert len(accuracies) == 3 and min(map(min, accuracies)) > 97
    assert max(max(row) - min(row) for row in accuracies) < 0.1
    assert printed.rstrip().splitlines()[-1].startswith("Low precision ran ")


def cells(text: str) -> list[list[str]]:
    """Return the rows of all Markdown tables in a text."""
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in text.splitlines() if line[:1] == "|"]


def test_the_story_of_a_repair_ends_in_a_passing_model() -> None:
    printed = output_of(sys.executable, EXAMPLES / "repair.py", "offset_norm", cwd=ROOT)
    commands = re.findall(r"(?m)^\$ amp-rewrite (.*)$", printed)
    assert len(commands) == 7
    before, located, repaired, after = (printed.split(f"$ amp-rewrite {commands[i]}\n")[1] for i in (1, 3, 4, 5))
    assert "failed: output 'y'" in before.split("\n$ ")[0]
    assert re.search(r"the error first jumps at\n.*\n  norm ", located)
    assert "1 of 12 regions pinned to float32, each is needed" in repaired
    assert "\nok: 256 values compared" in after
    assert printed.split(f"$ amp-rewrite {commands[6]}\n")[1].startswith("offset (Conv) is float32: repair\n")


def test_an_unknown_story_names_the_available_ones() -> None:
    done = run(sys.executable, EXAMPLES / "repair.py", "no_such", cwd=ROOT)
    names = "far_rotary, large_logits, llama_outlier, masked_rows, offset_norm, t5_outlier, vae_decoder"
    assert (done.returncode, done.stderr) == (1, f"there is no model 'no_such'; choose one of {names}\n")


# Pipelines


@pytest.mark.slow
@pytest.mark.torch
@pytest.mark.transformers
def test_the_examples_of_torch_and_hugging_face_run() -> None:
    """They share a process, which imports PyTorch once."""
    pytest.importorskip("torch", reason="PyTorch is not installed: make extras")
    pytest.importorskip("transformers", reason="transformers is not installed: make extras")
    code = "import runpy, sys\nfor path in sys.argv[1:]:\n    runpy.run_path(path, run_name='__main__')"
    paths = (EXAMPLES / "torch_export.py", EXAMPLES / "huggingface_export.py")
    assert output_of(sys.executable, "-c", code, *paths, cwd=ROOT, HF_HUB_OFFLINE="1").count("\nok: ") == 2
