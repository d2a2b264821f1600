"""Gradients that vanish in float16, and the loss scale that brings them back.

    python examples/training/underflow.py

The loss of this digit classifier counts a millionth: so does one task of many, or one pixel in a mean over a large
picture. Its gradients are about 1e-9, and float16 has nothing between 0 and 6e-8. They become 0, and nothing is
learned, without any error. Times 2**15 they are where float16 has numbers, and the same network trains as in float32.
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

SHARE = 1e-6
RUNS = (
    ("float32, no loss scale", "float32", None),
    ("float16, no loss scale", "mixed_float16", None),
    ("float16, fixed loss scale 2^15", "mixed_float16", 2.0**15),
    ("float16, dynamic loss scale", "mixed_float16", "dynamic"),
)


def small_loss(hidden: int) -> onnx.ModelProto:
    """The guide's network with its loss in the graph: a millionth of the mean cross entropy."""
    model = network(hidden, seed=0)
    graph = model.graph
    graph.input.append(make_tensor_value_info("label", onnx.TensorProto.INT64, ["batch"]))
    graph.initializer.append(from_array(np.array(SHARE, np.float32), "share"))
    graph.node.append(make_node("SoftmaxCrossEntropyLoss", ["logits", "label"], ["mean"], reduction="mean"))
    graph.node.append(make_node("Mul", ["mean", "share"], ["loss"]))
    return model


def run(
    model: onnx.ModelProto, policy: str, loss_scale: object, digits: Digits, epochs: int
) -> tuple[float, float, float]:
    """Held-out accuracy, the first and the last loss in millionths."""
    # Plain gradient descent, whose rate makes up for the small loss: only the gradients' size is the matter here.
    rule = SGD(0.1 / SHARE)
    trainer = Trainer(training_step(model, loss="loss", optimizer=rule, policy=policy, loss_scale=loss_scale))
    losses = [loss for e in range(epochs) for loss in trainer.fit(list(digits.batches(64, seed=e))).losses]
    right = logits(trainer.state, digits.x_test).argmax(1) == digits.y_test
    return float(right.mean()), losses[0] / SHARE, losses[-1] / SHARE


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="small and short: does it run?")
    given = parser.parse_args()
    hidden, epochs = (32, 20) if given.quick else (256, 30)
    digits = load()
    print(f"{digits.origin}; a guess is right in {100 * np.bincount(digits.y_test).max() / len(digits.y_test):.0f} %")
    for name, policy, loss_scale in RUNS:
        accuracy, first, last = run(small_loss(hidden), policy, loss_scale, digits, epochs)
        print(f"{name:<31} loss {first:.3f} → {last:.3f} millionths, accuracy {100 * accuracy:.2f} %", flush=True)


if __name__ == "__main__":
    main()
