"""Drafts painted as no option asks for."""

from __future__ import annotations

from dataclasses import replace

from amp_rewrite.decide.coloring.paint import Coloring, paint
from amp_rewrite.pipeline.draft import Draft


def painted(draft: Draft, *, place: bool) -> Coloring:
    """Return the coloring of a draft, with or without placement."""
    options = replace(draft.paint_options(), place=place)
    return paint(draft.view, draft.request.op_lists, draft.request.to, options, draft.needs)
