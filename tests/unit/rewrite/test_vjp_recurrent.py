"""Gradients of LSTM, GRU and RNN, through the Scan that says the same."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from amp_rewrite import GradientError, gradients
from support.train.vjp_case import Case, judged

STEPS, BATCH, FEATURES, HIDDEN = 3, 2, 2, 2
GATES = {"LSTM": 4, "GRU": 3, "RNN": 1}


def case(
    name: str,
    op: str,
    words: str = "",
    extra: Sequence[str] = ("b",),
    outputs: Sequence[str] = ("y", "h"),
    *,
    ways: int = 1,
    **values: object,
) -> Case:
    """A layer: `extra` are its inputs after X, W and R, "" for those that are left out."""
    gates = GATES[op] * HIDDEN
    first = "layout=1" in words
    state = (BATCH, ways, HIDDEN) if first else (ways, BATCH, HIDDEN)
    sizes = {"x": (BATCH, STEPS, FEATURES) if first else (STEPS, BATCH, FEATURES), "w": (ways, gates, FEATURES)}
    sizes |= {"r": (ways, gates, HIDDEN), "b": (ways, 2 * gates), "n": (BATCH,), "h0": state, "c0": state}
    sizes |= {"p": (ways, 3 * HIDDEN)}
    names = ["x", "w", "r", *extra]
    read = ",".join("m" if n == "n" else n for n in names)
    lengths = "m=Cast[to=6](n);" if "n" in names else ""
    graph = f"{lengths}{','.join(outputs)}={op}[hidden_size={HIDDEN}{words and ','}{words}]({read})"
    return Case(
        f"{op}, {name}",
        graph,
        {n: sizes[n] for n in names if n},
        outputs=[o for o in outputs if o != "_"],
        types={"n": "int"},
        known=("r",),
        low=-1,
        high=1,
        opsets=(16, 20) if name == "plain" else (20,),
        **values,  # type: ignore[arg-type]
    )


CASES = (
    # of no rows or no steps onnxruntime's own LSTM ends the process
    *(
        Case(f"{op}, of ones", f"y,h={op}[hidden_size=1](x,w,r,b)",
             {"x": (1, 1, 1), "w": (1, n, 1), "r": (1, n, 1), "b": (1, 2 * n)}, outputs=("y", "h"), known=("r",))
        for op, n in GATES.items()
    ),
    case("plain", "LSTM"),
    case("with all it gives", "LSTM", "", ("b", "", "h0", "c0"), ("y", "h", "c")),
    case("the last cell alone", "LSTM", "", ("b",), ("_", "_", "c")),
    case("without biases", "LSTM", "", ()),
    case("both ways", "LSTM", "direction=bidirectional", ("b", "", "h0", "c0"), ("y", "h", "c"), ways=2),
    case("with lengths", "LSTM", "direction=bidirectional", ("b", "n", "h0", "c0"), ("y", "h", "c"), ways=2,
         values={"n": [2, 3]}),
    case("of other activations", "LSTM", "activations=HardSigmoid Softsign Tanh", single=True),
    case("plain", "GRU"),
    case("that resets after", "GRU", "linear_before_reset=1"),
    case("both ways", "GRU", "direction=bidirectional,linear_before_reset=1", ("b", "", "h0"), ways=2),
    case("from the back with lengths", "GRU", "direction=reverse", ("b", "n", "h0"), values={"n": [1, 3]}),
    case("plain", "RNN"),
    case("of Relu, both ways", "RNN", "direction=bidirectional,activations=Relu Relu", ("b", "", "h0"), ways=2),
    case("its last state alone", "RNN", "", ("b",), ("_", "h")),
)  # fmt: skip

TestRules = judged(CASES)


def test_what_has_no_rule_is_refused() -> None:
    activations = "activation 'Affine'; use Sigmoid, Tanh, Relu, Softsign, Softplus, HardSigmoid, Elu"
    for op, words, extra, fact in (
        ("GRU", "activations=Affine Tanh", (), activations),
        ("GRU", "activation_alpha=0.5 0.5", (), "activation_alpha; use a layer without it"),
        ("GRU", "clip=0.25", (), "clip; use a layer without it"),
        ("LSTM", "", ("b", "", "", "", "p"), "peepholes; use a layer without it"),
    ):
        with pytest.raises(GradientError) as caught:
            gradients(case("", op, words, extra).model(20), "loss", ["w"])
        assert str(caught.value) == f"node 'y' ({op}): no gradient with {fact}"
