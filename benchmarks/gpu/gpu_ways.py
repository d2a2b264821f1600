"""Ways of running a model on a GPU: float32, this package's conversions, and other tools' conversions."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.shared import measure

OPTIMIZER_TYPES: Mapping[str, str] = {
    "bert_base": "bert",
    "bert_large": "bert",
    "bert_tiny": "bert",
    "gpt2": "gpt2",
    "gpt2_step": "gpt2",
    "gpt2_step_tiny": "gpt2",
    "vit_base": "vit",
    "unet": "unet",
    "whisper": "bart",
}
"""Model types for onnxruntime's optimizer; it does not support our other models."""


@dataclass(frozen=True, slots=True)
class Way:
    """One way: its name in tables, and the source of its file.

    `options`: keywords of `amp_rewrite.convert`. `tool`: a tool of peers/peer_tools.py, run by the interpreter of
    `--peers` or `--autocast` (`python`). `packages`: packages that determine its result. `file`: another way, for a way
    that runs the other's file with different settings.
    """

    name: str
    options: Mapping[str, Any] | None = None
    tool: str = ""
    python: str = ""
    packages: tuple[str, ...] = ()
    file: str = ""
    provider: Mapping[str, str] = field(default_factory=dict)


EXPORT = ("torch", "transformers", "onnxscript")

WAYS: Mapping[str, Way] = {
    "float32": Way("float32", packages=EXPORT),
    "tf32": Way("float32 with TF32", file="float32", provider={"use_tf32": "1"}),
    "amp": Way("amp-rewrite", options={}),
    "amp_diffusion": Way("amp-rewrite --fuse diffusion", options={"fuse": "diffusion"}),
    "amp_basic": Way("amp-rewrite --fuse basic", options={"fuse": "basic"}),
    "torch_half": Way("module.half()", packages=EXPORT),
    "amp_bf16": Way("amp-rewrite --to bfloat16", options={"to": "bfloat16"}),
    "amp_bf16_opset": Way("amp-rewrite --to bfloat16 --opset auto", options={"to": "bfloat16", "opset": "auto"}),
    "amp_opset": Way("amp-rewrite --opset auto", options={"opset": "auto"}),
    "amp_io_low": Way("amp-rewrite --io low", options={"io": "low"}),
    "ort_opt": Way(
        "onnxruntime's optimizer, float16", tool="onnxruntime_optimizer", python="peers", packages=("onnxruntime",)
    ),
    "ort_half": Way("onnxruntime's float16", tool="onnxruntime_float16", python="peers", packages=("onnxruntime",)),
    "occ": Way("onnxconverter-common", tool="onnxconverter_common", python="peers", packages=("onnxconverter-common",)),
    "autocast": Way("AutoCast", tool="modelopt_autocast", python="autocast", packages=("nvidia-modelopt",)),
    "autocast_all": Way(
        "AutoCast, every op", tool="modelopt_float16", python="autocast", packages=("nvidia-modelopt",)
    ),
}
"""Ways in the order of opening, the most important first; float32 is the reference."""

FEW = ("float32", "amp")
"""Ways for models with a batch of one, to compare with PyTorch."""
OF_DIFFUSION = "amp_diffusion"
"""The way only for diffusion models."""


def ways_of(model: str) -> tuple[str, ...]:
    """Return the ways for a model."""
    return FEW if model.endswith("_one") else tuple(way for way in WAYS if way != OF_DIFFUSION or model == "unet")


BASELINES = ("float32", "tf32", "torch_half")
"""The baselines of every table."""


def by_amp(way: Way, source: Path, target: Path) -> None:
    """Write one of this package's conversions."""
    import amp_rewrite

    assert way.options is not None
    amp_rewrite.convert(source, **way.options).save(target, overwrite=True)


def by_peer(way: Way, model: str, source: Path, target: Path, settings: Mapping[str, Any]) -> None:
    """Write another tool's conversion, or raise LookupError with the reason. `settings`: interpreters and limits."""
    python = settings.get(way.python)
    if not python:
        raise LookupError(f"the tool has no interpreter; add --{way.python} PYTHON")
    more = [OPTIMIZER_TYPES.get(model, "")] if way.tool == "onnxruntime_optimizer" else []
    if more == [""]:
        raise LookupError("onnxruntime's optimizer has no type for this model")
    if not _starts(python):
        raise LookupError(f"{python} of --{way.python} does not start")
    command = [*measure.script("peer_tools", python), way.tool, source, target, *more]
    found = measure.cost(command, limit=settings.get("limit"), memory=settings.get("memory"))
    if found.code:
        lines = found.said.strip().splitlines() or [f"exit code {found.code}"]
        raise LookupError(lines[-1][-200:])


def made_with(way: Way, settings: Mapping[str, Any]) -> dict[str, str]:
    """Return the versions of a way's packages in its interpreter."""
    code = "import importlib.metadata as m, json, sys; print(json.dumps({n: m.version(n) for n in sys.argv[1:]}))"
    command = [settings[way.python] if way.python else sys.executable, "-c", code, *way.packages]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    found: dict[str, str] = json.loads(done.stdout) if done.returncode == 0 else {}
    return found


def _starts(python: str) -> bool:
    try:
        return subprocess.run([python, "--version"], capture_output=True, check=False).returncode == 0
    except OSError:
        return False


def files(folder: Path, model: str) -> dict[str, Path]:
    """Return the files of a model in a folder of grown models, by way."""
    named = {key: folder / f"{model}.{way.file or key}.onnx" for key, way in WAYS.items()}
    return {key: file for key, file in named.items() if file.exists()}
