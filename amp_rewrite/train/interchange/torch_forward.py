"""Losses of a PyTorch module's export: dropout, changed buffers, gradients of its own.

They are found by running the module. `torch_forms.py` exports some of them; the report names the others, or an error
is raised.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from amp_rewrite.errors import TrainingError
from amp_rewrite.train.interchange.torch_forms import (
    ARGUMENTS,
    ATTENTION,
    NUMBER,
    Drop,
    is_number,
    recurrent,
    training,
)
from amp_rewrite.train.objective.parameters import Note

_MULTI_HEAD = "multi_head_attention_forward"
_MULTI_HEAD_ARGUMENTS = (
    *("query", "key", "value", "embed_dim_to_check", "num_heads", "in_proj_weight", "in_proj_bias", "bias_k", "bias_v"),
    *("add_zero_attn", "dropout_p", "out_proj_weight", "out_proj_bias"),
)
_DRAWS = frozenset(
    (
        *(NUMBER, "randn", "randint", "rand_like", "randn_like", "bernoulli", "bernoulli_", "uniform_", "normal_"),
        *("rrelu", "multinomial", "exponential_", "random_", "randperm", "alpha_dropout", "feature_alpha_dropout"),
    )
)
_PACKS = ("_pack_padded_sequence", "pack_padded_sequence")
MODULE_ERRORS = (ArithmeticError, AssertionError, AttributeError, LookupError, RuntimeError, TypeError, ValueError)
"""Errors of a module in a mode that it was not made for, and of PyTorch's exporter."""
_NAMED = 4
"""Modules that a sentence names."""


Call = Callable[[dict[str, Any]], list[Any]]
"""A call of a module with these parameters and buffers by name, which it may change; its outputs."""


@dataclass(frozen=True)
class ForwardFindings:
    """Names of modules with a dropout for the export, and sentences for the report.

    `outputs`: those of evaluation; None where they are random, or the call failed.
    """

    kept: tuple[str, ...]
    notes: tuple[Note, ...]
    outputs: list[Any] | None

    @classmethod
    def of(cls, torch: Any, module: Any, call: Call, dropout: bool) -> ForwardFindings:
        """Run the module in both modes. `call`: call it on the example with these tensors; return its outputs.

        The dropout of a module is kept if it gives the outputs of evaluation when nothing is dropped.

        TrainingError for packed sequences, projections of an LSTM, and parameters or buffers that a call changes in
        evaluation mode.
        """
        parts = dict(module.named_modules())
        run = _Runs(torch, module, call)
        expected = run(())
        _check(torch, parts, expected)
        trained = run([name for name, part in parts.items() if not hasattr(part, "track_running_stats")], number=1.0)
        drops = trained.drops  # where it fails, it needs targets in training mode, or cannot run in it at all
        if trained.outputs is None:
            drops = dict.fromkeys(name for name, part in parts.items() if isinstance(part, torch.nn.Dropout))
        kept = [name for name in drops if dropout and name not in trained.draws]
        if kept and not run(kept).equals(expected):
            kept = [name for name in kept if run([name]).equals(expected)]
        left = [name for name in parts if name in {**drops, **trained.draws} and name not in kept]
        others = [name for name, part in parts.items() if _has_own_statistics(torch, part)]
        if not trained.equals(expected):
            others += [name for name in parts if name not in left and not run([name]).equals(expected)]
        gradients = [*_hooked(parts, module), *([] if expected.outputs is None else _own_gradients(torch, run.call))]
        own = type(module).__name__
        notes = (
            Note(f"the export left out the dropout of {_names(left, own)}; {_LEFT_OUT}", False) if left else None,
            Note(f"in training mode PyTorch computes {_names(others, own)} {_OTHERWISE}", False) if others else None,
            Note(f"{_names(gradients, own)} {_OWN_GRADIENT}", True) if gradients else None,
        )
        outputs = None if expected.draws else expected.outputs
        return cls(tuple(kept), tuple(note for note in notes if note is not None), outputs)


_LEFT_OUT = "from_torch(…, dropout=True) keeps dropout of elements, channels and attention, not of rows or layers"
_OTHERWISE = (
    "differently than in evaluation mode, or changes buffers there; a step computes what evaluation does, and leaves"
    " such buffers as they are"
)
_OWN_GRADIENT = "has a custom gradient in PyTorch; a step computes that of the forward pass"


def _names(names: Iterable[str], whole: str) -> str:
    names = list(dict.fromkeys(name or whole for name in names))
    more = f" and {len(names) - _NAMED} more" if len(names) > _NAMED else ""
    return ", ".join(map(repr, names[:_NAMED])) + more


def _has_own_statistics(torch: Any, part: Any) -> bool:
    of_instances = isinstance(part, torch.nn.modules.instancenorm._InstanceNorm)
    return bool(getattr(part, "track_running_stats", False)) and (of_instances or part.momentum is None)


def _check(torch: Any, parts: Mapping[str, Any], expected: _Run) -> None:
    if expected.packs:
        raise TrainingError(
            "the module packs sequences, which PyTorch cannot export; pass padded sequences to the recurrent layer, and"
            " take the last outputs by their lengths, or mask those of padding"
        )
    if expected.changed:
        raise TrainingError(
            f"the module changes {', '.join(map(repr, expected.changed[:_NAMED]))} in place when it is called, even in"
            " evaluation mode, which no export keeps; compute a new tensor, and change a buffer only if self.training"
        )
    projected = [name for name, part in parts.items() if getattr(part, "proj_size", 0)]
    if projected:
        raise TrainingError(
            f"{projected[0]!r} is an LSTM with proj_size, which the ONNX operator does not support; use an"
            " LSTM without it, and a Linear after it"
        )


# -- running the module ----------------------------------------------------------------------------------


@dataclass
class _Run:
    """One call of a module in which nothing was dropped. Names of its parts are in the order of their calls.

    `outputs`: None if the call failed. `changed`: parameters and buffers that it changed. `drops`, `draws`: parts that
    drop, and that draw other random numbers. `packs`: sequences are packed. `running`: parts that run now.
    """

    outputs: list[Any] | None = None
    changed: list[str] = field(default_factory=list)
    drops: dict[str, None] = field(default_factory=dict)
    draws: dict[str, None] = field(default_factory=dict)
    packs: bool = False
    running: list[str] = field(default_factory=lambda: [""])

    def equals(self, other: _Run) -> bool:
        if self.outputs is None or other.outputs is None or self.changed:
            return False
        return len(self.outputs) == len(other.outputs) and all(
            a.shape == b.shape and a.equal(b) for a, b in zip(self.outputs, other.outputs, strict=True)
        )


@dataclass(frozen=True)
class _Runs:
    """Calls of a module on its example, with copies of its tensors. `forward`: return the outputs of a call."""

    torch: Any
    module: Any
    forward: Call

    def call(self) -> list[Any]:
        grads = {name: tensor.requires_grad for name, tensor in self.module.named_parameters()}
        copies = {name: t.requires_grad_(grads.get(name, False)) for name, t in self._copies().items()}
        with self.torch.random.fork_rng(), training(self.module, ()):
            return self.forward(copies)

    def _copies(self) -> dict[str, Any]:
        tensors = (*self.module.named_parameters(), *self.module.named_buffers())
        return {name: tensor.detach().clone() for name, tensor in tensors}

    def __call__(self, names: Sequence[str], number: float = 0.0) -> _Run:
        """Call the module with these parts in training mode, but drop nothing.

        `number`: what a layer draws that is skipped if it is small.
        """
        seen, copies = _Run(), self._copies()

        def leave(*_: object) -> None:
            seen.running.pop()

        hooks = []
        for name, part in self.module.named_modules():
            hooks.append(part.register_forward_pre_hook(lambda *_, name=name: seen.running.append(name)))
            hooks.append(part.register_forward_hook(leave, always_call=True))
        try:
            random, mode = self.torch.random.fork_rng(), training(self.module, names)
            with (
                self.torch.no_grad(),
                random,
                mode,
                _watch(self.torch, seen, number),
            ):
                seen.outputs = self.forward(copies)
        except MODULE_ERRORS:
            return seen
        finally:
            for hook in hooks:
                hook.remove()
        before = self._copies()
        seen.changed += [name for name, tensor in copies.items() if not tensor.equal(before[name])]
        return seen


def _watch(torch: Any, seen: _Run, number: float) -> Any:

    class Watch(torch.overrides.TorchFunctionMode):  # type: ignore[misc]
        def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            kwargs, name, here = kwargs or {}, getattr(func, "__name__", ""), seen.running[-1]
            drop, layers = Drop.of(name, args, kwargs), recurrent(name, args, kwargs)
            if drop is not None:
                if drop.on and drop.p > 0:
                    seen.drops[here] = None
                return drop.x
            if layers is not None:
                if layers["train"] and layers["dropout"] > 0 and layers["num_layers"] > 1:
                    seen.drops[here] = None
                return func(**{**layers, "dropout": 0.0})
            names = {ATTENTION: ARGUMENTS, _MULTI_HEAD: _MULTI_HEAD_ARGUMENTS}.get(name)
            if names is not None:
                given = {**dict(zip(names, args, strict=False)), **kwargs}
                if given.get("dropout_p", 0) > 0 and given.get("training", True):
                    seen.drops[here] = None
                return func(**{**given, "dropout_p": 0.0})
            if is_number(name, args):
                return number
            if name in _DRAWS:
                seen.draws[here] = None
            seen.packs |= name in _PACKS
            return func(*args, **kwargs)

    return Watch()


def _hooked(parts: Mapping[str, Any], module: Any) -> list[str]:
    changed = ("_backward_hooks", "_backward_pre_hooks", "scale_grad_by_freq")
    every = {**dict(module.named_parameters()), **parts}
    return [name for name, one in every.items() if any(getattr(one, attribute, None) for attribute in changed)]


def _own_gradients(torch: Any, call: Callable[[], list[Any]]) -> list[str]:
    with torch.enable_grad():
        pending = [output.grad_fn for output in call()]
    seen: dict[Any, None] = {}
    while pending:
        node = pending.pop()
        if node is not None and node not in seen:
            seen[node] = None
            pending += [before for before, _ in node.next_functions]
    own = torch.autograd.function.BackwardCFunction
    return [type(node).__name__.removesuffix("Backward") for node in seen if isinstance(node, own)]
