"""Judges of outputs: every function returns a description of the fault, or None."""

import math
from collections.abc import Sequence

import numpy as np

from amp_rewrite.dtypes import DType

DEEP_ENOUGH = 4.0
"""The largest allowed error of a result, in eps, for models of any depth."""
STANDARD_TOLERANCE = 1e-3
"""The standard's relative tolerance for all its cases."""
DEVIATIONS = 5.0
"""The allowed error of a statistic of random numbers in standard errors: one in two million exceeds it by chance."""


def bound(low: DType, lowered: int) -> float:
    """Return the allowed error of a result after `lowered` low ops, relative to its tensor's largest magnitude.

    Rounding to nearest has a relative error of at most eps/2. The two operands of a product contribute eps/2 each, eps
    in total. Every low op rounds its result, and independent errors add up like the steps of a random walk:
    sqrt(lowered) * eps. Sums are accumulated in float32, so their length does not count. Deep models of the standard
    contract rather than grow, so the limit is `DEEP_ENOUGH` * eps.
    """
    return min(1.0 + math.sqrt(lowered), DEEP_ENOUGH) * low.eps


def objection(got: Sequence[object], wanted: Sequence[object], relative: float, *, quantum: int = 0) -> str | None:
    """Describe the first wrong output; integers must be equal up to `quantum` steps.

    Floats may differ by `relative` times the largest finite magnitude of the expected tensor. NaN, infinities, types
    and shapes must agree.
    """
    if len(got) != len(wanted):
        return f"{len(got)} outputs instead of {len(wanted)}"
    for at, (left, right) in enumerate(zip(got, wanted, strict=True)):
        found = _objection(left, right, relative, quantum)
        if found is not None:
            return f"output {at}: {found}"
    return None


def _objection(got: object, wanted: object, relative: float, quantum: int) -> str | None:
    if isinstance(wanted, list) or isinstance(got, list) or got is None or wanted is None:
        if not isinstance(wanted, list) or not isinstance(got, list):
            return None if got is wanted else f"{type(got).__name__} instead of {type(wanted).__name__}"
        return objection(got, wanted, relative, quantum=quantum)
    a, b = np.asarray(got), np.asarray(wanted)
    if a.dtype != b.dtype or a.shape != b.shape:
        return f"{a.dtype}{list(a.shape)} instead of {b.dtype}{list(b.shape)}"
    if b.dtype.kind == "f":
        return _of_floats(a.astype(np.float64), b.astype(np.float64), relative)
    if b.dtype.kind in "iu" and quantum:
        steps = int(np.abs(a.astype(np.int64) - b.astype(np.int64)).max(initial=0))
        return f"{steps} steps away" if steps > quantum else None
    different = int(np.count_nonzero(a != b))
    return f"{different} of {b.size} {b.dtype} values differ" if different else None


def _of_floats(got: np.ndarray, wanted: np.ndarray, relative: float) -> str | None:
    finite = np.isfinite(wanted)
    if not np.array_equal(got[~finite], wanted[~finite], equal_nan=True):
        return "infinities or NaN differ"
    if not np.isfinite(got[finite]).all():
        return f"{np.count_nonzero(~np.isfinite(got[finite]))} of {finite.sum()} finite values became infinite or NaN"
    scale = float(np.abs(wanted[finite]).max(initial=0.0))
    off = float(np.abs(got[finite] - wanted[finite]).max(initial=0.0))
    return f"off by {off:.3g}, allowed {relative * scale:.3g}" if off > relative * scale else None


def unlike(got: Sequence[object], wanted: Sequence[object]) -> str | None:
    """Describe the first wrong output of a model with random numbers.

    Types and shapes must agree; the share of zeros (or False) and the mean of the other elements must agree up to
    sampling error.
    """
    if len(got) != len(wanted):
        return f"{len(got)} outputs instead of {len(wanted)}"
    for at, (left, right) in enumerate(zip(got, wanted, strict=True)):
        a, b = np.asarray(left), np.asarray(right)
        if a.dtype != b.dtype or a.shape != b.shape:
            return f"output {at}: {a.dtype}{list(a.shape)} instead of {b.dtype}{list(b.shape)}"
        found = _unlike(a.astype(np.float64).ravel(), b.astype(np.float64).ravel())
        if found is not None:
            return f"output {at}: {found}"
    return None


def _unlike(got: np.ndarray, wanted: np.ndarray) -> str | None:
    if not got.size:
        return None
    if not np.isfinite(got).all():
        return "infinities or NaN"
    share, expected = np.count_nonzero(got) / got.size, np.count_nonzero(wanted) / wanted.size
    pooled = (share + expected) / 2
    error = math.sqrt(2 * pooled * (1 - pooled) / got.size)
    if abs(share - expected) > DEVIATIONS * error:
        return f"{share:.0%} are nonzero instead of {expected:.0%}"
    if not (np.count_nonzero(got) and np.count_nonzero(wanted)):
        return None
    left, right = got[got != 0], wanted[wanted != 0]
    spread = math.hypot(left.std() / math.sqrt(left.size), right.std() / math.sqrt(right.size))
    if abs(left.mean() - right.mean()) > DEVIATIONS * spread + STANDARD_TOLERANCE * abs(right.mean()):
        return f"the mean of nonzero elements is {left.mean():.3g} instead of {right.mean():.3g}"
    return None
