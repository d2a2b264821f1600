"""TensorFlow's mixed precision guide of 2020, on an ONNX model: the same network, the same optimizer, both ways.

    python examples/training/guide.py                      # fit, in float32, float16 and bfloat16
    python examples/training/guide.py --loop               # the custom loop with get_scaled_loss and so on
    python examples/training/guide.py --seeds 5            # is the accuracy the same? a table over seeds
    python examples/training/guide.py --seeds 5 --hidden 4096 --log runs.jsonl   # an hour; goes on if it is stopped
    python examples/training/guide.py --trace scale.svg    # how the loss scale finds its place
    python examples/training/guide.py --mnist FOLDER --hidden 4096 --batch 8192 --epochs 5 --rate 0.001

The last line is the guide itself: 784-4096-4096-10 on MNIST with batches of 8192, for a GPU. The defaults are for a
CPU: layers of 512, batches of 128 with a lower rate, and scikit-learn's digits drawn on 28 x 28 pixels. On a CPU
float16 and bfloat16 are emulated (float32 kernels whose results are rounded): that shows accuracy and overflow, not
speed.
"""

from __future__ import annotations

import argparse
import itertools
import json
import statistics
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import onnx
import onnx.parser
from chart import loss_chart, loss_scale_chart
from digits import Digits, load
from onnx.numpy_helper import from_array

from amp_rewrite.train import DynamicLossScale, LossScaleOptimizer, ModelLoss, RMSprop, Trainer, training_step

POLICIES = ("float32", "mixed_float16", "mixed_bfloat16")
LOSS = "cross_entropy(logits, label)"


def network(hidden: int, seed: int) -> onnx.ModelProto:
    """The guide's network from image [batch, 784] to logits [batch, 10], with Glorot's uniform start as in Keras."""
    # Its last layer and softmax are float32 in the guide. Here the loss is, always: it is appended to the model.
    model = onnx.parser.parse_model(
        """<ir_version: 10, opset_import: ["": 20]> guide (float[batch,784] image) => (float[batch,10] logits) {
          h1 = MatMul (image, w1)  a1 = Add (h1, b1)  dense_1 = Relu (a1)
          h2 = MatMul (dense_1, w2)  a2 = Add (h2, b2)  dense_2 = Relu (a2)
          h3 = MatMul (dense_2, w3)  logits = Add (h3, b3)
        }"""
    )
    rng = np.random.default_rng(seed)
    for number, (rows, columns) in enumerate([(784, hidden), (hidden, hidden), (hidden, 10)], start=1):
        limit = np.sqrt(6 / (rows + columns))
        weight = rng.uniform(-limit, limit, (rows, columns)).astype(np.float32)
        model.graph.initializer.append(from_array(weight, f"w{number}"))
        model.graph.initializer.append(from_array(np.zeros(columns, np.float32), f"b{number}"))
    return model


@dataclass(frozen=True)
class Outcome:
    """What a run ended with: mean loss of its last epoch, held-out accuracy, steps skipped, where it ran."""

    losses: list[float]
    accuracy: float
    skipped: int
    where: str


@dataclass(frozen=True)
class Run:
    """One training from scratch: `rate` is the learning rate, `loop` whether by the custom loop."""

    seed: int
    policy: str
    hidden: int
    batch: int
    epochs: int
    rate: float
    loop: bool
    origin: str

    def trained(self, digits: Digits) -> Outcome:
        return (by_loop if self.loop else by_fit)(self, digits)


def by_fit(run: Run, digits: Digits) -> Outcome:
    """The short way: the whole step is one graph, and `fit` runs it."""
    model = network(run.hidden, run.seed)
    step = training_step(model, loss=LOSS, optimizer=RMSprop(run.rate), policy=run.policy)
    trainer = Trainer(step)
    losses = []
    for epoch in range(run.epochs):
        history = trainer.fit(list(digits.batches(run.batch, seed=1000 * run.seed + epoch)))
        losses.append(statistics.fmean(history.losses))
    accuracy = trainer.evaluate(digits.test).metrics["accuracy"]
    return Outcome(losses, accuracy, trainer.skipped, trainer.where)


def by_loop(run: Run, digits: Digits) -> Outcome:
    """The long way, line by line that of the guide."""
    loss = ModelLoss.of(network(run.hidden, run.seed), LOSS, policy=run.policy)
    # only float16 needs a loss scale: bfloat16 reaches as far as float32 does
    optimizer = LossScaleOptimizer(RMSprop(run.rate), "dynamic" if run.policy == "mixed_float16" else 1)
    losses, skipped = [], 0
    for epoch in range(run.epochs):
        seen = []
        for rows in digits.batches(run.batch, seed=1000 * run.seed + epoch):
            loss_now = loss.on(rows)
            seen.append(float(loss_now()))
            scaled_loss = optimizer.get_scaled_loss(loss_now)
            scaled_gradients = scaled_loss.gradients(loss.variables, np.float32(1))
            gradients = optimizer.get_unscaled_gradients(scaled_gradients)
            before = optimizer.iterations
            optimizer.apply_gradients(zip(gradients, loss.variables, strict=True))
            skipped += optimizer.iterations == before
        losses.append(statistics.fmean(seen))
    weights = {v.name: v.numpy() for v in loss.variables}
    return Outcome(losses, float((logits(weights, digits.x_test).argmax(1) == digits.y_test).mean()), skipped, "")


def logits(weights: dict[str, np.ndarray], x: np.ndarray) -> np.ndarray:
    """The network in numpy, to judge what the loop has trained."""
    for number in (1, 2):
        x = np.maximum(x @ weights[f"w{number}"] + weights[f"b{number}"], 0)
    return x @ weights["w3"] + weights["b3"]


def trace(digits: Digits, hidden: int, batch: int, steps: int) -> tuple[list[float], list[int]]:
    """The loss scale that each step used, and the numbers of those that were skipped.

    It starts at 2**24, which is too high, and doubles after 20 good steps instead of 2000, so that a short run shows
    what a long one does: some skipped steps at first, then one now and then.
    """
    step = training_step(
        network(hidden, 0), loss=LOSS, optimizer=RMSprop(0.0003), loss_scale=DynamicLossScale(2**24, 20)
    )
    trainer = Trainer(step)
    endless = (rows for epoch in itertools.count() for rows in digits.batches(batch, seed=epoch))
    scales: list[float] = []
    skipped: list[int] = []
    for number, rows in enumerate(itertools.islice(endless, steps)):
        assert trainer.loss_scale is not None
        scales.append(trainer.loss_scale)
        if trainer.fit([rows]).skipped:
            skipped.append(number)
    return scales, skipped


def logged(log: Path | None) -> dict[Run, Outcome]:
    """The runs that a log holds, one in each line."""
    lines = log.read_text("utf-8").splitlines() if log is not None and log.exists() else []
    held = [json.loads(line) for line in lines]
    return {Run(**entry["run"]): Outcome(**entry["outcome"]) for entry in held}


def outcome_of(run: Run, digits: Digits, log: Path | None) -> Outcome:
    """From the log if the run is there; else it is made, and written there."""
    known = logged(log).get(run)
    if known is not None:
        return known
    outcome = run.trained(digits)
    if log is not None:
        with log.open("a", encoding="utf-8") as lines:
            lines.write(json.dumps({"run": asdict(run), "outcome": asdict(outcome)}) + "\n")
    return outcome


def table(found: dict[str, list[Outcome]]) -> str:
    """Mean and deviation over seeds; differences are to float32 with the same seed."""
    lines = [
        "| policy | loss, last epoch | accuracy | accuracy less that of float32 | steps skipped |",
        "|---|---|---|---|---|",
    ]
    for policy, outcomes in found.items():
        accuracies = [o.accuracy for o in outcomes]
        apart = [a - o.accuracy for a, o in zip(accuracies, found["float32"], strict=True)]
        losses = _spread([o.losses[-1] for o in outcomes], 4)
        percent = _spread([100 * a for a in accuracies], 2)
        points = _spread([100 * a for a in apart], 2)
        lines.append(f"| {policy} | {losses} | {percent} % | {points} | {sum(o.skipped for o in outcomes)} |")
    return "\n".join(lines)


def _spread(values: list[float], digits: int) -> str:
    deviation = statistics.stdev(values) if len(values) > 1 else 0.0
    return f"{statistics.fmean(values):.{digits}f} ± {deviation:.{digits}f}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--mnist", type=Path, help="folder with MNIST's four files")
    parser.add_argument("--hidden", type=int, default=512, help="width of both hidden layers")
    parser.add_argument("--batch", type=int, default=128)
    parser.add_argument("--epochs", type=int, default=20)
    parser.add_argument("--rate", type=float, default=0.0003, help="learning rate; the guide's is 0.001")
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--log", type=Path, metavar="JSONL", help="keep each run here, and make none that is here")
    parser.add_argument("--curves", type=Path, metavar="SVG", help="draw the loss of each epoch under each policy")
    parser.add_argument("--loop", action="store_true", help="the custom loop instead of fit")
    parser.add_argument("--trace", type=Path, metavar="SVG", help="draw the loss scale over --steps steps, and stop")
    parser.add_argument("--steps", type=int, default=300, help="of --trace")
    parser.add_argument("--quick", action="store_true", help="small and short: does it run?")
    given = parser.parse_args()
    if given.quick:
        given.hidden, given.epochs, given.rate, given.steps = 64, 8, 0.001, 80
    digits = load(given.mnist)
    print(f"{digits.origin}: {len(digits.x)} to train on, {len(digits.x_test)} held out")
    if given.trace:
        scales, skipped = trace(digits, given.hidden, given.batch, given.steps)
        title = f"Loss scale, 784-{given.hidden}-{given.hidden}-10, RMSprop, mixed_float16"
        given.trace.write_text(loss_scale_chart(scales, skipped, title), encoding="utf-8")
        print(f"skipped {len(skipped)} of {len(scales)} steps: {skipped}; ends at 2^{np.log2(scales[-1]):.0f}")
        return
    how = (given.hidden, given.batch, given.epochs, given.rate, given.loop, digits.origin)
    found: dict[str, list[Outcome]] = {policy: [] for policy in POLICIES}
    for seed in range(given.seeds):
        for policy in POLICIES:
            outcome = outcome_of(Run(seed, policy, *how), digits, given.log)
            found[policy].append(outcome)
            curve = " ".join(f"{loss:.3f}" for loss in outcome.losses)
            print(f"seed {seed} {policy}: {curve}; {100 * outcome.accuracy:.2f} % {outcome.where}", flush=True)
    print(table(found))
    if given.curves:
        curves = {policy: [o.losses for o in outcomes] for policy, outcomes in found.items()}
        title = f"Loss of each epoch, 784-{given.hidden}-{given.hidden}-10, RMSprop: mean, and {given.seeds} seeds"
        given.curves.write_text(loss_chart(curves, title), encoding="utf-8")


if __name__ == "__main__":
    main()
