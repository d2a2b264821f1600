"""Copies of files beside models: when one that is there counts as the same."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from amp_rewrite.errors import ModelError
from amp_rewrite.fleet.stores import copy


@pytest.mark.parametrize(
    ("there", "later", "same"),
    [
        (b"abc", True, True),
        (b"abd", True, False),
        (b"abd", False, True),  # of equal size and time: not read
        (b"ab", False, False),
    ],
)
def test_a_copy_that_is_there_counts_by_size_time_and_bytes(
    there: bytes, later: bool, same: bool, tmp_path: Path
) -> None:
    source, target = tmp_path / "a.json", tmp_path / "b.json"
    source.write_bytes(b"abc")
    target.write_bytes(there)
    for path, nanoseconds in ((source, 10**18), (target, 10**18 + later * 10**9)):
        os.utime(path, ns=(nanoseconds, nanoseconds))
    if same:
        copy(source, target, overwrite=False, resume=True)
    else:
        with pytest.raises(ModelError, match=r"b\.json exists and differs from .*a\.json; name another folder"):
            copy(source, target, overwrite=False, resume=True)
    assert target.read_bytes() == there


def test_a_copy_replaces_what_it_may_and_keeps_the_time(tmp_path: Path) -> None:
    source, target = tmp_path / "a.json", tmp_path / "b.json"
    source.write_bytes(b"abc")
    target.write_bytes(b"")
    os.utime(source, ns=(10**18, 10**18))
    with pytest.raises(ModelError, match=r"b\.json exists; name another folder"):
        copy(source, target, overwrite=False, resume=False)
    copy(source, target, overwrite=True, resume=False)
    assert (target.read_bytes(), target.stat().st_mtime_ns) == (b"abc", 10**18)
    copy(source, source, overwrite=False, resume=False)
    assert source.read_bytes() == b"abc", "copied into itself"
    with pytest.raises(ModelError, match=r"^cannot copy .*none to .*b\.json: No such file or directory$"):
        copy(tmp_path / "none", target, overwrite=True, resume=False)
