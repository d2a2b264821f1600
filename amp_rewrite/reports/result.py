"""Base class of all results: a one-line repr, text as str, JSON and HTML."""

from __future__ import annotations

import json
from collections.abc import Sequence
from html import escape
from typing import TYPE_CHECKING, Any

from amp_rewrite.errors import plain

if TYPE_CHECKING:
    from amp_rewrite.reports.page.page import Figure


class Result:
    """Base class of results. Subclasses define `text`, `to_json` and `brief`."""

    __slots__ = ()

    def text(self) -> str:
        """Return the result as text."""
        raise NotImplementedError

    def to_json(self) -> str:
        """Return the result as JSON."""
        raise NotImplementedError

    @property
    def brief(self) -> str:
        """One-line summary of the result."""
        raise NotImplementedError

    def figures(self) -> Sequence[Figure]:
        """Return the figures of the result in reading order; empty for a text-only result."""
        return ()

    def to_html(self) -> str:
        """Return a self-contained HTML page of the figures, or of the text if there are none."""
        from amp_rewrite.reports.page.page import page_of, text_figure  # late: most results are not drawn

        return page_of(self.brief, tuple(self.figures()) or (text_figure(self.text()),))

    def to_dict(self) -> dict[str, Any]:
        """Return the JSON of the result as a dictionary."""
        decoded: dict[str, Any] = json.loads(self.to_json())
        return decoded

    def __str__(self) -> str:
        return self.text()

    def __repr__(self) -> str:
        return plain(f"<{type(self).__name__} {self.brief}>")

    def _repr_html_(self) -> str:
        lines = "\n".join(map(plain, self.text().splitlines()))
        return f"<pre>{escape(lines)}</pre>"
