"""Export architectures with both of PyTorch's exporters: `export FOLDER [NAME ...]`.

It writes NAME.EXPORTER.onnx for each successful exporter, NAME.npz with batches and PyTorch's outputs in float32,
float16 and bfloat16, and NAME.json with the errors of failed exporters. `--real` exports the architectures at real
width, with only the batch as built, and with external weights from dynamo.
"""

from __future__ import annotations

import argparse
import copy
import json
import logging
import multiprocessing
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from benchmarks.architectures.architecture import Architecture, seed_of

EXPORTERS: Mapping[str, tuple[int, ...]] = {"dynamo": (18, 20, 21, 23), "torchscript": (13, 14, 17)}
LOW = {"float16": torch.float16, "bfloat16": torch.bfloat16}
FLOATS_TIMES = 8.0
LARGE = 10_000_000
"""The minimum number of parameters for external weights from dynamo."""


def registry() -> dict[str, Architecture]:
    """Return all architectures by name."""
    from benchmarks.architectures.multimodal import MULTIMODAL
    from benchmarks.architectures.nets import NETS
    from benchmarks.architectures.speech import SPEECH
    from benchmarks.architectures.text import TEXT
    from benchmarks.architectures.vision import VISION

    return {one.name: one for one in (*TEXT, *SPEECH, *VISION, *MULTIMODAL, *NETS)}


def registry_of_real_widths() -> dict[str, Architecture]:
    """Return the architectures at real width and length by name."""
    from benchmarks.architectures.real import REAL

    return {one.name: one for one in REAL}


def opset(name: str, exporter: str, attempt: int = 0) -> int:
    """Return one of the exporter's opsets, depending on the architecture; the latest one after a failure."""
    choice = EXPORTERS[exporter]
    return choice[-1] if attempt else choice[seed_of(name) % len(choice)]


def batches(inputs: Mapping[str, Tensor]) -> dict[str, dict[str, Tensor]]:
    """Return the batches: as built, shuffled, with larger floats, and with a fully masked row."""
    found = {"built": dict(inputs), "drawn": {k: _drawn(k, v) for k, v in inputs.items()}}
    if any(_scalable(k, v) for k, v in inputs.items()):
        found["large"] = {k: v * FLOATS_TIMES if _scalable(k, v) else v for k, v in inputs.items()}
    masks = [k for k in inputs if k == "attention_mask"]
    if masks:
        found["masked"] = {k: _without_last_row(v) if k in masks else v for k, v in inputs.items()}
    return found


def _scalable(name: str, value: Tensor) -> bool:
    return value.dtype.is_floating_point and "mask" not in name


def _drawn(name: str, value: Tensor) -> Tensor:
    """Shuffle the values along the last axis, except masks."""
    if "mask" in name or value.ndim == 0:
        return value
    return value[..., torch.randperm(value.shape[-1])]


def _without_last_row(mask: Tensor) -> Tensor:
    mask = mask.clone()
    mask[-1] = 0
    return mask


def outputs(module: nn.Module, inputs: Mapping[str, Tensor]) -> list[Tensor]:
    with torch.no_grad():
        result = module(*(v.clone() for v in inputs.values()))
    return [result] if isinstance(result, Tensor) else list(result)


def computed(module: nn.Module, feeds: Mapping[str, Mapping[str, Tensor]]) -> dict[str, np.ndarray[Any, Any]]:
    """Return `BATCH/in/NAME` and `BATCH/float32/I`, and the low types' outputs if PyTorch has all their kernels."""
    arrays: dict[str, np.ndarray[Any, Any]] = {}
    for batch, inputs in feeds.items():
        arrays |= {f"{batch}/in/{name}": value.numpy() for name, value in inputs.items()}
        arrays |= {f"{batch}/float32/{i}": y.numpy() for i, y in enumerate(outputs(module, inputs))}
    for name, dtype in LOW.items():
        low = copy.deepcopy(module).to(dtype)
        for batch, inputs in feeds.items():
            cast = {k: v.to(dtype) if v.dtype.is_floating_point else v for k, v in inputs.items()}
            try:
                found = outputs(low, cast)
            except (RuntimeError, IndexError, ValueError, TypeError, AttributeError, NotImplementedError):
                break  # an op of the model has no such kernel
            arrays |= {f"{batch}/{name}/{i}": y.float().numpy() for i, y in enumerate(found)}
    return arrays


@dataclass(frozen=True, slots=True)
class Attempt:
    """The options of an export: its opset, and whether its shapes are fixed."""

    opset: int
    fixed: bool


def dynamo(one: Architecture, module: nn.Module, inputs: Mapping[str, Tensor], path: Path, by: Attempt) -> None:
    auto = torch.export.Dim.AUTO  # type: ignore[attr-defined]
    shapes = tuple(dict.fromkeys(one.dynamic.get(name, {}), auto) for name in inputs)
    torch.onnx.export(
        module,
        tuple(inputs.values()),
        path,
        input_names=list(inputs),
        dynamo=True,
        opset_version=by.opset,
        # The registry's modules take *values, which counts as one parameter that is a tuple.
        dynamic_shapes=None if by.fixed or not one.dynamic else (shapes,),
        external_data=sum(p.numel() for p in module.parameters()) > LARGE,
        verbose=False,
    )


def torchscript(one: Architecture, module: nn.Module, inputs: Mapping[str, Tensor], path: Path, by: Attempt) -> None:
    torch.onnx.export(
        module,
        tuple(inputs.values()),
        str(path),
        input_names=list(inputs),
        dynamo=False,
        opset_version=by.opset,
        dynamic_axes=None if by.fixed else {k: dict(v) for k, v in one.dynamic.items()},
    )


def export(one: Architecture, folder: Path, exporters: Sequence[str], *, real: bool) -> None:
    """Write the files of one architecture; its .json has "dynamic", "fixed" or the error for each exporter.

    A failed export is tried again with plain attention in the latest opset, then with fixed shapes.
    """
    module, inputs = one.build()
    arrays = {f"built/in/{k}": v.numpy() for k, v in inputs.items()} if real else computed(module, batches(inputs))
    np.savez(folder / f"{one.name}.npz", **arrays)  # type: ignore[arg-type]
    results: dict[str, Any] = {"architecture": one.name}
    for exporter, write in {"dynamo": dynamo, "torchscript": torchscript}.items():
        if exporter not in exporters:
            continue
        path = folder / f"{one.name}.{exporter}.onnx"
        for attempt in range(3):
            by = Attempt(opset(one.name, exporter, attempt), attempt == 2)
            if attempt and hasattr(getattr(module, "model", None), "set_attn_implementation"):
                module.model.set_attn_implementation("eager")
            try:
                with torch.no_grad():
                    write(one, module, inputs, path, by)
                results[exporter] = "fixed" if by.fixed or not one.dynamic else "dynamic"
                break
            except Exception as error:  # noqa: BLE001  # exporters raise any error of the traced code
                why = " ".join(str(error).rpartition("Exception summary")[2].split())  # dynamo gives advice first
                results[exporter] = f"{type(error).__name__}: {why[:200]}"
                path.unlink(missing_ok=True)
    (folder / f"{one.name}.json").write_text(json.dumps(results))


def apart(one: Architecture, folder: Path, args: argparse.Namespace) -> None:
    """Export one architecture in a separate process, so a crash or a hang affects only this one."""
    limit, options = args.limit, {"real": args.real}
    child = multiprocessing.get_context("fork").Process(target=export, args=(one, folder, args.by), kwargs=options)
    child.start()
    child.join(limit)
    if child.exitcode != 0:
        child.kill()
        why = f"stopped after {limit:.0f} s" if child.exitcode is None else f"exit code {child.exitcode}"
        path = folder / f"{one.name}.json"
        results = json.loads(path.read_text()) if path.exists() else {"architecture": one.name}
        path.write_text(json.dumps({**results, "fault": why}))


def warm_up(folder: Path) -> None:
    """Load the modules for exports, for the child processes to inherit."""
    torch.onnx.export(nn.Linear(2, 2), (torch.ones(1, 2),), folder / "warm.onnx", dynamo=True, verbose=False)
    (folder / "warm.onnx").unlink()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("names", nargs="*")
    parser.add_argument("--limit", type=float, default=300.0, help="seconds per architecture")
    parser.add_argument("--real", action="store_true", help="export the architectures at real width instead")
    parser.add_argument(
        "--by", nargs="+", default=list(EXPORTERS), choices=list(EXPORTERS), help="the exporters to use"
    )
    args = parser.parse_args()
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    torch.set_num_threads(1)
    args.folder.mkdir(parents=True, exist_ok=True)
    known = registry_of_real_widths() if args.real else registry()
    warm_up(args.folder)
    for name in args.names or known:
        if not (args.folder / f"{name}.json").exists():
            apart(known[name], args.folder, args)
            print((args.folder / f"{name}.json").read_text(), flush=True)


if __name__ == "__main__":
    main()
