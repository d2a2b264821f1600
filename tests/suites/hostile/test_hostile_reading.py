"""Files that change while they are read, file systems without sync or locks, and shared data files."""

import errno
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import onnx
import onnx.parser
import pytest

from amp_rewrite.errors import ModelError
from amp_rewrite.files import wire
from amp_rewrite.files.disk import write_whole
from amp_rewrite.files.model import Model
from amp_rewrite.pipeline.convert import convert
from suites.hostile.given import files, net, weights


@pytest.fixture(params=["inline", "external"])
def source(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[Path, Path]:
    """Return a model and the file with its weights."""
    folder = tmp_path / "in"
    folder.mkdir()
    model = folder / "m.onnx"
    if request.param == "inline":
        onnx.save(net(size=300), model)
        return model, model
    onnx.save_model(net(size=300), model, save_as_external_data=True, location="m.bin", size_threshold=0)
    return model, folder / "m.bin"


# -- changes during reading -------------------------------------------------------------------------------------


def overwrite(path: Path) -> None:
    with path.open("r+b") as file:
        file.seek(500_000)
        file.write(b"\1" * 4096)


def append(path: Path) -> None:
    with path.open("ab") as file:
        file.write(b"\1")


def truncate(path: Path) -> None:
    os.truncate(path, 400_000)


def to_hole(path: Path) -> None:
    """Change bytes but not the size."""
    size = path.stat().st_size
    os.truncate(path, 400_000)
    os.truncate(path, size)


@pytest.mark.parametrize("change", [overwrite, append, truncate, to_hole])
def test_weights_changed_while_a_model_is_saved_are_not_mixed(
    source: tuple[Path, Path], change: Callable[[Path], None], tmp_path: Path
) -> None:
    """The same file stays open, so half of the bytes read would be old and half new."""
    model, weights = source
    converted = convert(model).result
    pending = [change]

    def progress(done: int, total: int) -> None:
        if pending:
            pending.pop()(weights)

    out = tmp_path / "out"
    out.mkdir()
    (out / "out.onnx").write_bytes(b"the old model")
    with pytest.raises(ModelError, match=f"^{weights} has changed since the model was loaded from it; load it again$"):
        converted.save(out / "out.onnx", overwrite=True, external_data=model != weights, progress=progress)
    assert files(out) == {"out.onnx": b"the old model"}


def test_a_changed_file_is_noticed_when_the_next_one_is_opened(tmp_path: Path) -> None:
    onnx.save_model(
        net(size=300), tmp_path / "m.onnx", save_as_external_data=True, all_tensors_to_one_file=False, size_threshold=0
    )
    found = Model.load(tmp_path / "m.onnx")
    pending = [tmp_path / "w"]

    def progress(done: int, total: int) -> None:
        if pending and done > 100_000:  # w has been read
            append(pending.pop())

    with pytest.raises(ModelError, match="w has changed since the model was loaded"):
        found.save(tmp_path / "out.onnx", external_data=False, progress=progress)
    assert not (tmp_path / "out.onnx").exists()


def test_a_model_changed_while_it_is_loaded_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "m.onnx"
    onnx.save(net(size=300), path)
    walk = wire.lightened

    def slow(*words: object) -> bytes:
        found = walk(*words)  # type: ignore[arg-type]
        append(path)
        return found

    monkeypatch.setattr(wire, "lightened", slow)
    with pytest.raises(ModelError, match=r"m\.onnx changed while it was read; load it again$"):
        Model.load(path)


# -- file systems without sync or locks -------------------------------------------------------------------------


@pytest.mark.parametrize("code", [errno.EINVAL, errno.ENOSYS, errno.ENOTSUP])
@pytest.mark.parametrize("external", [False, True])
def test_a_file_system_without_sync_or_locks_can_be_written(
    code: int, external: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import fcntl

    def refuse(*_: object) -> None:
        raise OSError(code, os.strerror(code))

    for module, name in ((os, "fsync"), (fcntl, "flock")):
        monkeypatch.setattr(module, name, refuse, raising=False)
    Model.load(net()).save(tmp_path / "out.onnx", external_data=external)
    write_whole(tmp_path / "words", b"whole")
    assert weights(onnx.load(tmp_path / "out.onnx")) == weights(net())
    assert (tmp_path / "words").read_bytes() == b"whole"
    assert len(files(tmp_path)) == 2 + external


# -- shared data files ------------------------------------------------------------------------------------------


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    """Save a model with its weights in a data file."""
    Model.load(net()).save(tmp_path / "m.onnx", external_data=True)
    return tmp_path / "m.onnx"


@pytest.mark.parametrize("name", ["other.onnx", "other.model", "sub/other.onnx"])
def test_data_of_the_source_stays_when_another_model_with_it_is_replaced(saved: Path, name: str) -> None:
    other = saved.parent / name
    other.parent.mkdir(exist_ok=True)
    shutil.copy(saved, other)
    folder = saved.parent if name.startswith("sub") else None
    Model.load(other, folder=folder).save(saved, overwrite=True, external_data=True)
    again = Model.load(other, folder=folder).to_proto()
    assert weights(again) == weights(onnx.load(saved)) == weights(net())
