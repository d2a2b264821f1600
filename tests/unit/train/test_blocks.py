"""Updates of large parameters block by block: which nodes they take, and that no bit changes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from onnx import ModelProto, numpy_helper

from amp_rewrite.files.model import Model
from amp_rewrite.runtime.runner import CPU, CUDA, Runner
from amp_rewrite.settings.loss_scale import DynamicLossScale
from amp_rewrite.train.step import execution
from amp_rewrite.train.step.step import training_step
from amp_rewrite.train.step.trainer import Trainer
from amp_rewrite.train.update.blocks import in_blocks
from amp_rewrite.train.update.optimizers import LAMB, SGD, Adafactor, Adagrad, Adam, AdamW, Lion, Optimizer, RMSprop
from support.train.nets import CROSS_ENTROPY, PLACE, batches, mlp, parsed, same, step

EACH = [
    SGD(0.1, 0.9, nesterov=True),
    RMSprop(0.01, momentum=0.5, clipvalue=0.1),
    Adam(0.01, momentum_dtype="bfloat16"),
    AdamW(0.01, global_clipnorm=0.5),
    LAMB(0.01),
    Lion(0.01),
    Adagrad(0.1, ema_momentum=0.5),
    Adafactor(0.1),
]


def after(monkeypatch: pytest.MonkeyPatch, block: int, **options: Any) -> tuple[Trainer, Sequence[float]]:
    """Train with blocks of so many elements; a batch in the middle has no finite gradients."""
    monkeypatch.setattr(execution, "BLOCK", block)
    made = Trainer(step(**options), **PLACE)
    data = list(batches(6))
    data[3]["x"][0, 0] = np.inf
    return made, made.fit(data).losses


@pytest.mark.parametrize("options", [{}, {"loss_scale": DynamicLossScale(2.0**10, 2)}, {"micro_batches": 2}])
@pytest.mark.parametrize("optimizer", EACH)
def test_blocks_change_no_bit(optimizer: Optimizer, options: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    given = {"optimizer": optimizer, "policy": "float32", **options}
    (whole, losses), (cut, others) = (after(monkeypatch, block, **given) for block in (1 << 20, 31))
    kinds = [Counter(n.op_type for n in made._model.proto.graph.node)["Scan"] for made in (whole, cut)]

    assert kinds[0] == 0 < kinds[1]
    assert same(whole.state, cut.state) and np.array_equal(losses, others, equal_nan=True)
    assert (whole.skipped, whole.nonfinite) == (cut.skipped, cut.nonfinite) and whole.nonfinite > 0


def test_an_emulated_step_is_cut_as_well(monkeypatch: pytest.MonkeyPatch) -> None:
    (whole, _), (cut, _) = (after(monkeypatch, block, policy="mixed_float16") for block in (1 << 20, 31))
    assert cut.skipped == 1 and same(whole.state, cut.state)
    assert any(n.op_type == "Scan" for n in cut._model.proto.graph.node)


def scans(model: Model) -> list[Counter[str]]:
    """Ops in each Scan of a step, those of the update first."""
    nodes = [n for n in model.proto.graph.node if n.op_type == "Scan"]
    nodes.sort(key=lambda n: not n.name.startswith("amp.update/"))
    return [Counter(n.op_type for a in node.attribute for n in a.g.node) for node in nodes]


def test_a_scan_takes_the_whole_update_of_a_parameter_and_its_finite_test() -> None:
    model = in_blocks(step(policy="float32", optimizer="rmsprop").model, 16)
    expected = {"Mul": 4, "Sub": 2, "Add": 2, "Sqrt": 1, "Div": 1, "ReduceSum": 1}
    assert scans(model)[:2] == [expected, expected]  # w1 and w2


def gelu() -> ModelProto:
    """`mlp` with Gelu in place of Relu."""
    model = mlp()
    for node in model.graph.node:
        if node.op_type == "Relu":
            node.op_type = "Gelu"
    return model


@pytest.mark.parametrize("number", [1, 6, 7])
def test_chains_are_cut_by_rows_where_the_batch_is_unknown(number: int, monkeypatch: pytest.MonkeyPatch) -> None:
    made = training_step(gelu(), loss=CROSS_ENTROPY, optimizer="sgd", policy="float32")
    (rows,) = scans(in_blocks(made.model, 64))
    data = [{name: array[:number] for name, array in batch.items()} for batch in batches(3)]
    losses, states = list[Any](), list[Any]()
    for block in (1 << 20, 64):
        monkeypatch.setattr(execution, "BLOCK", block)
        trainer = Trainer(made, **PLACE)
        losses.append(trainer.fit(data).losses)
        states.append(trainer.state)

    assert rows["Erf"] == rows["Exp"] == rows["ReduceSum"] == 1  # the sum is the gradient of the bias
    np.testing.assert_allclose(*losses, rtol=1e-6)
    for name, array in states[0].items():
        np.testing.assert_allclose(states[1][name], array, rtol=1e-5, atol=1e-6)


CHAIN = "b = Exp(a) c = Mul(b, b) d = Neg(c) y = Add(d, s)"
EQUAL = {
    "a Reshape": "r = Reshape(t, rows) a = Mul(r, s)",
    "a broadcast": "r = Reshape(t, rows) p = Sum(r, s, one) q = Abs(p) a = Sub(s, q)",
}
OTHER = {
    "several unknown dims": "r = Reshape(u, rows) a = Mul(r, s)",
    "rows of another size": "r = Reshape(v, rows) a = Mul(r, s)",
    "one row or all": "a = Mul(w, s)",
}


def chain(text: str) -> Model:
    types = "float[N,2,4] t, float[N,M,8] u, float[N,5,4] v, float[K,8] w, float[N,8] s, float[1,8] one"
    model = parsed(f"net ({types}) => (float[N,8] y) {{ {text} {CHAIN} }}")
    model.graph.initializer.append(numpy_helper.from_array(np.array([-1, 8]), "rows"))
    return Model(model)


@pytest.mark.parametrize("text", EQUAL.values(), ids=EQUAL)
def test_dims_that_stay_equal_are_one(text: str) -> None:
    model = chain(text)
    random = np.random.default_rng(0)
    shapes = {"t": (6, 2, 4), "u": (6, 2, 8), "v": (6, 5, 4), "w": (6, 8), "s": (6, 8), "one": (1, 8)}
    feeds = {name: random.random(shape, np.float32) for name, shape in shapes.items()}
    cut = in_blocks(model, 16)

    (ops,) = scans(cut)
    assert ops.total() == len(text.split(" = ")) + 2  # all but the Reshape
    assert np.array_equal(*(Runner.open(m).run(feeds)["y"] for m in (model, cut)))


@pytest.mark.parametrize("text", OTHER.values(), ids=OTHER)
def test_dims_that_may_differ_are_not_one(text: str) -> None:
    assert all(ops.total() <= 4 for ops in scans(in_blocks(chain(text), 16)))


def test_sums_over_rows_are_of_a_chain_and_others_are_not() -> None:
    ends = "z = ReduceSum<keepdims=0>(c, first) o = ReduceSum<keepdims=0>(c, second)"
    outputs = "float[8] z, float[N] o"
    model = parsed(f"net (float[N,8] s) => ({outputs}) {{ a = Exp(s) b = Mul(a, a) c = Neg(b) {ends} }}")
    for axis, name in enumerate(("first", "second")):
        model.graph.initializer.append(numpy_helper.from_array(np.array([axis]), name))
    whole, cut = Model(model), in_blocks(Model(model), 16)
    feeds = {"s": np.random.default_rng(0).random((6, 8), np.float32)}
    expected, found = (Runner.open(m).run(feeds) for m in (whole, cut))

    assert scans(cut) == [{"Exp": 1, "Mul": 1, "Neg": 1, "ReduceSum": 1}]
    np.testing.assert_allclose(found["z"], expected["z"], rtol=1e-5)
    assert np.array_equal(found["o"], expected["o"])


def test_small_parameters_and_sizes_without_divisors_stay_whole() -> None:
    model = step(policy="float32").model
    assert in_blocks(model, 64) is model  # 128 elements are not four blocks of 64
    assert len(scans(in_blocks(model, 31))) == 1  # 128 elements in 8 blocks


@pytest.mark.parametrize(
    ("named", "opens", "providers", "emulated"),
    [
        (None, True, (CUDA, CPU), False),
        (None, False, (CPU,), True),
        ((CUDA, CPU), False, (CPU,), True),
        ((CUDA,), False, (CUDA,), False),
        ((CPU,), True, (CPU,), True),
        ((CPU, CUDA), False, (CPU, CUDA), True),
    ],
)
def test_a_step_runs_on_cuda_if_that_opens_and_is_emulated_on_the_cpu(
    named: Sequence[str] | None,
    opens: bool,
    providers: tuple[str, ...],
    emulated: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(execution, "cuda_opens", lambda: opens)
    lowered, full = (step(policy=policy) for policy in ("mixed_float16", "float32"))
    made = execution.Execution.of(lowered, named, None, 1, {})
    assert (made.options.providers, made.emulated) == (providers, emulated)
    assert (made.model is lowered.model) == (not emulated)
    assert not execution.Execution.of(full, named, None, 1, {}).emulated
    for asked in (True, False):
        assert execution.Execution.of(lowered, named, asked, 1, {}).emulated is asked
