"""Batches of files in stores by URL: fsspec's memory and file systems."""

import sys
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import onnx
import pytest

from amp_rewrite import Outcome, convert_many
from amp_rewrite.errors import MachineError, ModelError, PatternError, ReportError
from amp_rewrite.files.disk import url_of
from amp_rewrite.pipeline.batch.places import copy, files_of
from support.repositories import net, repository, tree
from unit.cli.test_cli import run

fsspec = pytest.importorskip("fsspec", reason="needs fsspec")


@pytest.fixture
def memory() -> Iterator[Any]:
    store = fsspec.filesystem("memory")
    store.store.clear()
    yield store
    store.store.clear()
    store.pseudo_dirs[:] = [""]


@pytest.fixture
def src(tmp_path: Path, memory: Any) -> Path:
    """Write a repository locally and at memory://hub/src."""
    folder = repository(tmp_path / "src")
    net(folder / "big" / "model.onnx", data="model.onnx_data")
    (folder / "genai_config.json").write_text('{"model": {"decoder": {"filename": "model.onnx"}}}')
    memory.put(f"{folder}/", "/hub/src", recursive=True)
    return folder


def files(memory: Any, folder: str) -> dict[str, bytes]:
    return {path.removeprefix(f"/{folder}/"): memory.cat_file(path) for path in memory.find(f"/{folder}")}


@pytest.mark.parametrize(
    ("there", "overwrite", "resume", "expected"),
    [
        (None, False, True, b"abc"),
        (b"xyz", False, True, b"xyz"),
        (b"xyz", True, False, b"abc"),
        (b"wxyz", True, True, b"abc"),
        (b"wxyz", False, True, None),
    ],
)
@pytest.mark.parametrize("url", [False, True])
def test_a_copy_of_the_same_size_is_not_repeated(
    there: bytes | None, overwrite: bool, resume: bool, expected: bytes | None, url: bool, tmp_path: Path, memory: Any
) -> None:
    source, here = tmp_path / "a.json", tmp_path / "b.json"
    source.write_bytes(b"abc")
    if there is not None:
        memory.pipe_file("/hub/b.json", there)
        here.write_bytes(there)
    with (
        nullcontext()
        if expected is not None
        else pytest.raises(ModelError, match=r"b\.json already exists and differs from ")
    ):
        copy(source, Path("memory://hub/b.json") if url else here, overwrite=overwrite, resume=resume)
    assert (memory.cat_file("/hub/b.json") if url else here.read_bytes()) == (expected or there)
    with pytest.raises(ModelError, match=r"^cannot copy .*none to .*b\.json: No such file or directory; "):
        copy(tmp_path / "none", here, overwrite=True, resume=False)


def test_files_in_folders_with_a_dot_are_not_listed(memory: Any) -> None:
    for name in ("a.onnx", ".b.onnx", ".git/c.onnx", "d/.e/f/g.onnx", "d/h.onnx"):
        memory.pipe_file(f"/hub/{name}", b"abc")
    for place, found in (
        ("memory://hub", [".b.onnx", "a.onnx", "d/h.onnx"]),
        ("memory://hub/*", [".b.onnx", "a.onnx"]),
    ):
        assert [relative.as_posix() for relative in files_of([place], Path("out")).values()] == found


def done(*arguments: Any, **more: Any) -> list[Outcome]:
    outcomes = list(convert_many(*arguments, **more))
    assert not any(outcome.error for outcome in outcomes), outcomes
    return outcomes


@pytest.mark.parametrize("source", ["memory://hub/src", "here"])
@pytest.mark.parametrize("out", ["memory://hub/out", "out"])
def test_results_by_url_match_those_of_folders(
    source: str, out: str, src: Path, tmp_path: Path, memory: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    options = {"external_data": True}
    done(src, out="expected", **options)
    outcomes = done(str(src) if source == "here" else source, out=out, **options)
    assert (files(memory, "hub/out") if url_of(out) else tree(Path(out))) == tree(Path("expected"))
    assert all(outcome.target.startswith(f"{out}/") for outcome in outcomes)
    assert not list(tmp_path.glob("memory*"))


def test_the_data_of_a_model_is_converted_with_it_and_not_copied(src: Path, tmp_path: Path) -> None:
    done("memory://hub/src/big", out=tmp_path / "out")
    assert sorted(tree(tmp_path / "out")) == ["model.onnx"]
    done("memory://hub/src/big/model.onnx", out=tmp_path / "one")
    assert tree(tmp_path / "one") == tree(tmp_path / "out")


def test_models_are_uploaded_after_their_data(src: Path, memory: Any, monkeypatch: Any) -> None:
    order: list[str] = []
    for name in ("put_file", "pipe_file"):
        own = getattr(type(memory), name)

        def spy(self: Any, *arguments: Any, _own: Any = own, _to: int = name == "put_file", **more: Any) -> None:
            order.append(arguments[_to].removeprefix("/hub/"))
            _own(self, *arguments, **more)

        monkeypatch.setattr(type(memory), name, spy)
    done("memory://hub/src/big", out="memory://hub/out", external_data=True)
    assert [name for name in order if not name.startswith("src")] == ["out/model.onnx_data", "out/model.onnx"]


def test_a_run_is_resumed_from_the_stores_listing(src: Path, memory: Any, tmp_path: Path) -> None:
    options: dict[str, Any] = {"out": "memory://hub/out", "summary": tmp_path / "s.jsonl"}
    first = done("memory://hub/src", **options)
    with pytest.raises(ModelError, match=r"memory://hub/out/\S+ and 6 more files already exist"):
        convert_many("memory://hub/src", out="memory://hub/out")
    with pytest.raises(ReportError, match=r"s\.jsonl already exists"):
        convert_many("memory://hub/src", **options)
    with pytest.raises(ReportError, match=r"cannot write a summary to memory://hub/s\.jsonl: .* name a local file"):
        convert_many("memory://hub/src", out="memory://hub/out", summary="memory://hub/s.jsonl", resume=True)
    memory.pipe_file("/hub/src/model.onnx", net(src / "model.onnx", seed=9).read_bytes())
    memory.rm_file("/hub/out/decoder/plain.onnx")
    memory.pipe_file("/hub/src/big/model.onnx_data", (src / "big/model.onnx_data").read_bytes()[::-1])
    again = done("memory://hub/src", **options, resume=True)
    assert [o.source.removeprefix("memory://hub/src/") for o in again if o.finished] == ["decoder/model.onnx"]
    assert len(again) == len(first) == 4 and all(o.finished for o in done("memory://hub/src", **options, resume=True))
    assert memory.exists("/hub/out/decoder/plain.onnx")


def test_failures_name_urls_and_do_not_stop_the_others(src: Path, memory: Any, tmp_path: Path) -> None:
    memory.pipe_file("/hub/src/decoder/model.onnx", b"\x08\x08garbage")
    outcomes = list(convert_many("memory://hub/src", out=tmp_path / "out"))
    (failed,) = [outcome for outcome in outcomes if outcome.rc]
    assert failed.source == "memory://hub/src/decoder/model.onnx" and "amp-rewrite-" not in failed.error
    assert len(outcomes) == 4
    memory.rm_file("/hub/src/big/model.onnx_data")
    (absent,) = convert_many("memory://hub/src/big", out=tmp_path / "big")
    assert absent.error.startswith("cannot fetch memory://hub/src/big/model.onnx_data: there is no such file")
    with pytest.raises(PatternError, match="nonsense"):
        done("memory://hub/src/model.onnx", out=tmp_path / "one", keep="nonsense")
    with pytest.raises(ModelError, match=r"no \.onnx model in memory:/+hub/none"):
        convert_many("memory://hub/none", out=tmp_path / "none")


def test_the_command_takes_urls(src: Path, memory: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    output = run("memory://hub/src", "-o", "memory://hub/out", "--report", "s.jsonl")
    assert output.exit_code == 0, output.stderr
    assert "ok  memory://hub/out/decoder/plain.onnx: 2 of 2" in output.stdout
    assert "4 models done, 3 other files copied\nwrote s.jsonl\n" in output.stderr
    assert onnx.load_model_from_string(memory.cat_file("/hub/out/model.onnx")).graph.node
    wrong = run("memory://hub/src/model.onnx", "-o", "model_fp16.onnx")
    assert wrong.exit_code == 2 and "with URLs, -o must name a folder" in wrong.stderr
    assert sorted(path.name for path in tmp_path.iterdir()) == ["s.jsonl", "src"]


def test_an_unknown_or_uninstalled_store_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(MachineError, match=r"nowhere://a: Protocol not known: nowhere; name a store"):
        convert_many("nowhere://a", out=tmp_path / "out")
    monkeypatch.setitem(sys.modules, "fsspec.core", None)
    with pytest.raises(MachineError, match=r"s3://a requires the `fsspec` package: .*pip install '\.\[remote\]'"):
        convert_many("s3://a", out=tmp_path / "out")
