"""Losses of a PyTorch module's export: dropout, changed buffers, gradients of its own.

They are found by running the module. `torch_forms.py` exports some of them; the report names the others, or an error
is raised.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from amp_rewrite.errors import TrainingError, one_line
from amp_rewrite.train.interchange.torch_forms import ARGUMENTS, ATTENTION, Drop, training
from amp_rewrite.train.objective.parameters import Note

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
"""Errors of a module in a mode that it was not made for, and of PyTorch's exporter."""
_NAMED = 4
"""Modules that a sentence names."""


Call = Callable[[dict[str, Any]], dict[str, Any]]
"""A call of a module with these parameters and buffers by name, which it may change; its outputs by name."""


@dataclass(frozen=True)
class ForwardFindings:
    """Names of modules with a dropout for the export, and sentences for the report.

    `outputs`: those of evaluation by name. `random`: they are drawn.
    """

    kept: tuple[str, ...]
    notes: tuple[Note, ...]
    outputs: Mapping[str, Any]
    random: bool

    @classmethod
    def of(cls, torch: Any, module: Any, call: Call, dropout: bool) -> ForwardFindings:
        """Run the module in both modes. `call`: call it on the example with these tensors; return its outputs.

        The dropout of a module is kept if it gives the outputs of evaluation when nothing is dropped.

        TrainingError for an example that does not fit, and for parameters or buffers that a call changes in evaluation
        mode.
        """
        parts = dict(module.named_modules())
        run = _Runs(torch, module, call)
        expected = run(())
        if expected.outputs is None:
            raise TrainingError(f"the module fails on the example: {expected.error}; correct the example")
        if expected.changed:
            raise TrainingError(
                f"the module changes {', '.join(map(repr, expected.changed[:_NAMED]))} in place when it is called, even"
                " in evaluation mode, which no export keeps; compute a new tensor, and change a buffer only if"
                " self.training"
            )
        layered = [n for n, part in parts.items() if isinstance(part, torch.nn.RNNBase) and _drops_between_layers(part)]
        modes = [n for n, part in parts.items() if n not in layered and not hasattr(part, "track_running_stats")]
        trained = run(modes)
        drops = trained.drops  # where it fails, it needs targets in training mode, or cannot run in it at all
        if trained.outputs is None:
            drops = dict.fromkeys(name for name, part in parts.items() if isinstance(part, torch.nn.Dropout))
        kept = [name for name in drops if dropout and name not in trained.draws]
        if kept and not run(kept).equals(expected):
            kept = [name for name in kept if run([name]).equals(expected)]
        left = [name for name in parts if name in {**drops, **trained.draws, **dict.fromkeys(layered)}]
        left = [name for name in left if name not in kept]
        others = []
        if not trained.equals(expected):
            others = [name for name in parts if name not in left and not run([name]).equals(expected)]
        gradients, own = _own_gradients(torch, run.call), type(module).__name__
        notes = (
            Note(f"the export left out the dropout of {_names(left, own)}; {_LEFT_OUT}", False) if left else None,
            Note(f"in training mode PyTorch computes {_names(others, own)} {_OTHERWISE}", False) if others else None,
            Note(f"{_names(gradients, own)} {_OWN_GRADIENT}", True) if gradients else None,
        )
        given = tuple(note for note in notes if note is not None)
        return cls(tuple(kept), given, expected.outputs, bool(expected.draws))


_LEFT_OUT = (
    "from_torch(…, dropout=True) keeps dropout of elements, channels and attention, not of rows, of layers, or between"
    " the layers of an RNN"
)
_OTHERWISE = (
    "differently than in evaluation mode, or changes buffers there; a step computes what evaluation does, and leaves"
    " such buffers as they are"
)
_OWN_GRADIENT = "has a custom gradient in PyTorch; a step computes that of the forward pass"


def _drops_between_layers(part: Any) -> bool:
    return bool(part.dropout > 0 and part.num_layers > 1)


def _names(names: Iterable[str], whole: str) -> str:
    names = list(dict.fromkeys(name or whole for name in names))
    more = f" and {len(names) - _NAMED} more" if len(names) > _NAMED else ""
    return ", ".join(map(repr, names[:_NAMED])) + more


# -- running the module ----------------------------------------------------------------------------------


@dataclass
class _Run:
    """One call of a module in which nothing was dropped. Names of its parts are in the order of their calls.

    `outputs`: None if the call failed with `error`. `changed`: parameters and buffers that it changed. `drops`,
    `draws`: parts that drop, and that draw other random numbers. `running`: parts that run now.
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
    """Calls of a module on its example, with copies of its tensors. `forward`: return the outputs of a call."""

    torch: Any
    module: Any
    forward: Call

    def call(self) -> dict[str, Any]:
        grads = {name: tensor.requires_grad for name, tensor in self.module.named_parameters()}
        copies = {name: t.requires_grad_(grads.get(name, False)) for name, t in self._copies().items()}
        with self.torch.random.fork_rng(), training(self.module, ()):
            return self.forward(copies)

    def _copies(self) -> dict[str, Any]:
        tensors = (*self.module.named_parameters(), *self.module.named_buffers())
        return {name: tensor.detach().clone() for name, tensor in tensors}

    def __call__(self, names: Sequence[str]) -> _Run:
        """Call the module with these parts in training mode, but drop nothing."""
        seen, copies = _Run(), self._copies()

        def leave(*_: object) -> None:
            seen.running.pop()

        hooks = []
        for name, part in self.module.named_modules():
            hooks.append(part.register_forward_pre_hook(lambda *_, name=name: seen.running.append(name)))
            hooks.append(part.register_forward_hook(leave, always_call=True))
        random, mode = self.torch.random.fork_rng(), training(self.module, names)
        try:
            with self.torch.no_grad(), random, mode, _watch(self.torch, seen):
                seen.outputs = self.forward(copies)
        except MODULE_ERRORS as cause:
            seen.error = one_line(cause)
            return seen
        finally:
            for hook in hooks:
                hook.remove()
        before = self._copies()
        seen.changed += [name for name, tensor in copies.items() if not tensor.equal(before[name])]
        return seen


def _watch(torch: Any, seen: _Run) -> Any:

    class Watch(torch.overrides.TorchFunctionMode):  # type: ignore[misc]
        def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            kwargs, name, here = kwargs or {}, getattr(func, "__name__", ""), seen.running[-1]
            drop = Drop.of(name, args, kwargs)
            if drop is not None:
                if drop.on and drop.p > 0:
                    seen.drops[here] = None
                return drop.x
            names = {ATTENTION: ARGUMENTS, _MULTI_HEAD: _MULTI_HEAD_ARGUMENTS}.get(name)
            if names is not None:
                given = {**dict(zip(names, args, strict=False)), **kwargs}
                if given.get("dropout_p", 0) > 0 and given.get("training", True):
                    seen.drops[here] = None
                return func(**{**given, "dropout_p": 0.0})
            if name in _DRAWS:
                seen.draws[here] = None
            return func(*args, **kwargs)

    return Watch()


def _own_gradients(torch: Any, call: Callable[[], dict[str, Any]]) -> list[str]:
    with torch.enable_grad():
        pending = [output.grad_fn for output in call().values()]
    seen: dict[Any, None] = {}
    while pending:
        node = pending.pop()
        if node is not None and node not in seen:
            seen[node] = None
            pending += [before for before, _ in node.next_functions]
    own = torch.autograd.function.BackwardCFunction
    return [type(node).__name__.removesuffix("Backward") for node in seen if isinstance(node, own)]
