"""Scratch files: written beside their target, removed after their process was killed."""

from __future__ import annotations

import os
import stat
import time
from contextlib import ExitStack
from pathlib import Path

import pytest

from amp_rewrite.files.disk import alone, replacing, scratch, sweep, write_whole

OLD = time.time() - 7200


def left_behind(folder: Path, name: str, age: float = OLD) -> Path:
    path = folder / f".amp-rewrite.{name}.tmp"
    path.write_bytes(b"half")
    os.utime(path, (age, age))
    return path


def test_what_a_killed_process_left_is_swept_and_nothing_else(tmp_path: Path) -> None:
    dead, young = left_behind(tmp_path, "dead"), left_behind(tmp_path, "young", time.time())
    other, target = tmp_path / "model.tmp", left_behind(tmp_path / "..", tmp_path.name)
    other.write_bytes(b"")
    os.utime(other, (OLD, OLD))
    link = tmp_path / ".amp-rewrite.link.tmp"
    link.symlink_to(target)
    with ExitStack() as undo:
        mine, _ = scratch(tmp_path, undo)
        sweep(tmp_path)
        assert (dead.exists(), young.exists(), other.exists(), link.is_symlink(), mine.exists()) == (
            False,
            *(True,) * 4,
        )
    assert not mine.exists()
    target.unlink()


def test_a_file_is_replaced_whole_or_not_at_all(tmp_path: Path) -> None:
    target, dead = tmp_path / "words", left_behind(tmp_path, "dead")
    write_whole(target, b"first")
    target.chmod(0o640)
    write_whole(target, b"second")
    assert (target.read_bytes(), stat.S_IMODE(target.stat().st_mode), dead.exists()) == (b"second", 0o640, False)
    with pytest.raises(KeyboardInterrupt), replacing(target) as file:
        file.write(b"third")
        raise KeyboardInterrupt
    assert [(path.name, path.read_bytes()) for path in tmp_path.iterdir()] == [("words", b"second")]


def test_a_folder_is_held_by_one_at_a_time(tmp_path: Path) -> None:
    import fcntl

    with alone(tmp_path):
        other = os.open(tmp_path, os.O_RDONLY)
        with pytest.raises(BlockingIOError):
            fcntl.flock(other, fcntl.LOCK_EX | fcntl.LOCK_NB)
    fcntl.flock(other, fcntl.LOCK_EX | fcntl.LOCK_NB)
    os.close(other)
