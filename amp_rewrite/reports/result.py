"""Base of all results: a line as repr, a text as str, JSON, HTML."""

from __future__ import annotations

import json
from collections.abc import Sequence
from html import escape
from typing import TYPE_CHECKING, Any

from amp_rewrite.errors import plain

if TYPE_CHECKING:
    from amp_rewrite.reports.page.page import Figure


class Result:
    """Base of results for people. A subclass gives its `text`, `to_json` and `brief`."""

    __slots__ = ()

    def text(self) -> str:
        """Return the result as text."""
        raise NotImplementedError

    def to_json(self) -> str:
        """Return the result as JSON."""
        raise NotImplementedError

    @property
    def brief(self) -> str:
        """Gist of the result in one line."""
        raise NotImplementedError

    def figures(self) -> Sequence[Figure]:
        """Return the drawings of the result, in reading order; none for a result of text alone."""
        return ()

    def to_html(self) -> str:
        """Return a page of the figures, or of the text without any, as HTML reading no other file."""
        from amp_rewrite.reports.page.page import page_of, written_out  # late: most results are not drawn

        return page_of(self.brief, tuple(self.figures()) or (written_out(self.text()),))

    def to_dict(self) -> dict[str, Any]:
        """Return the JSON of the result as a dictionary."""
        encoded: dict[str, Any] = json.loads(self.to_json())
        return encoded

    def __str__(self) -> str:
        return self.text()

    def __repr__(self) -> str:
        return plain(f"<{type(self).__name__} {self.brief}>")

    def _repr_html_(self) -> str:
        lines = "\n".join(map(plain, self.text().splitlines()))
        return f"<pre>{escape(lines)}</pre>"
