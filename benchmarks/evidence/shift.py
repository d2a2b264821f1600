"""Range shifting on planted models with values beyond float16, compared with keeping the ops in float32.

    python benchmarks/run.py shift [NAME ...]    # NAME: measure only these, and keep the other rows

This needs torch and transformers for the export. Each model is small, with seeded weights, and has outliers like those
of trained models: two channels of the residual stream, or the hidden values of feed-forward layers, reach 2·10⁵. `bits`
compares the shifted model before it is lowered with the unshifted one, in onnxruntime on one thread without
optimizations. `optimized` is the largest difference at the default level, relative to the largest output. In `float16
throughout`, every op with a float16 kernel is float16. Low precision is emulated.
"""

from __future__ import annotations

import argparse
import json
import logging
import sys
import tempfile
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import amp_rewrite
from amp_rewrite.files.model import Model
from amp_rewrite.ir.view import View
from amp_rewrite.pipeline.conversion import Draft
from amp_rewrite.pipeline.measured import shift_draft
from amp_rewrite.reports.work import flops
from amp_rewrite.runtime.runner import Runner, SessionOptions
from amp_rewrite.settings.choices import HEADROOM
from amp_rewrite.settings.request import Request
from benchmarks.architectures.architecture import Architecture, Built, livened, seed_of
from benchmarks.architectures.export import Attempt, dynamo
from benchmarks.architectures.speech import WHISPER, called, heard
from benchmarks.architectures.text import text, translation
from benchmarks.shared import measure
from support.hard_models import halved
from support.shifting import bits

LARGEST = 195_094.0
TOLERANCE = 2e-2
OPSET = 18
WIDE = {"hidden_size": 128, "num_hidden_layers": 4, "intermediate_size": 256}
CHANNELS = (3, 5)
ROUND = 2.0**17 + 2.0**16
"""The magnitude of outlier channels. It must be exact, since rounding it would shift the mean in norms."""


@dataclass(frozen=True, slots=True)
class Planted:
    """An architecture, and the modules that get outliers, by the end of their names.

    `how`: "channels" (two channels of a module's output, with opposite signs) or "all" (the whole output). `writers`
    write to the residual stream; `readers` are the norms that read it.
    """

    architecture: Architecture
    where: tuple[str, ...]
    how: str = "channels"
    writers: tuple[str, ...] = ()
    readers: tuple[str, ...] = ()
    half: bool = False


class Autoencoder(nn.Module):
    """The decoder of an image autoencoder: group norms, SiLU, attention, upsampling, and a final norm."""

    def __init__(self, width: int = 64) -> None:
        super().__init__()
        self.entry = nn.Conv2d(4, width, 3, padding=1)
        self.norms = nn.ModuleList(nn.GroupNorm(8, width) for _ in range(5))
        self.convs = nn.ModuleList(nn.Conv2d(width, width, 3, padding=1) for _ in range(4))
        self.mix_norm = nn.GroupNorm(8, width)
        self.qkv, self.out = nn.Conv2d(width, 3 * width, 1), nn.Conv2d(width, width, 1)
        self.exit = nn.Conv2d(width, 3, 3, padding=1)

    def forward(self, latent: Tensor) -> Tensor:
        x = self.entry(latent)
        q, k, v = (y.flatten(2).transpose(1, 2) for y in self.qkv(self.mix_norm(x)).chunk(3, dim=1))
        mixed = F.scaled_dot_product_attention(q[:, None], k[:, None], v[:, None])[:, 0]
        x = x + self.out(mixed.transpose(1, 2).reshape(x.shape))
        for i, conv in enumerate(self.convs):
            x = x + conv(F.silu(self.norms[i](x)))
            if i % 2:
                x = F.interpolate(x, scale_factor=2.0, mode="nearest")
        return self.exit(F.silu(self.norms[4](x)))


def _autoencoder() -> Built:
    torch.manual_seed(seed_of("vae"))
    return livened(Autoencoder()), {"latent": torch.randn(1, 4, 8, 8)}


def _registers() -> Built:
    from transformers import Dinov2WithRegistersConfig, Dinov2WithRegistersModel

    torch.manual_seed(seed_of("vit"))
    config = Dinov2WithRegistersConfig(
        hidden_size=128, num_hidden_layers=4, num_attention_heads=4, image_size=64, patch_size=8, mlp_ratio=2
    )

    class Eyes(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.model = Dinov2WithRegistersModel(config)

        def forward(self, pixel_values: Tensor) -> Tensor:
            return self.model(pixel_values).last_hidden_state

    return livened(Eyes()), {"pixel_values": torch.randn(1, 3, 64, 64)}


_GROUPED = {"num_key_value_heads": 2, "head_dim": 32}
_LLAMA = text("llama", "LlamaForCausalLM", **WIDE, **_GROUPED)
PLANTED: Mapping[str, Planted] = {
    "t5": Planted(
        translation(
            "t5",
            "T5ForConditionalGeneration",
            d_model=512,
            d_kv=64,
            d_ff=1024,
            num_layers=6,
            num_heads=8,
            relative_attention_num_buckets=32,
        ),
        ("encoder.block.1.layer.1.DenseReluDense.wi", "encoder.block.4.layer.1.DenseReluDense.wi"),
        "all",
    ),
    "llama": Planted(
        _LLAMA,
        ("embed_tokens",),
        writers=("embed_tokens", "o_proj", "down_proj"),
        readers=("input_layernorm", "post_attention_layernorm", "model.norm"),
    ),
    "gemma3": Planted(
        text(
            "gemma3",
            "Gemma3ForCausalLM",
            config="Gemma3TextConfig",
            sliding_window=4,
            query_pre_attn_scalar=32,
            **WIDE,
            **_GROUPED,
        ),
        ("embed_tokens",),
        writers=("embed_tokens", "post_attention_layernorm", "post_feedforward_layernorm"),
        readers=("input_layernorm", "pre_feedforward_layernorm", "model.norm"),
    ),
    "gpt2": Planted(
        text("gpt2", "GPT2LMHeadModel", n_embd=128, n_layer=4, n_head=4),
        ("h.1.mlp.c_proj",),
        writers=("c_proj", "wte", "wpe"),
        readers=("ln_1", "ln_2", "ln_f"),
    ),
    "vit": Planted(
        Architecture("vit", _registers),
        ("layer.1.mlp.fc2",),
        writers=("output.dense", "fc2", "projection", "_token", "_tokens", "position_embeddings"),
        readers=("norm1", "norm2", "layernorm"),
    ),
    "vae": Planted(Architecture("vae", _autoencoder), ("convs.1",), "all"),
    "whisper": Planted(
        called(
            "whisper",
            "WhisperForConditionalGeneration",
            heard(),
            **{**WHISPER, "d_model": 128, "encoder_ffn_dim": 256, "decoder_ffn_dim": 256},
        ),
        ("encoder.layers.0.fc2",),
        writers=("out_proj", "fc2", "conv2", "embed_positions", "embed_tokens"),
        readers=("layer_norm",),
    ),
    "llama in float16": Planted(_LLAMA, ("layers.1.mlp.down_proj",), "all", half=True),
    "xlm_roberta_xl": Planted(
        text("xlm_roberta_xl", "XLMRobertaXLForMaskedLM", **WIDE),
        ("layer.1.output.dense",),
        writers=("output.dense", "word_embeddings", "position_embeddings", "token_type_embeddings"),
        readers=("self_attn_layer_norm", "LayerNorm"),
    ),
}


# -- planting ----------------------------------------------------------------------------------------


def plant(module: nn.Module, inputs: Mapping[str, Tensor], one: Planted) -> None:
    """Plant the outliers in a module, in place."""
    with torch.no_grad():
        for where in one.where:
            writer = next(part for name, part in module.named_modules() if name.endswith(where))
            if one.how == "all":
                _scale(module, inputs, writer)
            else:
                _set_channels(module, inputs, writer, one)


def _scale(module: nn.Module, inputs: Mapping[str, Tensor], writer: nn.Module) -> None:
    """Scale a module's output to the largest value."""
    factor = LARGEST / float(_traffic(module, inputs, writer)[1].abs().max())
    for parameter in writer.parameters(recurse=False):
        parameter *= factor


def _set_channels(module: nn.Module, inputs: Mapping[str, Tensor], writer: nn.Module, one: Planted) -> None:
    """Give two channels of the residual stream large values, and adjust the stream's norms to compensate.

    The values come from a product or an embedding; nothing else writes to these channels.
    """
    readers = [part for name, part in module.named_modules() if name.endswith(one.readers)]
    before = {part: _size(_traffic(module, inputs, part)[0]) for part in readers}
    for name, part in module.named_modules():
        if name.endswith(one.writers) and getattr(part, "weight", None) is not None:
            _clear_channels(part)
    for name, parameter in module.named_parameters():
        if name.endswith(one.writers) and name.endswith(("token", "tokens", "embeddings")):
            parameter[..., CHANNELS] = 0
    for channel, sign in zip(CHANNELS, (1, -1), strict=True):
        if isinstance(writer, nn.Embedding):
            writer.weight[:, channel] = sign * ROUND / getattr(writer, "scalar_embed_scale", 1.0)
        else:
            rows = writer.weight.T if "Conv1D" in type(writer).__name__ else writer.weight
            read = _traffic(module, inputs, writer)[0].flatten(0, -2)
            rows[channel] = read.mean(0) * (sign * LARGEST / float((read @ read.mean(0)).abs().max()))
    offset = 1.0 if one.architecture.name.startswith("gemma") else 0.0
    for part in readers:
        factor = _size(_traffic(module, inputs, part)[0]) / before[part]
        if factor > 2:
            gain = (offset + part.weight) * factor
            gain[list(CHANNELS)] *= 0.1 / factor
            part.weight.copy_(gain - offset)


def _clear_channels(part: nn.Module) -> None:
    """Stop a module from writing to the channels."""
    if part.weight.ndim == 1:
        part.weight[list(CHANNELS)] = -1.0  # Gemma's norms multiply by 1 + weight
        return
    transposed = isinstance(part, nn.Embedding) or "Conv1D" in type(part).__name__
    rows = part.weight.T if transposed else part.weight
    rows[list(CHANNELS)] = 0
    if getattr(part, "bias", None) is not None:
        part.bias[list(CHANNELS)] = 0


def _size(read: Tensor) -> float:
    return float(read.square().mean(-1).sqrt().median())


def _traffic(module: nn.Module, inputs: Mapping[str, Tensor], part: nn.Module) -> tuple[Tensor, Tensor]:
    """Return the input and the output of a part of a module."""
    seen: list[tuple[Tensor, Tensor]] = []
    hook = part.register_forward_hook(lambda _, read, out: seen.append((read[0].detach(), out.detach())))
    with torch.no_grad():
        module(*inputs.values())
    hook.remove()
    return seen[0]


# -- measuring ---------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Row:
    """One model. Errors are relative to the largest output; shares are percentages of the products' FLOPs."""

    model: str
    ops: int
    largest: float
    plain: str
    low_before: float
    error_before: str
    low: float
    error: str
    error_without_outliers: str
    casts: int
    casts_before: int
    casts_without_outliers: int
    muls: int
    bits: bool
    regions: tuple[str, ...]
    throughout: str = ""
    optimized: float | None = None


def measured(name: str, folder: Path) -> Row:
    """Measure one model."""
    one = PLANTED[name]
    path = folder / "model.onnx"
    clean = _exported(one, path, outliers=False)
    model = _exported(one, path, outliers=True)
    module, inputs = one.architecture.build()
    del module
    batch = {name: value.numpy() for name, value in inputs.items()}
    plain = batch
    if one.half:
        model = halved(model)  # a half model is decided again as float32, so compare with that
        batch = {k: v.astype(np.float16) if v.dtype == np.float32 else v for k, v in batch.items()}
    ranges, usual = amp_rewrite.calibrate(model, batch), amp_rewrite.calibrate(clean, plain)
    none = amp_rewrite.convert(model, ranges=ranges, shift="none")
    auto = amp_rewrite.convert(model, ranges=ranges)
    without = amp_rewrite.convert(clean, ranges=usual)
    reference = _float32(model, one)
    findings = [finding for finding in auto.report.findings if finding.kind == "shifted"]
    before = Draft.of(model, Request.of(), widen=one.half)
    after = shift_draft(Draft.of(model, Request.of()), ranges, HEADROOM).draft
    graphs = [draft.view.model.to_proto() for draft in (before, after)]
    muls = len(graphs[1].graph.node) - len(graphs[0].graph.node)
    return Row(
        name,
        len(model.graph.node),
        max(r.absmax for r in ranges.values.values() if r.absmax < 1e30),
        _error(reference, model if one.half else amp_rewrite.convert(model, shift="none").model, batch),
        _share(none),
        _error(reference, none.model, batch),
        _share(auto),
        _error(reference, auto.model, batch),
        _error(clean, without.model, plain),
        _casts(auto),
        _casts(none),
        _casts(without),
        muls,
        bits(graphs[0], batch) == bits(graphs[1], batch),
        tuple(f"{finding.subject}: {finding.message}" for finding in findings),
        _error(reference, model if one.half else _throughout(model), batch),
        _optimized(graphs, batch),
    )


def _throughout(model: onnx.ModelProto) -> onnx.ModelProto:
    return amp_rewrite.convert(model, level="unsafe-force-all", safety="none", shift="none").model


def _optimized(graphs: Sequence[onnx.ModelProto], batch: Mapping[str, Any]) -> float:
    """Return the largest difference of outputs at the default level, relative to the largest value of an output."""
    options = SessionOptions(threads=1, spinning=False)
    runs = [Runner.open(Model.load(graph), options).run(batch) for graph in graphs]
    return max(
        float(np.abs(np.asarray(first, np.float64) - second).max() / max(np.abs(first).max(), 1e-30))
        for first, second in zip(*(run.values() for run in runs), strict=True)
        if first.dtype.kind == "f" and first.size
    )


def _tempered(module: nn.Module) -> None:
    """Make T5's queries as small as in its own initialization, since it does not scale its scores."""
    for name, part in module.named_modules():
        if name.endswith("Attention.q"):
            with torch.no_grad():
                part.weight *= 0.125


def _float32(model: onnx.ModelProto, one: Planted) -> onnx.ModelProto:
    return amp_rewrite.emulate(model, rounding=False, io="float32").to_proto() if one.half else model


def _exported(one: Planted, path: Path, *, outliers: bool) -> onnx.ModelProto:
    module, inputs = one.architecture.build()
    _tempered(module)
    if outliers:
        plant(module, inputs, one)
    with warnings.catch_warnings(), torch.no_grad():
        warnings.simplefilter("ignore")
        dynamo(one.architecture, module, inputs, path, Attempt(OPSET, fixed=True))
    return onnx.load(path)


def _casts(converted: amp_rewrite.Converted) -> int:
    totals = converted.report.totals
    return totals.casts_to_low + totals.casts_to_float32


def _share(converted: amp_rewrite.Converted) -> float:
    """Return the percentage of FLOPs in float16."""
    view = View.of(Model.load(converted.model))
    whole = low = 0.0
    for op in view.ops:
        work = flops(view, op)
        whole += work
        dtypes = [dtype for v in op.operands if (dtype := view.dtype(v)) is not None and dtype.floating]
        low += work if dtypes and all(dtype.low for dtype in dtypes[:2]) else 0.0
    return round(100 * low / whole, 2)


def _error(reference: Any, candidate: Any, batch: Mapping[str, Any]) -> str:
    verdict = amp_rewrite.verify(reference, candidate, batch, tolerance=TOLERANCE, emulate=True)
    return f"{verdict.largest:.2g}" if verdict.ok else verdict.because


def _short(error: str) -> str:
    """Shorten an error; for outputs within the tolerance, `_error` returns a number."""
    return "not finite" if "NaN or infinite" in error else error.partition("error ")[2].partition(" of")[0] or error


def table(rows: Sequence[Row]) -> list[str]:
    """Return the rows as a Markdown table."""
    head = (
        "model",
        "ops",
        "largest value",
        "by the lists",
        "float16 throughout",
        "FLOPs low, unshifted",
        "error",
        "FLOPs low, shifted",
        "error",
        "error without outliers",
        "Casts",
        "unshifted",
        "without outliers",
        "extra nodes",
        "bits",
        "optimized",
    )
    return measure.markdown(
        head,
        (
            (
                row.model,
                row.ops,
                f"{row.largest:.4g}",
                _short(row.plain),
                _short(row.throughout) or "–",
                f"{row.low_before:.2f}%",
                _short(row.error_before),
                f"{row.low:.2f}%",
                row.error,
                row.error_without_outliers,
                row.casts,
                row.casts_before,
                row.casts_without_outliers,
                row.muls,
                "equal" if row.bits else "differ",
                "–" if row.optimized is None else f"{row.optimized:.1g}",
            )
            for row in rows
        ),
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("names", nargs="*", default=list(PLANTED))
    names = parser.parse_args().names
    logging.disable(logging.WARNING)  # hide torch's notes about missing packages
    file = measure.RESULTS / "shift.json"
    stored = json.loads(file.read_text("utf-8"))["rows"] if file.exists() else []
    results = {row["model"]: _row(row) for row in stored}
    for name in names:
        with tempfile.TemporaryDirectory() as folder:
            results[name] = measured(name, Path(folder))
        print(*table([results[name]])[2:], *results[name].regions, sep="\n", file=sys.stderr, flush=True)
        rows = [results[name] for name in PLANTED if name in results]  # an interrupted run keeps its results so far
        measure.write("shift", measure.machine(), rows, table(rows))


def _row(stored: Mapping[str, Any]) -> Row:
    return Row(**{**stored, "regions": tuple(stored["regions"])})


if __name__ == "__main__":
    main()
