"""Drafts painted as no option asks for."""

from dataclasses import replace

from amp_rewrite.decide.coloring.paint import Coloring, paint
from amp_rewrite.pipeline.conversion import Draft


def painted(draft: Draft, *, place: bool) -> Coloring:
    """Return the coloring of a draft, with or without placement."""
    return paint(replace(draft.problem(), place=place))
