"""Export of transformers' models for training: the example, the dimensions and the outputs follow from the model."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from amp_rewrite.errors import TrainingError
from amp_rewrite.files.model import Model
from amp_rewrite.train.door import door
from amp_rewrite.train.interchange.torch_module import OPSET, from_torch

if TYPE_CHECKING:
    import torch

_ROWS, _TOKENS = 2, 16
_TEXT, _IMAGE = "input_ids", "pixel_values"
_EAGER = "eager"


@door()
def from_transformers(
    model: torch.nn.Module,
    *,
    example: Mapping[str, Any] | None = None,
    dynamic: Mapping[str, Mapping[int, str]] | None = None,
    dropout: bool = False,
    opset: int = OPSET,
) -> Model:
    """Export a model of Hugging Face's transformers with every parameter bound, ready for `training_step`.

    A text model takes input_ids and attention_mask [batch, tokens], a vision model pixel_values [batch, channels,
    height, width]. The outputs are the tensors of the model's result: logits, or last_hidden_state. Where PyTorch
    cannot export the attention that the model is set to, such as that of T5 and Swin, its "eager" one is exported.

    Args:
        model: a PreTrainedModel, in float32.
        example: inputs by name; needed for models of other inputs.
        dynamic: as `from_torch` takes it; by default batch and tokens.
        dropout: as `from_torch` takes it.
        opset: the ai.onnx opset.

    Returns:
        The model.

    Raises:
        TrainingError: the model is not one of transformers, its inputs need an example, or as `from_torch` raises it.

    Example:
        >>> from transformers import GPT2Config, GPT2LMHeadModel
        >>> from amp_rewrite.train import from_transformers, training_step
        >>> net = GPT2LMHeadModel(GPT2Config(vocab_size=50, n_positions=32, n_embd=16, n_layer=1, n_head=2))
        >>> step = training_step(from_transformers(net), loss="cross_entropy(logits, labels, axis=-1)")
        >>> step.batch
        ('input_ids', 'attention_mask', 'labels')
    """
    config = getattr(model, "config", None)
    if config is None or not hasattr(model, "main_input_name"):
        raise TrainingError(f"not a model of transformers: {type(model).__name__}; use from_torch(module, example)")
    inputs = dict(example) if example is not None else _example(model, config)
    if dynamic is None:
        dynamic = {name: _axes(name) for name in inputs}
    with _without_cache(config):
        try:
            return from_torch(model, inputs, dynamic=dynamic, dropout=dropout, opset=opset)
        except TrainingError:
            own = getattr(config, "_attn_implementation", _EAGER)
            if own == _EAGER or not hasattr(model, "set_attn_implementation"):
                raise
            model.set_attn_implementation(_EAGER)
            try:
                return from_torch(model, inputs, dynamic=dynamic, dropout=dropout, opset=opset)
            finally:
                model.set_attn_implementation(own)


@contextmanager
def _without_cache(config: Any) -> Iterator[None]:
    parts: list[Any] = [config, getattr(config, "text_config", None)]
    caching = [(part, part.use_cache) for part in parts if hasattr(part, "use_cache")]
    try:
        for part, _ in caching:
            part.use_cache = False
        yield
    finally:
        for part, own in caching:
            part.use_cache = own


def _axes(name: str) -> dict[int, str]:
    return {0: "batch", 1: "tokens"} if name in (_TEXT, "attention_mask", "token_type_ids") else {0: "batch"}


def _example(model: Any, config: Any) -> dict[str, Any]:
    import torch

    if model.main_input_name == _TEXT:
        most = getattr(config, "max_position_embeddings", None) or getattr(config, "n_positions", None) or _TOKENS
        shape = (_ROWS, min(_TOKENS, int(most)))
        return {_TEXT: torch.ones(shape, dtype=torch.long), "attention_mask": torch.ones(shape, dtype=torch.long)}
    if model.main_input_name == _IMAGE and hasattr(config, "image_size"):
        size = config.image_size
        height, width = size if isinstance(size, (list, tuple)) else (size, size)
        return {_IMAGE: torch.zeros(_ROWS, getattr(config, "num_channels", 3), height, width)}
    raise TrainingError(
        f"{type(model).__name__} takes {model.main_input_name!r}, for which no example is known; pass one as `example`"
    )
