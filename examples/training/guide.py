"""TensorFlow's mixed precision guide of 2020 with an ONNX model: the same network and optimizer, in both styles.

    python examples/training/guide.py                      # fit, in float32, float16 and bfloat16
    python examples/training/guide.py --loop               # the custom loop, with get_scaled_loss etc.
    python examples/training/guide.py --seeds 5            # compare the accuracies over seeds, in a table
    python examples/training/guide.py --seeds 5 --hidden 4096 --log runs.jsonl   # takes an hour, can be resumed
    python examples/training/guide.py --trace scale.svg    # show how the loss scale settles
    python examples/training/guide.py --mnist FOLDER --hidden 4096 --batch 8192 --epochs 5 --rate 0.001

The last command is the guide itself: 784-4096-4096-10 on MNIST with batches of 8192, for a GPU. The defaults are for a
CPU: layers of 512, batches of 128 with a lower learning rate, and scikit-learn's digits enlarged to 28 x 28 pixels. On
a CPU, float16 and bfloat16 are emulated (float32 kernels, with rounded results), which shows accuracy and overflow, but
not speed.
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
    """Build the guide's network from image [batch, 784] to logits [batch, 10], with Keras's Glorot uniform weights."""
    # In the guide, the last layer and the softmax are float32. Here the loss appended to the model always is.
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
    """The results of a run: the mean loss of each epoch, the held-out accuracy, the steps skipped, and the device."""

    losses: list[float]
    accuracy: float
    skipped: int
    where: str


@dataclass(frozen=True)
class Run:
    """One training from scratch. `rate` is the learning rate; `loop` selects the custom loop."""

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
    """Train the short way: `fit` runs the whole step as one graph."""
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
    """Train the long way, following the guide line by line."""
    loss = ModelLoss.of(network(run.hidden, run.seed), LOSS, policy=run.policy)
    # only float16 needs a loss scale: bfloat16 has float32's range
    optimizer = LossScaleOptimizer(RMSprop(run.rate), "dynamic" if run.policy == "mixed_float16" else 1)
    losses, skipped = [], 0
    for epoch in range(run.epochs):
        history = []
        for rows in digits.batches(run.batch, seed=1000 * run.seed + epoch):
            loss_now = loss.on(rows)
            history.append(float(loss_now()))
            scaled_loss = optimizer.get_scaled_loss(loss_now)
            scaled_gradients = scaled_loss.gradients(loss.variables, np.float32(1))
            gradients = optimizer.get_unscaled_gradients(scaled_gradients)
            iterations = optimizer.iterations
            optimizer.apply_gradients(zip(gradients, loss.variables, strict=True))
            skipped += optimizer.iterations == iterations
        losses.append(statistics.fmean(history))
    weights = {v.name: v.numpy() for v in loss.variables}
    return Outcome(losses, float((logits(weights, digits.x_test).argmax(1) == digits.y_test).mean()), skipped, "")


def logits(weights: dict[str, np.ndarray], x: np.ndarray) -> np.ndarray:
    """Run the network in numpy, to evaluate the weights from the loop."""
    for number in (1, 2):
        x = np.maximum(x @ weights[f"w{number}"] + weights[f"b{number}"], 0)
    return x @ weights["w3"] + weights["b3"]


def trace(digits: Digits, hidden: int, batch: int, steps: int) -> tuple[list[float], list[int]]:
    """Return the loss scale of each step, and the indices of the skipped steps.

    The scale starts too high, at 2**24, and doubles after 20 finite steps instead of 2000. So a short run shows the
    behavior of a long one: a few skipped steps at first, and later one now and then.
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
    """Read the runs in a log, one per line."""
    lines = log.read_text("utf-8").splitlines() if log is not None and log.exists() else []
    entries = [json.loads(line) for line in lines]
    return {Run(**entry["run"]): Outcome(**entry["outcome"]) for entry in entries}


def outcome_of(run: Run, digits: Digits, log: Path | None) -> Outcome:
    """Return the run's outcome from the log, or train and log it."""
    outcome = logged(log).get(run)
    if outcome is not None:
        return outcome
    outcome = run.trained(digits)
    if log is not None:
        with log.open("a", encoding="utf-8") as lines:
            lines.write(json.dumps({"run": asdict(run), "outcome": asdict(outcome)}) + "\n")
    return outcome


def table(found: dict[str, list[Outcome]]) -> str:
    """Format means and deviations over seeds, with differences from float32 at the same seed."""
    lines = [
        "| policy | loss, last epoch | accuracy | accuracy minus float32's | steps skipped |",
        "|---|---|---|---|---|",
    ]
    for policy, outcomes in found.items():
        accuracies = [o.accuracy for o in outcomes]
        differences = [a - o.accuracy for a, o in zip(accuracies, found["float32"], strict=True)]
        losses = _spread([o.losses[-1] for o in outcomes], 4)
        percent = _spread([100 * a for a in accuracies], 2)
        points = _spread([100 * d for d in differences], 2)
        lines.append(f"| {policy} | {losses} | {percent}% | {points} | {sum(o.skipped for o in outcomes)} |")
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
    parser.add_argument("--log", type=Path, metavar="JSONL", help="log each run here, and skip the runs already logged")
    parser.add_argument("--curves", type=Path, metavar="SVG", help="draw the loss of each epoch under each policy")
    parser.add_argument("--loop", action="store_true", help="use the custom loop instead of fit")
    parser.add_argument("--trace", type=Path, metavar="SVG", help="draw the loss scale over --steps steps, and exit")
    parser.add_argument("--steps", type=int, default=300, help="number of steps for --trace")
    parser.add_argument("--quick", action="store_true", help="run a small and short version, as a smoke test")
    args = parser.parse_args()
    if args.quick:
        args.hidden, args.epochs, args.rate, args.steps = 64, 8, 0.001, 80
    digits = load(args.mnist)
    print(f"{digits.origin}: {len(digits.x)} to train on, {len(digits.x_test)} held out")
    if args.trace:
        scales, skipped = trace(digits, args.hidden, args.batch, args.steps)
        title = f"Loss scale, 784-{args.hidden}-{args.hidden}-10, RMSprop, mixed_float16"
        args.trace.write_text(loss_scale_chart(scales, skipped, title), encoding="utf-8")
        print(f"skipped {len(skipped)} of {len(scales)} steps: {skipped}; ends at 2^{np.log2(scales[-1]):.0f}")
        return
    settings = (args.hidden, args.batch, args.epochs, args.rate, args.loop, digits.origin)
    found: dict[str, list[Outcome]] = {policy: [] for policy in POLICIES}
    for seed in range(args.seeds):
        for policy in POLICIES:
            outcome = outcome_of(Run(seed, policy, *settings), digits, args.log)
            found[policy].append(outcome)
            curve = " ".join(f"{loss:.3f}" for loss in outcome.losses)
            print(f"seed {seed} {policy}: {curve}; {100 * outcome.accuracy:.2f}% {outcome.where}", flush=True)
    print(table(found))
    if args.curves:
        curves = {policy: [o.losses for o in outcomes] for policy, outcomes in found.items()}
        title = f"Loss of each epoch, 784-{args.hidden}-{args.hidden}-10, RMSprop: mean, and {args.seeds} seeds"
        args.curves.write_text(loss_chart(curves, title), encoding="utf-8")


if __name__ == "__main__":
    main()
