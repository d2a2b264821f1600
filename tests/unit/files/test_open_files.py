"""Models from and to files that are open already: in memory, of fsspec, closed, of text."""

from __future__ import annotations

import io
from pathlib import Path

import pytest

from amp_rewrite import convert
from amp_rewrite.errors import ModelError
from amp_rewrite.files import store
from amp_rewrite.files.model import Model
from support.repositories import net


def test_a_model_comes_from_an_open_file_and_goes_to_one(tmp_path: Path) -> None:
    path = net(tmp_path / "m.onnx", data="w.bin")
    net(tmp_path / "whole.onnx")
    convert(tmp_path / "whole.onnx").save(tmp_path / "out.onnx")
    target = io.BytesIO()
    with (tmp_path / "whole.onnx").open("rb") as source:
        convert(source).save(target)
    assert target.getvalue() == (tmp_path / "out.onnx").read_bytes()
    seen: list[tuple[int, int]] = []
    second = io.BytesIO()
    Model.load(path).save(second, progress=lambda done, total: seen.append((done, total)))
    assert seen[-1] == (len(second.getvalue()),) * 2


@pytest.mark.parametrize("scheme", ["memory", "file"])
def test_fsspec_gives_such_files(tmp_path: Path, scheme: str) -> None:
    fsspec = pytest.importorskip("fsspec")
    net(tmp_path / "m.onnx")
    base = f"{scheme}://{tmp_path}"
    with fsspec.open(f"{base}/in.onnx", "wb") as file:
        file.write((tmp_path / "m.onnx").read_bytes())
    with fsspec.open(f"{base}/in.onnx", "rb") as source, fsspec.open(f"{base}/out.onnx", "wb") as target:
        convert(source).save(target)
    convert(tmp_path / "m.onnx").save(tmp_path / "here.onnx")
    with fsspec.open(f"{base}/out.onnx", "rb") as file:
        assert file.read() == (tmp_path / "here.onnx").read_bytes()


def test_files_that_do_not_give_or_take_bytes_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = Model.load(net(tmp_path / "m.onnx"))
    with pytest.raises(ModelError, match="open it with mode 'rb'"):
        Model.load(io.StringIO("text"))
    closed = io.BytesIO(b"")
    closed.close()
    with pytest.raises(ModelError, match="I/O operation on closed file; open it to read bytes"):
        Model.load(closed)
    for file in (closed, io.StringIO()):
        with pytest.raises(ModelError, match="does not hold a whole model now"):
            model.save(file)  # type: ignore[arg-type]
    with pytest.raises(ModelError, match="an open file cannot have data files beside it"):
        model.save(io.BytesIO(), external_data=True)
    monkeypatch.setattr(store, "LARGEST_FILE", 1000)
    with pytest.raises(ModelError, match="to a path, which may have external data"):
        model.save(io.BytesIO())
