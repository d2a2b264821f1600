"""Export of Keras 3 models for training: every weight becomes a separate initializer, named by its Keras path.

A model of the torch backend is wrapped in a module that calls it as a function of its weights (`stateless_call`), and
`from_torch` exports the module. A model of another backend is saved, then loaded under the torch backend in a new
process.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from onnx import ModelProto

from amp_rewrite.errors import TrainingError
from amp_rewrite.files.model import Model
from amp_rewrite.train.arguments import checked_arguments
from amp_rewrite.train.interchange.torch_module import from_torch
from amp_rewrite.train.objective.parameters import MODULE_KEY

if TYPE_CHECKING:
    import keras

_ROWS, _SIZE = 2, 8
"""Example sizes of the first axis, and of other axes of unknown size."""
_OTHER_BACKENDS = ("tensorflow", "jax")
_PROGRAM = """
import sys, keras
from amp_rewrite.train import from_keras
from_keras(keras.saving.load_model(sys.argv[1], compile=False)).save(sys.argv[2], external_data=False)
"""


@checked_arguments()
def from_keras(model: keras.Model) -> Model:
    """Export a Keras 3 model with every weight as an initializer, ready for `Network` and `training_step`.

    All trainable weights are trained. `training_mode=True` puts Dropout and BatchNormalization into training mode; a
    BatchNormalization with `trainable=False` keeps its statistics. `model.set_weights(network.get_weights())` copies
    the trained values back. Under a backend other than torch, the model is saved and loaded again under the torch
    backend, so PyTorch must be installed, and custom layers must be registered in an importable module.

    Args:
        model: a built float32 model, either Sequential or Functional.

    Returns:
        The model; inputs and outputs keep their Keras names.

    Raises:
        TrainingError: Keras 3 or PyTorch is missing, or the model cannot be exported.

    Example:
        >>> import keras
        >>> from amp_rewrite.train import Network, from_keras
        >>> layers = [keras.Input((4,)), keras.layers.Dense(8, "relu"), keras.layers.Dense(3)]
        >>> network = Network(from_keras(keras.Sequential(layers)))
    """
    try:
        import keras
    except ImportError as cause:
        raise TrainingError("from_keras needs Keras 3; pip install keras torch onnxscript") from cause
    if not isinstance(model, keras.Model):
        raise TrainingError(f"{type(model).__name__} is not a Keras 3 model; use from_torch for a PyTorch module")
    if not model.built or not getattr(model, "inputs", None):
        raise TrainingError(
            "the Keras model does not declare its inputs; build a Sequential or Functional model from keras.Input"
        )
    low = next((layer for layer in model._flatten_layers() if layer.compute_dtype != "float32"), None)
    if low is not None:
        raise TrainingError(
            f"layer {low.name!r} computes in {low.compute_dtype} under a Keras policy; build the model in float32, and"
            " pass mixed_float16 to training_step, Network or set_policy instead"
        )
    backend = keras.backend.backend()
    if backend == "torch":
        return _exported(model)
    if backend not in _OTHER_BACKENDS:
        raise TrainingError(f"Keras's {backend!r} backend cannot be exported; set KERAS_BACKEND to torch or tensorflow")
    with tempfile.TemporaryDirectory() as folder:
        keras_file, onnx_file = Path(folder) / "model.keras", Path(folder) / "model.onnx"
        model.save(keras_file)
        environment = {**os.environ, "KERAS_BACKEND": "torch", "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
        command = [sys.executable, "-c", _PROGRAM, str(keras_file), str(onnx_file)]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
        if done.returncode:
            lines = done.stderr.strip().splitlines() or ["no message"]
            raise TrainingError(
                f"the model cannot be exported under Keras's torch backend: {lines[-1][:300]}; set KERAS_BACKEND=torch,"
                " build the model there, and read the full error"
            )
        return Model.load(ModelProto.FromString(onnx_file.read_bytes()))


def _exported(model: Any) -> Model:
    import torch

    weights = {weight.path: weight for weight in model.weights}
    if len(weights) != len(model.weights):
        raise TrainingError("two weights of the Keras model share a path; give their layers different names")
    trainable = {weight.path for weight in model.trainable_weights}
    names = [tensor.name for tensor in model.inputs]
    if len(names) == 1 and names[0].startswith(("keras_tensor", "input_layer")):
        names = ["x"]
    outputs = list(dict.fromkeys(getattr(model, "output_names", None) or [model.layers[-1].name]))
    if len(outputs) != len(model.outputs):
        outputs = [f"output_{i}" for i in range(len(model.outputs))]

    class Stateless(torch.nn.Module):  # type: ignore[misc]
        """The model as a function of its weights and inputs."""

        def __init__(self) -> None:
            super().__init__()
            for path, weight in weights.items():
                value = torch.from_numpy(np.array(weight.numpy()))
                if path in trainable:
                    self.register_parameter(path, torch.nn.Parameter(value))
                else:
                    self.register_buffer(path, value)

        def forward(self, **kwargs: Any) -> Any:
            tensors = {**self._parameters, **self._buffers}
            trained, fixed = (
                [tensors.get(v.path, v.value) for v in variables]
                for variables in (model.trainable_variables, model.non_trainable_variables)
            )
            inputs = [kwargs[name] for name in names]
            return model.stateless_call(trained, fixed, inputs[0] if len(inputs) == 1 else inputs, training=False)[0]

    example, dynamic = {}, {}
    for name, tensor in zip(names, model.inputs, strict=True):
        shape = [size or (_SIZE if axis else _ROWS) for axis, size in enumerate(tensor.shape)]
        values = np.random.default_rng(0).normal(size=shape) if "float" in tensor.dtype else np.ones(shape)
        example[name] = values.astype(tensor.dtype)
        dynamic[name] = {
            axis: f"{name}_{axis}" if axis else "batch" for axis, size in enumerate(tensor.shape) if size is None
        }
    with _layers_as_ops(torch):
        exported = from_torch(Stateless(), example, outputs=outputs, dynamic=dynamic, dropout=True)
    entry = next(p for p in exported.proto.metadata_props if p.key == MODULE_KEY)
    declared = json.loads(entry.value)
    entry.value = json.dumps({path: declared[path] for path in weights if path in declared})
    exported.proto.graph.name = model.name
    return exported


@contextmanager
def _layers_as_ops(torch: Any) -> Iterator[None]:
    """Make Keras's norms and dropouts call functions of torch, which are exported as one op each."""
    from keras import layers

    functional = torch.nn.functional

    def normalized(layer: Any, inputs: Any, training: Any = None, mask: Any = None) -> Any:
        if not layer.trainable or mask is not None or getattr(layer, "renorm", False):
            return originals[layers.BatchNormalization](layer, inputs, training=False, mask=mask)
        axis = layer.axis % inputs.ndim
        statistics = (layer.moving_mean.value, layer.moving_variance.value)
        affine = (layer.gamma.value if layer.scale else None, layer.beta.value if layer.center else None)
        result = functional.batch_norm(
            torch.movedim(inputs, axis, 1), *statistics, *affine, False, 1 - layer.momentum, layer.epsilon
        )
        return torch.movedim(result, 1, axis)

    def dropped(layer: Any, inputs: Any, training: Any = False) -> Any:
        spatial = getattr(layer, "_get_noise_shape", None)
        noise = layer.noise_shape if spatial is None else spatial(inputs)
        if not layer.rate:
            return inputs
        if noise is None:
            return functional.dropout(inputs, layer.rate, True)
        sizes = [full if size is None else size for full, size in zip(inputs.shape, noise, strict=True)]
        return inputs * functional.dropout(torch.ones(sizes), layer.rate, True)

    replacements: Mapping[Any, Any] = {
        layers.BatchNormalization: normalized,
        layers.Dropout: dropped,
        layers.SpatialDropout1D.__mro__[1]: dropped,
    }
    originals = {kind: kind.call for kind in replacements}
    try:
        for kind, call in replacements.items():
            kind.call = call
        yield
    finally:
        for kind, call in originals.items():
            kind.call = call
