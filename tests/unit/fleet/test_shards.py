"""Verification over shards of data: the rows of one run over all of it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from amp_rewrite import (
    EvidenceError,
    FeedError,
    ModelError,
    PolicyError,
    Ranges,
    Verdict,
    calibrate,
    calibrate_many,
    convert,
    verify,
    verify_many,
)
from amp_rewrite.fleet import shards as fleet_shards
from support.repositories import net
from unit.cli.test_cli import run


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A model, its float16 form, and a folder of three shards of several batches; one has an error of its own."""
    monkeypatch.chdir(tmp_path)
    net(tmp_path / "net.onnx")
    convert("net.onnx").save("low.onnx")
    Path("shards").mkdir()
    draw = np.random.default_rng(5)
    for number in range(3):
        batches = {f"{i}/x": draw.standard_normal((2, 128), np.float32) * 100.0**number for i in range(number + 1)}
        np.savez(f"shards/{number}.npz", **batches)
    return tmp_path


def shards() -> list[Path]:
    return sorted(Path("shards").iterdir())


@pytest.mark.parametrize("jobs", [None, 2])
@pytest.mark.parametrize("limit", [{"tolerance": 1e-2}, {"rtol": 1e-6}, {"metric": "cosine", "at_least": 0.9}])
def test_the_rows_are_those_of_one_run(folder: Path, jobs: int | None, limit: dict[str, object]) -> None:
    apart = verify_many("net.onnx", "low.onnx", shards(), jobs=jobs, **limit)
    whole = verify("net.onnx", "low.onnx", "shards", **limit)

    assert apart.rows == whole.rows and len({row.batch for row in apart.rows}) == 6
    assert (apart.ok, apart.because, apart.notes) == (whole.ok, whole.because, whole.notes)
    assert (apart.reference, apart.candidate, apart.fed.batches) == (whole.reference, whole.candidate, 6)


@pytest.mark.parametrize("jobs", [None, 2])
def test_the_ranges_are_those_of_one_run(folder: Path, jobs: int | None) -> None:
    whole = calibrate("net.onnx", "shards")
    assert calibrate_many("net.onnx", shards(), jobs=jobs) == replace(whole, origin="0.npz; 1.npz; 2.npz")


def test_keywords_of_a_calibration_reach_each_shard(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = {"to": "bfloat16", "allow_nonfinite": True, "chunk": 3, "threads": 1}
    seen = []

    def measured(model: str, data: str, **keywords: object) -> Ranges:
        seen.append((model, data, keywords))
        return calibrate(model, data, **keywords)  # type: ignore[arg-type]

    monkeypatch.setattr(fleet_shards, "calibrate", measured)
    calibrate_many("net.onnx", shards(), **asked)  # type: ignore[arg-type]
    assert seen == [(str(folder / "net.onnx"), str(folder / shard), asked) for shard in shards()]


def test_verdicts_of_other_models_or_criteria_do_not_merge(folder: Path) -> None:
    low, other = (verify("net.onnx", "low.onnx", shards()[0], tolerance=limit) for limit in (1e-2, 1e-3))
    with pytest.raises(EvidenceError, match="verdicts of different criteria do not merge"):
        low.merge(other)
    with pytest.raises(EvidenceError, match="verdicts of different candidates do not merge"):
        low.merge(verify("net.onnx", "net.onnx", shards()[0], tolerance=1e-2))


def test_a_shard_that_cannot_be_compared_is_named(folder: Path) -> None:
    np.savez("shards/9.npz", x=np.ones((2, 7), np.float32))
    with pytest.raises((FeedError, ModelError), match=r"9\.npz"):
        verify_many("net.onnx", "low.onnx", shards(), jobs=2, tolerance=1e-2)
    with pytest.raises(FeedError, match="no shard of data is given"):
        verify_many("net.onnx", "low.onnx", [], tolerance=1e-2)
    with pytest.raises(PolicyError, match="no criterion given"):
        verify_many("net.onnx", "low.onnx", shards())
    with pytest.raises(PolicyError, match="does not go over shards"):
        verify_many("net.onnx", "low.onnx", shards(), tolerance=1e-2, depth=True)


def test_the_command_line_compares_shards_at_the_same_time(folder: Path) -> None:
    words = ("verify", "net.onnx", "low.onnx", "--data", "shards", "--json")
    for limit, code in (("1e-2", 0), ("1e-9", 1)):
        apart, whole = (run(*words, "--tolerance", limit, *more) for more in (("-j", "2"), ()))
        assert (apart.exit_code, apart.stdout) == (whole.exit_code, whole.stdout) and apart.exit_code == code


@pytest.mark.parametrize(
    ("more", "said"),
    [
        (("--random", "-j", "2"), "add --data FOLDER"),
        (("--data", "shards", "-j", "2", "--depth"), "--depth follows one run"),
        (("--data", "shards", "-j", "0"), "0 is not a number of jobs"),
    ],
)
def test_what_does_not_go_together_is_a_usage_error(folder: Path, more: tuple[str, ...], said: str) -> None:
    done = run("verify", "net.onnx", "low.onnx", "--tolerance", "1e-2", *more)
    assert done.exit_code == 2 and said in done.stderr


def test_merging_is_associative(folder: Path) -> None:
    a, b, c = (verify("net.onnx", "low.onnx", shard, tolerance=1e-2) for shard in shards())
    assert isinstance(a, Verdict) and a.merge(b).merge(c) == a.merge(b.merge(c))


def test_without_a_number_of_jobs_no_process_is_started(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(count: int) -> None:
        raise AssertionError(f"{count} processes")

    monkeypatch.setattr("amp_rewrite.fleet.shards.cores", lambda: 3)
    monkeypatch.setattr("amp_rewrite.fleet.shards.Processes", refused)
    assert verify_many("net.onnx", "low.onnx", shards(), tolerance=1e-2).fed.batches == 6
    with pytest.raises(AssertionError, match="2 processes"):
        verify_many("net.onnx", "low.onnx", shards(), jobs=2, tolerance=1e-2)
