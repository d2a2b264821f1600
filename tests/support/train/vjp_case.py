"""Cases of the gradient rules: small graphs, checked against central differences and against torch.

`gradients` builds the graph of the gradients of Σ y·c, over every output y with a fixed random c of its shape. They are
compared with (f(x + h·d) − f(x − h·d))/2h along a random line d: in float64, or in float32 if the graph is linear in
each input, so that h may be 1. In float32 on onnxruntime the gradients must agree, even without known dims, and the
loss must equal that of the graph itself.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import product
from typing import Any

import numpy as np
import onnx
import onnx.parser
import pytest
from onnx import ModelProto, TensorProto, helper, numpy_helper
from onnx.reference import ReferenceEvaluator
from onnxruntime.capi.onnxruntime_pybind11_state import NotImplemented as NoKernel

from amp_rewrite import View, gradients
from amp_rewrite.files.model import Model
from amp_rewrite.files.protos import clone
from amp_rewrite.ir.op_classes import RECURRENT
from amp_rewrite.rewrite.autodiff.gradients import differentiable
from support import objections
from support.cases import build
from support.retyped import retyped
from support.train.float64_ops import REPAIRED

Feed = dict[str, np.ndarray]

_STEP = 1e-6
"""Near the cube root of 2⁻⁵², which balances truncation (h²) and rounding (2⁻⁵²/h) of a central difference."""
_CLOSE = 1e-7
"""For float64 differences: ten times the rounding 2⁻⁵²/h ≈ 2e-10 of sums of up to a hundred terms of size 1."""
_CLOSE_FLOAT32 = 2e-4
"""For float32 against float64: 2⁻²³ times a hundred terms and the condition of the worst op in the cases."""
_CLOSE_TO_TORCH = 2e-5
"""For float32 against torch's float32: 2⁻²³ times a hundred terms."""

Torch = Callable[..., object]


@dataclass(frozen=True, eq=False)
class Case:
    """A graph in the language of `cases`, with the shapes of its inputs.

    `wrt`: the inputs to differentiate by, by default all floating ones. `low`, `high` bound random inputs; `values`
    fixes some. `torch` computes the same from the torch module and the inputs as tensors; `close`: its tolerance,
    relative to the largest slope. `fixed`: the rule needs fixed dims; `known`: only of these inputs. `opsets`: opsets
    with different forms of the operators. `meaning`: the same by other operators, if float64 is missing or wrong in
    the evaluators. `single`: the standard has no float64 version. `linear`: linear in each input, so that float32 is
    enough. `kink`: the inputs have no slope, so only torch is compared. `text`: the nodes as ONNX text, for graphs
    beyond the language of `cases`.
    """

    name: str
    graph: str
    shapes: Mapping[str, Sequence[int]]
    wrt: Sequence[str] = ()
    outputs: Sequence[str] = ("y",)
    types: Mapping[str, str] = field(default_factory=dict)
    constants: Mapping[str, object] = field(default_factory=dict)
    values: Mapping[str, object] = field(default_factory=dict)
    low: float = -2.0
    high: float = 2.0
    torch: Torch | None = None
    fixed: bool = False
    known: Sequence[str] = ()
    opsets: Sequence[int] = (20,)
    change: Callable[[ModelProto], None] | None = None
    meaning: str = ""
    single: bool = False
    linear: bool = False
    kink: bool = False
    text: str = ""
    close: float = 1e-9

    def __str__(self) -> str:
        return self.name

    @property
    def parameters(self) -> list[str]:
        return list(self.wrt) or [n for n in self.shapes if self.types.get(n, "float") == "float"]

    def model(self, opset: int, *, symbolic: bool = False) -> ModelProto:
        """Append a loss to the graph; with `symbolic` only inputs in `known` declare their dims."""
        model = self._base(opset)
        if self.change is not None:
            self.change(model)
        terms = []
        for i, out in enumerate(self.outputs):
            model.graph.node.append(helper.make_node("Mul", [out, f"weight_{i}"], [f"term_{i}"]))
            model.graph.node.append(helper.make_node("ReduceSum", [f"term_{i}"], [f"sum_{i}"], keepdims=0))
            terms.append(f"sum_{i}")
        model.graph.node.append(helper.make_node("Sum", terms, ["loss"]))
        for i, y in enumerate(self._forward(model)):
            weight = np.asarray(np.random.default_rng(i).uniform(0.5, 1.5, y.shape), np.float32)
            model.graph.initializer.append(numpy_helper.from_array(weight, f"weight_{i}"))
        del model.graph.output[:]
        model.graph.output.append(helper.make_tensor_value_info("loss", TensorProto.FLOAT, ()))
        if symbolic:
            for formal in model.graph.input:
                for dim in formal.type.tensor_type.shape.dim if formal.name not in self.known else ():
                    dim.Clear()
        return model

    def _base(self, opset: int) -> ModelProto:
        if not self.text:
            return build(
                self.graph, self.outputs, shapes=self.shapes, types=self.types, constants=self.constants, opset=opset
            )
        kinds = {n: self.types.get(n, "float").replace("int", "int64") for n in self.shapes}
        dims = {n: f"[{','.join(map(str, shape))}]" if shape else "" for n, shape in self.shapes.items()}
        formals = ", ".join(f"{kinds[n]}{dims[n]} {n}" for n in self.shapes)
        results = ", ".join(f"float {name}" for name in self.outputs)
        header = f'<ir_version: 9, opset_import: ["": {opset}]>'
        model = onnx.parser.parse_model(f"{header} g ({formals}) => ({results}) {{ {self.text} }}")
        for formal in model.graph.output:
            formal.type.tensor_type.ClearField("shape")
        return model

    def _forward(self, model: ModelProto) -> list[np.ndarray]:
        """Return the outputs, for the shapes of the weights."""
        bare = clone(model)
        del bare.graph.node[len(self._base(self.opsets[0]).graph.node) :]
        return run_float32(bare, self.feed(), self.outputs)

    def feed(self) -> Feed:
        rng = np.random.default_rng(7)
        found: Feed = {}
        for name, shape in self.shapes.items():
            kind = {"float": np.float32, "int": np.int64, "bool": np.bool_}[self.types.get(name, "float")]
            drawn = rng.uniform(self.low, self.high, shape).astype(np.float32)
            found[name] = np.asarray(self.values.get(name, drawn), kind)
        return {name: found[name] for name in found if name not in self.constants}


def every(cases: Iterable[Case]) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("case", list(cases), ids=str)


def judged(cases: Sequence[Case]) -> type:
    """Build the tests of some cases: against differences, also with free dims, and against torch."""

    class Judged:
        @every(case for case in cases if not case.kink)
        def test_gradients_match_slopes_along_a_line(self, case: Case) -> None:
            check_along_a_line(case)

    compared = [case for case in cases if case.torch is not None]
    if not compared:
        return Judged

    class Compared(Judged):
        @pytest.mark.slow
        @pytest.mark.torch
        @every(compared)
        def test_gradients_match_those_of_torch(self, case: Case) -> None:
            pytest.importorskip("torch")
            check_against_torch(case)

    return Compared


# -- comparisons -------------------------------------------------------------------------------------------


def check_along_a_line(case: Case) -> None:
    """Compare with one central difference per input along a random line, and float32 on onnxruntime with float64."""
    rng, feed, narrow = np.random.default_rng(11), case.feed(), case.single or case.linear
    line = {name: np.asarray(rng.uniform(0.5, 1.5, feed[name].shape)) for name in case.parameters}
    slopes, names = _slopes(case, line), [f"{name}_grad" for name in line]
    close = _CLOSE_FLOAT32 if narrow else _CLOSE
    for opset, symbolic in product(case.opsets, {False, not case.fixed}):
        model = case.model(opset, symbolic=symbolic)
        differentiated = gradients(model, "loss", list(line)).to_proto()
        onnx.checker.check_model(differentiated, full_check=True)
        View.of(Model(differentiated))
        loss, *found = run_float32(differentiated, feed, ["loss", *names])
        _compare(["loss"], [loss], run_float32(model, feed, ["loss"]), _CLOSE_FLOAT32)
        if not narrow:
            wide = run(gradients(widened(model), "loss", list(line)).to_proto(), widened_feed(feed), names)
            _compare(names, found, wide, _CLOSE_FLOAT32)
            found = wide
        for (name, step), mine, slope in zip(line.items(), found, slopes, strict=True):
            assert mine.shape == step.shape, name
            size = max(1.0, float(np.abs(mine * step).sum()))
            assert float((mine * step).sum()) == pytest.approx(slope, rel=0, abs=close * size), name


def _slopes(case: Case, line: Mapping[str, np.ndarray]) -> list[float]:
    """Return central differences of the loss along the line of each input."""
    if case.linear:
        model, feed, width = case.model(case.opsets[-1]), case.feed(), 0.5
    else:
        meant = replace(case, graph=case.meaning, change=None) if case.meaning else case
        model, feed, width = widened(meant.model(case.opsets[-1])), widened_feed(case.feed()), _STEP
        if {node.op_type for node in model.graph.node} & RECURRENT:  # only their float32 loss is compared
            model = differentiable(Model(model), "loss", list(line)).to_proto()
    compute, slopes = evaluator(model), []
    for name, step in line.items():
        moved = (np.asarray(feed[name] + h * step, feed[name].dtype) for h in (width, -width))
        ends = [compute({**feed, name: there}, ["loss"])[0].item() for there in moved]
        slopes.append((ends[0] - ends[1]) / (2 * width))
    return slopes


def _compare(names: Sequence[str], found: Sequence[np.ndarray], expected: Sequence[np.ndarray], close: float) -> None:
    for name, mine, other in zip(names, found, expected, strict=True):
        assert (mine.shape, mine.dtype) == (other.shape, np.float32), name
        np.testing.assert_allclose(mine, other, rtol=close, atol=close * _size(other), err_msg=name)


def check_against_torch(case: Case) -> None:
    """Compare with torch.autograd, in float64 unless the case is linear."""
    import torch

    assert case.torch is not None
    model, feed, close = case.model(case.opsets[0]), case.feed(), _CLOSE_TO_TORCH
    if not case.linear:
        model, feed, close = widened(model), widened_feed(feed), case.close
    names = [f"{name}_grad" for name in case.parameters]
    mine = run(gradients(model, "loss", case.parameters).to_proto(), feed, names)
    tensors = {name: torch.tensor(array) for name, array in feed.items()}
    leaves = [tensors[name].requires_grad_() for name in case.parameters]
    results = case.torch(torch, *[tensors.get(n, case.constants.get(n)) for n in case.shapes])
    weights = {t.name: torch.tensor(numpy_helper.to_array(t)) for t in model.graph.initializer}
    results = results if isinstance(results, (tuple, list)) else [results]
    loss = sum((y * weights[f"weight_{i}"]).sum() for i, y in enumerate(results))
    theirs = torch.autograd.grad(loss, leaves, allow_unused=True)
    for name, leaf, a, b in zip(case.parameters, leaves, mine, theirs, strict=True):
        expected = torch.zeros_like(leaf).numpy() if b is None else b.numpy()
        np.testing.assert_allclose(a, expected, rtol=close, atol=close * _size(expected), err_msg=name)


def _size(array: np.ndarray) -> float:
    return max(1.0, float(np.abs(array).max())) if array.size else 1.0


# -- running -----------------------------------------------------------------------------------------------


def run(model: ModelProto, feed: Feed, outputs: Sequence[str]) -> list[np.ndarray]:
    return evaluator(model)(feed, outputs)


def evaluator(model: ModelProto) -> Callable[[Feed, Sequence[str]], list[np.ndarray]]:
    """Return a function that runs the model on onnxruntime, or on onnx's reference if kernels are missing."""
    try:
        session: Any = objections.session(model, "DISABLE_ALL")  # fusions are less exact
    except NoKernel:
        reference = ReferenceEvaluator(model, new_ops=REPAIRED)

        def slow(feed: Feed, outputs: Sequence[str]) -> list[np.ndarray]:
            with np.errstate(all="ignore"):
                return [np.asarray(a) for a in reference.run(list(outputs), feed)]

        return slow
    return lambda feed, outputs: [np.asarray(a) for a in session.run(list(outputs), feed)]


def run_float32(model: ModelProto, feed: Feed, outputs: Sequence[str]) -> list[np.ndarray]:
    session: Any = objections.session(model)
    return [np.asarray(a) for a in session.run(list(outputs), feed)]


# -- other types -------------------------------------------------------------------------------------------


def widened(model: ModelProto) -> ModelProto:
    """Copy a model and change its float32 tensors, declarations and type attributes to float64."""
    return retyped(model, TensorProto.DOUBLE)


def widened_feed(feed: Feed) -> Feed:
    return {n: a.astype(np.float64) if a.dtype == np.float32 else a for n, a in feed.items()}
