"""Forms of what a PyTorch module computes that its exporter keeps: dropout, attention, stopped gradients.

The exporter leaves out the dropout of attention weights, writes that of channels as random numbers, which would stay on
in evaluation, and forgets `detach()` and `torch.no_grad()`. Here each becomes an op that training understands.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple

from amp_rewrite.files.model import Model
from amp_rewrite.files.protos import refill
from amp_rewrite.rewrite.autodiff.vjp.paths import STOP

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


_CHANNELS = ("dropout1d", "dropout2d", "dropout3d", "feature_dropout", "feature_dropout_")
_FEATURES = ("feature_alpha_dropout", "feature_alpha_dropout_")
_ALPHA = ("alpha_dropout", "alpha_dropout_", *_FEATURES)
_ELEMENTS = ("dropout", "dropout_")
_WITHOUT_BATCH = {"dropout1d": 2, "dropout3d": 4}
"""Axes of an input whose first axis is that of the channels."""
ATTENTION = "scaled_dot_product_attention"
ARGUMENTS = ("query", "key", "value", "attn_mask", "dropout_p", "is_causal")
RECURRENT = ("lstm", "gru", "rnn_tanh", "rnn_relu")
RECURRENT_ARGUMENTS = (
    *("input", "hx", "params", "has_biases", "num_layers", "dropout", "train", "bidirectional", "batch_first"),
)
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
    changed = [(part, found) for part in module.modules() if (found := _rows_of(torch, part)) is not None]

    def forward(part: Any, found: tuple[float, bool], x: Any) -> Any:
        p, scaled = found
        kept = torch.nn.functional.dropout(_ones(torch, x, 1), p, part.training)
        return x * (kept if scaled else kept.clamp(max=1.0))

    try:
        for part, found in changed:
            part.forward = partial(forward, part, found)
        yield
    finally:
        for part, _ in changed:
            del part.forward


def _rows_of(torch: Any, part: Any) -> tuple[float, bool] | None:
    """The share of rows that a part drops, and if it divides the others by 1 less the share; None for other parts."""
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
    if values.numel() != 2 or not out.equal(first.expand_as(out)):
        return None
    found = [scaled for scaled in (True, False) if values.allclose(torch.tensor([0.0, 1 / (1 - p) if scaled else 1.0]))]
    return (p, found[0]) if found else None


_SHARES = ("drop_prob", "p")
_LEAST = 1e-4
_EXPECTED = 30
"""Rows of the rarer kind to expect when a part is tried: none at all is less likely than 1e-12."""


class Drop(NamedTuple):
    """A call of a function that drops. `on`: in training mode; `inside`: it changes `x` itself."""

    name: str
    x: Any
    p: float
    on: bool
    inside: bool

    @classmethod
    def of(cls, name: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Drop | None:
        """Return the call of a function by name; None if the function drops nothing."""
        if name not in (*_ELEMENTS, *_CHANNELS, *_ALPHA):
            return None
        given = {**dict(zip(("input", "p", "training", "inplace"), args, strict=False)), **kwargs}
        on = given.get("training", given.get("train", name not in _ALPHA))
        return cls(name, given["input"], given.get("p", 0.5), on, name.endswith("_") or given.get("inplace", False))

    def written_out(self, torch: Any) -> Any:
        """Return the result by dropout of ones, which is 0 or more than 1 in training, and 1 in evaluation."""
        x, p = self.x, self.p
        if not self.on or not p:
            return x
        axes = 1 if _WITHOUT_BATCH.get(self.name) == x.ndim else 2 if self.name in (*_CHANNELS, *_FEATURES) else x.ndim
        kept = torch.nn.functional.dropout(_ones(torch, x, axes), p)
        made = _alpha(torch, x, kept, p) if self.name in _ALPHA else x * kept
        return x.copy_(made) if self.inside else made


def _ones(torch: Any, x: Any, axes: int) -> Any:
    return torch.ones_like(x[(*[slice(None)] * axes, *[slice(0, 1)] * (x.ndim - axes))])


def _alpha(torch: Any, x: Any, kept: Any, p: float) -> Any:
    """Alpha dropout (Klambauer et al., 2017): what is dropped is the least value of SELU; mean and variance stay."""
    if p == 1:
        return x * kept
    scale = ((_LEAST_OF_SELU**2 * p + 1) * (1 - p)) ** -0.5
    dropped = torch.where(kept > 0, x, -_LEAST_OF_SELU) * scale + _LEAST_OF_SELU * scale * p
    return torch.where(kept == 1, x, dropped)


_LEAST_OF_SELU = 1.7580993408473766
"""PyTorch's constant, scale times alpha of SELU."""


def recurrent(name: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, Any] | None:
    """Return the arguments of a call of a recurrent network by name; None for other calls, and packed sequences."""
    given = {**dict(zip(RECURRENT_ARGUMENTS, args, strict=False)), **kwargs}
    return given if name in RECURRENT and isinstance(given.get("has_biases"), bool) else None


def _by_layer(torch: Any, func: Any, given: Mapping[str, Any]) -> Any:
    """The layers of a recurrent network, each by itself, with dropout between them."""
    layers, p = given["num_layers"], given["dropout"]
    if layers == 1 or not given["train"] or not p:
        return func(**given)
    states, weights, x, ends = given["hx"], given["params"], given["input"], []
    for i in range(layers):
        own = [torch.chunk(state, layers)[i] for state in (states if isinstance(states, (tuple, list)) else (states,))]
        each = len(weights) // layers
        layer = {"input": x, "hx": own if len(own) > 1 else own[0], "params": weights[i * each : (i + 1) * each]}
        x, *last = func(**{**given, **layer, "num_layers": 1, "dropout": 0.0, "train": False})
        ends.append(last)
        x = x if i == layers - 1 else torch.nn.functional.dropout(x, p)
    return (x, *map(torch.cat, zip(*ends, strict=True)))


def is_number(name: str, args: Sequence[Any]) -> bool:
    return name == NUMBER and len(args) == 1 and isinstance(args[0], (list, tuple)) and not args[0]


def written_out(torch: Any) -> Any:
    """Return a context in which attention and dropout take forms that PyTorch exports, the dropout as one op each."""

    class WrittenOut(torch.overrides.TorchFunctionMode):  # type: ignore[misc]
        def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            kwargs, name = kwargs or {}, getattr(func, "__name__", "").removesuffix(".default")
            drop, layers = Drop.of(name, args, kwargs), recurrent(name, args, kwargs)
            if drop is not None and name not in _ELEMENTS:
                return drop.written_out(torch)
            if layers is not None:
                return _by_layer(torch, func, layers)
            if name == ATTENTION:
                given = {**dict(zip(ARGUMENTS, args, strict=False)), **kwargs}
                if given.get("dropout_p") or given["query"].ndim != _EXPORTED:
                    return _attention(torch, given)
            known = in_known_functions(torch, name, args, kwargs)
            if known is not None:
                return known
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
