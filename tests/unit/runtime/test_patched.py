"""Tables of older releases, as changes to a newer one."""

from __future__ import annotations

from amp_rewrite.runtime.kernels import patched


def test_a_change_takes_away_adds_and_keeps() -> None:
    table = {
        "runtime": "new",
        "opset": 24,
        "ir": 11,
        "format": 1,
        "kernels": {"Add": [1], "Mul": [2], "Gelu": [3]},
        "aliases": {"Gelu": {"1": 2}},
        "contrib": {"FusedConv": {}},
    }
    change = {
        "runtime": "old",
        "opset": 23,
        "ir": 10,
        "kernels": {"Gelu": None, "Mul": [4], "Sub": [5]},
        "aliases": {"Gelu": None},
    }
    assert patched(table, change) == {
        "runtime": "old",
        "opset": 23,
        "ir": 10,
        "format": 1,
        "kernels": {"Add": [1], "Mul": [4], "Sub": [5]},
        "aliases": {},
        "contrib": {"FusedConv": {}},
    }
