"""Base of all results: a line as repr, a text as str, HTML in notebooks, dictionaries, and tables of pandas."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from itertools import islice
from typing import Any

from amp_rewrite.reports.render import html, plain

_SHOWN = 20
"""Records of a result in a notebook."""


class Result:
    """A result that people look at. A subclass gives its `text`, `to_json`, `brief` and `records`."""

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

    def records(self) -> Iterable[Mapping[str, object]]:
        """Return the items of the result, each as the row of a table."""
        raise NotImplementedError

    def to_dict(self) -> dict[str, Any]:
        """Return what `to_json` writes, as a dictionary."""
        encoded: dict[str, Any] = json.loads(self.to_json())
        return encoded

    def to_pandas(self) -> Any:
        """Return the records as a pandas.DataFrame. ImportError without pandas."""
        try:
            import pandas
        except ImportError as error:
            raise ImportError("to_pandas needs pandas; install it (pip install pandas), or use to_dict") from error
        return pandas.DataFrame(list(self.records()))

    def __str__(self) -> str:
        return self.text()

    def __repr__(self) -> str:
        return plain(f"<{type(self).__name__} {self.brief}>")

    def _repr_html_(self) -> str:
        """Return the text and the first records for a notebook."""
        rows = [[str(cell) for cell in row.values()] for row in islice(self.records(), _SHOWN)]
        head = next((tuple(row) for row in islice(self.records(), 1)), ())
        return html(self.brief, self.text(), head, rows)
