"""A static type checker accepts valid calls and reports each invalid one on its line."""

import subprocess
import sys
from pathlib import Path

import pytest

from support.paths import ROOT

RIGHT = """
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import onnx

import amp_rewrite
from amp_rewrite import DType, Feed, Model, Policy, Target

proto = onnx.ModelProto()
x = np.ones((2, 8), np.float32)

def batches() -> Iterator[dict[str, Any]]:
    yield {"x": x}

converted = amp_rewrite.convert("net.onnx")
amp_rewrite.convert(Path("net.onnx"), to="bf16", level="lower-all", target="onnx", safety="none")
amp_rewrite.convert(proto, to=np.float16, level="default", target=Target.ONNX, opset=20, fuse="contrib", io="low")
amp_rewrite.convert(b"", to=np.dtype("float16"), keep="op=Softmax", lower=["a", "b"], opset="auto", quantized="rescale")
amp_rewrite.convert(Model.load("net.onnx"), to=DType.BFLOAT16, io=["x=float16"], lists={"deny": ["Exp"]}, data=[x])
amp_rewrite.convert(proto, to=onnx.TensorProto.FLOAT16, level=None, headroom=4)
amp_rewrite.convert(proto, to=ml_dtypes.bfloat16)
amp_rewrite.convert(proto, to=Policy("mixed_float16"))
repaired = amp_rewrite.repair("net.onnx", {"x": x}, rtol=1e-2, metric=None, to="half")
amp_rewrite.verify(proto, converted, batches, metric="cosine=0.99")
amp_rewrite.verify("net.onnx", repaired, batches, metric="top1=0.5")
amp_rewrite.verify(proto, repaired.model, (x, x), rtol=1, outputs="y")
amp_rewrite.locate(proto, repaired, Feed.randomly(Model.load(proto)))
amp_rewrite.calibrate("net.onnx", Path("data.npz"), to="float16")
amp_rewrite.bench(["net.onnx", converted], x)
amp_rewrite.diff("a.onnx", converted).text()
amp_rewrite.diff(converted.report, Path("b.json"))
print(amp_rewrite.explain("net.onnx", "Softmax", "op=Add", to="bfloat16").to_dict())
rows = converted.report.find("op=Softmax")
print(rows[0].dtype, repaired.report.to_dict(), converted._repr_html_())
"""
WRONG = """
import numpy as np
import amp_rewrite

x = np.ones((2, 8), np.float32)
amp_rewrite.convert(42)
amp_rewrite.convert("net.onnx", to="banana")
amp_rewrite.convert("net.onnx", to=[])
amp_rewrite.convert("net.onnx", level="deafult")
amp_rewrite.convert("net.onnx", safety="some")
amp_rewrite.convert("net.onnx", keep=5)
amp_rewrite.convert("net.onnx", kep="a")
amp_rewrite.convert("net.onnx", data=7)
amp_rewrite.convert("net.onnx", opset="newest")
amp_rewrite.repair("net.onnx", x, headroom="2")
amp_rewrite.verify("a.onnx", "b.onnx", 7, rtol=1)
amp_rewrite.verify("a.onnx", "b.onnx", x, rtol="1")
amp_rewrite.verify("a.onnx", "b.onnx", x, metric=3)
amp_rewrite.verify("a.onnx", 1.5, x, rtol=1)
amp_rewrite.diff("a.onnx", 3)
amp_rewrite.explain("a.onnx", 3)
amp_rewrite.calibrate("a.onnx", x, to="int7")
"""


def test_mypy_accepts_right_calls_and_refuses_each_wrong_one(tmp_path: Path) -> None:
    pytest.importorskip("mypy")
    right, wrong = tmp_path / "right.py", tmp_path / "wrong.py"
    right.write_text(RIGHT, "utf-8")
    wrong.write_text(WRONG, "utf-8")
    words = ("--config-file", str(ROOT / "pyproject.toml"), "--cache-dir", str(ROOT / ".mypy_cache"))
    command = [sys.executable, "-m", "mypy", *words, "--no-pretty", str(right), str(wrong)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300)
    errors = [line for line in done.stdout.splitlines() if ": error:" in line]
    assert [line for line in errors if "wrong.py" not in line] == [], done.stdout + done.stderr
    refused = {int(line.partition("wrong.py:")[2].partition(":")[0]) for line in errors}
    calls = {number for number, line in enumerate(WRONG.splitlines(), 1) if line.startswith("amp_rewrite.")}
    assert refused == calls, done.stdout
