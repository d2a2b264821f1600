"""docs/how-to/training.md: every name of training is there. The page itself runs in test_consoles.py."""

from __future__ import annotations

import pytest

import amp_rewrite.train


def test_every_public_name_of_training_is_there() -> None:
    assert all(getattr(amp_rewrite.train, name) is not None for name in amp_rewrite.train.__all__)
    assert sorted(dir(amp_rewrite.train)) == sorted(amp_rewrite.train.__all__)
    with pytest.raises(AttributeError, match=r"^module 'amp_rewrite.train' has no attribute 'tape'$"):
        amp_rewrite.train.tape  # noqa: B018
