"""Functions that PyTorch's exporter does not export, or exports as others, in terms of functions that it does.

Cross entropy loses its label smoothing there, bags of embeddings become a Loop over lists, and distances are unknown.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

_ARGUMENTS: Mapping[str, Sequence[str]] = {
    "cross_entropy": (
        *("input", "target", "weight", "size_average", "ignore_index", "reduce", "reduction", "label_smoothing"),
    ),
    "embedding_bag": (
        *("input", "weight", "offsets", "max_norm", "norm_type", "scale_grad_by_freq", "mode", "sparse"),
        *("per_sample_weights", "include_last_offset", "padding_idx"),
    ),
    "cdist": ("x1", "x2", "p", "compute_mode"),
}


def in_known_functions(torch: Any, name: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """Return the result of a function by name, computed by functions that are exported; None for other calls."""
    if name not in _ARGUMENTS:
        return None
    return _FORMS[name](torch, {**dict(zip(_ARGUMENTS[name], args, strict=False)), **kwargs})


def _cross_entropy(torch: Any, given: Mapping[str, Any]) -> Any:
    """Cross entropy with label smoothing or with shares of classes; the mean is one quotient of sums."""
    x, target, weight, smoothing = given["input"], given["target"], given.get("weight"), given.get("label_smoothing", 0)
    shares, reduction = target.is_floating_point(), given.get("reduction", "mean")
    if given.get("size_average") is not None or given.get("reduce") is not None or not (shares or smoothing):
        return None
    axis = 1 if x.ndim > 1 else 0
    classes = x.shape[axis]
    weights = torch.ones_like(x[:1].flatten()[:1]).expand(classes) if weight is None else weight
    logs = torch.log_softmax(x, axis) * weights.reshape([classes, *[1] * (x.ndim - axis - 1)])
    if shares:
        each = -(logs * (target * (1 - smoothing) + smoothing / classes)).sum(axis)
        count = torch.ones_like(each).sum()
    else:
        kept = target != given.get("ignore_index", -100)
        safe = torch.where(kept, target, 0)
        own, spread = logs.gather(axis, safe.unsqueeze(axis)).squeeze(axis), logs.sum(axis)
        each = -torch.where(kept, own * (1 - smoothing) + spread * (smoothing / classes), 0.0)
        count = (weights[safe] * kept).sum()
    return each if reduction == "none" else each.sum() if reduction == "sum" else each.sum() / count


def _embedding_bag(torch: Any, given: Mapping[str, Any]) -> Any:
    """The sum, mean or maximum of the embeddings of each row."""
    ids, table, mode, padding = given["input"], given["weight"], given.get("mode", "mean"), given.get("padding_idx")
    if ids.ndim != 2 or given.get("max_norm") is not None or given.get("scale_grad_by_freq"):
        return None
    rows, factors = torch.nn.functional.embedding(ids, table), given.get("per_sample_weights")
    kept = torch.ones_like(ids, dtype=torch.bool) if padding is None else ids != padding % table.shape[0]
    if mode == "max":
        most = rows.masked_fill(~kept.unsqueeze(-1), torch.finfo(rows.dtype).min).max(1).values
        return torch.where(kept.any(1, keepdim=True), most, 0.0)
    shares = kept.to(rows.dtype) if factors is None else kept * factors
    total = (rows * shares.unsqueeze(-1)).sum(1)
    return total if mode == "sum" else total / kept.sum(1, keepdim=True).clamp(min=1)


def _cdist(torch: Any, given: Mapping[str, Any]) -> Any:
    """Distances of rows by the sum of absolute values, or by the root of the sum of squares: without gradient at 0."""
    off, p = given["x1"].unsqueeze(-2) - given["x2"].unsqueeze(-3), given.get("p", 2.0)
    if p == 1:
        return off.abs().sum(-1)
    if p != 2:
        return None
    square = off.square().sum(-1)
    return torch.where(square > 0, torch.where(square > 0, square, 1.0).sqrt(), 0.0)


_FORMS: Mapping[str, Callable[[Any, Mapping[str, Any]], Any]] = {
    "cross_entropy": _cross_entropy,
    "embedding_bag": _embedding_bag,
    "cdist": _cdist,
}
