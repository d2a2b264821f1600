"""Values of unknown type before operators that would crash onnx's inference."""

import subprocess
import sys
from pathlib import Path

import onnx.parser

HEAD = '<ir_version: 8, opset_import: ["": 20, "com.microsoft": 1, "ai.onnx.ml": 4]>'
MODELS = {
    "EyeLike in a branch": """g (float[8,8] x, float[8,8] w, bool c) => (float[8,8] y) {
        a = com.microsoft.FastGelu (x)
        s = If (c) <
            then_branch = t () => (float[8,8] p) { p = EyeLike <dtype = 1> (a) },
            else_branch = e () => (float[8,8] q) { q = Identity (a) }
        >
        y = MatMul (s, w)
    }""",
    "RegexFullMatch": """g (string[8] s, float[8,8] x, float[8,8] w) => (bool[8] m, float[8,8] y) {
        t = com.microsoft.StringLower (s)
        m = RegexFullMatch <pattern = "a.*"> (t)
        y = MatMul (x, w)
    }""",
    "LabelEncoder": """g (string[8] s, float[8,8] x, float[8,8] w) => (float[8,8] y) {
        t = com.microsoft.StringLower (s)
        l = ai.onnx.ml.LabelEncoder <keys_strings = ["a", "b"], values_floats = [1.0, 2.0], default_float = 0.0> (t)
        p = MatMul (x, w)
        y = Mul (p, l)
    }""",
}

PROGRAM = """
import sys
from amp_rewrite import Model, View, convert
from amp_rewrite.ir.shapes import shape_of
for path in sys.argv[1:]:
    print(path, flush=True)
    view = View.of(Model.load(path))
    assert any(shape_of(view, value.id) for value in view.values)
    assert "Cast" in {node.op_type for node in convert(path).model.graph.node}
"""


def test_an_input_of_unknown_type_does_not_end_the_process(tmp_path: Path) -> None:
    """In a separate process, which a failure would end; its last line names the model."""
    for name, text in MODELS.items():
        onnx.save(onnx.parser.parse_model(f"{HEAD}\n{text}"), tmp_path / f"{name}.onnx")
    words = [sys.executable, "-c", PROGRAM, *sorted(tmp_path.glob("*.onnx"))]
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, ""), done.stdout
