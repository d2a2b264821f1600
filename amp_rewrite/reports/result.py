"""Base of all results: a line as repr, a text as str, HTML in notebooks, dictionaries, and tables of pandas."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from itertools import islice
from typing import TYPE_CHECKING, Any

from amp_rewrite.reports.render import plain

if TYPE_CHECKING:
    from amp_rewrite.reports.page.page import Figure, Page

_SHOWN = 20
"""Records of a result in a notebook."""


class Result:
    """Base of results for people. A subclass gives its `text`, `to_json`, `brief` and `records`."""

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

    def figures(self) -> Sequence[Figure]:
        """Return the drawings of the result, in reading order; none for a result of text alone."""
        return ()

    def page(self) -> Page:
        """Return the result as a page: its figures, or its text and records for a result without any.

        Example:
            >>> import amp_rewrite
            >>> page = amp_rewrite.convert("model.onnx").page()
            >>> sorted(page.data()) == sorted(figure.name for figure in page.figures)
            True
        """
        from amp_rewrite.reports.page.page import Page, written_out  # late: most results are not drawn

        return Page(self.brief, tuple(self.figures()) or (written_out(self.text(), self.records()),))

    def to_html(self) -> str:
        """Return the page as one HTML text, without references to other files."""
        return self.page().to_html()

    def to_dict(self) -> dict[str, Any]:
        """Return the JSON of the result as a dictionary."""
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
        from amp_rewrite.reports.page.page import fragment, written_out  # late: most results are not drawn

        words = written_out(f"{self.brief}\n\n{self.text()}", islice(self.records(), _SHOWN))
        return fragment(words)
