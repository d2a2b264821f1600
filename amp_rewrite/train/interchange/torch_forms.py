"""Forms of what a PyTorch module computes that its exporter keeps: dropout, attention, stopped gradients.

The exporter leaves out the dropout of attention weights, writes that of channels as random numbers, which would stay on
in evaluation, and forgets `detach()` and `torch.no_grad()`. Here each becomes an op that training understands.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

from amp_rewrite.files.model import Model
from amp_rewrite.files.protos import refill
from amp_rewrite.rewrite.autodiff.vjp.paths import STOP

CHANNELS = ("dropout1d", "dropout2d", "dropout3d", "feature_dropout", "feature_dropout_")
ATTENTION = "scaled_dot_product_attention"
ARGUMENTS = ("query", "key", "value", "attn_mask", "dropout_p", "is_causal")
_EXPORTED = 4
"""Axes of attention that PyTorch exports."""
NUMBER = "rand"
"""Drawn without a size by layers that are skipped at random, as `torch.rand([]) < layerdrop`."""
_DOMAIN, _OP = "amp_rewrite", "StopGradient"


@contextmanager
def training(module: Any, names: Sequence[str]) -> Iterator[None]:
    """Put these parts of a module into training mode, and all others into evaluation mode."""
    modes = {part: part.training for part in module.modules()}
    try:
        for name, part in module.named_modules():
            part.training = name in names
        yield
    finally:
        for part, mode in modes.items():
            part.training = mode


@contextmanager
def rows_dropped(torch: Any, module: Any) -> Iterator[None]:
    """Let parts that drop whole rows (stochastic depth, Huang et al., 2016) do it by dropout of a factor per row."""
    changed = [(part, p) for part in module.modules() if (p := _share_of_rows(torch, part)) is not None]

    def forward(part: Any, p: float, x: Any) -> Any:
        ones = torch.ones_like(x[(slice(None), *[slice(0, 1)] * (x.ndim - 1))])
        return x * torch.nn.functional.dropout(ones, p, part.training)

    try:
        for part, p in changed:
            part.forward = partial(forward, part, p)
        yield
    finally:
        for part, _ in changed:
            del part.forward


def _share_of_rows(torch: Any, part: Any) -> float | None:
    """The share of rows that a part drops, and multiplies the others by its inverse; None for other parts."""
    p = next((v for n in _SHARES if isinstance(v := vars(part).get(n), float) and _LEAST < v < 1), None)
    if p is None or type(part).__module__.startswith("torch.nn.") or "forward" in vars(part) or list(part.children()):
        return None
    rows = torch.ones(round(_EXPECTED / min(p, 1 - p)), 2, 2)
    try:
        with torch.no_grad(), torch.random.fork_rng(), training(part, ("",)):
            out = part(rows)
    except Exception:  # noqa: BLE001 a part of another kind may raise anything
        return None
    if not isinstance(out, torch.Tensor) or out.shape != rows.shape:
        return None
    first = out[:, :1, :1]
    values = first.unique()
    whole = values.numel() == 2 and values.allclose(torch.tensor([0, 1 / (1 - p)])) and out.equal(first.expand_as(out))
    return p if whole else None


_SHARES = ("drop_prob", "p")
_LEAST = 1e-4
_EXPECTED = 30
"""Rows of the rarer kind to expect when a part is tried: none at all is less likely than 1e-12."""


def dropout_of(input: Any, p: float = 0.5, training: bool = True, inplace: bool = False, **other: Any) -> Any:
    return input, p, other.get("train", training)


def is_number(name: str, args: Sequence[Any]) -> bool:
    return name == NUMBER and len(args) == 1 and isinstance(args[0], (list, tuple)) and not args[0]


def written_out(torch: Any) -> Any:
    """Return a context in which attention and dropout take forms that PyTorch exports, the dropout as one op each."""
    drop = torch.nn.functional.dropout

    def of_channels(x: Any, p: float, on: bool) -> Any:
        if not on or not p:
            return x
        return x * drop(torch.ones_like(x[(slice(None), slice(None), *[slice(0, 1)] * (x.ndim - 2))]), p)

    class WrittenOut(torch.overrides.TorchFunctionMode):  # type: ignore[misc]
        def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            kwargs, name = kwargs or {}, getattr(func, "__name__", "").removesuffix(".default")
            if name in CHANNELS:
                return of_channels(*dropout_of(*args, **kwargs))
            if name == ATTENTION:
                given = {**dict(zip(ARGUMENTS, args, strict=False)), **kwargs}
                if given.get("dropout_p") or given["query"].ndim != _EXPORTED:
                    return _attention(torch, given)
            return 0.0 if is_number(name, args) else func(*args, **kwargs)

    return WrittenOut()


def _attention(torch: Any, given: Mapping[str, Any]) -> Any:
    """Attention as `torch.nn.functional.scaled_dot_product_attention` defines it; a row that is all masked gives 0."""
    query, key, value, mask = given["query"], given["key"], given["value"], given.get("attn_mask")
    if given.get("enable_gqa"):
        key, value = (x.repeat_interleave(query.shape[-3] // x.shape[-3], -3) for x in (key, value))
    scale = given.get("scale")
    scores = query @ key.transpose(-2, -1) * (query.shape[-1] ** -0.5 if scale is None else scale)
    if given.get("is_causal"):
        mask = torch.ones(query.shape[-2], key.shape[-2], dtype=torch.bool).tril()
    if mask is None or mask.dtype is not torch.bool:
        weights = torch.softmax(scores if mask is None else scores + mask, -1)
    else:
        fill = torch.finfo(scores.dtype).min
        weights = torch.softmax(scores.masked_fill(~mask, fill), -1).masked_fill(~mask, 0.0)
    return torch.nn.functional.dropout(weights, given.get("dropout_p", 0.0)) @ value


def stopping(torch: Any) -> Any:
    """Return a context for `forward` in an export, in which `detach()` and `torch.no_grad()` leave an op.

    Without a gradient is what an op computes from a tensor that requires one.
    """
    data = torch.Tensor.data.__get__

    def stopped(x: Any) -> Any:
        if not isinstance(x, torch.Tensor) or not x.is_floating_point():
            return x
        return torch.onnx.ops.symbolic(f"{_DOMAIN}::{_OP}", (x,), dtype=x.dtype, shape=x.shape, version=1)

    class Stopping(torch.overrides.TorchFunctionMode):  # type: ignore[misc]
        on = False

        def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            kwargs, name = kwargs or {}, getattr(func, "__name__", "")
            if name == "detach" or func == data:
                return stopped(args[0])
            if name == "_set_grad_enabled":
                self.on = not args[0]
            made = func(*args, **kwargs)
            if self.on and any(isinstance(x, torch.Tensor) and x.requires_grad for x in (*args, *kwargs.values())):
                return type(made)(map(stopped, made)) if type(made) in (tuple, list) else stopped(made)
            return made

    return Stopping()


def mark_stops(model: Model) -> None:
    """Let each op that stands for a stopped gradient be an Identity that passes none."""
    graph = model.proto
    for node in graph.graph.node:
        if (node.domain, node.op_type) == (_DOMAIN, _OP):
            node.domain, node.op_type = "", "Identity"
            node.metadata_props.add(key=STOP, value="")
    refill(graph, "opset_import", [entry for entry in graph.opset_import if entry.domain != _DOMAIN])
