"""Gradients of operators without a row, through the function bodies that the standard gives them."""

from __future__ import annotations

from dataclasses import replace

from support.train.vjp_case import Case, Torch, judged

HEADS = {"q": (2, 2, 3, 4), "k": (2, 2, 5, 4), "v": (2, 2, 5, 3)}


def attention(name: str, words: str, shapes: dict[str, tuple[int, ...]], torch: Torch | None = None) -> Case:
    operands = ",".join(shapes)
    graph = f"y=Attention[{words}]({operands})" if words else f"y=Attention({operands})"
    # The body holds the root of the scale in float32.
    return Case(f"Attention, {name}", graph, shapes, opsets=(23,), torch=torch, close=2**-20)


def sdpa(**words: object) -> Torch:
    return lambda t, q, k, v, *mask: t.nn.functional.scaled_dot_product_attention(q, k, v, *mask, **words)


CASES = (
    attention("plain", "", HEADS, sdpa()),
    attention("causal", "is_causal=1", {**HEADS, "k": (2, 2, 3, 4), "v": (2, 2, 3, 3)}, sdpa(is_causal=True)),
    attention("with a mask that is added", "", {**HEADS, "m": (3, 5)}, sdpa()),
    attention("with fewer heads of keys", "", {"q": (2, 4, 3, 4), "k": (2, 2, 5, 4), "v": (2, 2, 5, 4)},
              sdpa(enable_gqa=True)),
    # From unknown dims onnx infers wrong ones here.
    replace(attention("of three axes", "q_num_heads=2,kv_num_heads=2",
                      {"q": (2, 3, 8), "k": (2, 5, 8), "v": (2, 5, 6)}), fixed=True),
    attention("with a soft cap", "softcap=2.5", HEADS),
    Case("Attention, with what came before", "y,n,w=Attention(q,k,v,,a,b)",
         {**HEADS, "a": (2, 2, 1, 4), "b": (2, 2, 1, 3)}, outputs=("y", "n"), opsets=(23,), fixed=True),
    Case("RotaryEmbedding", "y=RotaryEmbedding(x,c,s,p)",
         {"x": (2, 2, 3, 4), "c": (5, 2), "s": (5, 2), "p": (2, 3)}, types={"p": "int"},
         values={"p": [[0, 1, 2], [2, 3, 4]]}, opsets=(23,), single=True, constants={"one": [1]},
         meaning="a,b=Split[axis=-1,num_outputs=2](x);c0=Gather(c,p);s0=Gather(s,p);c1=Unsqueeze(c0,one);"
         "s1=Unsqueeze(s0,one);ac=Mul(a,c1);bs=Mul(b,s1);as=Mul(a,s1);bc=Mul(b,c1);l=Sub(ac,bs);r=Add(as,bc);"
         "y=Concat[axis=-1](l,r)"),
    Case("CenterCropPad", "y=CenterCropPad(x,z)", {"x": (3, 6)}, constants={"z": [4, 4]}, opsets=(18, 20)),
)  # fmt: skip

TestRules = judged(CASES)
