"""Hints on sizes: dimensions of low products for which tensor cores have to pad."""

from __future__ import annotations

from amp_rewrite.deploy.doctor.advice import ALIGNED, better_size, misaligned
from amp_rewrite.dtypes import DType
from amp_rewrite.files.model import Model
from amp_rewrite.ir.view import View


def size_hints(model: Model, low: DType | None) -> tuple[str, ...]:
    """Return one sentence on the fixed dimensions of a lowered step that are not multiples of 8; none without any."""
    if low is None:
        return ()
    sizes = sorted({size for _, _, size in misaligned(View.of(model), low)})
    if not sizes:
        return ()
    pads = ", ".join(f"{size} (pad to {better_size(size)})" for size in sizes[:4])
    more = f" and {len(sizes) - 4} more" if len(sizes) > 4 else ""
    return (
        f"products in {low.spelling} have dimensions that are not multiples of {ALIGNED}: {pads}{more}; tensor cores"
        f" run best on multiples of {ALIGNED}, and below 256 on powers of two",
    )
