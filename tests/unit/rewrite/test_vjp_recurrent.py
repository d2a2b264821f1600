"""Gradients through bodies: LSTM, GRU and RNN as a Scan, and operators without a row by their function body."""

from collections.abc import Sequence
from dataclasses import replace

import pytest

from amp_rewrite import GradientError, gradients
from support.train.vjp_case import Case, Torch, judged

STEPS, BATCH, FEATURES, HIDDEN = 3, 2, 2, 2
GATES = {"LSTM": 4, "GRU": 3, "RNN": 1}


def case(
    name: str,
    op: str,
    settings: str = "",
    extra: Sequence[str] = ("b",),
    outputs: Sequence[str] = ("y", "h"),
    *,
    directions: int = 1,
    **values: object,
) -> Case:
    """Return a case of a layer; `extra` are its inputs after X, W and R, "" for omitted ones."""
    gates = GATES[op] * HIDDEN
    first = "layout=1" in settings
    state = (BATCH, directions, HIDDEN) if first else (directions, BATCH, HIDDEN)
    sizes = {"x": (BATCH, STEPS, FEATURES) if first else (STEPS, BATCH, FEATURES), "w": (directions, gates, FEATURES)}
    sizes |= {"r": (directions, gates, HIDDEN), "b": (directions, 2 * gates), "n": (BATCH,), "h0": state, "c0": state}
    sizes |= {"p": (directions, 3 * HIDDEN)}
    names = ["x", "w", "r", *extra]
    read = ",".join("m" if n == "n" else n for n in names)
    lengths = "m=Cast[to=6](n);" if "n" in names else ""
    graph = f"{lengths}{','.join(outputs)}={op}[hidden_size={HIDDEN}{settings and ','}{settings}]({read})"
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


LAYERS = (
    # without rows or steps, onnxruntime's own LSTM aborts the process
    *(
        Case(f"{op}, of ones", f"y,h={op}[hidden_size=1](x,w,r,b)",
             {"x": (1, 1, 1), "w": (1, n, 1), "r": (1, n, 1), "b": (1, 2 * n)}, outputs=("y", "h"), known=("r",))
        for op, n in GATES.items()
    ),
    case("plain", "LSTM"),
    case("with all outputs", "LSTM", "", ("b", "", "h0", "c0"), ("y", "h", "c")),
    case("only the last cell", "LSTM", "", ("b",), ("_", "_", "c")),
    case("without biases", "LSTM", "", ()),
    case("bidirectional", "LSTM", "direction=bidirectional", ("b", "", "h0", "c0"), ("y", "h", "c"), directions=2),
    case("with lengths", "LSTM", "direction=bidirectional", ("b", "n", "h0", "c0"), ("y", "h", "c"), directions=2,
         values={"n": [2, 3]}),
    case("with other activations", "LSTM", "activations=HardSigmoid Softsign Tanh", single=True),
    case("plain", "GRU"),
    case("with the reset after the product", "GRU", "linear_before_reset=1"),
    case("bidirectional", "GRU", "direction=bidirectional,linear_before_reset=1", ("b", "", "h0"), directions=2),
    case("reverse, with lengths", "GRU", "direction=reverse", ("b", "n", "h0"), values={"n": [1, 3]}),
    case("plain", "RNN"),
    case("bidirectional Relu", "RNN", "direction=bidirectional,activations=Relu Relu", ("b", "", "h0"), directions=2),
    case("only the last state", "RNN", "", ("b",), ("_", "h")),
)  # fmt: skip

HEADS = {"q": (2, 2, 3, 4), "k": (2, 2, 5, 4), "v": (2, 2, 5, 3)}


def attention(name: str, settings: str, shapes: dict[str, tuple[int, ...]], torch: Torch | None = None) -> Case:
    operands = ",".join(shapes)
    graph = f"y=Attention[{settings}]({operands})" if settings else f"y=Attention({operands})"
    # The body has the root of the scale in float32.
    return Case(f"Attention, {name}", graph, shapes, opsets=(23,), torch=torch, close=2**-20)


def sdpa(**options: object) -> Torch:
    return lambda t, q, k, v, *mask: t.nn.functional.scaled_dot_product_attention(q, k, v, *mask, **options)


BODIES = (
    attention("plain", "", HEADS, sdpa()),
    attention("causal", "is_causal=1", {**HEADS, "k": (2, 2, 3, 4), "v": (2, 2, 3, 3)}, sdpa(is_causal=True)),
    attention("with an additive mask", "", {**HEADS, "m": (3, 5)}, sdpa()),
    attention("with fewer heads of keys", "", {"q": (2, 4, 3, 4), "k": (2, 2, 5, 4), "v": (2, 2, 5, 4)},
              sdpa(enable_gqa=True)),
    # With unknown dims, onnx infers wrong ones here.
    replace(attention("with three axes", "q_num_heads=2,kv_num_heads=2",
                      {"q": (2, 3, 8), "k": (2, 5, 8), "v": (2, 5, 6)}), fixed=True),
    attention("with a soft cap", "softcap=2.5", HEADS),
    Case("Attention, with a cache", "y,n,w=Attention(q,k,v,,a,b)",
         {**HEADS, "a": (2, 2, 1, 4), "b": (2, 2, 1, 3)}, outputs=("y", "n"), opsets=(23,), fixed=True),
    Case("RotaryEmbedding", "y=RotaryEmbedding(x,c,s,p)",
         {"x": (2, 2, 3, 4), "c": (5, 2), "s": (5, 2), "p": (2, 3)}, types={"p": "int"},
         values={"p": [[0, 1, 2], [2, 3, 4]]}, opsets=(23,), single=True, constants={"one": [1]},
         meaning="a,b=Split[axis=-1,num_outputs=2](x);c0=Gather(c,p);s0=Gather(s,p);c1=Unsqueeze(c0,one);"
         "s1=Unsqueeze(s0,one);ac=Mul(a,c1);bs=Mul(b,s1);as=Mul(a,s1);bc=Mul(b,c1);l=Sub(ac,bs);r=Add(as,bc);"
         "y=Concat[axis=-1](l,r)"),
    Case("CenterCropPad", "y=CenterCropPad(x,z)", {"x": (3, 6)}, constants={"z": [4, 4]}, opsets=(18, 20)),
)  # fmt: skip
CASES = (*LAYERS, *BODIES)

TestRules = judged(CASES)


def test_forms_without_a_rule_are_refused() -> None:
    activations = "activation 'Affine'; use Sigmoid, Tanh, Relu, Softsign, Softplus, HardSigmoid, Elu"
    for op, settings, extra, fact in (
        ("GRU", "activations=Affine Tanh", (), activations),
        ("GRU", "activation_alpha=0.5 0.5", (), "activation_alpha; use a layer without it"),
        ("GRU", "clip=0.25", (), "clip; use a layer without it"),
        ("LSTM", "", ("b", "", "", "", "p"), "peepholes; use a layer without it"),
    ):
        with pytest.raises(GradientError) as caught:
            gradients(case("", op, settings, extra).model(20), "loss", ["w"])
        assert str(caught.value) == f"node 'y' ({op}): there is no gradient rule for {fact}"
