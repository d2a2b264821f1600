"""Passes imported only for models that they could change, and the evaluation of constants."""

import inspect
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path

import numpy as np
import onnx.parser
import pytest

from amp_rewrite import convert
from amp_rewrite.files.model import Model
from amp_rewrite.ir.view import View
from amp_rewrite.rewrite.const_eval import numbers
from amp_rewrite.rewrite.passes import canonicalize
from amp_rewrite.rewrite.reference import run
from amp_rewrite.rewrite.replacement import Context, LazyPass, Outcome
from support.fusing import outputs_of

MODELS = sorted((Path(__file__).parents[2] / "models").glob("*.onnx"))
ROUNDS = (*canonicalize._DECOMPOSITIONS, *canonicalize._CONTRIB_ROUNDS, (canonicalize._BOUND_FILLS,))
PASSES = {each.name: each for passes in ROUNDS for each in passes}


@pytest.mark.parametrize("name", PASSES)
def test_each_pass_is_a_function_of_a_view_and_a_context(name: str) -> None:
    parameters = list(inspect.signature(PASSES[name].resolve()).parameters.values())
    assert [p.annotation for p in parameters if p.default is p.empty] == ["View", "Context"]


@pytest.mark.parametrize("model", MODELS, ids=lambda path: path.stem)
def test_skipped_passes_would_find_nothing(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = LazyPass.__call__

    def checked(self: LazyPass, view: View, context: Context) -> Iterable[Outcome]:
        outcomes = run(self, view, context)
        if outcomes == ():
            assert not list(self.resolve()(view, context)), self.name
        return outcomes

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


def test_a_model_without_attention_imports_neither_its_fusions_nor_reports(tmp_path: Path) -> None:
    done = subprocess.run([sys.executable, "-c", SCRIPT], capture_output=True, text=True, cwd=tmp_path, check=True)
    assert done.stdout == "[]\n"


@pytest.mark.parametrize(
    ("body", "known", "opset"),
    [
        ("s = Mul (w, tenth)  t = LessOrEqual (s, limit)  y = Cast <to = 1> (t)", True, 17),
        ("s = Cast <to = 10> (w)  r = Cast <to = 1> (s)  t = IsInf (r)  y = Cast <to = 1> (t)", True, 17),
        ("y = Slice (w, last, first, axis)", True, 17),
        ("y = Slice (w, far_back, far_back, axis, back)", False, 17),
        ("y = Slice (w, last, least, axis, back)", False, 17),
        ("y = Softmax (w)", True, 17),
        ("y = Softmax <axis = 2> (w)", True, 11),
        ("y = Softmax <axis = -1> (w)", True, 11),
        ("y = Softmax (w)", False, 11),
        ("s = Shape (w)  y = ConstantOfShape (s)", True, 17),
        ("y = MaxPool <kernel_shape = [1]> (w)", False, 17),  # onnx's reference runs loops
        ("y = RandomNormalLike (w)", False, 17),
    ],
)
def test_known_values_match_the_runtime(body: str, known: bool, opset: int) -> None:
    constants = """float[1,2,3] w = {5, 1, 7, 100000, 6, 0}, float tenth = {0.1}, float limit = {0.5},
        int64[1] last = {-1}, int64[1] first = {1}, int64[1] axis = {2}, int64[1] back = {-1},
        int64[1] far_back = {-9}, int64[1] least = {-9223372036854775807}"""
    text = f'<ir_version: 8, opset_import: ["": {opset}]> g () => (float[a,b,c] y) <{constants}> {{ {body} }}'
    model = onnx.parser.parse_model(text)
    view = View.of(Model(model))
    array = numbers(view, view.ops[-1].results[0])
    assert (array is not None) is known
    if array is not None:
        np.testing.assert_allclose(array, outputs_of(model, {})[0], rtol=1e-6)


@pytest.mark.parametrize(("last", "most", "runs"), [("Not", 12, True), ("Not", 11, False), ("Cast", 12, False)])
def test_bools_may_be_eight_times_as_many(last: str, most: int, runs: bool) -> None:
    rows, columns = np.arange(4.0).reshape(4, 1), np.arange(8.0)
    ends = {"Not": "y = Not (t)", "Cast": "y = Cast <to = 1> (t)"}
    text = f"g (double[4,1] a, double[8] b) => (y) {{ s = LessOrEqual (b, a)  t = And (s, s)  {ends[last]} }}"
    nodes = list(onnx.parser.parse_graph(text).node)
    results = run(nodes, "y", [{"a": rows, "b": columns}], {"": 18}, most)
    assert (not isinstance(results, str)) is runs
    if not isinstance(results, str):
        np.testing.assert_array_equal(results[0], rows < columns)
