"""Exportable forms of dropout, attention and stopped gradients, and detection of other features lost in an export.

PyTorch's exporter omits attention dropout, `detach()` and `torch.no_grad()`, and exports channel dropout as random
numbers that would remain active in evaluation mode. The forms here become ops that training supports. Running the
module reveals other dropout, changed buffers and custom gradients; they appear in the report or raise an error.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from amp_rewrite.errors import TrainingError, one_line
from amp_rewrite.files.model import Model
from amp_rewrite.files.protos import refill
from amp_rewrite.rewrite.autodiff.vjp.movement import PADDING_KEY
from amp_rewrite.rewrite.autodiff.vjp.rule import STOP_KEY
from amp_rewrite.train.objective.parameters import Note

_CROSS_ENTROPY = (
    *("input", "target", "weight", "size_average", "ignore_index", "reduce", "reduction", "label_smoothing"),
)
"""Positional arguments of torch.nn.functional.cross_entropy."""


def _cross_entropy(torch: Any, bound: Mapping[str, Any]) -> Any:
    """Compute a cross entropy with label smoothing or class probabilities; None for other forms."""
    x, target, weight, smoothing = bound["input"], bound["target"], bound.get("weight"), bound.get("label_smoothing", 0)
    soft, reduction = target.is_floating_point(), bound.get("reduction", "mean")
    if bound.get("size_average") is not None or bound.get("reduce") is not None or not (soft or smoothing):
        return None
    axis = 1 if x.ndim > 1 else 0
    classes = x.shape[axis]
    weights = torch.ones_like(x[:1].flatten()[:1]).expand(classes) if weight is None else weight
    logs = torch.log_softmax(x, axis) * weights.reshape([classes, *[1] * (x.ndim - axis - 1)])
    if soft:
        terms = -(logs * (target * (1 - smoothing) + smoothing / classes)).sum(axis)
        count = torch.ones_like(terms).sum()
    else:
        mask = target != bound.get("ignore_index", -100)
        safe = torch.where(mask, target, 0)
        picked, spread = logs.gather(axis, safe.unsqueeze(axis)).squeeze(axis), logs.sum(axis)
        terms = -torch.where(mask, picked * (1 - smoothing) + spread * (smoothing / classes), 0.0)
        count = (weights[safe] * mask).sum()
    return terms if reduction == "none" else terms.sum() if reduction == "sum" else terms.sum() / count


_CHANNELS = ("dropout1d", "dropout2d", "dropout3d", "feature_dropout", "feature_dropout_")
_ELEMENTS = ("dropout", "dropout_")
_WITHOUT_BATCH = {"dropout1d": 2, "dropout3d": 4}
"""Rank of an unbatched input, with channels on the first axis."""
ATTENTION = "scaled_dot_product_attention"
ARGUMENTS = ("query", "key", "value", "attn_mask", "dropout_p", "is_causal")
_EXPORTED_RANK = 4
"""Rank of the attention inputs that PyTorch exports."""
_DOMAIN, _OP = "amp_rewrite", "StopGradient"


@contextmanager
def training(module: Any, names: Sequence[str]) -> Iterator[None]:
    """Put these submodules into training mode, and all others into evaluation mode, inside a `with` block."""
    modes = {part: part.training for part in module.modules()}
    try:
        for name, part in module.named_modules():
            part.training = name in names
        yield
    finally:
        for part, mode in modes.items():
            part.training = mode


class DropoutCall(NamedTuple):
    """A call of a dropout function."""

    name: str
    x: Any
    p: float
    training: bool
    inplace: bool

    @classmethod
    def of(cls, name: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> DropoutCall | None:
        """Parse a call of the function with this name; return None if it is not a dropout function."""
        if name not in (*_ELEMENTS, *_CHANNELS):
            return None
        bound = {**dict(zip(("input", "p", "training", "inplace"), args, strict=False)), **kwargs}
        training, inplace = bound.get("training", bound.get("train", True)), bound.get("inplace", name.endswith("_"))
        return cls(name, bound["input"], bound.get("p", 0.5), training, inplace)

    def computed(self, torch: Any) -> Any:
        """Multiply the input by an element-wise dropout of ones, one per channel."""
        x, p = self.x, self.p
        if not self.training or not p:
            return x
        axes = 1 if _WITHOUT_BATCH.get(self.name) == x.ndim else 2
        ones = torch.ones_like(x[(*[slice(None)] * axes, *[slice(0, 1)] * (x.ndim - axes))])
        result = x * torch.nn.functional.dropout(ones, p)
        return x.copy_(result) if self.inplace else result


def exportable_forms(torch: Any) -> Any:
    """Return a context manager for exports: attention and dropout become forms with one Dropout op each."""

    class ExportableForms(torch.overrides.TorchFunctionMode):  # type: ignore[misc]
        def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            kwargs, name = kwargs or {}, getattr(func, "__name__", "").removesuffix(".default")
            drop = DropoutCall.of(name, args, kwargs)
            if drop is not None and name in _CHANNELS:
                return drop.computed(torch)
            if name == ATTENTION:
                bound = {**dict(zip(ARGUMENTS, args, strict=False)), **kwargs}
                if bound.get("dropout_p") or bound["query"].ndim != _EXPORTED_RANK:
                    return _attention(torch, bound)
            if name == "cross_entropy":
                loss = _cross_entropy(torch, {**dict(zip(_CROSS_ENTROPY, args, strict=False)), **kwargs})
                if loss is not None:
                    return loss
            return func(*args, **kwargs)

    return ExportableForms()


def _attention(torch: Any, bound: Mapping[str, Any]) -> Any:
    query, key, value, mask = bound["query"], bound["key"], bound["value"], bound.get("attn_mask")
    if bound.get("enable_gqa"):
        key, value = (x.repeat_interleave(query.shape[-3] // x.shape[-3], -3) for x in (key, value))
    scale = bound.get("scale")
    scores = query @ key.transpose(-2, -1) * (query.shape[-1] ** -0.5 if scale is None else scale)
    if bound.get("is_causal"):
        mask = torch.ones(query.shape[-2], key.shape[-2], dtype=torch.bool).tril()
    if mask is None or mask.dtype is not torch.bool:
        weights = torch.softmax(scores if mask is None else scores + mask, -1)
    else:
        fill = torch.finfo(scores.dtype).min
        weights = torch.softmax(scores.masked_fill(~mask, fill), -1).masked_fill(~mask, 0.0)
    return torch.nn.functional.dropout(weights, bound.get("dropout_p", 0.0)) @ value


def stopped_gradients(torch: Any) -> Any:
    """Return a context manager for `forward` in an export: `detach()` and `torch.no_grad()` become ops.

    Under `no_grad()`, the op follows every function of a tensor that requires a gradient.
    """
    data = torch.Tensor.data.__get__

    def stop(x: Any) -> Any:
        if not isinstance(x, torch.Tensor) or not x.is_floating_point():
            return x
        return torch.onnx.ops.symbolic(f"{_DOMAIN}::{_OP}", (x,), dtype=x.dtype, shape=x.shape, version=1)

    class StoppedGradients(torch.overrides.TorchFunctionMode):  # type: ignore[misc]
        no_grad = False

        def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            kwargs, name = kwargs or {}, getattr(func, "__name__", "")
            if name == "detach" or func == data:
                return stop(args[0])
            if name == "_set_grad_enabled":
                self.no_grad = not args[0]
            result = func(*args, **kwargs)
            if self.no_grad and any(isinstance(x, torch.Tensor) and x.requires_grad for x in (*args, *kwargs.values())):
                return type(result)(map(stop, result)) if type(result) in (tuple, list) else stop(result)
            return result

    return StoppedGradients()


def mark(torch: Any, module: Any, model: Model, dropout: bool) -> None:
    """Mark stopped gradients, padding rows and dropout in the exported model, for training.

    A stopped gradient becomes a marked Identity. An embedding's Gathers are marked with its padding row, which gets no
    gradient. With `dropout`, Dropout nodes stay off until a training step enables them.
    """
    names = {id(tensor): name for name, tensor in module.named_parameters()}
    embeddings = (part for part in module.modules() if isinstance(part, torch.nn.Embedding))
    rows = {names[id(e.weight)]: e.padding_idx for e in embeddings if e.padding_idx is not None}
    proto = model.proto
    for node in proto.graph.node:
        if (node.domain, node.op_type) == (_DOMAIN, _OP):
            node.domain, node.op_type = "", "Identity"
            node.metadata_props.add(key=STOP_KEY, value="")
        elif node.op_type == "Gather" and not node.domain and node.input[0] in rows:
            node.metadata_props.add(key=PADDING_KEY, value=str(rows[node.input[0]]))
        elif dropout and node.op_type == "Dropout" and not node.domain:
            del node.input[2:]
    refill(proto, "opset_import", [entry for entry in proto.opset_import if entry.domain != _DOMAIN])


# -- omissions of an export --------------------------------------------------------------------------------

_MULTI_HEAD = "multi_head_attention_forward"
_MULTI_HEAD_ARGUMENTS = (
    *("query", "key", "value", "embed_dim_to_check", "num_heads", "in_proj_weight", "in_proj_bias", "bias_k", "bias_v"),
    *("add_zero_attn", "dropout_p", "out_proj_weight", "out_proj_bias"),
)
_DRAWS = frozenset(
    (
        *("rand", "randn", "randint", "rand_like", "randn_like", "bernoulli", "bernoulli_", "uniform_", "normal_"),
        *("rrelu", "multinomial", "exponential_", "random_", "randperm", "alpha_dropout", "feature_alpha_dropout"),
    )
)
MODULE_ERRORS = (ArithmeticError, AssertionError, AttributeError, LookupError, RuntimeError, TypeError, ValueError)
"""Errors of a module in an unsupported mode, and of PyTorch's exporter."""
_MAX_NAMES = 4
"""Maximum number of names in a message."""


Call = Callable[[dict[str, Any]], dict[str, Any]]
"""A call of a module: from parameters and buffers by name, which it may change, to outputs by name."""


@dataclass(frozen=True)
class ForwardFindings:
    """Results of running a module before its export.

    `exported`: names of submodules with exported dropout. `notes`: sentences for the report. `outputs`: the outputs in
    evaluation mode by name. `random`: True if the outputs depend on random numbers.
    """

    exported: tuple[str, ...]
    notes: tuple[Note, ...]
    outputs: Mapping[str, Any]
    random: bool

    @classmethod
    def of(cls, torch: Any, module: Any, call: Call, dropout: bool) -> ForwardFindings:
        """Run the module on its example in both modes, through `call`.

        A submodule's dropout is exported if the outputs in training mode, with dropout suppressed, equal those in
        evaluation mode.

        TrainingError if the module fails on the example, or if a call in evaluation mode changes parameters or buffers.
        """
        parts = dict(module.named_modules())
        run = _Runs(torch, module, call)
        expected = run(())
        if expected.outputs is None:
            raise TrainingError(f"the module fails on the example: {expected.error}; correct the example")
        if expected.changed:
            raise TrainingError(
                f"a call of the module changes {', '.join(map(repr, expected.changed[:_MAX_NAMES]))} in place, even in"
                " evaluation mode, and an export loses the change; compute a new tensor, and change buffers only if"
                " self.training"
            )
        recurrent = {name: part for name, part in parts.items() if isinstance(part, torch.nn.RNNBase)}
        layered = [name for name, part in recurrent.items() if part.dropout > 0 and part.num_layers > 1]
        modes = [n for n, part in parts.items() if n not in layered and not hasattr(part, "track_running_stats")]
        trained = run(modes)
        drops = trained.drops  # a module may fail in training mode, for example without targets
        if trained.outputs is None:
            drops = dict.fromkeys(name for name, part in parts.items() if isinstance(part, torch.nn.Dropout))
        exported = [name for name in drops if dropout and name not in trained.draws]
        if exported and not run(exported).equals(expected):
            exported = [name for name in exported if run([name]).equals(expected)]
        omitted = [name for name in parts if name in {**drops, **trained.draws, **dict.fromkeys(layered)}]
        omitted = [name for name in omitted if name not in exported]
        others = []
        if not trained.equals(expected):
            others = [name for name in parts if name not in omitted and not run([name]).equals(expected)]
        gradients, whole = run.custom_gradients(), type(module).__name__
        notes = (
            Note(f"the export omits the dropout of {_names(omitted, whole)}; {_HINT}", False) if omitted else None,
            Note(f"in training mode, PyTorch computes {_names(others, whole)} {_EFFECT}", False) if others else None,
            Note(f"the custom gradient of {_names(gradients, whole)} {_CUSTOM_GRADIENT}", True) if gradients else None,
        )
        present = tuple(note for note in notes if note is not None)
        return cls(tuple(exported), present, expected.outputs, bool(expected.draws))


_HINT = (
    "from_torch(…, dropout=True) keeps dropout of elements, channels and attention, but not of rows or layers, or"
    " between the layers of an RNN"
)
_EFFECT = (
    "differently or changes its buffers; a step computes the same as in evaluation mode, and does not change these"
    " buffers"
)
_CUSTOM_GRADIENT = "is not exported; a step differentiates the forward pass instead"


def _names(names: Iterable[str], whole: str) -> str:
    names = list(dict.fromkeys(name or whole for name in names))
    more = f" and {len(names) - _MAX_NAMES} more" if len(names) > _MAX_NAMES else ""
    return ", ".join(map(repr, names[:_MAX_NAMES])) + more


# -- running the module ----------------------------------------------------------------------------------


@dataclass
class _Run:
    """One call of a module with dropout suppressed; names of submodules are in the order of their calls.

    `outputs`: None if the call failed with `error`. `changed`: parameters and buffers that it changed. `drops`:
    submodules with dropout. `draws`: submodules that draw other random numbers. `running`: the current call stack.
    """

    outputs: dict[str, Any] | None = None
    error: str = ""
    changed: list[str] = field(default_factory=list)
    drops: dict[str, None] = field(default_factory=dict)
    draws: dict[str, None] = field(default_factory=dict)
    running: list[str] = field(default_factory=lambda: [""])

    def equals(self, other: _Run) -> bool:
        if self.outputs is None or other.outputs is None or self.changed:
            return False
        return self.outputs.keys() == other.outputs.keys() and all(
            a.shape == b.shape and a.equal(b)
            for a, b in zip(self.outputs.values(), other.outputs.values(), strict=True)
        )


@dataclass(frozen=True)
class _Runs:
    """Calls of a module on its example, with copies of its tensors."""

    torch: Any
    module: Any
    forward: Call

    def _copies(self) -> dict[str, Any]:
        tensors = (*self.module.named_parameters(), *self.module.named_buffers())
        return {name: tensor.detach().clone() for name, tensor in tensors}

    def __call__(self, names: Sequence[str]) -> _Run:
        """Call the module with these submodules in training mode, but with dropout suppressed."""
        result, copies, hooks = _Run(), self._copies(), []

        def leave(*_: object) -> None:
            result.running.pop()

        for name, part in self.module.named_modules():
            hooks.append(part.register_forward_pre_hook(lambda *_, name=name: result.running.append(name)))
            hooks.append(part.register_forward_hook(leave, always_call=True))
        random, mode = self.torch.random.fork_rng(), training(self.module, names)
        try:
            with self.torch.no_grad(), random, mode, _watch(self.torch, result):
                result.outputs = self.forward(copies)
        except MODULE_ERRORS as cause:
            result.error = one_line(cause)
            return result
        finally:
            for hook in hooks:
                hook.remove()
        before = self._copies()
        result.changed += [name for name, tensor in copies.items() if not tensor.equal(before[name])]
        return result

    def custom_gradients(self) -> list[str]:
        """Return the names of the custom autograd functions of the outputs in evaluation mode."""
        torch, trained = self.torch, {name for name, p in self.module.named_parameters() if p.requires_grad}
        copies = {name: tensor.requires_grad_(name in trained) for name, tensor in self._copies().items()}
        with torch.enable_grad(), torch.random.fork_rng(), training(self.module, ()):
            pending = [output.grad_fn for output in self.forward(copies).values()]
        seen: dict[Any, None] = {}
        while pending:
            node = pending.pop()
            if node is not None and node not in seen:
                seen[node] = None
                pending += [before for before, _ in node.next_functions]
        custom = torch.autograd.function.BackwardCFunction
        return [type(node).__name__.removesuffix("Backward") for node in seen if isinstance(node, custom)]


def _watch(torch: Any, run: _Run) -> Any:

    class Watch(torch.overrides.TorchFunctionMode):  # type: ignore[misc]
        def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            kwargs, name, here = kwargs or {}, getattr(func, "__name__", ""), run.running[-1]
            drop = DropoutCall.of(name, args, kwargs)
            if drop is not None:
                if drop.training and drop.p > 0:
                    run.drops[here] = None
                return drop.x
            names = {ATTENTION: ARGUMENTS, _MULTI_HEAD: _MULTI_HEAD_ARGUMENTS}.get(name)
            if names is not None:
                bound = {**dict(zip(names, args, strict=False)), **kwargs}
                if bound.get("dropout_p", 0) > 0 and bound.get("training", True):
                    run.drops[here] = None
                return func(**{**bound, "dropout_p": 0.0})
            if name in _DRAWS:
                run.draws[here] = None
            return func(*args, **kwargs)

    return Watch()
