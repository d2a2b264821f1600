"""Train with gradients that underflow in float16, and with a loss scale that rescues them.

    python examples/training/underflow.py

This digit classifier's loss has a weight of one millionth, like one task among many, or one pixel in the mean over a
large image. Its gradients are about 1e-9, but float16 has no values between 0 and 6e-8. They become 0, and training
silently learns nothing. Multiplied by 2**15, they are within float16's range, and the network trains as in float32.
"""

from __future__ import annotations

import argparse

import numpy as np
import onnx
from digits import Digits, load
from guide import logits, network
from onnx.helper import make_node, make_tensor_value_info
from onnx.numpy_helper import from_array

from amp_rewrite.train import SGD, Trainer, training_step

WEIGHT = 1e-6
RUNS = (
    ("float32, no loss scale", "float32", None),
    ("float16, no loss scale", "mixed_float16", None),
    ("float16, fixed loss scale 2^15", "mixed_float16", 2.0**15),
    ("float16, dynamic loss scale", "mixed_float16", "dynamic"),
)


def small_loss(hidden: int) -> onnx.ModelProto:
    """Build the guide's network with its loss in the graph: a millionth of the mean cross entropy."""
    model = network(hidden, seed=0)
    graph = model.graph
    graph.input.append(make_tensor_value_info("label", onnx.TensorProto.INT64, ["batch"]))
    graph.initializer.append(from_array(np.array(WEIGHT, np.float32), "weight"))
    graph.node.append(make_node("SoftmaxCrossEntropyLoss", ["logits", "label"], ["mean"], reduction="mean"))
    graph.node.append(make_node("Mul", ["mean", "weight"], ["loss"]))
    return model


def run(
    model: onnx.ModelProto, policy: str, loss_scale: object, digits: Digits, epochs: int
) -> tuple[float, float, float]:
    """Train; return the held-out accuracy, and the first and the last loss in millionths."""
    # The learning rate of plain gradient descent makes up for the small loss, so only the gradients' size matters.
    optimizer = SGD(0.1 / WEIGHT)
    trainer = Trainer(training_step(model, loss="loss", optimizer=optimizer, policy=policy, loss_scale=loss_scale))
    losses = [loss for e in range(epochs) for loss in trainer.fit(list(digits.batches(64, seed=e))).losses]
    correct = logits(trainer.state, digits.x_test).argmax(1) == digits.y_test
    return float(correct.mean()), losses[0] / WEIGHT, losses[-1] / WEIGHT


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="run a small and short version, as a smoke test")
    args = parser.parse_args()
    hidden, epochs = (32, 20) if args.quick else (256, 30)
    digits = load()
    print(f"{digits.origin}; guessing is right for {100 * np.bincount(digits.y_test).max() / len(digits.y_test):.0f}%")
    for name, policy, loss_scale in RUNS:
        accuracy, first, last = run(small_loss(hidden), policy, loss_scale, digits, epochs)
        print(f"{name:<31} loss {first:.3f} → {last:.3f} millionths, accuracy {100 * accuracy:.2f}%", flush=True)


if __name__ == "__main__":
    main()
