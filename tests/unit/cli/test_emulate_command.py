"""`amp-rewrite emulate`: exact output, where it goes, and exit codes."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import onnx
import onnx.parser
import pytest
from click.testing import CliRunner, Result

from amp_rewrite.cli import program
from support.objections import run as run_model

HALF = """
<ir_version: 10, opset_import: ["" : 21]>
net (float16[2] x, bfloat16[2] b) => (float16[2] y, bfloat16[2] c) { y = Mul (x, x)  c = Mul (b, b) }
"""
PLAIN = '<ir_version: 10, opset_import: ["" : 21]> net (float[2] x) => (float[2] y) { y = Mul (x, x) }'


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A current folder with a model of both low types, and no settings in the environment."""
    monkeypatch.chdir(tmp_path)
    for name in [name for name in os.environ if name.startswith("AMP_REWRITE_")]:
        monkeypatch.delenv(name)
    onnx.save(onnx.parser.parse_model(HALF), "net.onnx")
    return tmp_path


def emulate(*words: str) -> Result:
    return CliRunner().invoke(program, ["emulate", *words])


def said(done: Result) -> tuple[int, str, str]:
    return done.exit_code, done.stdout, done.stderr


def types(path: str) -> list[str]:
    graph = onnx.load(path).graph
    return [onnx.TensorProto.DataType.Name(v.type.tensor_type.elem_type) for v in (*graph.input, *graph.output)]


def ops(path: str) -> list[str]:
    return [node.op_type for node in onnx.load(path).graph.node]


def test_the_twin_is_written_beside_the_model() -> None:
    assert said(emulate("net.onnx")) == (0, "", "wrote net.emulated.onnx\n")
    assert types("net.emulated.onnx") == ["FLOAT16", "FLOAT", "FLOAT16", "FLOAT"]
    assert ops("net.emulated.onnx") == [*["Cast"] * 3, "Mul", "Cast", "Cast", "Mul", *["Cast"] * 3]
    y, c = run_model(onnx.load("net.emulated.onnx"), {"x": np.float16([300, 2]), "b": np.float32([1.01, 3])})
    np.testing.assert_array_equal(y, np.float16([np.inf, 4]))
    np.testing.assert_array_equal(c, np.float32([1.015625, 9]))  # 1.01 is 1.0078125 in bfloat16, its square 1.015625


@pytest.mark.parametrize(
    ("words", "expected"),
    {
        "--io same": ["FLOAT16", "BFLOAT16", "FLOAT16", "BFLOAT16"],
        "--io float32": ["FLOAT", "FLOAT", "FLOAT", "FLOAT"],
    }.items(),
)
def test_inputs_and_outputs_have_the_types_asked_for(words: str, expected: list[str]) -> None:
    assert said(emulate("net.onnx", "-o", "twin.onnx", *words.split())) == (0, "", "wrote twin.onnx\n")
    assert types("twin.onnx") == expected


def test_a_model_without_low_types_is_written_as_it_is_and_that_is_said() -> None:
    onnx.save(onnx.parser.parse_model(PLAIN), "plain.onnx")
    assert said(emulate("plain.onnx")) == (
        0,
        "",
        "nothing to emulate: plain.onnx holds no float16 and no bfloat16\nwrote plain.emulated.onnx\n",
    )
    assert Path("plain.emulated.onnx").read_bytes() == Path("plain.onnx").read_bytes()


def test_weights_go_where_they_are_asked_to_go() -> None:
    square = "float16[128, 128]"
    header = '<ir_version: 10, opset_import: ["" : 21]>'
    model = onnx.parser.parse_model(f"{header} net ({square} x) => ({square} y) {{ y = Mul (x, w) }}")
    weight = np.random.default_rng(1).standard_normal((128, 128)).astype(np.float16)
    model.graph.initializer.append(onnx.numpy_helper.from_array(weight, "w"))
    onnx.save(model, "heavy.onnx")
    assert said(emulate("heavy.onnx")) == (0, "", "wrote heavy.emulated.onnx\n")
    assert said(emulate("heavy.onnx", "-o", "apart.onnx", "--set", "external-data=true")) == (
        0,
        "",
        "wrote apart.onnx\n",
    )
    assert len(list(Path().glob("*.data"))) == 1
    for path in ("heavy.emulated.onnx", "apart.onnx"):
        (held,) = onnx.load(path).graph.initializer
        np.testing.assert_array_equal(onnx.numpy_helper.to_array(held), weight.astype(np.float32))


@pytest.mark.parametrize(
    ("words", "message"),
    {
        "gone.onnx": "cannot read gone.onnx: No such file or directory",
        "": "Missing argument 'MODEL', as in `amp-rewrite emulate model.float16.onnx`",
        "net.onnx --io low": (
            "Invalid value for '--io': 'low' is not one of 'numpy', 'same', 'float32'; see 'amp-rewrite emulate"
        ),
        "net.onnx --rounding": "no such option --rounding; did you mean --no-rounding? See 'amp-rewrite emulate",
        "net.onnx -o net.onnx/out.onnx": "cannot make the folder net.onnx: File exists; name another output",
        "net.onnx -o net.onnx": "net.onnx exists; name another output, or replace it with --overwrite",
        "empty.onnx": "empty.onnx is empty; export or download it again",
    }.items(),
)
def test_a_mistake_is_said_in_one_line_and_leaves_nothing(words: str, message: str) -> None:
    Path("empty.onnx").touch()
    before = sorted(path.name for path in Path().iterdir())
    done = emulate(*words.split())
    assert (done.exit_code, done.stdout) == (2, "")
    assert done.stderr.startswith(f"error: {message}")
    assert done.stderr.count("\n") == 1
    assert sorted(path.name for path in Path().iterdir()) == before
