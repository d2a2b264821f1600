"""Copies of protobuf messages, and their repeated fields refilled."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TypeVar, cast

from google.protobuf.message import Message  # type: ignore[import-untyped]

M = TypeVar("M")


def clone(message: M) -> M:
    """Return a copy of a message."""
    copy = type(message)()
    cast(Message, copy).CopyFrom(message)
    return copy


def refill(message: Message, name: str, items: Iterable[Message]) -> None:
    """Replace the messages of a repeated field. `items` may be messages of that field itself."""
    kept = list(items)
    field = getattr(message, name)
    del field[:]
    field.extend(kept)
