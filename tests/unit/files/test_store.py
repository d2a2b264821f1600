"""Saving: complete and atomic output, data files and scratch files."""

import errno
import hashlib
import os
import stat
import subprocess
import sys
import time
from contextlib import ExitStack
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import numpy_helper

from amp_rewrite.dtypes import DType
from amp_rewrite.errors import ModelError
from amp_rewrite.files import store, wire
from amp_rewrite.files.disk import locked, replacing, scratch, sweep, write_whole
from amp_rewrite.files.model import Model, baked
from amp_rewrite.files.protos import clone
from amp_rewrite.files.tensors import is_stub
from support.paths import ROOT
from support.weights import model, one, plain, scatter, values


@pytest.fixture
def inline(tmp_path: Path) -> Path:
    path = tmp_path / "in" / "inline.onnx"
    path.parent.mkdir()
    onnx.save_model(model(), path)
    return path


def files(folder: Path) -> dict[str, bytes]:
    return {str(p.relative_to(folder)): p.read_bytes() for p in sorted(folder.rglob("*")) if p.is_file()}


def data_file(path: Path) -> Path:
    (found,) = path.parent.glob(f"{path.stem}.*.data")
    return found


@pytest.mark.parametrize("external", [False, True])
@pytest.mark.parametrize("kind", ["inline", "scattered", "memory"])
def test_saving_loses_and_changes_nothing(tmp_path, inline, kind, external):
    source = inline
    if kind == "scattered":
        source = inline.parent / "scattered.onnx"
        scatter(model(), source)
    found = Model.load(model()) if kind == "memory" else Model.load(source)
    before = files(inline.parent)
    out = tmp_path / "out" / "m.onnx"
    out.parent.mkdir()
    found.save(out, external_data=external)
    assert plain(Model.load(out).to_proto()) == plain(Model.load(source).to_proto())
    if kind != "memory" and not external:
        assert Model.load(out).to_proto() == Model.load(source).to_proto()
    assert len(list(out.parent.iterdir())) == 1 + external
    assert files(inline.parent) == before


def test_the_data_file_is_named_by_its_content_and_aligned(tmp_path, inline):
    out = tmp_path / "m.onnx"
    Model.load(inline).save(out, external_data=True)
    found = data_file(out)
    assert found.name == f"m.{hashlib.sha256(found.read_bytes()).hexdigest()[:16]}.data"
    saved = onnx.load(out, load_external_data=False)
    entries = {t.name: {e.key: e.value for e in t.external_data} for t in wire.tensors(saved) if is_stub(t)}
    assert entries.keys() == {"heavy", "typed", "big", "tied", "body", "moment", ""}
    assert {e["location"] for e in entries.values()} == {found.name}
    assert int(entries["big"]["offset"]) % 4096 == 0
    assert all(int(e["offset"]) % 64 == 0 for e in entries.values())


def test_light_tensors_lists_of_integers_and_strings_stay_in_the_model_file(tmp_path):
    proto = one(numpy_helper.from_array(values(255), "light"))
    proto.graph.initializer.append(numpy_helper.from_array(np.arange(1000), "shape"))
    proto.graph.initializer.append(numpy_helper.from_array(np.array(["x" * 5000], object), "words"))
    Model.load(proto).save(tmp_path / "m.onnx", external_data=True)
    assert files(tmp_path).keys() == {"m.onnx"}
    assert onnx.load(tmp_path / "m.onnx") == proto


def test_tied_stubs_are_written_once(tmp_path, inline):
    found = Model.load(inline)
    proto = clone(found.proto)
    big = next(t for t in proto.graph.initializer if t.name == "big")
    for name in ("tied1", "tied2"):
        proto.graph.initializer.add().CopyFrom(baked(big, DType.FLOAT16, name=name, model=found))
    proto.graph.initializer.add().CopyFrom(baked(big, DType.BFLOAT16, name="other", model=found))
    out = tmp_path / "m.onnx"
    Model(proto).save(out, external_data=True)
    saved = {t.name: t for t in onnx.load(out, load_external_data=False).graph.initializer}
    offsets = [{e.key: e.value for e in saved[n].external_data}["offset"] for n in ("big", "tied1", "tied2", "other")]
    assert offsets[1] == offsets[2] and len(set(offsets)) == 3


@pytest.mark.parametrize("external", [False, True])
@pytest.mark.parametrize("to", [DType.FLOAT16, DType.BFLOAT16])
def test_pending_casts_are_applied(tmp_path, to, external):
    special = np.array([np.nan, np.inf, -np.inf, 0.0, -0.0, 1e-7, 6e-8, 1e-42, 7e4, -7e4, 65519, 3.4e38], np.float32)
    weights = np.concatenate([special, values(600_000) * 1e-4])  # more than one chunk
    onnx.save_model(one(numpy_helper.from_array(weights, "w")), tmp_path / "in.onnx")
    found = Model.load(tmp_path / "in.onnx")
    proto = found.to_proto()
    proto.graph.initializer[0].CopyFrom(baked(found.proto.graph.initializer[0], to, model=found))
    Model(proto).save(tmp_path / "out.onnx", external_data=external)
    with np.errstate(all="ignore"):
        expected = weights.astype(to.numpy)
        over = np.isinf(expected) & np.isfinite(weights)
        expected[over] = np.copysign(to.max, weights[over]).astype(to.numpy)
    saved = Model.load(tmp_path / "out.onnx").to_proto().graph.initializer[0]
    assert (saved.name, saved.data_type, list(saved.dims)) == ("w", to.code, [weights.size])
    np.testing.assert_array_equal(np.frombuffer(saved.raw_data, "u2"), expected.view("u2"))


def test_external_data_is_the_default_from_a_size_on(tmp_path, inline, monkeypatch):
    found = Model.load(inline)
    found.save(tmp_path / "small.onnx")
    assert not list(tmp_path.glob("*.data"))
    monkeypatch.setattr(store, "MAX_INLINE_BYTES", found.nbytes - 1)
    found.save(tmp_path / "large.onnx")
    assert data_file(tmp_path / "large.onnx")
    for overwrite in (np.True_, np.False_):
        found.save(tmp_path / f"{overwrite}.onnx", external_data=overwrite)
    assert data_file(tmp_path / "True.onnx")
    assert not list(tmp_path.glob("False.*.data"))


def test_an_existing_output_is_replaced_only_on_request(tmp_path, inline):
    found = Model.load(inline)
    before = files(tmp_path)
    with pytest.raises(ModelError, match="already exists; name another output, or use overwrite=True"):
        found.save(inline)
    (tmp_path / "dangling").symlink_to("nothing")
    with pytest.raises(ModelError, match="exists"):
        found.save(tmp_path / "dangling")
    assert files(tmp_path) == before


@pytest.mark.parametrize("external", [False, True])
@pytest.mark.parametrize("alias", ["same", "symlink", "hardlink"])
def test_the_output_may_be_the_input_on_request(tmp_path, inline, alias, external):
    out = inline
    if alias == "symlink":
        out = tmp_path / "link.onnx"
        out.symlink_to(inline)
    elif alias == "hardlink":
        out = tmp_path / "link.onnx"
        out.hardlink_to(inline)
    found = Model.load(out)
    found.save(out, overwrite=True, external_data=external)
    assert plain(Model.load(out).to_proto()) == plain(model())
    assert not out.is_symlink()
    heavy = next(t for t in found.proto.graph.initializer if t.name == "heavy")
    if alias != "same":
        assert onnx.load(inline) == model()
    if alias == "symlink":
        assert found.array(heavy).shape == (65, 64)
    else:
        with pytest.raises(ModelError, match="has changed since the model was loaded"):
            found.array(heavy)


@pytest.mark.parametrize("external", [False, True])
def test_only_the_old_data_file_is_removed_and_after_the_model(tmp_path, inline, external):
    out = tmp_path / "m.onnx"
    Model.load(inline).save(out, external_data=True)
    old = data_file(out)
    others = [f"m.{'0' * 16}.data", f"n.{'0' * 16}.data", "m.data"]
    for name in others:
        (tmp_path / name).write_bytes(b"kept")
    found = Model.load(out)
    proto = clone(found.proto)
    heavy = next(t for t in proto.graph.initializer if t.name == "heavy")
    heavy.CopyFrom(baked(heavy, DType.FLOAT16, model=found))
    Model(proto, out).save(out, overwrite=True, external_data=external)
    assert not old.exists()
    assert all((tmp_path / name).read_bytes() == b"kept" for name in others)
    saved = Model.load(out).to_proto()
    assert plain(saved).graph.initializer[-1] == plain(model()).graph.initializer[-1]


@pytest.mark.parametrize("external", [False, True])
@pytest.mark.parametrize("call", range(1, 4))
@pytest.mark.parametrize("name", ["replace", "fsync"])
def test_a_failure_leaves_only_the_old_model(tmp_path, inline, monkeypatch, name, call, external):
    out = tmp_path / "m.onnx"
    changed = model()
    next(t for t in changed.graph.initializer if t.name == "big").doc_string = "old"
    Model.load(changed).save(out, external_data=True)
    before = files(tmp_path)
    count = 0
    real = getattr(os, name)

    def fail(*args: object, **kwargs: object) -> object:
        nonlocal count
        count += 1
        if count == call:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return real(*args, **kwargs)

    monkeypatch.setattr(os, name, fail)
    weights = Model.load(inline)
    proto = clone(weights.proto)
    big = next(t for t in proto.graph.initializer if t.name == "big")
    big.CopyFrom(baked(big, DType.FLOAT16, model=weights))
    if call <= 1 + external:  # of the data file and of the model; the third is of the folder
        with pytest.raises(ModelError, match=r"cannot write .*m\.onnx: Input/output error; nothing was changed"):
            Model(proto).save(out, overwrite=True, external_data=external)
        assert files(tmp_path) == before
    else:
        Model(proto).save(out, overwrite=True, external_data=external)
        assert len(list(tmp_path.iterdir())) == (3 if external else 2)


MEMORY = """
import re, sys
from pathlib import Path
from amp_rewrite.dtypes import DType
from amp_rewrite.files.model import Model, baked
import onnx
def peak():
    return int(re.search(r"VmHWM:\\s+(\\d+)", Path("/proc/self/status").read_text())[1]) // 1024
source, target = sys.argv[1:]
before = peak()
model = Model.load(source)
proto = onnx.ModelProto()
proto.CopyFrom(model.proto)
for tensor in proto.graph.initializer:
    model.fit(tensor, DType.FLOAT16)
    tensor.CopyFrom(baked(tensor, DType.FLOAT16, model=model))
model = Model(proto)
model.skeleton()
model.save(target)
print(peak() - before)
"""


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="peak memory is read from /proc")
def test_a_model_of_256_mib_is_lowered_in_less_than_80(tmp_path):
    proto = one(numpy_helper.from_array(np.full((64, 1 << 20), 1e-3, np.float32), "w"))
    onnx.save_model(proto, tmp_path / "in.onnx", save_as_external_data=True, location="w.bin")
    run = [sys.executable, "-c", MEMORY, tmp_path / "in.onnx", tmp_path / "out.onnx"]
    done = subprocess.run(run, capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    # A chunk is 16 MiB; a cast needs it, its low copy and its masks.
    assert int(done.stdout) < 80


@pytest.mark.parametrize("file", ["a.bin", "lone.bin"])
def test_a_file_of_source_weights_is_never_replaced(tmp_path, file):
    scatter(model(), tmp_path / "m.onnx")
    before = files(tmp_path)
    found = Model.load(tmp_path / "m.onnx")
    with pytest.raises(ModelError, match=f"{file}: the model still reads weights from it; name another"):
        found.save(tmp_path / file, overwrite=True)
    assert files(tmp_path) == before


@pytest.fixture
def out(tmp_path: Path) -> Path:
    (tmp_path / "out").mkdir()
    return tmp_path / "out"


@pytest.mark.parametrize("name", ["../up", "a/b", "n.onnx", "..", "a\\b"])
def test_a_data_file_must_be_named_beside_the_model(inline: Path, out: Path, name: str) -> None:
    with pytest.raises(ModelError, match="cannot name the weights"):
        Model.load(inline).save(out / "n.onnx", external_data=name)
    assert not files(out)


def test_named_data_of_the_replaced_model_is_replaced_with_it(inline: Path, out: Path) -> None:
    found = Model.load(inline)
    found.save(out / "m.onnx", external_data="m.onnx_data")
    with pytest.raises(ModelError, match="exists"):
        found.save(out / "m.onnx", external_data="m.onnx_data")
    found.save(out / "m.onnx", external_data="m.onnx_data", overwrite=True)
    assert files(out).keys() == {"m.onnx", "m.onnx_data"}
    assert plain(Model.load(out / "m.onnx").to_proto()) == plain(model())


def test_data_shared_with_another_model_is_never_replaced(inline: Path, out: Path) -> None:
    found = Model.load(inline)
    found.save(out / "one.onnx", external_data="weights.bin")
    before = files(out)
    with pytest.raises(ModelError, match=r"one\.onnx reads .*weights\.bin"):
        found.save(out / "two.onnx", external_data="weights.bin", overwrite=True)
    assert files(out) == before


def test_an_interrupt_leaves_nothing(inline: Path, out: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write, begun = store._write, []

    def failing(*arguments) -> None:
        begun.append(arguments)
        if len(begun) > 1:
            raise KeyboardInterrupt
        write(*arguments)

    monkeypatch.setattr(store, "_write", failing)
    with pytest.raises(KeyboardInterrupt):
        Model.load(inline).save(out / "m.onnx", external_data=True)
    assert not files(out)


OLD = time.time() - 7200


def left_behind(folder: Path, name: str, age: float = OLD) -> Path:
    path = folder / f".amp-rewrite.{name}.tmp"
    path.write_bytes(b"half")
    os.utime(path, (age, age))
    return path


def test_only_leftovers_of_a_killed_process_are_swept(tmp_path: Path) -> None:
    dead, young = left_behind(tmp_path, "dead"), left_behind(tmp_path, "young", time.time())
    other, target = tmp_path / "model.tmp", left_behind(tmp_path / "..", tmp_path.name)
    other.write_bytes(b"")
    os.utime(other, (OLD, OLD))
    link = tmp_path / ".amp-rewrite.link.tmp"
    link.symlink_to(target)
    with ExitStack() as undo:
        mine, _ = scratch(tmp_path, undo)
        sweep(tmp_path)
        assert not dead.exists()
        assert young.exists() and other.exists() and link.is_symlink() and mine.exists()
    assert not mine.exists()
    target.unlink()


def test_a_file_is_replaced_atomically(tmp_path: Path) -> None:
    target, dead = tmp_path / "words", left_behind(tmp_path, "dead")
    write_whole(target, b"first")
    target.chmod(0o640)
    write_whole(target, b"second")
    assert (target.read_bytes(), stat.S_IMODE(target.stat().st_mode), dead.exists()) == (b"second", 0o640, False)
    with pytest.raises(KeyboardInterrupt), replacing(target) as file:
        file.write(b"third")
        raise KeyboardInterrupt
    assert [(path.name, path.read_bytes()) for path in tmp_path.iterdir()] == [("words", b"second")]


def test_a_folder_is_locked_by_one_process_at_a_time(tmp_path: Path) -> None:
    import fcntl

    with locked(tmp_path):
        other = os.open(tmp_path, os.O_RDONLY)
        with pytest.raises(BlockingIOError):
            fcntl.flock(other, fcntl.LOCK_EX | fcntl.LOCK_NB)
    fcntl.flock(other, fcntl.LOCK_EX | fcntl.LOCK_NB)
    os.close(other)
