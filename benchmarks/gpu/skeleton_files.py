"""Read and write folders of skeletons, and a small archive per model.

For each model, a folder contains NAME.json (facts about its ways), NAME.recipes.json, NAME.npz (inputs that are not
drawn) and NAME.WAY.skeleton, an ONNX file without weights. NAME.tar.xz contains the same files: a model's ways are
similar, so together they compress to little more than one.
"""

from __future__ import annotations

import io
import json
import lzma
import shutil
import tarfile
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import onnx

from benchmarks.gpu.skeleton import Array, Sources, bits_of, drawn, grown

ENDING = ".skeleton"
ARCHIVE = ".tar.xz"
BESIDE = 1_900_000_000
"""Bytes of weights above which they are stored in a separate file."""
FILTERS = [{"id": lzma.FILTER_LZMA2, "preset": 9 | lzma.PRESET_EXTREME}]


def names_in(folder: Path) -> list[str]:
    """Return the names of the models with skeletons in a folder."""
    return sorted(path.name.removesuffix(".recipes.json") for path in folder.glob("*.recipes.json"))


def about(folder: Path, name: str) -> dict[str, Any]:
    """Return the facts about a model's skeletons."""
    found: dict[str, Any] = json.loads((folder / f"{name}.json").read_text("utf-8"))
    return found


def recipes(folder: Path, name: str) -> dict[str, Any]:
    """Return a model's sources, scales and inputs, and its recipes by way."""
    found: dict[str, Any] = json.loads((folder / f"{name}.recipes.json").read_text("utf-8"))
    return found


def note(folder: Path, name: str, about: Mapping[str, Any], recipes: Mapping[str, Any]) -> None:
    """Write the files of `about` and `recipes`; the file with the ways is last."""
    (folder / f"{name}.recipes.json").write_text(json.dumps(recipes), encoding="utf-8")
    (folder / f"{name}.json").write_text(json.dumps(about) + "\n", encoding="utf-8")


def file_of(folder: Path, name: str, way: str) -> Path:
    """Return the file of a way without its weights."""
    return folder / f"{name}.{way}{ENDING}"


def stripped(folder: Path, name: str, way: str) -> onnx.ModelProto:
    """Return the model of a way without its weights."""
    return onnx.load_from_string(file_of(folder, name, way).read_bytes())


# -- archives ------------------------------------------------------------------------------------------


def pack(folder: Path, name: str, target: Path, there: Path | None = None) -> None:
    """Write a model's skeletons as one archive, without files that are equal in the archive `there`.

    Equal files give equal archives.
    """
    paths = [folder / f"{name}{end}" for end in (".json", ".recipes.json", ".npz")]
    paths += [file_of(folder, name, way) for way in about(folder, name)["ways"]]
    held = dict[str, bytes]()
    if there is not None and there.exists():
        with tarfile.open(there) as archive:
            files = ((member.name, archive.extractfile(member)) for member in archive)
            held = {name: file.read() for name, file in files if file is not None}
    with lzma.open(target, "wb", filters=FILTERS) as out, tarfile.open(fileobj=out, mode="w") as archive:
        for path in paths:
            if held.get(path.name) == path.read_bytes():
                continue
            member = tarfile.TarInfo(path.name)
            member.size = path.stat().st_size
            archive.addfile(member, io.BytesIO(path.read_bytes()))


def unpack(archive: Path, folder: Path) -> None:
    """Extract an archive into a folder."""
    folder.mkdir(parents=True, exist_ok=True)
    with tarfile.open(archive) as packed:
        packed.extractall(folder, **({"filter": "data"} if hasattr(tarfile, "data_filter") else {}))


def select(folder: Path, name: str, ways: Collection[str], target: Path) -> None:
    """Copy a model's skeletons of some ways to another folder, with the scales they need."""
    noted, recipe = about(folder, name), recipes(folder, name)
    for kept in (noted["ways"], noted["missing"], recipe["ways"]):
        for way in [way for way in kept if way not in ways]:
            del kept[way]
    parts = [p for of_way in recipe["ways"].values() for r in of_way.values() for p in r.get("parts", [r])]
    numbers = sorted({part["scale"] for part in parts if "scale" in part})
    recipe["scales"] = [recipe["scales"][number] for number in numbers]
    for part in parts:
        if "scale" in part:
            part["scale"] = numbers.index(part["scale"])
    target.mkdir(parents=True, exist_ok=True)
    for way in noted["ways"]:
        shutil.copy(file_of(folder, name, way), target)
    shutil.copy(folder / f"{name}.npz", target)
    note(target, name, noted, recipe)


# -- models again --------------------------------------------------------------------------------------


def save(model: onnx.ModelProto, target: Path) -> None:
    """Write a model with its weights, as external data if they are too large."""
    weights = sum(len(tensor.raw_data) for tensor in model.graph.initializer)
    onnx.save(model, target, save_as_external_data=weights > BESIDE, location=f"{target.name}.data")


def regrow(folder: Path, target: Path, name: str) -> int:
    """Write every way of a model as NAME.WAY.onnx, with one common weights file, and its batch; return the bytes.

    `target` is a new folder, or has other models. The ways need the weights file.
    """
    noted = recipes(folder, name)
    sources = Sources(noted["sources"]).arrays
    weights, places = target / f"{name}.weights", dict[str, tuple[int, int]]()
    with weights.open("wb") as out:
        for way, of_way in noted["ways"].items():
            model = stripped(folder, name, way)
            for tensor in model.graph.initializer:
                recipe = of_way.get(tensor.name)
                if recipe is None:
                    continue
                mark = json.dumps(recipe, sort_keys=True)
                if mark not in places:
                    data = bits_of(grown(recipe, sources, noted["scales"]))
                    out.write(b"\0" * (-out.tell() % 4096))
                    places[mark] = out.tell(), data.nbytes
                    out.write(memoryview(data.view(np.uint8)))
                _refer(tensor, weights.name, places[mark])
            (target / f"{name}.{way}.onnx").write_bytes(model.SerializeToString())
    np.savez(target / f"{name}.npz", **batch(folder, name, noted["inputs"]))
    return weights.stat().st_size


def batch(folder: Path, name: str, inputs: Mapping[str, Mapping[str, Any]]) -> dict[str, Array]:
    """Return a model's batch: stored inputs, and large ones drawn by name."""
    with np.load(folder / f"{name}.npz") as stored:
        kept = {key: stored[key] for key in stored.files}
    return kept | {k: drawn(f"input {k}", v["shape"], v["mean"], v["std"]) for k, v in inputs.items()}


def _refer(tensor: onnx.TensorProto, file: str, place: tuple[int, int]) -> None:
    """Refer a tensor's data to a file next to the model."""
    tensor.data_location = onnx.TensorProto.EXTERNAL
    for key, value in (("location", file), ("offset", str(place[0])), ("length", str(place[1]))):
        entry = tensor.external_data.add()
        entry.key, entry.value = key, value
