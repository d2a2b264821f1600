"""A CNN and a transformer beside PyTorch: the same losses, step by step."""

from typing import Any

import numpy as np
import pytest

from amp_rewrite.train.interchange.torch_module import from_torch
from amp_rewrite.train.step.step import training_step
from amp_rewrite.train.step.trainer import Trainer
from amp_rewrite.train.update.optimizers import Adam
from support.train.nets import PLACE

# -- a transformer ---------------------------------------------------------------------------------------

WORDS, TOKENS, WIDTH, TRANSFORMER_STEPS = 40, 12, 32, 30


def sentences() -> list[dict[str, Any]]:
    """Rows that count upwards by 1, 2 or 3; the class is the step."""
    rng, found = np.random.default_rng(1), []
    for _ in range(TRANSFORMER_STEPS):
        by = rng.integers(1, 4, (16, 1))
        words = rng.integers(0, 4, (16, 1)) + by * np.arange(TOKENS)
        found.append({"words": words, "label": by[:, 0] - 1})
    return found


def transformer(torch: Any) -> Any:
    nn = torch.nn

    class Classifier(nn.Module):  # type: ignore[misc, name-defined]
        """A layer with its norms first and one with them last, on embeddings of words and places."""

        def __init__(self) -> None:
            super().__init__()
            self.words, self.places = nn.Embedding(WORDS, WIDTH), nn.Embedding(TOKENS, WIDTH)
            options = {"dim_feedforward": 64, "dropout": 0.0, "activation": "gelu", "batch_first": True}
            self.layers = nn.ModuleList(
                nn.TransformerEncoderLayer(WIDTH, 4, **options, norm_first=first) for first in (True, False)
            )
            self.head = nn.Linear(WIDTH, 3)

        def forward(self, words: Any) -> Any:
            x = self.words(words) + self.places.weight
            for layer in self.layers:
                x = layer(x)
            return self.head(x.mean(1))

    torch.manual_seed(0)
    return Classifier()


def losses_of_torch(torch: Any, net: Any, data: list[dict[str, Any]], low: Any) -> list[float]:
    optimizer, losses = torch.optim.Adam(net.parameters(), 1e-3), []
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**15, enabled=low is not None)
    for batch in data:
        optimizer.zero_grad()
        with torch.autocast("cpu", dtype=low, enabled=low is not None):
            logits = net(torch.from_numpy(batch["words"]))
        loss = torch.nn.functional.cross_entropy(logits.float(), torch.from_numpy(batch["label"]))
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        losses.append(loss.item())
    return losses


@pytest.mark.torch
@pytest.mark.slow
def test_a_transformer_is_within_1e_5_of_torch_in_float32_and_as_near_as_torch_amp_in_float16() -> None:
    torch = pytest.importorskip("torch")
    pytest.importorskip("onnxscript")
    data = sentences()
    exact, amp = (np.array(losses_of_torch(torch, transformer(torch), data, t)) for t in (None, torch.float16))
    model = from_torch(transformer(torch).eval(), {"words": torch.from_numpy(data[0]["words"])}, outputs="y")
    found = {}
    for policy in ("float32", "mixed_float16"):
        rule = Adam(1e-3, epsilon=1e-8)
        step = training_step(model, loss="cross_entropy(y, label)", optimizer=rule, policy=policy)
        found[policy] = np.abs(np.array(Trainer(step, **PLACE).fit(data).losses) - exact).max()
    assert exact[-1] < 0.8 * exact[0]
    assert found["float32"] <= 1e-5
    assert 0 < found["mixed_float16"] <= 2 * np.abs(amp - exact).max()  # 0.5 to 1.6 times, by the seed
