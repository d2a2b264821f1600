"""Main memory of a machine."""

from __future__ import annotations

import os

import pytest

from amp_rewrite.runtime.memory import main_memory


def test_memory_is_the_pages_of_the_machine_times_their_size(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sysconf", {"SC_PHYS_PAGES": 3, "SC_PAGE_SIZE": 4096}.__getitem__, raising=False)
    assert main_memory() == 12288


def test_memory_of_a_system_that_does_not_tell_is_0(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sysconf", int, raising=False)  # raises ValueError for a name
    assert main_memory() == 0
