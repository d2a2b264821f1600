"""PyTorch modules exported by `from_torch` and `from_transformers`: each trains as in PyTorch."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from amp_rewrite.errors import TrainingError
from amp_rewrite.train.interchange.torch_module import from_torch
from amp_rewrite.train.objective.parameters import module_notes
from amp_rewrite.train.step.model_loss import ModelLoss
from amp_rewrite.train.step.step import TrainingStep, training_step
from amp_rewrite.train.step.trainer import Trainer
from support.train.nets import F32, PLACE

pytestmark = [pytest.mark.torch, pytest.mark.filterwarnings("ignore")]
RNG = np.random.default_rng(0)
LOSS = "cross_entropy(output, label)"


def _why(step: TrainingStep, name: str) -> str:
    assert step.report is not None
    return next(row.why for row in step.report.parameters if row.name == name)


def _lookup(torch: Any) -> Any:
    """An embedding with a padding row, tied to the last layer."""
    nn = torch.nn

    class Net(nn.Module):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.table = nn.Embedding(6, 4, padding_idx=2)
            self.last = nn.Linear(4, 6, bias=False)
            self.last.weight = self.table.weight

        def forward(self, x: Any) -> Any:
            return self.last(torch.tanh(self.table(x))).mean(1)

    return Net()


def _rows(rows: int) -> Any:
    return RNG.normal(size=(rows, 8)).astype(F32)


def _shared(torch: Any) -> Any:
    """A net with one layer used three times, a weight shared by two layers, and a parameter named like the input."""
    nn = torch.nn

    class Net(nn.Module):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.layers, self.other = nn.ModuleList([nn.Linear(8, 8)] * 3), nn.Linear(8, 8)
            self.other.weight, self.last = self.layers[0].weight, nn.Linear(8, 6)
            self.x = nn.Parameter(torch.ones(8))

        def forward(self, x: Any) -> Any:
            for layer in (*self.layers, self.other):
                x = torch.tanh(layer(x)) * self.x
            return self.last(x)

    return Net()


def _norm(make: Callable[[Any], Any]) -> Callable[[Any], Any]:
    return lambda torch: torch.nn.Sequential(torch.nn.Linear(8, 16), make(torch.nn), torch.nn.Linear(16, 6))


def _train_alike(step: TrainingStep, net: Any, optimizer: Any, data: list[Any]) -> None:
    """Train here and in PyTorch, and compare each loss."""
    torch = pytest.importorskip("torch")
    trainer = Trainer(step, **PLACE)
    for x in data:
        label = RNG.integers(0, 6, len(x))
        loss = torch.nn.functional.cross_entropy(net(torch.from_numpy(x)), torch.from_numpy(label))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        assert trainer.fit([{step.batch[0]: x, "label": label}]).losses[0] == pytest.approx(loss.item(), abs=2e-6)


@pytest.mark.parametrize(
    ("make", "data"),
    [
        pytest.param(_lookup, lambda rows: RNG.integers(0, 4, (rows, 5)), id="padding_idx, tied"),
        pytest.param(
            _norm(lambda nn: nn.LayerNorm(16, elementwise_affine=False)), _rows, id="LayerNorm without weights"
        ),
        pytest.param(
            _norm(lambda nn: nn.BatchNorm1d(16, track_running_stats=False)), _rows, id="BatchNorm, no statistics"
        ),
        pytest.param(_shared, _rows, id="layers under several names"),
    ],
)
def test_losses_match_pytorch_and_all_parameters_are_trained(make: Any, data: Any) -> None:
    torch = pytest.importorskip("torch")
    torch.manual_seed(0)
    net = make(torch).train()
    step = training_step(
        from_torch(net, data(2)), loss=LOSS, optimizer="adam,lr=0.05,epsilon=1e-8", policy="float32", training_mode=True
    )
    assert set(step.parameters) == {name for name, _ in net.named_parameters()}
    _train_alike(step, net, torch.optim.Adam(net.parameters(), 0.05), [data(rows) for rows in (9, 9, 4)])


def test_the_report_names_padding_rows_buffers_frozen_parameters_and_constants() -> None:
    torch = pytest.importorskip("torch")

    class Net(torch.nn.Module):  # type: ignore[misc]
        """A norm without weights, a frozen layer and a buffer."""

        def __init__(self) -> None:
            super().__init__()
            self.first, self.norm = torch.nn.Linear(8, 16), torch.nn.LayerNorm(16, elementwise_affine=False)
            self.frozen = torch.nn.Linear(16, 6).requires_grad_(False)
            self.register_buffer("shift", torch.randn(16))

        def forward(self, x: Any) -> Any:
            return self.frozen(self.norm(self.first(x)) + self.shift)

    lookup = training_step(from_torch(_lookup(torch), RNG.integers(0, 4, (2, 5))), loss=LOSS, policy="float32")
    assert _why(lookup, "table.weight") == "read by 2 ops, row 2 is padding"
    step = training_step(from_torch(Net(), _rows(2)), loss=LOSS, policy="float32")
    assert _why(step, "shift") == "a buffer of the module"
    assert _why(step, "frozen.weight") == "a parameter with requires_grad=False"
    assert step.report is not None
    left = {row.why for row in step.report.parameters if row.role == "frozen"}
    assert "a constant from the exporter, not a parameter of the module" in left


def _stopped(torch: Any) -> Any:
    """A net with a straight-through gradient of a rounded weight, and with results without gradients."""
    nn = torch.nn

    class Net(nn.Module):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.first, self.line, self.target = nn.Linear(8, 8), nn.Linear(8, 6), nn.Linear(8, 8)

        def forward(self, x: Any) -> Any:
            weight = self.line.weight
            rounded = weight + (torch.round(weight * 4) / 4 - weight).detach()
            with torch.no_grad():
                target = torch.tanh(self.target(x)) * self.first.weight[0]
            x = self.first(x)
            return nn.functional.linear(x * target, rounded) + self.line(x).detach() + self.line.bias.data

    return Net()


def test_stopped_gradients_match_pytorch() -> None:
    torch = pytest.importorskip("torch")
    torch.manual_seed(0)
    net = _stopped(torch)
    step = training_step(from_torch(net, _rows(2)), loss=LOSS, optimizer="sgd,lr=0.5", policy="float32")
    assert set(step.parameters) == {"first.weight", "first.bias", "line.weight"}
    assert _why(step, "line.bias") == _why(step, "target.weight") == "no gradient of the loss reaches it"
    _train_alike(step, net, torch.optim.SGD(net.parameters(), 0.5), [_rows(5) for _ in range(4)])


def _odd(torch: Any, way: str) -> Any:
    """A net with behavior that an export loses."""
    nn = torch.nn

    class Rounded(torch.autograd.Function):  # type: ignore[misc]
        @staticmethod
        def forward(ctx: Any, x: Any) -> Any:
            return torch.round(x)

        @staticmethod
        def backward(ctx: Any, gradient: Any) -> Any:
            return gradient

    class Net(nn.Module):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            made = {"spectral": lambda: nn.utils.parametrizations.spectral_norm(nn.Linear(8, 6))}
            made["looked_up"] = lambda: nn.Embedding(4, 6, max_norm=0.1)
            self.line, self.part = nn.Linear(8, 6), made.get(way, nn.Identity)()
            self.register_buffer("calls", torch.zeros(1))

        def forward(self, x: Any) -> Any:
            if way == "looked_up":
                return self.line(x) + self.part((x[:, 0] > 0).long())
            if way == "counted" or (way == "counted in training" and self.training):
                self.calls += 1
            made = self.part(x) if way == "spectral" else self.line(x)
            return Rounded.apply(made) if way == "rounded" else made

    return Net()


@pytest.mark.parametrize(
    ("way", "message"),
    [
        ("counted", "a call of the module changes 'calls' in place, even in evaluation mode"),
        ("looked_up", "a call of the module changes 'part.weight' in place, even in evaluation mode"),
    ],
)
def test_modules_lost_in_the_export_are_refused(way: str, message: str) -> None:
    torch = pytest.importorskip("torch")
    net = _odd(torch, way)
    before = {name: tensor.clone() for name, tensor in net.state_dict().items()}
    with pytest.raises(TrainingError, match=message):
        from_torch(net, _rows(2))
    assert all(tensor.equal(before[name]) for name, tensor in net.state_dict().items())


@pytest.mark.parametrize(
    ("way", "beginning"),
    [
        ("spectral", "in training mode, PyTorch computes 'part.parametrizations.weight.0' differently or changes"),
        ("counted in training", "in training mode, PyTorch computes 'Net' differently or changes its buffers"),
        ("rounded", "the custom gradient of 'Rounded' is not exported; a step differentiates the forward pass instead"),
        ("", ""),
    ],
)
def test_the_report_lists_training_behavior_missing_from_the_export(way: str, beginning: str) -> None:
    torch = pytest.importorskip("torch")
    net = _odd(torch, way)
    before = {name: tensor.clone() for name, tensor in net.state_dict().items()}
    notes = module_notes(from_torch(net, _rows(2)), training_mode=True)
    assert all(tensor.equal(before[name]) for name, tensor in net.state_dict().items())
    assert [note[: len(beginning)] for note in notes] == ([beginning] if beginning else [])


_TIES: dict[str, tuple[Callable[[Any, Any], Any], list[list[float]]]] = {
    "a standard deviation of 0": (lambda t, x: (x - 1) / (x.std(-1, keepdim=True) + 1e-3), [[0, 0, 0], [1, 2, 4]]),
    "bounds of relu6": (lambda t, x: t.nn.functional.relu6(x), [[0, 6, 3], [7, -1, 6]]),
    "a clamp": (lambda t, x: x.clamp(0, 6), [[0, 6, 3], [7, -1, 6]]),
    "a clamp by tensors": (lambda t, x: x.clamp(t.zeros(3), t.full((3,), 6.0)), [[0, 6, 3], [7, -1, 6]]),
    "a maximum along an axis": (lambda t, x: x.max(-1).values + x.min(-1).values, [[1, 1, 0], [2, 2, 2]]),
    "the maximum of all": (lambda t, x: x.amax(-1) + x.max(), [[1, 1, 0], [2, 2, 2]]),
}


def test_gradients_at_ties_match_pytorch() -> None:
    torch = pytest.importorskip("torch")

    class Net(torch.nn.Module):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.ties = torch.nn.ParameterList(
                torch.tensor(values, dtype=torch.float32) for _, values in _TIES.values()
            )

        def forward(self, x: Any) -> Any:
            made = [function(torch, w * x) for w, (function, _) in zip(self.ties, _TIES.values(), strict=True)]
            return sum((m * torch.arange(1.0, m.numel() + 1).reshape(m.shape)).sum() for m in made).reshape(1)

    net, x = Net(), torch.ones(2, 3)
    net(x).backward()
    loss = ModelLoss.of(from_torch(net, x, dynamic={}), "output", policy="float32")
    gradients = loss.on({"x": x.numpy()}).gradients(loss.variables, np.array(1, np.float32))
    found = {variable.name: gradient for variable, gradient in zip(loss.variables, gradients, strict=True)}
    for case, (name, parameter) in zip(_TIES, net.named_parameters(), strict=True):
        expected = parameter.grad.numpy()
        np.testing.assert_allclose(np.asarray(found[name]), expected, rtol=1e-5, atol=1e-4, err_msg=case)


def test_an_input_of_one_row_beside_others_is_not_a_batch() -> None:
    torch = pytest.importorskip("torch")

    class Net(torch.nn.Module):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.words, self.places = torch.nn.Embedding(9, 4), torch.nn.Embedding(9, 4)

        def forward(self, ids: Any, positions: Any) -> Any:
            return self.words(ids) + self.places(positions)

    ids, positions = torch.ones(4, 6, dtype=torch.long), torch.arange(6)[None]

    def sizes(example: Any, **options: Any) -> list[list[int]]:
        inputs = from_torch(Net(), example, **options).proto.graph.input
        return [[d.dim_value for d in v.type.tensor_type.shape.dim] for v in inputs]

    assert sizes((ids, positions)) == [[0, 6], [1, 6]]
    assert sizes((ids[:1], positions), dynamic={"ids": {0: "n"}}) == [[0, 6], [1, 6]]
    with pytest.raises(TrainingError, match="name axes of the inputs ids, positions, as in dynamic="):
        from_torch(Net(), (ids, positions), dynamic={"ids": {2: "n"}})
