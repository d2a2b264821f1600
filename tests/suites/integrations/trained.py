"""Small language models, trained in seconds to continue what they have learnt: a wrong token is then no coin toss."""

from collections.abc import Callable
from typing import Any

import torch

VOCABULARY, LENGTH, SENTENCES = 128, 32, 6
FIRST = range(3, 3 + SENTENCES)
"""The first token of each sentence. The tokens below are padding, beginning and end."""


def sentences() -> torch.Tensor:
    """Return the sentences: random, each with a first token of its own, so that each next token follows from all."""
    drawn = torch.randint(3 + SENTENCES, VOCABULARY, (SENTENCES, LENGTH), generator=torch.Generator().manual_seed(0))
    drawn[:, 0] = torch.tensor(FIRST)
    return drawn


def trained(build: Callable[[], Any], steps: int = 100, **inputs: Any) -> Any:
    """Return a model that has learnt the sentences. `inputs`: further ones of its forward pass."""
    torch.manual_seed(0)
    torch.set_num_threads(1)
    model, labels = build().eval(), sentences()  # without dropout
    inputs = inputs or {"input_ids": labels}
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3)
    for _ in range(steps):
        loss = model(**inputs, labels=labels).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    assert loss.item() < 0.2, f"the model has not learnt its sentences: {loss.item():.2f}"
    return model
