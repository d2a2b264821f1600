"""150 mutations of exported models at the level of the wire format; `wire_totals.json` holds the totals of all."""

from __future__ import annotations

import json
import random
import sys
from pathlib import Path

import pytest

from suites.hostile import wire_mutations as wire
from support.paths import TESTS

pytestmark = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="the limits of a child are those of Linux")

TOTALS = Path(__file__).with_name("wire_totals.json")
STEP = 200
"""Of the mutations of all shards, one in so many runs here."""


@pytest.mark.parametrize("name", wire.MODELS)
def test_the_wire_format_is_read_and_written_back(name: str) -> None:
    content = (TESTS / "models" / f"{name}.onnx").read_bytes()
    fields = wire.parsed(content)

    assert fields is not None and wire.written(fields) == content
    assert wire.mutated(content, random.Random(1)) == wire.mutated(content, random.Random(1)) != content


@pytest.mark.parametrize("block", range(3))
def test_mutations_end_in_success_or_one_line(block: int, tmp_path: Path) -> None:
    seeds = [divmod(number * STEP, wire.SHARD) for number in range(block * 50, block * 50 + 50)]
    outcomes = wire.judged_apart(seeds, tmp_path / "case")

    assert [pair for pair in zip(seeds, outcomes, strict=True) if pair[1].failed] == []
    assert {outcome.name for outcome in outcomes} >= {"accepted", "refused"}


# Mutations that ended otherwise once, by the seed "shard:number" (see `wire_mutations.py show`).
FOUND = (
    "1:62",
    "1:159",
    "1:194",
    "2:32",
    "3:67",
    "5:170",
    "5:217",
    "6:88",
    "6:132",
    "6:204",
    "7:91",
    "8:182",
    "9:174",
    "11:114",
    "29:13",
    "94:25",
)


@pytest.mark.parametrize("seed", FOUND)
def test_what_mutations_found_stays_mended(seed: str, tmp_path: Path) -> None:
    shard, number = map(int, seed.split(":"))
    (outcome,) = wire.judged_apart([(shard, number)], tmp_path / "case")

    assert not outcome.failed, outcome


def test_the_totals_hold_no_failure() -> None:
    totals = json.loads(TOTALS.read_text(encoding="utf-8"))

    assert totals["failures"] == 0 and totals["models"] == len(wire.MODELS) == 11
    assert totals["mutations"] == sum(totals["outcomes"].values()) == totals["shards"] * wire.SHARD
    assert totals["slowest_seconds"] < wire.SECONDS and totals["largest_bytes"] < wire.MEMORY
