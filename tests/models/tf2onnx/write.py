"""Write small Keras models as tf2onnx does: `python write.py [FOLDER]`. Needs tensorflow and tf2onnx."""

import sys
from pathlib import Path

import keras
import numpy as np
import onnx
import tensorflow as tf
import tf2onnx
from keras import layers


def models() -> dict[str, keras.Model]:
    """Return a CNN for images in NHWC, and a classifier of token sequences by a bidirectional LSTM."""
    keras.utils.set_random_seed(0)
    cnn = keras.Sequential(
        [
            keras.Input((12, 12, 3)),
            layers.Conv2D(8, 3, padding="same"),
            layers.BatchNormalization(),
            layers.ReLU(),
            layers.DepthwiseConv2D(3, strides=2, padding="same"),
            layers.ReLU(6.0),
            layers.MaxPooling2D(),
            layers.Conv2D(16, 1, activation="swish"),
            layers.GlobalAveragePooling2D(),
            layers.Dense(5, activation="softmax"),
        ]
    )
    lstm = keras.Sequential(
        [
            keras.Input((None,), dtype="int32"),
            layers.Embedding(30, 8),
            layers.Bidirectional(layers.LSTM(8, return_sequences=True)),
            layers.LSTM(8),
            layers.Dense(3, activation="softmax"),
        ]
    )
    return {"cnn": cnn, "lstm": lstm}


def main(folder: Path) -> None:
    """Write the models and two batches for each."""
    rng = np.random.default_rng(0)
    data = {"cnn": rng.normal(size=(2, 4, 12, 12, 3)).astype(np.float32), "lstm": rng.integers(0, 30, (2, 4, 7))}
    for name, model in models().items():
        kind = tf.int32 if name == "lstm" else tf.float32
        shape = (None, None) if name == "lstm" else (None, 12, 12, 3)
        signature = (tf.TensorSpec(shape, kind, name="x"),)
        for opset in (12, 17):
            exported, _ = tf2onnx.convert.from_function(
                tf.function(lambda x, model=model: model(x, training=False), input_signature=signature),
                input_signature=signature,
                opset=opset,
            )
            onnx.save(exported, folder / f"{name}_{opset}.onnx")
        np.savez(
            folder / f"{name}.npz",
            **{f"{i}/x": batch.astype(kind.as_numpy_dtype) for i, batch in enumerate(data[name])},
        )


if __name__ == "__main__":
    main(Path(sys.argv[1]) if len(sys.argv) > 1 else Path(__file__).parent)
