"""Converted models on their way through a cache."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from amp_rewrite.deploy.session.session import _stored
from amp_rewrite.errors import ModelError


@pytest.mark.parametrize(
    ("cache", "model", "unkept"),
    [
        (None, "made", ""),
        (SimpleNamespace(store=lambda *_: None, load=lambda _: SimpleNamespace(model="kept")), "kept", ""),
        (SimpleNamespace(store=lambda *_: None, load=lambda _: None), "made", ""),
        (SimpleNamespace(store=lambda *_: (_ for _ in ()).throw(ModelError("full"))), "made", "full"),
    ],
)
def test_a_model_comes_from_the_cache_where_that_kept_it(cache: Any, model: str, unkept: str) -> None:
    made: Any = "made"
    found = _stored(cache, "key", made, "report")
    assert (found.model, found.report, found.unkept or "") == (model, "report", unkept)
