"""The table of gradient rules as a whole: every row has a case, and appended nodes have GPU kernels."""

import re
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path

import numpy as np
import onnx
import pytest

from amp_rewrite import View, gradients
from amp_rewrite.files.model import Model
from amp_rewrite.ir.schema import signature
from amp_rewrite.rewrite.autodiff.gradients import VJPS
from amp_rewrite.rewrite.autodiff.lowering.forms import OWN_BODIES
from amp_rewrite.rewrite.autodiff.vjp.rule import Joint, Stop, row
from amp_rewrite.runtime.kernels import load_kernels
from support.paths import ROOT
from support.train.vjp_case import Case, check_against_torch, check_along_a_line, retyped, run_float32

MODULES = (path.stem for path in sorted(Path(__file__).parent.glob("test_vjp_*.py")) if path != Path(__file__))
FAMILIES = tuple(import_module(f"unit.rewrite.{name}") for name in MODULES)
OPSET = 20

LAST_ENTRY_REPEATS = {"Slice"}
"""Rows with a last entry, a Stop, for all further inputs."""

NO_KERNEL = {
    "no cuda kernel for Constant",  # folded before a run
    "no cuda kernel for Sinh",  # from Cosh, which does not have a kernel either
    "no cuda kernel for Cosh",
    # Shapes and positions, which onnxruntime computes on the CPU.
    "no cuda kernel for ReduceProd with T=tensor(int64)",
    "no cuda kernel for Pad with T=tensor(int64), tensor(int64)=tensor(int64)",
}


@pytest.mark.parametrize("kind", VJPS)
def test_a_row_has_an_entry_for_every_input_of_the_schema(kind: str) -> None:
    row, schema = VJPS[kind], onnx.defs.get_schema(kind, onnx.defs.onnx_opset_version())
    variadic = onnx.defs.OpSchema.FormalParameterOption.Variadic
    formals = [p for p in schema.inputs if p.option != variadic]
    assert len(row.inputs) >= len(formals) or kind in LAST_ENTRY_REPEATS
    assert all(callable(e) or isinstance(e, (Joint, Stop)) for e in row.inputs)


def test_every_row_has_a_case() -> None:
    tried = {node.op_type for family in FAMILIES for case in family.CASES for node in every_node(case)}
    assert VJPS.keys() <= tried


def every_node(case: Case) -> Iterator[onnx.NodeProto]:
    graphs = [case.model(case.opsets[0]).graph]
    while graphs:
        for node in graphs.pop().node:
            yield node
            graphs.extend(a.g for a in node.attribute if a.HasField("g"))


NO_FLOAT16 = {
    "Celu",  # not in the standard either
    "Celu with another alpha",
    "MeanVarianceNormalization",  # its function body has float32 constants
    "ScatterElements that adds",  # no CPU kernel for the model itself
    "ScatterElements, the max",
    "ScatterElements, the min",
    "ScatterND that adds",
    "ScatterND, the max",
}


@pytest.mark.parametrize("family", FAMILIES, ids=lambda f: f.__name__)
def test_gradients_of_a_float16_model_are_float16(family: object) -> None:
    """One case for each set of operators."""
    cases = (case for case in family.CASES if case.name not in NO_FLOAT16)  # type: ignore[attr-defined]
    for case in {frozenset(node.op_type for node in every_node(case)): case for case in cases}.values():
        model = retyped(case.model(case.opsets[-1]), onnx.TensorProto.FLOAT16)
        after = gradients(model, "loss", case.parameters).to_proto()
        onnx.checker.check_model(after, full_check=True)
        feed = {n: a.astype(np.float16) if a.dtype == np.float32 else a for n, a in case.feed().items()}
        grads = run_float32(after, feed, [f"{name}_grad" for name in case.parameters])
        assert {a.dtype for a in grads} == {np.dtype(np.float16)}, case.name
        assert all(np.isfinite(a).all() for a in grads), case.name


@pytest.mark.parametrize("check", [check_along_a_line, pytest.param(check_against_torch, marks=pytest.mark.torch)])
def test_a_wrong_rule_is_noticed(check: object, monkeypatch: pytest.MonkeyPatch) -> None:
    if check is check_against_torch:
        pytest.importorskip("torch")
    case = Case("Tanh", "y=Tanh(x)", {"x": (2, 3)}, torch=lambda t, x: x.tanh())
    check(case)  # type: ignore[operator]
    monkeypatch.setitem(VJPS, "Tanh", row(lambda v, slot: v.do("Mul", v.g, v.do("Sub", 1.0, v.y()))))  # type: ignore[arg-type]
    with pytest.raises(AssertionError, match=r"Not equal to tolerance|^x"):
        check(case)  # type: ignore[operator]


@pytest.mark.parametrize("family", FAMILIES, ids=lambda f: f.__name__)
def test_appended_ops_have_cuda_kernels(family: object) -> None:
    refused = {}
    for case in family.CASES:  # type: ignore[attr-defined]
        if OPSET in case.opsets:
            after = gradients(case.model(OPSET), "loss", case.parameters)
            for dtype in ("float", "float16"):
                refused.update(dict.fromkeys(refusals(after, dtype), case.name))
    assert refused.keys() <= NO_KERNEL, refused


def refusals(model: Model, dtype: str) -> Iterator[str]:
    """Yield the kernel table's refusals of appended nodes, with `dtype` in place of float32."""
    view, kernels = View.of(model), load_kernels()
    for op in view.ops:
        if op.signature is None or op.bodies or not op.node.name.startswith(("backward/", "batch_norm/")):
            continue
        names = {v.name: v.type.dtype.onnx_name for v in view.variables[op.id] if v.type and v.type.dtype}
        types = {name: f"tensor({dtype if kind == 'float' else kind})" for name, kind in names.items()}
        refusal = kernels.refusal(op.domain, op.op_type, op.signature.since, types)
        if refusal is not None:
            yield refusal


def test_the_page_on_training_lists_the_operators_with_gradients() -> None:
    page = (ROOT / "docs" / "how-to" / "training.md").read_text("utf-8")
    table = page.partition("## Operators with gradients")[2].partition("|---|---|")[2].partition("\n## ")[0]
    named = re.findall(r"^\| [a-z][a-z, ]*(?:Scan)? \| ([\w ]+) \|$", table, re.MULTILINE)
    passing = {op for op, row in VJPS.items() if row.joint_rule or not all(isinstance(e, Stop) for e in row.inputs)}
    listed, supported = {op for names in named for op in names.split()}, passing | {*OWN_BODIES}
    assert listed >= supported
    assert all(signature("", op, OPSET + 4).expandable for op in listed - supported)
