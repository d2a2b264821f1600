"""Batches in Python: trees, names, failures, resuming, shared weights, other executors."""

import json
import os
import pickle
import shutil
import sys
from collections.abc import Callable
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import onnx
import pytest

from amp_rewrite import Outcome, convert, convert_many
from amp_rewrite.errors import AmpRewriteError, ModelError, PolicyError, ReportError
from support.repositories import net, repository, tree
from support.weights import plain

FLOAT16 = onnx.TensorProto.FLOAT16


@pytest.fixture
def src(tmp_path: Path) -> Path:
    return repository(tmp_path / "src")


@pytest.fixture
def out(tmp_path: Path) -> Path:
    return tmp_path / "out"


def done(*arguments: Any, **more: Any) -> list[Outcome]:
    return list(convert_many(*arguments, **more))


def left(out: Path) -> list[str]:
    return sorted(tree(out)) if out.exists() else []


def broken(path: Path) -> Path:
    path.write_bytes(b"\x08\x08garbage")
    return path


def test_a_tree_is_mirrored_and_other_files_are_copied(src: Path, out: Path) -> None:
    outcomes = done(src, out=out)
    assert sorted(tree(out)) == sorted(tree(src))
    assert {outcome.rc for outcome in outcomes} == {0} and len(outcomes) == 3
    assert (out / "config.json").read_text() == "{}"
    for path in src.rglob("*.onnx"):
        alone = out.parent / "alone.onnx"
        convert(path).save(alone, overwrite=True)
        assert (out / path.relative_to(src)).read_bytes() == alone.read_bytes()


@pytest.mark.parametrize(
    ("change", "more", "message"),
    [
        (lambda src: None, {"keep": "kee=p"}, "unknown key 'kee'"),
        (lambda src: None, {"jobs": 0}, "use 1 or more"),
        (lambda src: (src / "model.ONNX").symlink_to("model.onnx"), {}, "would both be written to"),
        (lambda src: (src.parent / "out").write_text(""), {}, "it is a file; name a folder for several models"),
    ],
)
def test_a_general_mistake_is_reported_before_anything_is_written(
    src: Path, out: Path, change: Callable[[Path], object], more: dict[str, Any], message: str
) -> None:
    change(src)
    with pytest.raises(AmpRewriteError, match=message):
        convert_many(src, out=out, **more)
    assert not out.is_dir()


def test_existing_results_stay_unless_replacing_is_allowed(src: Path, out: Path) -> None:
    done(src, out=out)
    before = tree(out)
    with pytest.raises(ModelError, match="and 4 more files already exist; name another folder, continue with resume"):
        convert_many(src, out=out)
    with pytest.raises(ReportError, match=r"nothing to resume from; .*: summary='FILE\.jsonl'"):
        convert_many(src, out=out, resume=True)
    summary = out.parent / "s.jsonl"
    for _ in range(2):  # without the first run's summary, and with one
        (out / "model.onnx").write_bytes(b"mine")
        (out / "config.json").write_text("mine")
        mine = tree(out)
        errors = {Path(o.source).name: o.error for o in done(src, out=out, resume=True, summary=summary) if o.rc}
        assert "already exists, and no earlier run wrote it; name another folder" in errors["model.onnx"]
        assert "exists and differs from" in errors["config.json"]
        assert len(errors) == 2 and tree(out) == mine
        assert {o.rc for o in done(src, out=out, overwrite=True, summary=summary)} == {0}
        assert tree(out) == before


def test_an_empty_folder_and_one_without_models_are_named(tmp_path: Path, out: Path) -> None:
    (tmp_path / "empty").mkdir()
    with pytest.raises(ModelError, match=r"no \.onnx model in .*empty \(no files\)"):
        convert_many(tmp_path / "empty", out=out)
    with pytest.raises(PolicyError, match="nothing to convert"):
        convert_many([], out=out)


def test_a_failing_model_does_not_stop_the_others(src: Path, out: Path) -> None:
    broken(src / "decoder" / "model.onnx")
    net(src / "out_of_folder.onnx", data="w.bin")
    shutil.move(src / "w.bin", src.parent / "w.bin")
    (src / "w.bin").symlink_to("../w.bin")
    (src / "gone.onnx").symlink_to("nowhere.onnx")
    outcomes = {os.path.relpath(o.source, src): o for o in done(src, out=out)}
    failed = {name for name, o in outcomes.items() if o.rc == 2}
    assert failed == {"decoder/model.onnx", "out_of_folder.onnx", "gone.onnx"}
    assert "links to a file outside the model's folder" in outcomes["out_of_folder.onnx"].error
    assert "\n" not in "".join(o.error for o in outcomes.values())
    assert left(out) == ["config.json", "decoder/plain.onnx", "decoder/vocab.txt", "model.onnx"]


def test_links_pipes_and_hidden_folders_are_not_followed(src: Path, out: Path) -> None:
    shutil.rmtree(src / "decoder")
    (src / "loop").symlink_to(".", target_is_directory=True)
    (src / "linked.onnx").symlink_to("model.onnx")
    os.mkfifo(src / "pipe")
    net(src / ".git" / "model.onnx")
    done(src, out=out)
    assert left(out) == ["config.json", "linked.onnx", "model.onnx"]
    assert not (out / "linked.onnx").is_symlink()


def test_a_folder_that_cannot_be_read_is_an_error(src: Path, out: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refusing(folder: Any) -> Any:
        if Path(folder) == src / "decoder":
            raise PermissionError(13, "Permission denied", os.fspath(folder))
        return scan(folder)

    scan = os.scandir
    monkeypatch.setattr(os, "scandir", refusing)
    with pytest.raises(
        ModelError, match=r"cannot read the folder .*decoder: Permission denied; make it readable, or name"
    ):
        convert_many(src, out=out)


def test_files_with_names_beyond_unicode_are_copied_and_models_refused(src: Path, out: Path) -> None:
    name = os.fsdecode(b"caf\xe9")
    (src / f"{name}.txt").write_text("x")
    net(src / f"{name}.onnx")
    outcomes = {outcome.source: outcome for outcome in done(src, out=out, summary=out.parent / "s.jsonl")}
    assert "its name is not Unicode" in outcomes[str(src / f"{name}.onnx")].error
    assert (out / f"{name}.txt").read_text() == "x"
    lines = [json.loads(line) for line in (out.parent / "s.jsonl").read_text().splitlines()]
    assert str(src / f"{name}.onnx") in {line["source"] for line in lines}


def test_a_pattern_must_match_in_some_model(src: Path, out: Path) -> None:
    net(src / "named.onnx", names=("mask", "z"))
    outcomes = done(src, out=out, io="mask=float16", keep="second")
    assert {outcome.rc for outcome in outcomes} == {0}
    assert sum("mask=float16" in outcome.unmatched for outcome in outcomes) == 3
    assert onnx.load(out / "named.onnx").graph.input[0].type.tensor_type.elem_type == FLOAT16


def conversions(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    home = sys.modules["amp_rewrite.pipeline.convert"]  # the package's name is the function
    real, names = home.convert, list[str]()

    def counting(model: Any, **more: Any) -> Any:
        names.append(model.path.name)
        return real(model, **more)

    monkeypatch.setattr(home, "convert", counting)
    return names


def test_a_resumed_batch_skips_the_finished_models_of_its_summary(
    src: Path, out: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    summary = tmp_path / "s.jsonl"
    whole = {outcome.source: outcome for outcome in done(src, out=out, summary=summary)}
    lines = summary.read_text().splitlines()
    assert [json.loads(line)["source"] for line in lines] == list(whole)
    with summary.open("w") as file:
        file.write(f"{lines[0]}\n{lines[1]}\n{lines[2][:40]}")
    names = conversions(monkeypatch)
    again = done(src, out=out, summary=summary, resume=True)
    assert names == ["model.onnx"] and [outcome.finished for outcome in again] == [True, True, False]
    assert [json.loads(line)["source"] for line in summary.read_text().splitlines()] == list(whole)


@pytest.mark.parametrize("change", ["source", "options", "target", "data"])
def test_changed_models_are_converted_again(
    src: Path, out: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, change: str
) -> None:
    summary, options = tmp_path / "s.jsonl", {"external_data": True}
    done(src, out=out, summary=summary, **options)
    if change == "source":
        net(src / "model.onnx", seed=5)
    elif change == "options":
        options["keep"] = "op=Relu"
    else:
        (out / ("model.onnx" if change == "target" else "model.onnx_data")).unlink()
    names = conversions(monkeypatch)
    outcomes = done(src, out=out, summary=summary, resume=True, **options)
    assert len(names) == (3 if change == "options" else 1)
    assert not any(outcome.error for outcome in outcomes)


@pytest.mark.parametrize("text", ["{}\n", "not json\n{}\n", "\xff\n"])
def test_a_file_that_is_not_a_summary_is_refused(src: Path, out: Path, tmp_path: Path, text: str) -> None:
    (tmp_path / "s.jsonl").write_text(text, encoding="latin-1")
    with pytest.raises(ReportError, match=r"s\.jsonl:1 is not a line written by convert"):
        convert_many(src, out=out, summary=tmp_path / "s.jsonl", resume=True)
    assert not out.exists()


def test_a_summary_is_not_replaced_unasked(src: Path, out: Path, tmp_path: Path) -> None:
    (tmp_path / "s.jsonl").write_text("mine")
    with pytest.raises(ReportError, match="already exists; continue with resume=True"):
        convert_many(src, out=out, summary=tmp_path / "s.jsonl")
    with pytest.raises(ReportError, match=r"name a \.jsonl file"):
        convert_many(src, out=out, summary=tmp_path / "model.onnx")


class Counting(Executor):
    """Run jobs immediately with pickled results, and count pending ones."""

    def __init__(self) -> None:
        self.most = self.flying = 0
        self.threads = ThreadPoolExecutor(1)

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        self.flying += 1
        self.most = max(self.most, self.flying)
        sent = pickle.loads(pickle.dumps((fn, args, kwargs)))
        return self.threads.submit(lambda: pickle.loads(pickle.dumps(self.call(*sent))))

    def call(self, fn: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        result = fn(*args, **kwargs)
        self.flying -= 1
        return result


@pytest.mark.parametrize("jobs", [1, 2])
def test_processes_and_executors_give_the_same_files(src: Path, out: Path, tmp_path: Path, jobs: int) -> None:
    done(src, out=tmp_path / "here", jobs=jobs)
    executor = Counting()
    assert {outcome.rc for outcome in done(src, out=out, executor=executor, jobs=jobs)} == {0}
    assert tree(out) == tree(tmp_path / "here")
    assert executor.most == jobs


def test_closing_the_iterator_stops_the_batch_and_leaves_whole_files(src: Path, out: Path) -> None:
    outcomes = convert_many(src, out=out)
    first = next(outcomes)
    outcomes.close()  # type: ignore[attr-defined]
    assert [name for name in left(out) if name.endswith(".onnx")] == [os.path.relpath(first.target, out)]


def test_models_with_shared_external_data_get_their_own_weights(tmp_path: Path, out: Path) -> None:
    for name in ("a", "b"):
        net(tmp_path / "src" / f"{name}.onnx", data="shared.onnx_data")
    outcomes = done(tmp_path / "src", out=out, external_data=True)
    assert left(out) == ["a.onnx", "a.onnx_data", "b.onnx", "b.onnx_data"]
    for outcome in outcomes:
        assert plain(onnx.load(outcome.target)) == plain(convert(outcome.source).model)
