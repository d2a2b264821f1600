"""Modules of PyTorch as `from_torch` and `from_transformers` export them: each trains as PyTorch trains it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from amp_rewrite.train.interchange.torch_module import from_torch
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
    """An embedding with a padding row, whose table is the last layer, too."""
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


def _norm(make: Callable[[Any], Any]) -> Callable[[Any], Any]:
    return lambda torch: torch.nn.Sequential(torch.nn.Linear(8, 16), make(torch.nn), torch.nn.Linear(16, 6))


@pytest.mark.parametrize(
    ("make", "data"),
    [
        pytest.param(_lookup, lambda rows: RNG.integers(0, 4, (rows, 5)), id="padding_idx, tied"),
        pytest.param(
            _norm(lambda nn: nn.LayerNorm(16, elementwise_affine=False)), _rows, id="LayerNorm without weights"
        ),
        pytest.param(_norm(lambda nn: nn.GroupNorm(4, 16)), _rows, id="GroupNorm"),
        pytest.param(_norm(lambda nn: nn.BatchNorm1d(16, affine=False)), _rows, id="BatchNorm without weights"),
        pytest.param(
            _norm(lambda nn: nn.BatchNorm1d(16, track_running_stats=False)), _rows, id="BatchNorm, no statistics"
        ),
        pytest.param(_norm(lambda nn: nn.RMSNorm(16)), _rows, id="RMSNorm"),
    ],
)
def test_losses_are_those_of_pytorch_and_all_of_its_parameters_are_trained(make: Any, data: Any) -> None:
    torch = pytest.importorskip("torch")
    torch.manual_seed(0)
    net = make(torch).train()
    step = training_step(
        from_torch(net, data(2)), loss=LOSS, optimizer="adam,lr=0.05,epsilon=1e-8", policy="float32", training_mode=True
    )
    assert set(step.parameters) == {name for name, _ in net.named_parameters()}
    trainer, optimizer = Trainer(step, **PLACE), torch.optim.Adam(net.parameters(), 0.05)
    source = step.batch[0]
    for rows in (9, 9, 4):
        x, label = data(rows), RNG.integers(0, 6, rows)
        loss = torch.nn.functional.cross_entropy(net(torch.from_numpy(x)), torch.from_numpy(label))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        assert trainer.fit([{source: x, "label": label}]).losses[0] == pytest.approx(loss.item(), abs=2e-6)


def test_the_report_names_padding_rows_and_constants_of_the_exporter() -> None:
    torch = pytest.importorskip("torch")
    lookup = training_step(from_torch(_lookup(torch), RNG.integers(0, 4, (2, 5))), loss=LOSS, policy="float32")
    assert _why(lookup, "table.weight") == "read by 2 ops, look-ups of row 2 are padding"
    plain = _norm(lambda nn: nn.LayerNorm(16, elementwise_affine=False))(torch)
    step = training_step(from_torch(plain, _rows(2)), loss=LOSS, policy="float32")
    assert step.report is not None
    left = [row.why for row in step.report.parameters if row.role == "frozen"]
    assert left == ["a constant of the exporter, not a parameter of the module"]


def test_a_dropout_that_is_not_called_itself_is_named_as_left_out() -> None:
    torch = pytest.importorskip("torch")

    class Net(torch.nn.Module):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.line, self.called, self.read = torch.nn.Linear(8, 6), torch.nn.Dropout(0.5), torch.nn.Dropout(0.5)

        def forward(self, x: Any) -> Any:
            x = torch.nn.functional.dropout(self.line(x), self.read.p, self.training)  # as attention does
            return self.called(x)

    step = training_step(from_torch(Net(), _rows(2), dropout=True), loss=LOSS, policy="float32", training_mode=True)
    assert step.report is not None and "left out the dropout of 'read'; from_torch(" in step.report.notes[-1]


def test_training_mode_says_which_dropout_is_not_in_the_export() -> None:
    torch = pytest.importorskip("torch")
    nn = torch.nn
    net = nn.Sequential(nn.Linear(8, 6), nn.Dropout(0.5), nn.Dropout1d(0.5))
    notes = {}
    for kept in (False, True):
        model = from_torch(net, _rows(2), dropout=kept)
        for mode in (False, True):
            report = training_step(model, loss=LOSS, policy="float32", training_mode=mode).report
            assert report is not None
            notes[kept, mode] = [note for note in report.notes if "dropout" in note]
    assert not notes[False, False] and not notes[True, False]
    assert notes[False, True][0].startswith("the export left out the dropout of 2 modules, such as '1'; from_torch(")
    assert notes[True, True][0].startswith("the export left out the dropout of '2'; from_torch(")


@pytest.mark.transformers
def test_attention_that_pytorch_cannot_export_becomes_eager() -> None:
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    from amp_rewrite.train.interchange.transformers_model import from_transformers

    sizes = {"vocab_size": 12, "d_model": 8, "d_kv": 4, "d_ff": 8, "num_layers": 1, "num_heads": 2}
    config = transformers.T5Config(**sizes, decoder_start_token_id=0)
    net = transformers.T5ForConditionalGeneration(config).eval()
    own = net.config._attn_implementation
    inputs = {name: torch.ones(2, 5, dtype=torch.long) for name in ("input_ids", "attention_mask", "decoder_input_ids")}
    step = training_step(
        from_transformers(net, example=inputs), loss="cross_entropy(logits, label, axis=-1)", policy="float32"
    )
    assert net.config._attn_implementation == own
    assert set(step.parameters) == {name for name, _ in net.named_parameters()}
    ids, label = RNG.integers(1, 12, (3, 5)), RNG.integers(0, 12, (3, 5))
    logits = net(input_ids=torch.from_numpy(ids), decoder_input_ids=torch.from_numpy(ids)).logits
    loss = torch.nn.functional.cross_entropy(logits.movedim(-1, 1), torch.from_numpy(label)).item()
    batch = {"input_ids": ids, "attention_mask": np.ones_like(ids), "decoder_input_ids": ids, "label": label}
    assert Trainer(step, **PLACE).evaluate([batch]).loss == pytest.approx(loss, abs=1e-6)
