"""Examples in the help of each command, without the name of the program; and the help that shows them."""

from __future__ import annotations

import click

EXAMPLES: dict[str, tuple[str, ...]] = {
    "": ("model.onnx", "model.onnx --data batches.npz --tolerance 1e-2", "explain model.onnx NODE"),
    "bench": ("bench model.onnx model.float16.onnx --random",),
    "calibrate": (
        "calibrate model.onnx --data batches.npz",
        "calibrate model.onnx --ranges a.json --ranges b.json -o c.json",
    ),
    "completion": ("completion zsh > ~/.zfunc/_amp-rewrite",),
    "convert": (
        "model.onnx",
        "model.onnx out.onnx --to bfloat16 --keep op=Softmax",
        "model.onnx --data batches.npz --tolerance 1e-2",
    ),
    "diff": ("diff model.onnx model.float16.onnx",),
    "doctor": ("doctor model.onnx --gpu H200",),
    "emulate": ("emulate model.float16.onnx",),
    "explain": ("explain model.onnx /encoder/layer.0/MatMul", "explain Softmax mask_fill", "explain rules"),
    "gate": ("gate model.onnx --base origin/main --fail-on raised,casts",),
    "locate": ("locate model.onnx model.float16.onnx --data batches.npz",),
    "report": ("report model.onnx --expect 'float16 >= 95%'",),
    "train-step": ("train-step model.onnx --loss 'cross_entropy(logits,labels)'",),
    "verify": ("verify model.onnx model.float16.onnx --data d.npz --tolerance 1e-2",),
}
"""Command lines by the words of the command; "" is the program itself."""


def write_examples(ctx: click.Context, formatter: click.HelpFormatter) -> None:
    """Write the examples of a command below a heading."""
    if examples := EXAMPLES.get(ctx.command_path.partition(" ")[2]):
        with formatter.section("Examples" if len(examples) > 1 else "Example"):
            formatter.write("".join(f"  amp-rewrite {example}\n" for example in examples))
