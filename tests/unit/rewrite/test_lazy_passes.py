"""Passes that are imported only for models with something for them."""

import inspect
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path

import pytest

from amp_rewrite import convert
from amp_rewrite.ir.view import View
from amp_rewrite.rewrite.passes import canonicalize
from amp_rewrite.rewrite.replacement import Context, LazyPass, Outcome

MODELS = sorted((Path(__file__).parents[2] / "models").glob("*.onnx"))
ROUNDS = (*canonicalize._SPELLING, *canonicalize._CONTRIB_ROUNDS, (canonicalize._BOUND_FILLS,))
PASSES = {each.name: each for passes in ROUNDS for each in passes}


@pytest.mark.parametrize("name", PASSES)
def test_each_pass_is_a_function_of_a_view_and_a_context(name: str) -> None:
    parameters = list(inspect.signature(PASSES[name].resolve()).parameters.values())
    assert [p.annotation for p in parameters if p.default is p.empty] == ["View", "Context"]


@pytest.mark.parametrize("model", MODELS, ids=lambda path: path.stem)
def test_a_pass_that_does_not_run_would_find_nothing(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = LazyPass.__call__

    def checked(self: LazyPass, view: View, context: Context) -> Iterable[Outcome]:
        found = run(self, view, context)
        if found == ():
            assert not list(self.resolve()(view, context)), self.name
        return found

    monkeypatch.setattr(LazyPass, "__call__", checked)
    convert(model, fuse="contrib")


RELU = '<ir_version: 8, opset_import: ["": 17]> g (float[2,3] x) => (float[2,3] y) {y=Relu(x)}'
SCRIPT = f"""
import sys, onnx, onnx.parser
from amp_rewrite import convert
convert(onnx.parser.parse_model({RELU!r}))
late = ("amp_rewrite.rewrite.attention.", "amp_rewrite.reports.report")
print([name for name in sys.modules if name.startswith(late)])
"""


def test_a_model_without_attention_imports_no_fusion_of_it_nor_a_report(tmp_path: Path) -> None:
    done = subprocess.run([sys.executable, "-c", SCRIPT], capture_output=True, text=True, cwd=tmp_path, check=True)
    assert done.stdout == "[]\n"
