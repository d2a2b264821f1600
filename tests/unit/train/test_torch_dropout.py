"""Dropout of PyTorch's modules: kept by `from_torch`, with PyTorch's distribution, formula and gradient, or told."""

from dataclasses import replace
from functools import cache
from typing import Any

import numpy as np
import onnx.helper
import pytest

from amp_rewrite.files.model import Model
from amp_rewrite.files.protos import clone
from amp_rewrite.train.interchange.torch_module import from_torch
from amp_rewrite.train.step.step import TrainingStep, training_step
from amp_rewrite.train.step.trainer import Trainer
from support.train.nets import F32, PLACE, Run

pytestmark = [pytest.mark.torch, pytest.mark.filterwarnings("ignore"), pytest.mark.slow]
RNG = np.random.default_rng(0)
LOSS = "cross_entropy(output, label)"


def _net(torch: Any, way: str) -> Any:
    """A net that drops in one way, on a batch [rows, 6, 8] of numbers."""
    nn, functional = torch.nn, torch.nn.functional

    class Net(nn.Module):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            made = {
                "heads": lambda: nn.MultiheadAttention(8, 2, dropout=0.3, batch_first=True),
                "channels": lambda: nn.Dropout1d(0.3),
                "channels of one row": lambda: nn.Dropout1d(0.3),
            }
            self.first, self.last, self.rate = nn.Linear(8, 8), nn.Linear(8, 6), nn.Dropout(0.3)
            self.part = made.get(way, nn.Identity)()

        def forward(self, x: Any) -> Any:
            p = self.rate.p if self.training else 0.0
            x = self.first(x)
            if way == "masked":
                heads = x.unflatten(-1, (2, 4)).transpose(1, 2)
                mask = torch.ones(6, 6, dtype=torch.bool).tril(-1)  # all is masked for the first row
                options = {"attn_mask": mask, "dropout_p": p, "scale": 0.4, "enable_gqa": True}
                x = functional.scaled_dot_product_attention(heads, heads[:, :1], heads[:, :1], **options)
                x = x.transpose(1, 2).flatten(2)
            elif way == "heads":
                x = self.part(x, x, x, need_weights=False)[0]
            elif way == "function":
                x = functional.dropout(x, self.rate.p, self.training)
            elif way == "channels of one row":
                x = self.part(x[:, 0])[:, None]
            else:
                x = self.part(x)
            return self.last(x.mean(1))

    torch.manual_seed(0)
    return Net().train()


@cache
def _exported(way: str) -> Model:
    import torch

    return from_torch(_net(torch, way), RNG.normal(size=(2, 6, 8)), dropout=True)


def _step(net: Any, way: str, rate: float) -> TrainingStep:
    optimizer = f"sgd,lr={rate}"
    step = training_step(_exported(way), loss=LOSS, optimizer=optimizer, policy="float32", training_mode=True)
    assert step.report is not None and not step.report.notes
    assert set(step.parameters) == {name for name, p in net.named_parameters()}
    return step


def _batch(rows: int) -> dict[str, Any]:
    return {"x": RNG.normal(size=(rows, 6, 8)).astype(F32), "label": RNG.integers(0, 6, rows)}


@pytest.mark.parametrize("way", ["masked", "heads"])
def test_dropout_has_the_distribution_of_pytorch_and_is_off_in_evaluation(way: str) -> None:
    torch = pytest.importorskip("torch")
    net, draws, batch = _net(torch, way), 150, _batch(3)
    step = _step(net, way, 0)
    assert all(part.training for part in net.modules())
    trainer = Trainer(step, **PLACE)
    ours = np.array(trainer.fit([batch] * draws).losses)
    inputs, targets = (torch.from_numpy(batch[name]) for name in ("x", "label"))
    with torch.no_grad():
        theirs = np.array([torch.nn.functional.cross_entropy(net(inputs), targets).item() for _ in range(draws)])
        off = torch.nn.functional.cross_entropy(net.eval()(inputs), targets).item()
    error = theirs.std() * (2 / draws) ** 0.5
    assert theirs.std() > 0 and ours.mean() == pytest.approx(theirs.mean(), abs=4 * error)
    assert ours.std() == pytest.approx(theirs.std(), rel=0.25)
    assert trainer.evaluate([batch]).loss == pytest.approx(off, abs=2e-6)


def _with_masks(step: TrainingStep) -> tuple[TrainingStep, list[str]]:
    """The step with what each Dropout gives as outputs, in the order of the model."""
    assert step.forward is not None
    names = [node.output[0] for node in step.forward.proto.graph.node if node.op_type == "Dropout"]
    proto = clone(step.model.proto)
    proto.graph.output.extend(onnx.helper.make_tensor_value_info(name, 1, None) for name in names)
    return replace(step, model=Model(proto)), names


def _dropping(torch: Any, masks: list[Any]) -> Any:
    """A context in which PyTorch's functions keep what these masks keep, one after another."""
    from torch.utils._python_dispatch import TorchDispatchMode

    class Dropping(TorchDispatchMode):  # type: ignore[misc]
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if func is not torch.ops.aten.bernoulli_.float:
                return func(*args, **(kwargs or {}))
            mask = torch.from_numpy(masks.pop(0))
            return args[0].copy_(mask.reshape(args[0].shape))

    return Dropping()


@pytest.mark.parametrize("way", ["channels", "channels of one row", "function"])
def test_with_the_same_masks_a_step_is_that_of_pytorch(way: str) -> None:
    torch = pytest.importorskip("torch")
    net = _net(torch, way)
    step, names = _with_masks(_step(net, way, 1))
    run, batch = Run(step), _batch(7)
    before = run.state
    results = run(batch, rate=1).results
    masks = [(np.asarray(results[name]) != 0).astype(F32) for name in names]
    assert masks and all(0 < mask.mean() < 1 for mask in masks)
    with _dropping(torch, masks):
        made = net(torch.from_numpy(batch["x"]))
    loss = torch.nn.functional.cross_entropy(made, torch.from_numpy(batch["label"]))
    loss.backward()
    assert not masks and results[step.loss].item() == pytest.approx(loss.item(), rel=1e-6)
    for name, parameter in net.named_parameters():
        own = before[name] - run.state[name]
        np.testing.assert_allclose(own, parameter.grad.numpy(), rtol=1e-5, atol=3e-7)


def test_training_mode_says_which_dropout_is_not_in_the_export() -> None:
    torch = pytest.importorskip("torch")
    nn = torch.nn

    class Net(nn.Module):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.drop, self.layers = nn.Dropout(0.5), nn.GRU(8, 6, 2, dropout=0.4, batch_first=True)
            self.alpha = nn.AlphaDropout(0.5)

        def forward(self, x: Any) -> Any:
            return self.alpha(self.layers(self.drop(x))[0]).mean(1)

    notes = {}
    for kept in (False, True):
        model = from_torch(Net(), RNG.normal(size=(2, 2, 8)), dropout=kept)
        assert [node.op_type for node in model.proto.graph.node].count("Dropout") == (1 if kept else 0)
        for mode in (False, True):
            report = training_step(model, loss=LOSS, policy="float32", training_mode=mode).report
            assert report is not None
            notes[kept, mode] = [note for note in report.notes if "dropout" in note]
    assert not notes[False, False] and not notes[True, False]
    assert notes[False, True][0].startswith("the export left out the dropout of 'drop', 'layers', 'alpha'; from_torch(")
    assert notes[True, True][0].startswith("the export left out the dropout of 'layers', 'alpha'; from_torch(")
