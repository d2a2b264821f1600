"""Rounding error of each weight of a model when stored in a low type."""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass

import numpy as np
from onnx import TensorProto

from amp_rewrite.dtypes import DType
from amp_rewrite.files.casting import cast
from amp_rewrite.files.fit import Fit
from amp_rewrite.files.model import Model, ModelSource
from amp_rewrite.ir.view import Value, ValueId, View
from amp_rewrite.reports.render import count, share, table
from amp_rewrite.settings.policy import LowType, low_type


@dataclass(frozen=True, slots=True)
class WeightFit:
    """Rounding error of one weight in a low type, rounded as conversions do: to nearest even, saturating.

    `max_rel`: the largest |rounded - w| / |w| over finite, nonzero values; 1 if one becomes zero. `error`:
    sqrt(sum (rounded - w)^2 / sum w^2). `fit` counts values: `overflow` those that saturate, `flushed` those that
    become zero, `subnormal` those that lose digits; its `absmax` is that of the original weight.
    """

    name: str
    scope: str
    dtype: str
    shape: tuple[int, ...]
    max_rel: float
    error: float
    fit: Fit

    @property
    def flushed(self) -> float:
        """Return the share of values that become zero."""
        return self.fit.flushed / self.fit.count if self.fit.count else 0.0


def check_weights(
    model: ModelSource | View, to: LowType, *, values: Collection[ValueId] | None = None
) -> tuple[WeightFit, ...]:
    """Return the rounding error of each floating weight (initializer or Constant) in the type `to`, the worst first.

    Weights are streamed: one chunk of one weight is in memory. Weights already of that type are skipped.

    Args:
        model: as `Model.load` takes it, or a View.
        to: the low type, as `convert` takes it.
        values: only these of its values, for example those that a plan bakes.

    Returns:
        Weights that saturate first, then those with the largest share of new zeros, then by `error`.

    Raises:
        PolicyError: `to` is not a low type.

    Example:
        >>> import amp_rewrite
        >>> worst = amp_rewrite.check_weights("model.onnx", "bfloat16")[0]
        >>> worst.fit.overflow
        0
    """
    low = low_type(to)
    view = model if isinstance(model, View) else View.of(Model.load(model))
    fits = []
    for value in view.values if values is None else [view.values[v] for v in sorted(values)]:
        dtype = view.dtype(value.id)
        if value.tensor is not None and dtype is not None and dtype.floating and dtype is not low:
            fits.append(_fit(view, value, value.tensor, low))
    return tuple(sorted(fits, key=lambda w: (-w.fit.overflow, -w.flushed, -w.error)))


def _fit(view: View, value: Value, tensor: TensorProto, low: DType) -> WeightFit:
    fit, worst, noise, signal = Fit(), 0.0, 0.0, 0.0
    for chunk in view.model.chunks(tensor):
        values = chunk if chunk.dtype in (np.float32, np.float64) else chunk.astype(np.float32)
        fit = fit.merge(Fit.of([values], low))
        counted = np.isfinite(values) & (values != 0)
        exact, rounded = values[counted].astype(np.float64), cast(values, low)[counted].astype(np.float64)
        lost = np.abs(rounded - exact)
        worst = max(worst, float((lost / np.abs(exact)).max(initial=0.0)))
        noise += float(lost @ lost)
        signal += float(exact @ exact)
    error = math.sqrt(noise / signal) if signal else 0.0
    dtype = DType(tensor.data_type)
    return WeightFit(value.name, view.scopes[value.scope].path, dtype.spelling, tuple(tensor.dims), worst, error, fit)


_HEAD = ("weight", "shape", "error", "max rel", "saturated", "to zero", "subnormal", "absmax")


def weights_text(weights: Sequence[WeightFit], to: str, *, limit: int | None = None) -> str:
    """Return a summary line and an aligned table of at most `limit` rows, the worst first; it ends with a newline."""
    losing = sum(1 for w in weights if w.fit.overflow or w.fit.flushed)
    shown = weights[:limit]
    lines = [f"{count(len(weights), 'weight')} to {to}: {losing} with values that saturate or become 0"]
    if shown:
        lines += table(map(_cells, shown), head=_HEAD, right="  >>>>>>")
    if len(shown) < len(weights):
        lines.append(f"  … and {count(len(weights) - len(shown), 'more weight')}")
    return "\n".join(lines) + "\n"


def _cells(weight: WeightFit) -> tuple[str, ...]:
    fit = weight.fit
    zero = share(fit.flushed, fit.count) if fit.flushed else "-"
    counts = (str(fit.overflow or "-"), zero, str(fit.subnormal or "-"))
    name = weight.name if weight.name.startswith(weight.scope) else weight.scope + weight.name
    return name, str(list(weight.shape)), f"{weight.error:.2g}", f"{weight.max_rel:.2g}", *counts, f"{fit.absmax:.4g}"
