"""A training step that PyTorch exported: converted like any model, and given a loss scale.

The graph and what PyTorch's autograd says of it lie beside this file; foreign_step.py made them.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx
import pytest

import amp_rewrite
from amp_rewrite.files.casting import Array
from amp_rewrite.files.model import Model
from amp_rewrite.rewrite.emulate import emulate
from amp_rewrite.runtime.runner import Runner, SessionOptions
from amp_rewrite.train import scale_gradients
from support.paths import TESTS
from support.train import foreign_step

HERE = TESTS / "support" / "train"
GRADS = [f"{name}_grad" for name in foreign_step.NAMES]
FLOAT32 = 5e-6
"""Of the largest gradient: sums of some 100 products in another order, each rounded to 2**-24."""
FLOAT16 = 2.0**-8
"""Of the largest gradient: some dozen float16 results on each path, rounded to 2**-11 each."""


def graph() -> onnx.ModelProto:
    return onnx.load(HERE / "foreign_step.onnx")


def expected() -> dict[str, Array]:
    """PyTorch's loss and gradients."""
    with np.load(HERE / "foreign_step.npz") as found:
        return {name: found[name] for name in ("loss", *GRADS)}


def fed(loss_grad: float = 1.0) -> dict[str, Array]:
    with np.load(HERE / "foreign_step.npz") as found:
        state = {name: found[name] for name in foreign_step.NAMES}
    return {**foreign_step.feed(), **state, "loss_grad": np.array(loss_grad, np.float32)}


def run(model: Model, loss_grad: float = 1.0, **more: Array) -> dict[str, Any]:
    return dict(Runner.open(model, SessionOptions(threads=1)).run({**fed(loss_grad), **more}))


def off(found: dict[str, Any], reference: dict[str, Array]) -> float:
    """The largest difference of a gradient, of the largest number in it."""
    return max(float(np.abs(found[g] - reference[g]).max() / np.abs(reference[g]).max()) for g in GRADS)


def test_our_gradients_of_its_forward_pass_are_those_that_it_brings() -> None:
    forward = onnx.utils.Extractor(graph()).extract_model(["tokens", "label", *foreign_step.NAMES], ["loss"])
    made = amp_rewrite.gradients(forward, "loss", list(foreign_step.NAMES))
    found = Runner.open(made, SessionOptions(threads=1)).run({n: a for n, a in fed().items() if n != "loss_grad"})
    assert off(found, expected()) < FLOAT32
    assert off(run(Model(graph())), expected()) < FLOAT32


@pytest.mark.parametrize(("to", "bound"), [("float16", FLOAT16), ("bfloat16", 8 * FLOAT16)])
def test_it_converts_like_any_model_backward_pass_included(to: str, bound: float) -> None:
    converted = amp_rewrite.convert(graph(), to=to)
    totals = converted.report.totals
    products = [row for row in converted.report.rows if row.op in ("Gemm", "MatMul")]

    assert (totals.compute_lowered, totals.compute_ops) == (len(products), len(products))
    assert len(products) == 6  # two layers: one forward, two backward each
    assert 1e-5 < off(run(emulate(converted.result)), expected()) < bound


def test_small_gradients_vanish_in_float16_without_the_scale_and_survive_with_it() -> None:
    small = 2.0**-24
    exact = {g: array * np.float32(small) for g, array in expected().items()}
    plain = run(emulate(amp_rewrite.convert(graph()).result), small)
    made = scale_gradients(graph(), loss="loss", grads=GRADS, seed="loss_grad", loss_scale=2.0**24)
    scaled = run(emulate(amp_rewrite.convert(made.model, keep=["amp.update/*"]).result), small)

    assert off(plain, exact) > 0.5
    assert not plain["up.weight_grad"].any()
    assert off(scaled, exact) < FLOAT16


@pytest.mark.torch
def test_what_pytorch_exports_today_is_what_lies_here() -> None:
    pytest.importorskip("torch", reason="PyTorch is not installed: make extras")
    pytest.importorskip("onnxscript", reason="onnxscript is not installed: make extras")
    net = foreign_step.module()
    made = foreign_step.exported(net)
    reference = foreign_step.differentiated(net)

    assert off(run(Model(made)), reference) < FLOAT32
    assert off({g: expected()[g] for g in GRADS}, reference) < FLOAT32
    assert amp_rewrite.convert(made).report.totals.compute_lowered == 6
