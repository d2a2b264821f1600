"""Ways of running a model on a GPU: float32, this package's conversions, and those of others."""

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
"""The types of models that onnxruntime's optimizer is told; it knows no others of ours."""


@dataclass(frozen=True, slots=True)
class Way:
    """One way: its name in tables, and how its file is made.

    `options`: the keywords of `amp_rewrite.convert`. `tool`: a tool of peers/peer_tools.py, run by the interpreter that
    `--peers` or `--autocast` (`python`) names. `packages`: those whose versions decide what it makes. `file`: the way
    whose file it runs, with other settings.
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
"""What matters most comes first: ways are opened in this order, and float32 is what others are compared with."""

FEW = ("float32", "amp")
"""Ways of models with a batch of one, beside which PyTorch is timed."""
OF_DIFFUSION = "amp_diffusion"
"""The way of diffusion models alone."""


def ways_of(model: str) -> tuple[str, ...]:
    """Return the ways in which a model is made."""
    return FEW if model.endswith("_one") else tuple(way for way in WAYS if way != OF_DIFFUSION or model == "unet")


BASELINES = ("float32", "tf32", "torch_half")
"""Ways that every table compares with."""


def by_amp(way: Way, source: Path, target: Path) -> None:
    """Write the model of one of this package's conversions."""
    import amp_rewrite

    assert way.options is not None
    amp_rewrite.convert(source, **way.options).save(target, overwrite=True)


def by_peer(way: Way, model: str, source: Path, target: Path, given: Mapping[str, Any]) -> None:
    """Write the model of another tool. LookupError says why there is none: `given` holds interpreters and limits."""
    python = given.get(way.python)
    if not python:
        raise LookupError(f"no interpreter for it was named; add --{way.python} PYTHON")
    more = [OPTIMIZER_TYPES.get(model, "")] if way.tool == "onnxruntime_optimizer" else []
    if more == [""]:
        raise LookupError("onnxruntime's optimizer has no type for this model")
    if not _starts(python):
        raise LookupError(f"{python}, which --{way.python} names, does not start")
    command = [*measure.script("peer_tools", python), way.tool, source, target, *more]
    found = measure.cost(command, limit=given.get("limit"), memory=given.get("memory"))
    if found.code:
        lines = found.said.strip().splitlines() or [f"exit code {found.code}"]
        raise LookupError(lines[-1][-200:])


def made_with(way: Way, given: Mapping[str, Any]) -> dict[str, str]:
    """Return the versions of the packages that decide what a way makes, in the interpreter that makes it."""
    code = "import importlib.metadata as m, json, sys; print(json.dumps({n: m.version(n) for n in sys.argv[1:]}))"
    command = [given[way.python] if way.python else sys.executable, "-c", code, *way.packages]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    found: dict[str, str] = json.loads(done.stdout) if done.returncode == 0 else {}
    return found


def _starts(python: str) -> bool:
    try:
        return subprocess.run([python, "--version"], capture_output=True, check=False).returncode == 0
    except OSError:
        return False


def files(folder: Path, model: str) -> dict[str, Path]:
    """Return the file of each way of a model that a folder of grown models holds."""
    named = {key: folder / f"{model}.{way.file or key}.onnx" for key, way in WAYS.items()}
    return {key: file for key, file in named.items() if file.exists()}
