"""Models of Keras as `from_keras` exports them: they compute and train as in Keras, and go back."""

import os
import subprocess
import sys
from typing import Any

import numpy as np
import pytest

from amp_rewrite.errors import TrainingError
from amp_rewrite.train.interchange.keras_model import from_keras
from amp_rewrite.train.keras.network import Network
from amp_rewrite.train.update.optimizers import SGD

pytestmark = [pytest.mark.torch, pytest.mark.slow, pytest.mark.filterwarnings("ignore")]

PROGRAM = """
import numpy as np, keras
from keras import layers
from amp_rewrite.train import Network, from_keras
inputs = keras.Input((4,))
model = keras.Model(inputs, layers.Dense(3, activation="softmax")(layers.Dense(5, activation="relu")(inputs)))
network, x = Network(from_keras(model)), np.eye(4, dtype=np.float32)
np.testing.assert_allclose(model.predict(x, verbose=0), network.predict(x), rtol=1e-5, atol=1e-6)
assert [v.name for v in network.trainable_variables] == [w.path for w in model.trainable_weights]
print(keras.backend.backend())
"""


@pytest.fixture(scope="module")
def keras() -> Any:
    pytest.importorskip("torch")
    os.environ.setdefault("KERAS_BACKEND", "torch")
    keras = pytest.importorskip("keras")
    if keras.backend.backend() != "torch":
        pytest.skip("Keras runs on another backend here")
    return keras


def _convolutional(keras: Any) -> Any:
    layers = keras.layers
    return keras.Sequential(
        [
            keras.Input((8, 8, 1)),
            layers.Conv2D(4, 3, padding="same", use_bias=False),
            layers.BatchNormalization(momentum=0.5),
            layers.ReLU(),
            layers.SpatialDropout2D(0.5),
            layers.GlobalAveragePooling2D(),
            layers.Dropout(0.5),
            layers.Dense(3, activation="softmax"),
        ]
    )


def test_norms_move_and_layers_drop_in_training_and_weights_go_back(keras: Any) -> None:
    keras.utils.set_random_seed(0)
    model = _convolutional(keras)
    exported = from_keras(model)
    kinds = [node.op_type for node in exported.proto.graph.node]
    assert (kinds.count("BatchNormalization"), kinds.count("Dropout")) == (1, 2)
    network = Network(exported, policy="float32", training_mode=True)
    assert len(network.trainable_variables) == len(model.trainable_weights) == 5
    assert [w.shape for w in network.get_weights()] == [tuple(w.shape) for w in model.weights]
    x, y = np.random.default_rng(0).normal(size=(32, 8, 8, 1)).astype(np.float32), np.arange(32) % 3
    network.compile(SGD(0.1), "sparse_categorical_crossentropy")
    network.fit(x, y, batch_size=16, epochs=2)
    before = model.get_weights()
    model.set_weights(network.get_weights())
    assert all((a != b).any() for a, b in zip(model.get_weights(), before, strict=True))
    np.testing.assert_allclose(model.predict(x, verbose=0), network.predict(x), rtol=1e-4, atol=1e-5)


def test_steps_are_those_of_keras(keras: Any) -> None:
    inputs = keras.Input((6,), name="digits")
    hidden = keras.layers.BatchNormalization(momentum=0.5)(keras.layers.Dense(8, activation="tanh")(inputs))
    model = keras.Model(inputs, keras.layers.Dense(3, activation="softmax")(hidden))
    network = Network(from_keras(model), policy="float32", training_mode=True)
    x, y = np.random.default_rng(1).normal(size=(48, 6)).astype(np.float32), np.arange(48) % 3
    network.compile(SGD(0.1), "sparse_categorical_crossentropy")
    ours = network.fit(x, y, batch_size=16, epochs=3, shuffle=False)
    model.compile(keras.optimizers.SGD(0.1), "sparse_categorical_crossentropy")
    theirs = model.fit(x, y, batch_size=16, epochs=3, shuffle=False, verbose=0)
    np.testing.assert_allclose(ours.history["loss"], theirs.history["loss"], rtol=1e-4)
    for one, other in zip(network.get_weights(), model.get_weights(), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-3, atol=1e-4)


def test_what_can_not_be_exported_is_refused(keras: Any) -> None:
    low = keras.Sequential([keras.Input((4,)), keras.layers.Dense(2, dtype="mixed_float16", name="low")])
    with pytest.raises(TrainingError, match="layer 'low' computes in float16 by Keras's own policy; build the model"):
        from_keras(low)
    with pytest.raises(TrainingError, match="not a model of Keras 3: Dense; use from_torch"):
        from_keras(keras.layers.Dense(2))
    with pytest.raises(TrainingError, match=r"does not tell its inputs; build it from keras\.Input"):
        from_keras(keras.Sequential([keras.layers.Dense(2)]))


@pytest.mark.parametrize("backend", ["tensorflow", "jax"])
def test_models_of_other_backends_are_loaded_under_torch(keras: Any, backend: str) -> None:
    pytest.importorskip(backend)
    environment = {**os.environ, "KERAS_BACKEND": backend}
    done = subprocess.run([sys.executable, "-c", PROGRAM], env=environment, capture_output=True, text=True, check=False)
    assert done.stdout.split() == [backend], done.stderr
