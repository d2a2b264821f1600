"""Skeletons of models: every way that weights are found in, and that they come back bit for bit."""

from __future__ import annotations

import hashlib
import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import onnx
import pytest
from onnx.numpy_helper import from_array

import amp_rewrite
from benchmarks.gpu import gpu_make, gpu_models, skeleton, skeleton_files
from benchmarks.gpu.gpu_ways import WAYS, by_peer
from suites.gpu.conftest import RUN, SMALL, ran

Array = np.ndarray[Any, Any]
SHAPES = {"dense": (96, 64), "other": (96, 64), "square": (64, 64), "kernel": (48, 16, 3, 3)}
GIVEN = {key: {"shape": list(shape), "mean": 0.0, "std": 0.05} for key, shape in SHAPES.items()}
LOW = (np.dtype(np.float16), np.dtype(ml_dtypes.bfloat16))


def weight(key: str) -> Array:
    return skeleton.drawn(key, **GIVEN[key])


def again(array: Array) -> tuple[Any, Array | None]:
    """The recipe of an array, and what it makes."""
    sources = skeleton.Sources(GIVEN)
    recipe = sources.recipe(array)
    if recipe is None:
        return None, None
    recipe = json.loads(json.dumps(recipe))
    return recipe, skeleton.grown(recipe, sources.arrays, sources.scales)


def same(array: Array) -> Any:
    """Check that an array comes back bit for bit, and return its recipe."""
    recipe, made = again(array)
    assert made is not None
    assert (made.dtype, made.shape) == (array.dtype, array.shape)
    assert made.tobytes() == np.ascontiguousarray(array).tobytes()
    return recipe


def test_the_numbers_of_a_name_stay_the_same_from_release_to_release() -> None:
    made = skeleton.drawn("layer.weight", (3, 5), 0.5, 0.02)
    assert hashlib.sha256(made.tobytes()).hexdigest()[:16] == "1211725ed9932d9c"
    assert (made.dtype, made.shape) == (np.float32, (3, 5))
    many = skeleton.drawn("b", (1000, 100), 0.0, 2.0)
    assert abs(many.mean()) < 0.05 and abs(many.std() - 2) < 0.02


@pytest.mark.parametrize("dtype", [np.dtype(np.float32), *LOW], ids=str)
@pytest.mark.parametrize("turned", [False, True], ids=["as drawn", "transposed"])
@pytest.mark.parametrize("key", ["dense", "square"])
def test_a_weight_comes_back_in_each_type(key: str, turned: bool, dtype: np.dtype[Any]) -> None:
    value = weight(key).T if turned else weight(key)
    recipe = same(np.ascontiguousarray(value).astype(dtype))
    assert (recipe["key"], recipe["perm"], "at" in recipe) == (key, [1, 0] if turned else [0, 1], False)


def test_a_few_elements_that_differ_are_noted_one_by_one() -> None:
    value = weight("dense").copy()
    value[3, 4], value[90, 63], value[0, 0] = 7.0, np.nan, -0.0
    recipe = same(value)
    assert len(skeleton.decoded(recipe["xor"], np.uint32)) == 3


@pytest.mark.parametrize("dtype", [np.dtype(np.float32), *LOW], ids=str)
def test_a_norm_that_was_folded_into_a_convolution_comes_back(dtype: np.dtype[Any]) -> None:
    factors = np.random.default_rng(0).uniform(0.3, 3, 48).astype(np.float32)
    folded = weight("kernel") * factors[:, None, None, None]
    assert "scale" in same(folded.astype(dtype))


def test_a_norm_that_was_folded_in_half_precision_comes_back() -> None:
    factors = np.random.default_rng(1).uniform(0.3, 3, 48).astype(np.float16)
    recipe = same(weight("kernel").astype(np.float16) * factors[:, None, None, None])
    assert recipe["half"]


@pytest.mark.parametrize("factor", [0.125, 2.0**-9, 3.7, -1.5])
def test_a_weight_times_one_number_comes_back(factor: float) -> None:
    assert "scale" in same((weight("dense") * np.float32(factor)).astype(np.float32))


def test_weights_side_by_side_come_back() -> None:
    recipe = same(np.concatenate([weight("dense"), weight("other")], axis=1).astype(np.float16))
    assert [part["key"] for part in recipe["parts"]] == ["dense", "other"]
    assert "parts" in same(np.concatenate([weight("dense").T, weight("other").T], axis=0))


@pytest.mark.parametrize("heads", [4, 8])
def test_weights_whose_heads_alternate_come_back(heads: int) -> None:
    parts = [weight(key).reshape(96, heads, -1) for key in ("dense", "other", "dense")]
    recipe = same(np.concatenate(parts, axis=2).reshape(96, -1))
    assert recipe["groups"] == heads


def test_a_convolution_with_channels_last_comes_back() -> None:
    assert same(np.ascontiguousarray(weight("kernel").transpose(0, 2, 3, 1)))["perm"] == [0, 2, 3, 1]


@pytest.mark.parametrize(
    "foreign",
    [
        np.random.default_rng(2).standard_normal((96, 64)).astype(np.float32),
        np.zeros((96, 64), np.float32),
        np.full((96, 64), np.nan, np.float32),
        np.full((96, 64), np.inf, np.float16),
        np.zeros((64, 64), ml_dtypes.bfloat16),
        np.float16(1e-8) * np.ones((48, 16, 3, 3), np.float16),
    ],
    ids=["random", "zeros", "nan", "infinity", "bfloat16 zeros", "underflow"],
)
def test_what_is_not_drawn_has_no_recipe(foreign: Array) -> None:
    assert again(foreign) == (None, None)


def test_initializers_without_a_recipe_stay_in_the_file() -> None:
    model = onnx.ModelProto()
    foreign = np.random.default_rng(3).standard_normal((96, 64)).astype(np.float32)
    arrays = {"drawn": weight("dense"), "foreign": foreign, "small": np.ones(8, np.float32), "ids": np.arange(4096)}
    model.graph.initializer.extend(from_array(array, name) for name, array in arrays.items())
    model.graph.node.append(onnx.helper.make_node("Relu", ["drawn"], ["y"], doc_string="a remark"))
    model.graph.node[0].metadata_props.add().key = "where it was made"
    found = skeleton.strip(model, skeleton.Sources(GIVEN))
    assert list(found.recipes) == ["drawn"]
    assert found.left == sum(arrays[name].nbytes for name in ("foreign", "small", "ids"))
    kept = {t.name: len(t.raw_data) for t in model.graph.initializer}
    assert kept == {"drawn": 0, "foreign": foreign.nbytes, "small": 32, "ids": arrays["ids"].nbytes}
    assert all(len(part.metadata_props) == 0 and not part.doc_string for part in model.graph.node)
    assert skeleton.strip(onnx.ModelProto(), skeleton.Sources({})) == skeleton.Stripped({}, 0)


@pytest.mark.parametrize("way", ["amp", "amp_bf16", "amp_io_low"])
def test_a_grown_model_is_what_a_conversion_here_makes(way: str, grown: Path, tmp_path: Path) -> None:
    source = tmp_path / "float32.onnx"
    gpu_models.source(SMALL).write(source)
    amp_rewrite.convert(source, **WAYS[way].options or {}).save(tmp_path / "half.onnx")
    for made, wanted in ((f"{SMALL}.{way}.onnx", "half.onnx"), (f"{SMALL}.float32.onnx", "float32.onnx")):
        a, b = onnx.load(grown / made), onnx.load(tmp_path / wanted)
        assert [node.SerializeToString() for node in a.graph.node] == [
            node.SerializeToString() for node in b.graph.node
        ]
        found, expected = (dict(skeleton.tensors(model)) for model in (a, b))
        assert found.keys() == expected.keys()
        assert all(found[name].tobytes() == expected[name].tobytes() for name in found)


def test_skeletons_are_small_and_say_what_could_not_be_made(skeletons: Path, grown: Path) -> None:
    about = skeleton_files.about(skeletons, SMALL)
    assert set(about["missing"]) == {"torch_half", "ort_opt", "ort_half", "occ", "autocast", "autocast_all"}
    assert about["missing"]["occ"] == "no interpreter for it was named; add --peers PYTHON"
    assert about["flops"] == 2 * 8 * (32 * 64 + 64 * 64 + 64 * 10)
    assert (skeletons / f"{SMALL}.amp.skeleton").stat().st_size < 4096 < (grown / f"{SMALL}.weights").stat().st_size
    assert not list((skeletons / "work").iterdir())


def test_ways_that_are_named_later_join_those_that_are_there(skeletons: Path, tmp_path: Path) -> None:
    first = ran("gpu_make", tmp_path, SMALL, "--ways", "amp_bf16")
    assert [line.split(":")[0].strip() for line in first.splitlines()] == [SMALL, "float32", "amp_bf16"]
    second = ran("gpu_make", tmp_path, SMALL, "--ways", "amp", "amp_bf16", "occ", "--peers", "/no/python")
    assert [line.split(":")[0].strip() for line in second.splitlines()] == [SMALL, "amp", "occ"]
    about = skeleton_files.about(tmp_path, SMALL)
    assert (set(about["ways"]), set(about["missing"])) == ({"float32", "amp", "amp_bf16"}, {"occ"})
    alone, together = (skeleton_files.recipes(folder, SMALL)["ways"] for folder in (tmp_path, skeletons))
    assert alone == {way: together[way] for way in alone}


def test_other_code_makes_the_conversions_of_this_package_again(skeletons: Path, tmp_path: Path) -> None:
    shutil.copytree(skeletons, tmp_path, dirs_exist_ok=True)
    about = skeleton_files.about(tmp_path, SMALL)
    (tmp_path / f"{SMALL}.json").write_text(json.dumps({**about, "tree": "other code"}))
    made = ran("gpu_make", tmp_path, SMALL, "--ways", "amp")
    assert [line.split(":")[0].strip() for line in made.splitlines()] == [SMALL, "amp"]
    again = skeleton_files.about(tmp_path, SMALL)
    assert (again["tree"], set(again["ways"])) == (about["tree"], {"float32", "amp"})
    assert again["missing"] == about["missing"]
    assert not list(tmp_path.glob("*amp_bf16*"))


def test_kept_skeletons_give_the_conversions_that_the_model_itself_gives(
    skeletons: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gpu_make, "KEPT", tmp_path / "kept")
    gpu_make.keep(skeletons, SMALL)
    (archive,) = (tmp_path / "kept").iterdir()
    first = archive.read_bytes()
    gpu_make.keep(skeletons, SMALL)
    assert archive.read_bytes() == first
    monkeypatch.setattr(gpu_models, "source", lambda name: pytest.fail("the model was built"))
    gpu_make.Making(SMALL, tmp_path / "made", {"anew": False}).run()
    assert skeleton_files.recipes(tmp_path / "made", SMALL) == skeleton_files.recipes(skeletons, SMALL)
    for way in gpu_make.own_ways():
        made, wanted = (skeleton_files.file_of(folder, SMALL, way) for folder in (tmp_path / "made", skeletons))
        assert made.read_bytes() == wanted.read_bytes(), way
    assert (
        skeleton_files.about(tmp_path / "made", SMALL)["missing"] == skeleton_files.about(skeletons, SMALL)["missing"]
    )


def test_the_checkout_holds_skeletons_of_every_model(tmp_path: Path) -> None:
    archives = {name: gpu_make.kept(name) for name in gpu_models.REAL}
    assert sum(path.stat().st_size for path in archives.values()) < 2_500_000
    kept = set(WAYS) - set(gpu_make.own_ways()) - {"tf32"}
    for name, path in archives.items():
        skeleton_files.unpack(path, tmp_path)
        about = skeleton_files.about(tmp_path, name)
        assert about["ways"].keys() | about["missing"].keys() == kept
        assert all(about["ways"][way]["with"] for way in about["ways"])
        assert not any("/" in reason for reason in about["missing"].values()), about["missing"]


def test_a_kept_skeleton_grows_to_the_model_that_is_written(tmp_path: Path) -> None:
    skeleton_files.unpack(gpu_make.kept("dense"), tmp_path)
    gpu_models.source("dense").write(tmp_path / "dense.onnx")
    made, wanted = skeleton_files.stripped(tmp_path, "dense", "float32"), onnx.load(tmp_path / "dense.onnx")
    noted = skeleton_files.recipes(tmp_path, "dense")
    skeleton.fill(made, noted["ways"]["float32"], skeleton.Sources(noted["sources"]))
    assert made.SerializeToString(deterministic=True) == wanted.SerializeToString(deterministic=True)


def test_scales_of_ways_that_are_not_kept_are_dropped(tmp_path: Path) -> None:
    def recipe(number: int) -> dict[str, Any]:
        return {"key": "dense", "scale": number}

    ways = {"float32": {"a": recipe(2)}, "amp": {"a": recipe(1)}, "occ": {"b": {"parts": [recipe(0), recipe(2)]}}}
    noted = {"ways": {way: {} for way in ways}, "missing": {"amp_bf16": "no", "autocast": "no"}}
    skeleton_files.note(tmp_path, "m", noted, {"scales": ["x", "y", "z"], "ways": ways})
    np.savez(tmp_path / "m.npz")
    for way in ways:
        skeleton_files.file_of(tmp_path, "m", way).write_bytes(b"")
    skeleton_files.select(tmp_path, "m", ["float32", "occ", "autocast"], tmp_path / "kept")
    assert skeleton_files.about(tmp_path / "kept", "m")["missing"] == {"autocast": "no"}
    found = skeleton_files.recipes(tmp_path / "kept", "m")
    assert found["scales"] == ["x", "z"]
    assert found["ways"] == {"float32": {"a": recipe(1)}, "occ": {"b": {"parts": [recipe(0), recipe(1)]}}}
    assert sorted(path.name for path in (tmp_path / "kept").glob("*.skeleton")) == [
        "m.float32.skeleton",
        "m.occ.skeleton",
    ]


def test_a_weight_with_other_bits_than_it_had_is_refused() -> None:
    sources = skeleton.Sources(GIVEN)
    recipe = sources.recipe(weight("dense"))
    assert recipe is not None
    sources.arrays["dense"] = sources.arrays["dense"] + 1
    with pytest.raises(ValueError, match="a weight made of dense has other bits than where its skeleton was made"):
        skeleton.grown(recipe, sources.arrays, sources.scales)


def test_a_model_whose_weights_cannot_be_drawn_again_is_left_out(skeletons: Path, tmp_path: Path) -> None:
    folder = tmp_path / "skeletons"
    shutil.copytree(skeletons, folder)
    recipes = skeleton_files.recipes(folder, SMALL)
    next(iter(recipes["ways"]["float32"].values()))["crc"] += 1
    skeleton_files.note(folder, SMALL, skeleton_files.about(folder, SMALL), recipes)
    command = [sys.executable, RUN, "gpu_grow", str(folder), str(tmp_path / "grown"), "--workers", "1"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr.strip()) == (1, "no model could be grown")
    assert done.stdout.startswith(f"{SMALL}: left out: a weight made of w1 has other bits than")
    assert not (tmp_path / "grown" / f"{SMALL}.json").exists()


def test_a_model_of_the_same_code_is_not_made_again(skeletons: Path) -> None:
    assert ran("gpu_make", skeletons, SMALL) == f"{SMALL}: is there\n"


def test_a_tool_that_fails_or_takes_too_long_is_said(tmp_path: Path) -> None:
    slow = tmp_path / "python"
    slow.write_text('#!/bin/sh\n[ "$1" = --version ] || { echo never mind >&2; exec sleep 30; }\n')
    slow.chmod(0o755)
    faults = {
        "/no/python": "/no/python, which --peers names, does not start",
        str(slow): "stopped after 1 s",
    }
    for python, said in faults.items():
        given = {"peers": python, "limit": 1}
        with pytest.raises(LookupError) as error:
            by_peer(WAYS["occ"], "dense", tmp_path / "a.onnx", tmp_path / "b.onnx", given)
        assert str(error.value) == said
