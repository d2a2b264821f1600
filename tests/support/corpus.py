"""Every model of the tests by name: hand-written, exported and built ones."""

import numpy as np
import onnx
import onnx.parser
from onnx import ModelProto, TensorProto, helper, numpy_helper

from support.paths import ROOT, TESTS

TEXT_MODELS = tuple(sorted(path.stem for path in (TESTS / "models_text").glob("*.onnxtxt")))
EXPORTED = tuple(
    sorted(
        str(path.relative_to(ROOT))
        for folder in (TESTS / "models", ROOT / "examples" / "models")
        for path in folder.glob("*.onnx")
    )
)
KINDS = ("bert_ts13", "cnn_external_dynamo22", "gpt2_ts17", "if_ts13", "llama_dynamo21", "loop_dynamo21", "lstm_ts13")
KINDS += ("moe_dynamo21", "t5_dynamo18", "unet_ts15", "vit_dynamo22", "whisper_step_dynamo20")
"""One exported model of each architecture, of both exporters."""


def text_model(name: str) -> ModelProto:
    """Parse a model from `models_text`."""
    return onnx.parser.parse_model((TESTS / "models_text" / f"{name}.onnxtxt").read_text("utf-8"))


def exported(name: str) -> ModelProto:
    """Load a model of `models` or of the examples with its weights."""
    return onnx.load(ROOT / name)


def with_sparse_weight() -> ModelProto:
    """A MatMul whose weight is a sparse initializer."""
    model = text_model("tied_weights")
    dense = numpy_helper.to_array(model.graph.initializer[0])
    diagonal = np.zeros_like(dense)
    np.fill_diagonal(diagonal, dense.diagonal())
    at = np.flatnonzero(diagonal)
    values = helper.make_tensor("w", TensorProto.FLOAT, [at.size], diagonal.ravel()[at])
    indices = helper.make_tensor("w_at", TensorProto.INT64, [at.size], at)
    del model.graph.initializer[:]
    model.graph.sparse_initializer.append(helper.make_sparse_tensor(values, indices, list(dense.shape)))
    return model


def with_everything_beside_the_graph() -> ModelProto:
    """A model with training_info, quantization annotations, metadata, doc strings and a second opset import."""
    model = text_model("value_info")
    model.producer_name, model.producer_version, model.doc_string = "someone", "7", "words"
    model.domain, model.model_version = "there", 3
    model.metadata_props.add(key="licence", value="any")
    model.opset_import.add(domain="elsewhere", version=2)
    model.graph.doc_string = "words about the graph"
    model.graph.node[0].doc_string = "words about a node"
    model.graph.node[0].metadata_props.add(key="from", value="layer 1")
    model.graph.input[0].doc_string = "words about an input"
    model.graph.metadata_props.add(key="graph", value="g")
    annotation = model.graph.quantization_annotation.add(tensor_name="a")
    annotation.quant_parameter_tensor_names.add(key="SCALE_TENSOR", value="w")
    training = model.training_info.add()
    training.algorithm.name = "step"
    training.algorithm.node.append(helper.make_node("Identity", ["w"], ["w_new"], name="update"))
    training.algorithm.output.append(helper.make_tensor_value_info("w_new", TensorProto.FLOAT, [8, 8]))
    training.update_binding.add(key="w", value="w_new")
    return model


BUILT = {"sparse_weight": with_sparse_weight, "everything_beside": with_everything_beside_the_graph}
