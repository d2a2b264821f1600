"""The search for cycles is paused, and is as it was before afterwards."""

from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest

from amp_rewrite.ir.gc_paused import gc_paused


@pytest.fixture(autouse=True)
def _as_it_was() -> Iterator[None]:
    yield
    gc.unfreeze()
    gc.enable()


def test_no_cycles_are_searched_for_inside_and_again_after_a_fault() -> None:
    with pytest.raises(KeyError), gc_paused():
        assert not gc.isenabled()
        raise KeyError
    assert gc.isenabled()


def test_where_no_one_searches_no_one_does_afterwards() -> None:
    gc.disable()
    with gc_paused():
        pass
    assert not gc.isenabled()


@pytest.mark.parametrize("last", [False, True])
def test_only_what_the_end_of_a_process_leaves_is_never_searched(last: bool) -> None:
    before = gc.get_freeze_count()
    with gc_paused(last=last):
        kept = [[i] for i in range(1000)]
    assert (gc.get_freeze_count() - before >= len(kept)) is last
