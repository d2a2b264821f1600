"""Copies of files beside models: when one that is there counts as the same."""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path

import pytest

from amp_rewrite.errors import ModelError
from amp_rewrite.pipeline.batch.places import copy


def test_a_copy_that_is_there_stays_and_one_that_differs_is_named(tmp_path: Path) -> None:
    source, target = tmp_path / "a.json", tmp_path / "b.json"
    source.write_bytes(b"abc")
    for there, differs in ((b"abc", ""), (b"abd", f" and differs from {source}"), (b"", f" and differs from {source}")):
        target.write_bytes(there)
        with pytest.raises(ModelError, match=r"b\.json exists; name another folder"):
            copy(source, target, overwrite=False, resume=False)
        refused = pytest.raises(ModelError, match=f"exists{differs}; name another folder")
        with refused if differs else nullcontext():
            copy(source, target, overwrite=False, resume=True)
        assert target.read_bytes() == there
    copy(source, target, overwrite=True, resume=False)
    assert target.read_bytes() == b"abc"
    with pytest.raises(ModelError, match=r"^cannot copy .*none to .*b\.json: No such file or directory; "):
        copy(tmp_path / "none", target, overwrite=True, resume=False)
