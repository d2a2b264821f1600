"""Strip weights from models and redraw them, so that gigabytes travel as kilobytes.

A model's weights come from a counter-based generator (Philox, whose stream numpy keeps stable), by parameter name. A
conversion's tensor is removed from its file if it is such a source, cast, transposed, scaled or joined with others; a
recipe describes how to restore it. Recipes list the elements that would differ, so a restored tensor is identical bit
for bit. Tensors without a recipe stay in the file.
"""

from __future__ import annotations

import base64
import functools
import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import ml_dtypes
import numpy as np
import onnx
from onnx import numpy_helper

LEAST = 512
"""The minimum number of elements; smaller tensors stay in the file."""
MAX_NOTED = 0.02
"""The largest share of differing elements in a recipe."""
SAMPLE = 1024
SHORTEST = 8
"""The minimum number of elements in a channel with its own scale."""
PERMS: Mapping[int, Sequence[tuple[int, ...]]] = {
    1: ((0,),),
    2: ((0, 1), (1, 0)),
    3: ((0, 1, 2),),
    4: ((0, 1, 2, 3), (0, 2, 3, 1), (1, 2, 3, 0)),
}
"""Orders of axes: as drawn, transposed, channels last, and a product's columns with all other axes as rows."""
GROUPS = (1, 2, 4, 5, 8, 10, 12, 16, 20, 32)
"""Numbers of heads for joined columns of weights."""
TYPES = {
    onnx.TensorProto.FLOAT: np.dtype(np.float32),
    onnx.TensorProto.FLOAT16: np.dtype(np.float16),
    onnx.TensorProto.BFLOAT16: np.dtype(ml_dtypes.bfloat16),
}
RAW = {2: np.dtype(np.uint16), 4: np.dtype(np.uint32)}
Array = np.ndarray[Any, Any]
Recipe = dict[str, Any]


def drawn(key: str, shape: Sequence[int], mean: float, std: float) -> Array:
    """Draw uniform float32 numbers with a mean and a standard deviation; a key gives the same on every machine."""
    count = int(np.prod(shape))
    raw = np.random.Philox(key=zlib.crc32(key.encode())).random_raw((count + 1) // 2)
    bits = raw.view(np.uint32)[:count] >> np.uint32(8)  # 24 bits are exact in float32
    unit = bits.astype(np.float32) * np.float32(2.0**-23) - np.float32(1)
    return (unit * np.float32(std * 3**0.5) + np.float32(mean)).reshape(shape)


def bits_of(array: Array) -> Array:
    """Return the bits of a float array as flat integers, for exact comparison."""
    return np.ascontiguousarray(array).reshape(-1).view(RAW[array.itemsize])


def crc_of(array: Array) -> int:
    """Return the checksum of an array's bits."""
    return zlib.crc32(memoryview(bits_of(array).view(np.uint8)))


def encoded(numbers: Array) -> str:
    """Return the bytes of an array as text for JSON."""
    return base64.b85encode(zlib.compress(np.ascontiguousarray(numbers).tobytes(), 9)).decode("ascii")


def decoded(text: str, dtype: Any) -> Array:
    """Return the flat array from a text of `encoded`."""
    return np.frombuffer(zlib.decompress(base64.b85decode(text)), dtype)


# -- from tensors to recipes ---------------------------------------------------------------------------


@dataclass
class Sources:
    """A model's drawn parameters: arguments of `drawn` by key, indexed by size."""

    distributions: Mapping[str, Mapping[str, Any]]
    scales: list[str] = field(default_factory=list)
    known: dict[str, dict[int, Array]] = field(default_factory=dict)
    by_size: dict[int, list[str]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for key, how in self.distributions.items():
            self.by_size.setdefault(int(np.prod(how["shape"])), []).append(key)

    @functools.cached_property
    def arrays(self) -> dict[str, Array]:
        """The parameters by key, drawn on first use."""
        return {k: drawn(k, v["shape"], v["mean"], v["std"]) for k, v in self.distributions.items()}

    def forget(self) -> None:
        """Free the parameters; they are drawn again on next use."""
        self.__dict__.pop("arrays", None)

    def recall(self, recipes: Mapping[str, Any]) -> None:
        """Load the scales of existing ways."""
        self.scales = list(recipes["scales"])
        for recipe in (recipe for of_way in recipes["ways"].values() for recipe in of_way.values()):
            for part in recipe.get("parts", [recipe]):
                if "scale" in part:
                    number = part["scale"]
                    self.known.setdefault(part["key"], {})[number] = _scale_of(self.scales[number])

    def recipe(self, array: Array) -> Recipe | None:
        """Return a recipe to make an array from the sources, with a checksum of its bits; None if there is none."""
        found = self._find_one(array) or self._find_joined(array)
        return None if found is None else {**found, "crc": crc_of(array)}

    def _find_one(self, array: Array) -> Recipe | None:
        """Find an array's source: cast, with its axes in another order, or with scaled channels."""
        places = np.linspace(0, array.size - 1, min(array.size, SAMPLE)).astype(np.int64)
        index = np.unravel_index(places, array.shape)
        sample = array[index]
        for key in self.by_size.get(array.size, ()):
            for perm in PERMS.get(self.arrays[key].ndim, ()):
                base = {"key": key, "perm": list(perm), **({"rows": True} if array.ndim < len(perm) else {})}
                view = _laid(self.arrays[key], base)
                if view.shape != array.shape:
                    continue
                if np.mean(view[index].astype(array.dtype) != sample) <= MAX_NOTED:
                    found = _with_differences(base, view.astype(array.dtype), array)
                else:
                    found = self._scaled(base, view, array) if _alike(view, array) else None
                if found is not None:
                    return found
        return None

    def _scaled(self, base: Recipe, source: Array, array: Array) -> Recipe | None:
        """Find the scales of a source's channels, as from folded norms, or a single scale."""
        best: tuple[Recipe, Array] | None = None
        for half, scale in self._candidates(base["key"], source, array):
            rounded = source.astype(np.float16) if half else source
            found = _with_differences(base, _product(rounded, scale, array.dtype), array)
            if found is not None and (best is None or len(found.get("at", "")) < len(best[0]["at"])):
                best = {**found, "half": half}, scale
                if "at" not in found:
                    break
        if best is None:
            return None
        recipe, scale = best
        number = self._scale_index(scale.dtype.str + encoded(scale))
        self.known.setdefault(base["key"], {})[number] = scale
        return {**recipe, "scale": number}

    def _candidates(self, key: str, source: Array, array: Array) -> Iterator[tuple[bool, Array]]:
        """Yield candidates: True if the source is rounded to half first, and the scales of other ways or new ones.

        Other ways mostly round float32's values, which determine the scales best. A scale computed in some type is a
        number of that type, so narrow bounds determine it exactly.
        """
        known = self.known.get(key, {}).values()
        yield from ((False, scale) for scale in known if len(scale) in (1, len(array)))
        for half in (False, True):
            rounded = source.astype(np.float16) if half else source
            for channels in (1, len(array)) if array.size >= SHORTEST * len(array) else (1,):
                scale = _scale(rounded.reshape(channels, -1), array.reshape(channels, -1))
                if scale is not None:
                    yield from ((half, scale.astype(kind)) for kind in (np.float16, np.float32, np.float64))

    def _scale_index(self, text: str) -> int:
        """Return the index of a list of scales, shared by the ways of a model."""
        if text not in self.scales:
            self.scales.append(text)
        return self.scales.index(text)

    def _find_joined(self, array: Array) -> Recipe | None:
        """Find the sources joined by an array: stacked, or side by side in groups.

        Attention heads are such groups: with 8 heads, the columns are the query's first head, the key's first head, the
        value's first head, the query's second head, and so on.
        """
        ways = ((1, 3), (1, 2), (0, 3), (0, 2)) if array.ndim == 2 else ((0, 3), (0, 2)) if array.ndim == 1 else ()
        for axis, parts in ways:
            for groups in GROUPS if axis == 1 else (1,):
                if array.shape[axis] % (parts * groups) or array.shape[axis] == parts * groups:
                    continue
                found: list[Recipe] = []
                for piece in _pieces(array, axis, parts, groups):
                    recipe = self._find_one(piece)
                    if recipe is None:
                        break
                    found.append(recipe)
                else:
                    return {"axis": axis, "groups": groups, "parts": found}
        return None


def _pieces(array: Array, axis: int, parts: int, groups: int) -> Iterator[Array]:
    """Yield the parts of an array joined in groups of columns, or in rows."""
    if axis == 0:
        yield from np.split(array, parts)
        return
    split = array.reshape(len(array), groups, parts, -1)
    for number in range(parts):
        yield np.ascontiguousarray(split[:, :, number]).reshape(len(array), -1)


def _together(parts: Sequence[Array], axis: int, groups: int) -> Array:
    """Join the parts from `_pieces`."""
    if axis == 0:
        return np.concatenate(parts)
    rows = len(parts[0])
    return np.stack([part.reshape(rows, groups, -1) for part in parts], axis=2).reshape(rows, -1)


def _alike(source: Array, array: Array) -> bool:
    """Return True if sampled rows of an array are proportional to the source's."""
    chosen = np.linspace(0, len(array) - 1, min(len(array), 8)).astype(np.int64)
    a, b = (x[chosen].reshape(len(chosen), -1)[:, :64].astype(np.float64) for x in (source, array))
    with np.errstate(all="ignore"):
        shared = np.abs((a * b).sum(1)) / np.sqrt((a * a).sum(1) * (b * b).sum(1))
    return bool(np.median(shared) > 0.9)


def _with_differences(recipe: Recipe, made: Array, wanted: Array) -> Recipe | None:
    """Add the differing elements to a recipe; None if there are too many."""
    made_bits, bits = bits_of(made), bits_of(wanted)
    at = np.flatnonzero(made_bits != bits)
    if len(at) > MAX_NOTED * bits.size:
        return None
    recipe = {**recipe, "type": wanted.dtype.name}
    if not len(at):
        return recipe
    steps = np.diff(at, prepend=0)
    width = np.dtype(np.uint16 if steps.max() < 1 << 16 else np.uint32)
    # Neighboring numbers differ in few bits, which compress well.
    return recipe | {
        "at": encoded(steps.astype(width)),
        "width": width.itemsize,
        "xor": encoded(bits[at] ^ made_bits[at]),
    }


def _scale(source: Array, array: Array) -> Array | None:
    """Return scales from a source's rows to an array's, up to rounding; None if there are none.

    Each element bounds the scale to an interval, since it must round to that element; the scale is in all of them.
    """
    a, b = source.astype(np.float64), array.astype(np.float64)
    large = np.abs(a) >= 0.25 * np.abs(a).max(axis=1, keepdims=True)  # small elements give wider bounds
    ulp = np.abs(np.spacing(array).astype(np.float64)) / 2
    with np.errstate(all="ignore"):
        low, high = np.sort(np.stack([(b - ulp) / a, (b + ulp) / a]), axis=0)
    low, high = np.where(large, low, -np.inf), np.where(large, high, np.inf)
    lowest, highest = low.max(axis=1), high.min(axis=1)
    scale = (lowest + highest) / 2
    apart = np.abs(lowest - highest) <= 2.0**-6 * np.abs(scale)
    return scale if np.isfinite(scale).all() and apart.all() and scale.all() else None


def _scale_of(text: str) -> Array:
    """Return scales from their text: the name of their type, and the numbers."""
    return decoded(text[3:], text[:3])


def _product(source: Array, scale: Array, dtype: Any) -> Array:
    """Scale a source's rows in float32, then cast it; converters fold before they cast."""
    rows = source.reshape(len(scale), -1).astype(np.float64)
    return (rows * scale[:, None].astype(np.float64)).astype(np.float32).astype(dtype).reshape(source.shape)


@dataclass(frozen=True, slots=True)
class Stripped:
    """A model's recipes by initializer, and the bytes that stay in its file."""

    recipes: dict[str, Recipe]
    left: int


def strip(model: onnx.ModelProto, sources: Sources) -> Stripped:
    """Remove the data of every initializer with a recipe from a model, in place, and all metadata."""
    recipes: dict[str, Recipe] = {}
    left = 0
    for tensor in model.graph.initializer:
        dtype = TYPES.get(tensor.data_type)
        if dtype is None or int(np.prod(tensor.dims)) < LEAST:
            left += len(tensor.raw_data)
            continue
        array = numpy_helper.to_array(tensor).astype(dtype, copy=False)
        if array.size == max(array.shape):  # a bias of any rank
            array = array.reshape(-1)
        found = sources.recipe(array)
        if found is None:
            left += array.nbytes
            continue
        recipes[tensor.name] = found
        for name in ("raw_data", "float_data", "int32_data", "external_data", "data_location"):
            tensor.ClearField(name)
    _drop_metadata(model.graph)
    return Stripped(recipes, left)


def _drop_metadata(graph: onnx.GraphProto) -> None:
    """Drop the metadata of exporters and converters, which no runtime reads, but which dominates the file."""
    for part in (*graph.node, *graph.value_info, *graph.input, *graph.output, *graph.initializer):
        for name in ("metadata_props", "doc_string"):
            part.ClearField(name)
    for node in graph.node:
        for attribute in node.attribute:
            for body in (attribute.g, *attribute.graphs):
                if body.node:
                    _drop_metadata(body)


# -- from recipes to tensors ---------------------------------------------------------------------------


def grown(recipe: Recipe, sources: Mapping[str, Array], scales: Sequence[str]) -> Array:
    """Return the array of a recipe; raise ValueError if its bits differ from the removed array's."""
    if "parts" in recipe:
        parts = [_grown(part, sources, scales) for part in recipe["parts"]]
        value = _together(parts, recipe["axis"], recipe["groups"])
    else:
        value = _grown(recipe, sources, scales)
    if crc_of(value) != recipe["crc"]:
        of = ", ".join(part["key"] for part in recipe.get("parts", [recipe]))
        raise ValueError(f"the bits of a weight from {of} differ from the skeleton's checksum")
    return value


def _grown(recipe: Recipe, sources: Mapping[str, Array], scales: Sequence[str]) -> Array:
    """Return the array of a recipe without parts."""
    source = _laid(sources[recipe["key"]], recipe)
    dtype = np.dtype(recipe["type"])
    if "scale" in recipe:
        rounded = np.ascontiguousarray(source.astype(np.float16) if recipe["half"] else source)
        value = _product(rounded, _scale_of(scales[recipe["scale"]]), dtype)
    else:
        value = np.ascontiguousarray(source).astype(dtype)
    if "at" in recipe:
        raw = bits_of(value).copy()
        at = np.cumsum(decoded(recipe["at"], RAW[recipe["width"]]), dtype=np.int64)
        raw[at] ^= decoded(recipe["xor"], raw.dtype)
        value = raw.view(dtype).reshape(value.shape)
    return value


def _laid(source: Array, recipe: Recipe) -> Array:
    """Return a source with a recipe's order of axes; with `rows`, all but the last are joined."""
    view = source.transpose(recipe["perm"])
    return view.reshape(-1, view.shape[-1]) if recipe.get("rows") else view


def fill(model: onnx.ModelProto, recipes: Mapping[str, Recipe], sources: Sources) -> None:
    """Restore the data of every initializer with a recipe, in place."""
    for tensor in model.graph.initializer:
        if tensor.name in recipes:
            tensor.raw_data = bits_of(grown(recipes[tensor.name], sources.arrays, sources.scales)).tobytes()


def tensors(model: onnx.ModelProto) -> Iterator[tuple[str, Array]]:
    """Yield the initializers of a model by name, as separate arrays."""
    for tensor in model.graph.initializer:
        yield tensor.name, numpy_helper.to_array(tensor)
