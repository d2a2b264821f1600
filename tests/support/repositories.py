"""Small model repositories as exporters write them."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

SIZE = 128  # rows and columns of a weight: 64 KiB, which stays in its file


def net(path: Path, *, seed: int = 0, names: Sequence[str] = ("x", "y"), data: str = "") -> Path:
    """Write y = relu(x w) v; with `data`, its weights go to that file beside it, which other nets may share."""
    x, y = names
    draw = np.random.default_rng(seed)
    weights = {name: draw.standard_normal((SIZE, SIZE), np.float32) / SIZE for name in ("w", "v")}
    nodes = [
        helper.make_node("MatMul", [x, "w"], ["h"], "first"),
        helper.make_node("Relu", ["h"], ["r"], "relu"),
        helper.make_node("MatMul", ["r", "v"], [y], "second"),
    ]
    inputs, outputs = ([helper.make_tensor_value_info(name, 1, ["n", SIZE])] for name in (x, y))
    tensors = [numpy_helper.from_array(values, name) for name, values in weights.items()]
    graph = helper.make_graph(nodes, "g", inputs, outputs, tensors)
    proto = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
    path.parent.mkdir(parents=True, exist_ok=True)
    if data:
        (path.parent / data).write_bytes(b"".join(values.tobytes() for values in weights.values()))
        for number, tensor in enumerate(proto.graph.initializer):
            tensor.ClearField("raw_data")
            tensor.data_location = TensorProto.EXTERNAL
            for key, value in (("location", data), ("offset", number * 4 * SIZE**2), ("length", 4 * SIZE**2)):
                tensor.external_data.add(key=key, value=str(value))
    onnx.save_model(proto, path)
    return path


def repository(folder: Path) -> Path:
    """Write a repository of three models, two of them in a subfolder, with a config and a tokenizer file."""
    net(folder / "model.onnx")
    net(folder / "decoder" / "model.onnx", seed=1, names=("past_key_values.0.key", "present.0.key"))
    net(folder / "decoder" / "plain.onnx", seed=2)
    (folder / "config.json").write_text("{}")
    (folder / "decoder" / "vocab.txt").write_text("a\nb\n")
    return folder


def tree(folder: Path) -> dict[str, bytes]:
    """Return the content of all files below a folder by path."""
    return {
        path.relative_to(folder).as_posix(): path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()
    }
