"""Training steps of recurrent networks: what their Scans compute in, what comes out in the end, where they run."""

from pathlib import Path
from typing import Any

import numpy as np
import onnx.parser
import pytest
from onnx import ModelProto
from onnx.numpy_helper import from_array

from amp_rewrite import View
from amp_rewrite.dtypes import DType
from amp_rewrite.runtime.runner import Runner, SessionOptions
from amp_rewrite.train import Trainer, training_step
from support import stub

GATES = {"LSTM": 4, "GRU": 3}
LOSS = "cross_entropy(logits, label)"


def network(cell: str) -> ModelProto:
    """Three classes of sequences of 5 steps of 4 numbers."""
    model = onnx.parser.parse_model(
        f"""<ir_version: 10, opset_import: ["": 20]> g (float[5,batch,4] x) => (float[batch,3] logits)
          <int64[1] first = {{0}}> {{
          seen, last = {cell} <hidden_size = 8> (x, w, r, b)
          state = Squeeze (last, first)
          logits = MatMul (state, out)
        }}"""
    )
    rng, wide = np.random.default_rng(0), 8 * GATES[cell]
    for name, shape in {"w": (1, wide, 4), "r": (1, wide, 8), "b": (1, 2 * wide), "out": (8, 3)}.items():
        model.graph.initializer.append(from_array(rng.uniform(-0.5, 0.5, shape).astype(np.float32), name))
    return model


def batch() -> dict[str, np.ndarray]:
    """Sequences whose class is the sign of their first numbers."""
    x = np.random.default_rng(1).normal(size=(5, 24, 4)).astype(np.float32)
    return {"x": x, "label": np.sign(x[0, :, 0]).astype(np.int64) + 1}


@pytest.mark.parametrize("cell", ["LSTM"])
def test_it_learns_alike_under_each_policy(cell: str) -> None:
    curves = {}
    for policy in ("float32", "mixed_float16", "mixed_bfloat16"):
        trainer = Trainer(training_step(network(cell), loss=LOSS, optimizer="adam,lr=0.02", policy=policy))
        curves[policy] = list(trainer.fit([batch()] * 60).losses)
    assert curves["float32"][-1] < 0.2 * curves["float32"][0]
    for policy, bound in (("mixed_float16", 2**-7), ("mixed_bfloat16", 2**-4)):  # 16 times half a unit at 1
        np.testing.assert_allclose(curves[policy], curves["float32"], rtol=0, atol=bound)


def test_each_step_multiplies_in_float16_and_weights_gradients_are_summed_in_float32() -> None:
    view = View.of(training_step(network("LSTM"), loss=LOSS, optimizer="sgd").model)
    inside = [op for op in view.ops if op.scope != 0]
    products = {view.dtype(out) for op in inside if op.op_type == "MatMul" for out in op.outputs if out is not None}
    back = next(op for op in reversed(view.ops) if op.op_type == "Scan")
    begun = [view.value_name(v) for v in back.inputs[:3] if v is not None]

    assert products == {DType.FLOAT16}
    assert {view.dtype(v) for v in back.outputs[:3] if v is not None} == {DType.FLOAT}, begun


@pytest.mark.parametrize("cell", GATES)
def test_what_is_trained_is_given_out_with_its_own_operator(cell: str) -> None:
    trainer = Trainer(training_step(network(cell), loss=LOSS, optimizer="sgd", policy="float32"))
    trainer.fit([batch()] * 3)
    exported = trainer.export()
    weights = {t.name: onnx.numpy_helper.to_array(t) for t in exported.to_proto().graph.initializer}

    assert [n.op_type for n in exported.to_proto().graph.node] == [cell, "Squeeze", "MatMul"]
    np.testing.assert_array_equal(weights["r"], trainer.state["r"])
    found = Runner.open(exported, SessionOptions(providers=("CPUExecutionProvider",))).run({"x": batch()["x"]})
    assert np.isfinite(found["logits"]).all()


def test_initial_states_are_no_weights_unless_they_are_named() -> None:
    model = network("LSTM")
    model.graph.node[0].input.extend(["", "zeros", "zeros"])
    model.graph.initializer.append(from_array(np.zeros((1, 24, 8), np.float32), "zeros"))

    assert training_step(model, loss=LOSS, optimizer="sgd").parameters == ("w", "r", "b", "out")
    assert training_step(model, loss=LOSS, optimizer="sgd", parameters=["zeros", "w"]).parameters == ("w", "zeros")


@pytest.mark.stub
@pytest.mark.parametrize(("cell", "policy"), [("LSTM", "mixed_float16"), ("GRU", "float32")])
def test_on_cuda_only_the_size_of_a_free_batch_is_worked_out_on_the_host(
    cell: str, policy: str, tmp_path: Path, cuda_stub: Path
) -> None:
    training_step(network(cell), loss=LOSS, optimizer="adamw", policy=policy).model.save(tmp_path / "step.onnx")
    row: dict[str, Any] = stub.placements([tmp_path / "step.onnx"])[0]

    assert "error" not in row
    assert {op.split()[0] for op in row["cpu_float"]} <= {"Cast", "Div"}
