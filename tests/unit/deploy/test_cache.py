"""The cache of converted models: complete entries, distinct keys, bounded size."""

import os
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

from amp_rewrite.deploy.session import Cache
from amp_rewrite.errors import ModelError
from amp_rewrite.files.model import Model

WEIGHT = np.random.default_rng(3).standard_normal((160, 160)).astype(np.float32)  # 100 KiB: stays in its file
A, B, C = "a" * 64, "b" * 64, "c" * 64


def product(weight: np.ndarray = WEIGHT, name: str = "w") -> onnx.ModelProto:
    x, y = (helper.make_tensor_value_info(n, TensorProto.FLOAT, [1, 160]) for n in "xy")
    node = helper.make_node("MatMul", ["x", name], ["y"])
    graph = helper.make_graph([node], "g", [x], [y], [numpy_helper.from_array(weight, name)])
    return helper.make_model(graph, ir_version=10, opset_imports=[helper.make_opsetid("", 20)])


def key_of(model: Model, settings: str) -> str:
    return Cache(Path("/none")).key(model, settings)


def small() -> Model:
    return Model.load(product(np.eye(160, dtype=np.float32)))


def names(cache: Cache) -> list[str]:
    return sorted(path.name for path in (cache.folder / "v1").iterdir())


def aged(cache: Cache, key: str, seconds: float) -> None:
    when = time.time() - seconds
    os.utime(cache.folder / "v1" / key, (when, when))


# -- keys ----------------------------------------------------------------------------------------------


def test_a_key_changes_with_any_bit_of_the_model(tmp_path: Path) -> None:
    onnx.save(product(), tmp_path / "inside.onnx")
    onnx.save(product(), tmp_path / "beside.onnx", save_as_external_data=True, location="w.data", size_threshold=0)
    ways = (product(), product().SerializeToString(), tmp_path / "inside.onnx", tmp_path / "beside.onnx")
    assert len({key_of(Model.load(way), "float16") for way in ways}) == 1
    keys = {key_of(Model.load(product()), "")}
    for place in (0, 80 * 160 + 80, WEIGHT.size - 1):
        weight = WEIGHT.copy()
        weight.view(np.uint32).reshape(-1)[place] ^= 1
        onnx.save(product(weight), tmp_path / f"{place}.onnx")
        keys.add(key_of(Model.load(tmp_path / f"{place}.onnx"), ""))
    keys.add(key_of(Model.load(product(name="v")), ""))
    keys.add(key_of(Model.load(product(WEIGHT.reshape(1, 160, 160))), ""))
    keys.add(key_of(Model.load(product()), "float16"))
    keys.add(key_of(Model.load(product()), "bfloat16"))
    assert len(keys) == 8


# -- entries -------------------------------------------------------------------------------------------


def test_a_stored_model_is_found_again(tmp_path: Path) -> None:
    cache = Cache(tmp_path / "not" / "yet")
    assert cache.load(A) is None
    cache.store(A, Model.load(product()), "a report, ä")
    entry = cache.load(A)
    assert entry is not None
    assert entry.report == "a report, ä"
    np.testing.assert_array_equal(entry.model.array(entry.model.proto.graph.initializer[0]), WEIGHT)
    assert cache.load(B) is None
    assert names(cache) == [A]


DAMAGE: dict[str, Callable[[Path], object]] = {
    "gone": Path.unlink,
    "binary": lambda file: file.write_bytes(b"\xff"),
    "a folder": lambda file: (file.unlink(), file.mkdir()),
    "a pipe": lambda file: (file.unlink(), os.mkfifo(file)),
    "cut": lambda file: file.write_bytes(file.read_bytes()[:-50]),
}


@pytest.mark.parametrize(
    ("file", "damage"),
    [(f, how) for f in ("model.onnx", "report.json") for how in DAMAGE if (f, how) != ("report.json", "cut")],
)
def test_a_damaged_entry_is_a_miss_and_can_be_rewritten(tmp_path: Path, file: str, damage: str) -> None:
    cache = Cache(tmp_path)
    cache.store(A, Model.load(product()), "x")
    DAMAGE[damage](tmp_path / "v1" / A / file)
    assert cache.load(A) is None
    cache.store(A, Model.load(product()), "y")
    entry = cache.load(A)
    assert entry is not None and entry.report == "y"


def test_many_threads_may_store_the_same_model(tmp_path: Path) -> None:
    cache = Cache(tmp_path)
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda _: cache.store(A, small(), "x"), range(24)))
    assert names(cache) == [A]
    assert cache.load(A) is not None


def test_a_model_that_cannot_be_written_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise ModelError("cannot write: No space left on device")

    monkeypatch.setattr(Model, "save", full)
    with pytest.raises(ModelError, match="No space left"):
        Cache(tmp_path).store(A, small(), "x")
    assert names(Cache(tmp_path)) == []


# -- the limit -----------------------------------------------------------------------------------------

ONE = 103_500  # bytes of one entry: 160 x 160 float32, and less than 1 KiB around it


def test_the_least_recently_used_entry_is_evicted_first(tmp_path: Path) -> None:
    cache = Cache(tmp_path, limit=2 * ONE)
    for age, key in ((3000, A), (2000, B)):
        cache.store(key, small(), "x")
        aged(cache, key, age)
    assert cache.load(A) is not None  # and so A is younger than B
    cache.store(C, small(), "x")
    assert names(cache) == [A, C]


def test_a_recently_used_entry_stays(tmp_path: Path) -> None:
    cache = Cache(tmp_path, limit=ONE)
    cache.store(A, small(), "x")
    cache.store(B, small(), "x")
    assert names(cache) == [A, B]
    aged(cache, A, 601)
    cache.store(C, small(), "x")
    assert names(cache) == [B, C]


def test_leftovers_of_a_killed_process_count_as_an_entry(tmp_path: Path) -> None:
    cache = Cache(tmp_path, limit=ONE)
    (tmp_path / "v1" / "tmp_old").mkdir(mode=0o700, parents=True)
    (tmp_path / "v1").chmod(0o700)
    (tmp_path / "v1" / "tmp_old" / "model.onnx").write_bytes(bytes(1 << 13))
    aged(cache, "tmp_old", 601)
    cache.store(A, small(), "x")
    assert names(cache) == [A]


# -- where ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("value", ["", "relative"])
def test_the_users_cache_is_in_the_standard_place(monkeypatch: pytest.MonkeyPatch, value: str) -> None:
    monkeypatch.setenv("HOME", "/home/someone")
    assert Cache.usual({"XDG_CACHE_HOME": "/big/disk"}) == Cache(Path("/big/disk/amp-rewrite"))
    assert Cache.usual({"XDG_CACHE_HOME": value}) == Cache(Path("/home/someone/.cache/amp-rewrite"))
