"""Held-out accuracy of Keras models trained by Keras and by this package, over seeds.

    KERAS_BACKEND=torch python benchmarks/run.py keras_accuracy [--models guide cnn] [--seeds 5] [--epochs 8]

This needs keras, torch, onnxscript and scikit-learn, and tensorflow for its backend. The models are the guide's network
with layers of 256, and a CNN with BatchNormalization and Dropout. The data are scikit-learn's 1,797 digits, with 360 of
them held out. A seed determines the weights and the order. Keras trains in float32. Here, both policies start from
Keras's weights, and train with the guide's code. On a CPU, float16 is emulated. The spread is the standard deviation
over seeds.
"""

from __future__ import annotations

import argparse
import statistics
from typing import Any

import numpy as np

POLICIES = ("float32", "mixed_float16")
Arrays = tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]


def guide(keras: Any) -> Any:
    inputs = keras.Input(shape=(8, 8, 1), name="digits")
    x = keras.layers.Flatten()(inputs)
    x = keras.layers.Dense(256, activation="relu", name="dense_1")(x)
    x = keras.layers.Dense(256, activation="relu", name="dense_2")(x)
    x = keras.layers.Dense(10, name="dense_logits")(x)
    return keras.Model(inputs=inputs, outputs=keras.layers.Activation("softmax", name="predictions")(x))


def cnn(keras: Any) -> Any:
    layers = keras.layers
    return keras.Sequential(
        [
            keras.Input((8, 8, 1)),
            layers.Conv2D(16, 3, padding="same", use_bias=False),
            layers.BatchNormalization(momentum=0.9),
            layers.ReLU(),
            layers.MaxPooling2D(),
            layers.Conv2D(32, 3, padding="same", use_bias=False),
            layers.BatchNormalization(momentum=0.9),
            layers.ReLU(),
            layers.Flatten(),
            layers.Dropout(0.3),
            layers.Dense(10, activation="softmax"),
        ]
    )


MODELS = {"guide": guide, "cnn": cnn}


def digits() -> Arrays:
    from sklearn.datasets import load_digits

    images, labels = load_digits(return_X_y=True)
    order = np.random.default_rng(0).permutation(len(images))
    images, labels = (images[order] / 16).astype(np.float32).reshape(-1, 8, 8, 1), labels[order].astype(np.int64)
    return images[360:], labels[360:], images[:360], labels[:360]


def by_keras(keras: Any, model: Any, data: Arrays, epochs: int) -> float:
    x, y, x_test, y_test = data
    model.compile(loss="sparse_categorical_crossentropy", optimizer=keras.optimizers.RMSprop(), metrics=["accuracy"])
    model.fit(x, y, batch_size=64, epochs=epochs, verbose=0)
    _, accuracy = model.evaluate(x_test, y_test, verbose=0)
    return float(accuracy)


def here(exported: Any, weights: list[np.ndarray], policy: str, data: Arrays, epochs: int, seed: int) -> float:
    from amp_rewrite.train import Network, RMSprop

    x, y, x_test, y_test = data
    model = Network(exported, policy=policy, training_mode=True, seed=seed)
    model.set_weights(weights)
    model.compile(loss="sparse_categorical_crossentropy", optimizer=RMSprop(epsilon_in_root=True), metrics=["accuracy"])
    model.fit(x, y, batch_size=64, epochs=epochs, seed=seed)
    _, accuracy = model.evaluate(x_test, y_test, verbose=0)
    return float(accuracy)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS))
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--epochs", type=int, default=8)
    args = parser.parse_args()
    import keras

    from amp_rewrite.train import from_keras

    data, backend = digits(), keras.backend.backend()
    print("| model | backend | Keras | float32 here | mixed_float16 here |\n|---|---|---|---|---|")
    for name in args.models:
        found: dict[str, list[float]] = {"keras": [], **{policy: [] for policy in POLICIES}}
        exported = None
        for seed in range(args.seeds):
            keras.utils.set_random_seed(seed)
            model = MODELS[name](keras)
            exported = exported or from_keras(model)
            weights = model.get_weights()
            for policy in POLICIES:
                found[policy].append(here(exported, weights, policy, data, args.epochs, seed))
            found["keras"].append(by_keras(keras, model, data, args.epochs))
        cells = [f"{100 * statistics.mean(own):.2f} ± {100 * statistics.stdev(own):.2f}%" for own in found.values()]
        print("| " + " | ".join((name, backend, *cells)) + " |", flush=True)


if __name__ == "__main__":
    main()
