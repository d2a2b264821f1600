"""Step files: runs in any runtime, metadata, and the command that writes them."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime as ort
import pytest

from amp_rewrite.errors import ModelError
from amp_rewrite.train.loss_scale import serialize
from amp_rewrite.train.step.step import KEY, save_step
from support.train.nets import CROSS_ENTROPY, batches, mlp, step
from unit.cli.test_cli import run

DATA = list(batches(4))


@pytest.fixture
def file(tmp_path: Path) -> Path:
    save_step(step(), tmp_path / "step.onnx")
    return tmp_path / "step.onnx"


def metadata_of(file: str | Path) -> dict[str, Any]:
    """Return the metadata of a step file."""
    (entry,) = (p for p in onnx.load(file).metadata_props if p.key == KEY)
    return dict(json.loads(entry.value))


def test_a_file_runs_anywhere_and_its_state_has_defaults(file: Path) -> None:
    onnx.checker.check_model(onnx.load(file), full_check=True)
    session = ort.InferenceSession(file, providers=["CPUExecutionProvider"])
    names = [output.name for output in session.get_outputs()]
    first = dict(zip(names, session.run(None, DATA[0]), strict=True))
    state = {name.removeprefix("new/"): value for name, value in first.items() if name.startswith("new/")}
    second = dict(zip(names, session.run(None, {**DATA[1], **state}), strict=True))

    assert (first["new/step"], second["new/step"], first["new/loss_scale"]) == (1, 2, 2.0**15)
    assert not np.array_equal(first["new/w1"], second["new/w1"])


def test_the_metadata_name_a_loops_inputs_and_files_are_not_overwritten(file: Path) -> None:
    made, found = step(), metadata_of(file)

    assert found["state"] == [[s.name, s.input, s.output] for s in made.state]
    assert (found["batch"], found["loss"], found["learning_rate"]) == (list(made.batch), made.loss, made.learning_rate)
    assert (found["optimizer"], found["loss_scale"]["class_name"]) == (serialize(made.optimizer), "DynamicLossScale")
    before = file.read_bytes()
    with pytest.raises(ModelError, match="exists"):
        save_step(step(optimizer="sgd"), file)
    assert file.read_bytes() == before


# -- the command -------------------------------------------------------------------------------------


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    onnx.save(mlp(), "net.onnx")
    return tmp_path


def test_the_command_writes_a_step_and_describes_it(folder: Path) -> None:
    done = run("train-step", "net.onnx", "--loss", CROSS_ENTROPY, "--optimizer", "adam,lr=0.01,clipnorm=1")

    assert (done.exit_code, done.stderr) == (0, "wrote net.step.onnx\n")
    assert done.stdout.startswith(
        f"net.onnx: trains 4 parameters (212 elements) to minimize {CROSS_ENTROPY}\n"
        "  trained: 4 (212 elements)\n"
        "    w1  [8, 16]\n"
        "    b1  [16]\n"
        "    w2  [16, 4]\n"
        "    b2  [4]\n"
        "  note: products in float16 have dimensions that are not multiples of 8: 4 (pad to 8); tensor cores run best"
        " on multiples of 8, and below 256 on powers of two\n\n"
        "net.onnx → float16\n"
    )
    assert metadata_of("net.step.onnx")["optimizer"]["config"]["clipnorm"] == 1.0
    assert sorted(file.name for file in folder.iterdir()) == ["net.onnx", "net.step.onnx"]


def test_the_command_accepts_the_librarys_options(folder: Path) -> None:
    words = "--policy float32 --loss-scale 8 --freeze *1 --micro-batches 3 -o s.onnx"
    done = run("train-step", "net.onnx", "--loss", "mean_squared_error(y, goal)", *words.split())

    assert done.exit_code == 0
    assert done.stdout == (
        "net.onnx: trains 2 parameters (68 elements) to minimize mean_squared_error(y, goal)\n"
        "  trained: 2 (68 elements)\n"
        "    w2  [16, 4]\n"
        "    b2  [4]\n"
        "  not trained: 2 (144 elements)\n"
        "    w1  [8, 16]        named in freeze\n"
        "    b1  [16]           named in freeze\n"
    )
    made = metadata_of("s.onnx")
    assert (made["state"][0][0], made["micro_batches"]) == ("micro_batch", 3)


def test_neither_the_model_nor_its_data_file_is_replaced_by_its_step_unasked(folder: Path) -> None:
    onnx.save(mlp(), "net.onnx", save_as_external_data=True, location="net.data", size_threshold=0)
    Path("amp.toml").write_text("overwrite = true\n")
    before = {name: Path(name).read_bytes() for name in ("net.onnx", "net.data")}
    words = ("train-step", "net.onnx", "--loss", CROSS_ENTROPY, "-o")

    discards = "overwriting it discards the model that the step was made from; name another output, or add --overwrite"
    for name, message in (
        ("net.onnx", f"net.onnx is the input: {discards} to this command"),
        (
            "net.data",
            "cannot write net.data: it contains the weights of net.onnx, which is being read; name another output",
        ),
    ):
        refused = run(*words, name)
        assert (refused.exit_code, refused.stderr) == (2, f"error: {message}\n")
    assert {name: Path(name).read_bytes() for name in before} == before
    assert run(*words, "net.onnx", "--overwrite").exit_code == 0


def test_the_command_line_overrides_settings_of_a_file(folder: Path) -> None:
    settings = ['to = "mixed_bfloat16"', 'keep = ["first"]', 'target = "onnx"', 'io = ["low"]', "overwrite = true"]
    Path("amp.toml").write_text("\n".join(settings))
    words = ["train-step", "net.onnx", "--loss", CROSS_ENTROPY]
    assert run(*words).exit_code == 0
    by_file = onnx.load("net.step.onnx")
    assert metadata_of("net.step.onnx")["policy"] == "mixed_bfloat16"
    assert run(*words, "--policy", "mixed_float16", "--keep", "second").exit_code == 0
    by_both = onnx.load("net.step.onnx")

    def nodes(policy: str, keep: str) -> Any:
        made = step(policy=policy, keep=[keep], optimizer="sgd", target="onnx")
        return made.model.proto.graph.node

    assert by_file.graph.node == nodes("mixed_bfloat16", "first")
    assert by_both.graph.node == nodes("mixed_float16", "second")


def test_in_float32_neither_file_nor_command_line_lowers_ops(folder: Path) -> None:
    Path("amp.toml").write_text('to = "bfloat16"\nkeep = ["first"]\n')
    words = ("train-step", "net.onnx", "--loss", CROSS_ENTROPY, "--policy", "float32")
    assert run(*words).exit_code == 0
    assert metadata_of("net.step.onnx")["policy"] == "float32"

    refused = run(*words, "--overwrite", "--keep", "second")
    message = "policy 'float32' lowers nothing, so keep would have no effect; remove the options, or use mixed_float16"
    assert (refused.exit_code, refused.stderr) == (2, f"error: {message}\n")
