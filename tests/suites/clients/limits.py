"""Combinations of a tool and an order that are not usable, or lose what the conversion gains, each with the reason.

`docs/how-to/order-of-tools.md` states every one of them; what no limit covers must be usable.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from suites.clients.trial import Outcome


@dataclass(frozen=True, slots=True)
class Limit:
    """A limit. `results`: what may come of it besides "usable"; `models`: those concerned, all if empty."""

    tools: tuple[str, ...]
    order: str
    results: frozenset[str]
    why: str
    models: frozenset[str] = frozenset()

    def covers(self, outcome: Outcome) -> bool:
        mine = outcome.tool in self.tools and outcome.order == self.order and outcome.result in self.results
        return mine and (not self.models or outcome.model in self.models)


SESSIONS = ("onnxruntime session BASIC", "onnxruntime session EXTENDED")
LIMITS = (
    Limit(
        ("onnxruntime quantize_dynamic",),
        "after",
        frozenset({"open", "tool"}),
        "DynamicQuantizeLinear takes float32 only, and DequantizeLinear no float16 scale below opset 19. Behind "
        "onnxruntime's operators the tool looks for types that onnx does not infer.",
    ),
    Limit(
        ("onnxruntime quantize_static",),
        "after",
        frozenset({"open"}),
        "Below opset 19 quantizers take no float16 scale. From there on the tool gives a scale the wrong type wherever "
        "float16 and float32 meet.",
    ),
    Limit(
        SESSIONS,
        "after",
        frozenset({"open", "float32"}),
        "The CPU provider has few float16 kernels. Its session runs the other ops in float32, between Casts, and saves "
        "them so, for every provider. In both branches of an If it gives its Casts the same names, and does not open "
        "the model that it saved.",
    ),
    Limit(
        ("onnxruntime session EXTENDED",),
        "before",
        frozenset({"float32"}),
        "Above BASIC a CPU session makes FusedConv and FusedGemm, which have no float16 kernel on CUDA: these ops stay "
        "float32.",
    ),
    *(
        Limit(tools, order, frozenset({"tool"}), why, frozenset({model}))
        for tools, model, why in (
            (
                ("onnxruntime quantize_dynamic",),
                "if_dynamo20",
                "The tool transposes a weight for the Gemm of a branch, and MatMul outside reads it, too.",
            ),
            (
                ("onnxruntime quantize_static",),
                "t5_ts14",
                "Position buckets take the logarithm of 0: a scale becomes infinite, and indices go out of bounds.",
            ),
            (
                ("onnxruntime transformers optimizer",),
                "gpt2_dynamo18",
                "The tool ends in an IndexError, on the float32 model, too.",
            ),
            (
                ("onnxruntime transformers optimizer",),
                "unet_ts15",
                "The GroupNorm that the tool makes has a kernel on CUDA only, so the suite cannot run it. On float16 "
                "weights the tool ends in a ValueError: it takes their bytes for those of float32.",
            ),
        )
        for order in ("before", "after")
    ),
)


def problems(outcomes: Iterable[Outcome]) -> Iterator[str]:
    """Yield a line for each outcome that is not usable and that no limit covers."""
    for outcome in outcomes:
        if outcome.result != "usable" and not any(limit.covers(outcome) for limit in LIMITS):
            yield f"{outcome.tool} {outcome.order} conversion, {outcome.model}: {outcome.result}: {outcome.words}"


def stale(outcomes: Iterable[Outcome]) -> Iterator[str]:
    """Yield a line for each limit that no outcome shows: it can go."""
    results = tuple(outcomes)
    for limit in LIMITS:
        if not any(limit.covers(outcome) for outcome in results):
            yield f"{' and '.join(limit.tools)} {limit.order} conversion: nothing shows the limit any more: {limit.why}"
