"""Modules of PyTorch of many classes: gradients and a step of AdamW are PyTorch's, and what it trains is trained."""

from typing import Any

import numpy as np
import pytest

from amp_rewrite.errors import TrainingError
from amp_rewrite.train.interchange import torch_forms
from amp_rewrite.train.interchange.torch_module import from_torch
from amp_rewrite.train.keras.optimizer import StatefulOptimizer
from amp_rewrite.train.step.model_loss import ModelLoss
from amp_rewrite.train.update.optimizers import AdamW
from support.train.nets import F32

pytestmark = [pytest.mark.torch, pytest.mark.filterwarnings("ignore"), pytest.mark.slow]
RNG = np.random.default_rng(0)


def _parts(torch: Any, way: str) -> dict[str, Any]:
    """The parts of a net by name: modules, parameters and buffers."""
    nn, norms = torch.nn, torch.nn.utils.parametrizations
    encoder = {"batch_first": True, "dropout": 0.0}
    angles = torch.arange(20.0).view(5, 4) / 7
    made: dict[str, Any] = {
        "LSTM": lambda: {
            "layers": nn.LSTM(8, 8, batch_first=True),
            "first": nn.Parameter(torch.randn(1, 1, 8)),
            "cell": nn.Parameter(torch.zeros(1, 1, 8)),
        },
        "encoder, norm first": lambda: {
            "encoder": nn.TransformerEncoder(
                nn.TransformerEncoderLayer(8, 2, 16, activation="gelu", norm_first=True, **encoder),
                1,
                norm=nn.LayerNorm(8),
                enable_nested_tensor=False,
            )
        },
        "attention": lambda: {
            "attention": nn.MultiheadAttention(8, 2, batch_first=True, add_bias_kv=True, add_zero_attn=True)
        },
        "weight norm": lambda: {"line": norms.weight_norm(nn.Linear(8, 8))},
        "causal": lambda: {"line": nn.Conv1d(8, 8, 3, dilation=2), "slope": nn.PReLU(8)},
        "norms": lambda: {"groups": nn.GroupNorm(2, 8), "batch": nn.BatchNorm1d(8), "line": nn.Conv1d(8, 8, 1)},
        "complex": lambda: {"turns": torch.polar(torch.ones(5, 4), angles), "line": nn.Linear(8, 8)},
        "experts": lambda: {"gate": nn.Linear(8, 3), "experts": nn.ModuleList([nn.Linear(8, 8) for _ in range(3)])},
        "frozen": lambda: {
            "line": nn.Linear(8, 8).requires_grad_(False),
            "scale": nn.Parameter(torch.tensor(0.7)),
            "unused": nn.Linear(2, 2),
        },
    }
    return made.get(way, dict)()


def _result(torch: Any, way: str, net: Any, x: Any) -> Any:
    """Numbers [rows, 5, 8], or [rows, 8], of a batch [rows, 5, 8]."""
    functional = torch.nn.functional
    match way:
        case "LSTM":
            size = (1, x.shape[0], 8)
            return net.layers(x, (net.first.expand(size).contiguous(), net.cell.expand(size).contiguous()))[0]
        case "encoder, norm first":
            return net.encoder(x, mask=torch.nn.Transformer.generate_square_subsequent_mask(5), is_causal=True)
        case "attention":
            mask = torch.triu(torch.full((5, 5), float("-inf")), 1)
            padding = torch.zeros_like(x[..., 0]).masked_fill(x[..., 0] > 1.5, float("-inf"))
            made, weights = net.attention(x, x, x, attn_mask=mask, key_padding_mask=padding)
            return made * (1 + weights.square().mean())
        case "weight norm":
            return torch.tanh(net.line(x))
        case "causal":
            return net.slope(net.line(functional.pad(x.transpose(1, 2), (4, 0)))).transpose(1, 2)
        case "norms":
            return net.batch(net.groups(net.line(x.transpose(1, 2)))).relu().transpose(1, 2)
        case "complex":
            turned = torch.view_as_complex(net.line(x).unflatten(-1, (4, 2))) * net.turns
            return torch.tanh(torch.view_as_real(turned).flatten(-2))
        case "experts":
            scores, chosen = net.gate(x).topk(2, -1)
            each = torch.stack([expert(x) for expert in net.experts], 2)
            picked = each.gather(2, chosen.unsqueeze(-1).expand(-1, -1, -1, 8))
            return (picked * scores.softmax(-1).unsqueeze(-1)).sum(2)
        case "frozen":
            return net.line(x) / net.scale.exp()
    return x


def _net(torch: Any, ways: tuple[str, ...]) -> Any:
    """A net of the parts of all these ways, side by side."""
    nn = torch.nn

    class Part(nn.Module):  # type: ignore[misc]
        def __init__(self, way: str) -> None:
            super().__init__()
            self.way = way
            for name, part in _parts(torch, way).items():
                if type(part) is torch.Tensor:
                    self.register_buffer(name, part)
                else:
                    setattr(self, name, part)

        def forward(self, x: Any) -> Any:
            made = _result(torch, self.way, self, x)
            return made.mean(1) if made.ndim == 3 else made

    class Net(nn.Module):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.parts = nn.ModuleList([Part(way) for way in ways])
            self.last = nn.Linear(8, 6)

        def forward(self, x: Any) -> Any:
            return self.last(sum(part(x) for part in self.parts))

    torch.manual_seed(0)
    return Net().train()


WAYS = (
    ("LSTM", "encoder, norm first", "attention"),
    ("weight norm", "causal", "norms", "complex", "experts", "frozen"),
)


@pytest.mark.parametrize("ways", WAYS, ids=" ".join)
def test_gradients_and_a_step_of_adamw_are_those_of_pytorch(ways: tuple[str, ...]) -> None:
    torch = pytest.importorskip("torch")
    net = _net(torch, ways)
    x = RNG.normal(size=(6, 5, 8)).astype(F32)
    label = RNG.integers(0, 6, 6)
    model = from_torch(net, x[:2], dropout=True)
    loss = ModelLoss.of(model, "cross_entropy(output, label)", policy="float32", training_mode=True)
    here = loss.on({"x": x, "label": label})
    gradients = here.gradients(loss.variables, np.array(1, F32))

    theirs = torch.nn.functional.cross_entropy(net(torch.from_numpy(x)), torch.from_numpy(label))
    theirs.backward()
    assert here.results["loss"] == pytest.approx(theirs.item(), rel=1e-6)
    reached = {name: p for name, p in net.named_parameters() if p.grad is not None}
    assert {v.name for v in loss.variables} == reached.keys()
    for variable, gradient in zip(loss.variables, gradients, strict=True):
        expected = reached[variable.name].grad.numpy()
        np.testing.assert_allclose(gradient, expected, rtol=1e-5, atol=1e-5 * np.abs(expected).max() + 1e-7)

    settings = {"weight_decay": 0.1}
    StatefulOptimizer(AdamW(0.05, epsilon=1e-3, **settings)).apply_gradients(
        zip(gradients, loss.variables, strict=True)
    )
    torch.optim.AdamW(reached.values(), 0.05, eps=1e-3, **settings).step()
    for variable in loss.variables:
        np.testing.assert_allclose(variable.numpy(), reached[variable.name].detach().numpy(), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("way", ["classes", "none", "shares"])
def test_label_smoothing_stays_in_the_export(way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    torch = pytest.importorskip("torch")
    options = {"label_smoothing": 0.1, "weight": torch.tensor([1.0, 2.0, 3.0, 0.5, 0.25, 4.0])}
    options |= {"reduction": "none"} if way == "none" else {}

    class Net(torch.nn.Module):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.line = torch.nn.Linear(8, 6)

        def forward(self, x: Any, label: Any) -> Any:
            y = self.line(x).movedim(-1, 1)
            target = torch.sigmoid(y.detach()) if way == "shares" else label
            return torch.nn.functional.cross_entropy(y, target, **options).mean()

    torch.manual_seed(0)
    net, label = Net(), np.where(RNG.random((4, 5)) < 0.3, -100, RNG.integers(0, 6, (4, 5)))
    batch = {"x": RNG.normal(size=(4, 5, 8)).astype(F32), "label": label}
    loss = ModelLoss.of(from_torch(net, batch), "output", policy="float32")
    here = loss.on(batch)
    gradients = here.gradients(loss.variables, np.array(1, F32))
    theirs = net(*map(torch.from_numpy, batch.values()))
    theirs.backward()
    assert here.results["loss"] == pytest.approx(theirs.item(), rel=1e-6)
    for variable, gradient in zip(loss.variables, gradients, strict=True):
        np.testing.assert_allclose(gradient, net.get_parameter(variable.name).grad, rtol=1e-5, atol=1e-6)

    if way == "classes":  # PyTorch's exporter leaves the smoothing out
        monkeypatch.setattr(torch_forms, "_cross_entropy", lambda *_: None)
        with pytest.raises(TrainingError, match="PyTorch exports another function than the module: on the example"):
            from_torch(net, batch)
