"""Forms of dropout, attention and stopped gradients for PyTorch's exporter.

The exporter leaves out the dropout of attention weights, writes that of channels as random numbers, which would stay on
in evaluation, and forgets `detach()` and `torch.no_grad()`. Here each becomes an op that training understands.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

from amp_rewrite.files.model import Model
from amp_rewrite.files.protos import refill
from amp_rewrite.rewrite.autodiff.vjp.movement import PADDING
from amp_rewrite.rewrite.autodiff.vjp.paths import STOP

_CROSS_ENTROPY = (
    *("input", "target", "weight", "size_average", "ignore_index", "reduce", "reduction", "label_smoothing"),
)
"""Arguments of torch.nn.functional.cross_entropy."""


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


_CHANNELS = ("dropout1d", "dropout2d", "dropout3d", "feature_dropout", "feature_dropout_")
_ELEMENTS = ("dropout", "dropout_")
_WITHOUT_BATCH = {"dropout1d": 2, "dropout3d": 4}
"""Axes of an input whose first axis is that of the channels."""
ATTENTION = "scaled_dot_product_attention"
ARGUMENTS = ("query", "key", "value", "attn_mask", "dropout_p", "is_causal")
_EXPORTED = 4
"""Axes of attention that PyTorch exports."""
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


class Drop(NamedTuple):
    """A call of a dropping function. `on`: in training mode; `inside`: it changes `x` itself."""

    name: str
    x: Any
    p: float
    on: bool
    inside: bool

    @classmethod
    def of(cls, name: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Drop | None:
        """Return the call of a function by name; None if the function drops nothing."""
        if name not in (*_ELEMENTS, *_CHANNELS):
            return None
        given = {**dict(zip(("input", "p", "training", "inplace"), args, strict=False)), **kwargs}
        on = given.get("training", given.get("train", True))
        return cls(name, given["input"], given.get("p", 0.5), on, name.endswith("_") or given.get("inplace", False))

    def written_out(self, torch: Any) -> Any:
        """Return the result by dropout of ones: 0 or more than 1 in training, 1 in evaluation."""
        x, p = self.x, self.p
        if not self.on or not p:
            return x
        axes = 1 if _WITHOUT_BATCH.get(self.name) == x.ndim else 2
        ones = torch.ones_like(x[(*[slice(None)] * axes, *[slice(0, 1)] * (x.ndim - axes))])
        made = x * torch.nn.functional.dropout(ones, p)
        return x.copy_(made) if self.inside else made


def written_out(torch: Any) -> Any:
    """Return a context for exportable forms of attention and dropout, one op for each dropout."""

    class WrittenOut(torch.overrides.TorchFunctionMode):  # type: ignore[misc]
        def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            kwargs, name = kwargs or {}, getattr(func, "__name__", "").removesuffix(".default")
            drop = Drop.of(name, args, kwargs)
            if drop is not None and name in _CHANNELS:
                return drop.written_out(torch)
            if name == ATTENTION:
                given = {**dict(zip(ARGUMENTS, args, strict=False)), **kwargs}
                if given.get("dropout_p") or given["query"].ndim != _EXPORTED:
                    return _attention(torch, given)
            if name == "cross_entropy":
                made = _cross_entropy(torch, {**dict(zip(_CROSS_ENTROPY, args, strict=False)), **kwargs})
                if made is not None:
                    return made
            return func(*args, **kwargs)

    return WrittenOut()


def _attention(torch: Any, given: Mapping[str, Any]) -> Any:
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
    """Return a context for `forward` in an export: `detach()` and `torch.no_grad()` leave an op.

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
    """Turn each op of a stopped gradient into an Identity without a gradient."""
    graph = model.proto
    for node in graph.graph.node:
        if (node.domain, node.op_type) == (_DOMAIN, _OP):
            node.domain, node.op_type = "", "Identity"
            node.metadata_props.add(key=STOP, value="")
    refill(graph, "opset_import", [entry for entry in graph.opset_import if entry.domain != _DOMAIN])


def switch_off(model: Model) -> None:
    """Let each Dropout pass its input, as an export for inference does, until a training step switches it on."""
    for node in model.proto.graph.node:
        if node.op_type == "Dropout" and not node.domain:
            del node.input[2:]


def mark_padding(torch: Any, module: Any, model: Model) -> None:
    """Let look-ups of the padding row of an embedding pass no gradient to it."""
    names = {id(tensor): name for name, tensor in module.named_parameters()}
    embeddings = (part for part in module.modules() if isinstance(part, torch.nn.Embedding))
    rows = {names[id(e.weight)]: e.padding_idx for e in embeddings if e.padding_idx is not None}
    for node in model.proto.graph.node:
        if node.op_type == "Gather" and not node.domain and node.input[0] in rows:
            node.metadata_props.add(key=PADDING, value=str(rows[node.input[0]]))
