"""Small language models, trained in seconds on a few sentences, so that their tokens are not arbitrary."""

from collections.abc import Callable
from typing import Any

import torch

VOCABULARY, LENGTH, SENTENCES = 128, 32, 6
FIRST = range(3, 3 + SENTENCES)
"""The first token of each sentence. Smaller tokens are padding, beginning and end."""


def sentences() -> torch.Tensor:
    """Return random sentences with distinct first tokens, so that each prefix determines the next token."""
    drawn = torch.randint(3 + SENTENCES, VOCABULARY, (SENTENCES, LENGTH), generator=torch.Generator().manual_seed(0))
    drawn[:, 0] = torch.tensor(FIRST)
    return drawn


def trained(build: Callable[[], Any], steps: int = 100, **inputs: Any) -> Any:
    """Train a model on the sentences. `inputs`: further inputs of its forward pass."""
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
    assert loss.item() < 0.2, f"the model has not learned its sentences: {loss.item():.2f}"
    return model
