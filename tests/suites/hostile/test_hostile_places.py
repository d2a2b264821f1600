"""Hostile surroundings: foreign files, pipes, links, permissions, failing streams and a foreign cache."""

import json
import os
import stat
import subprocess
import sys
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import numpy_helper

from amp_rewrite.deploy.session import Cache
from amp_rewrite.errors import ModelError
from amp_rewrite.files.disk import write_whole
from amp_rewrite.files.model import Model
from suites.fuzz.cage import Cage
from suites.hostile.given import net, sound

pytestmark = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="pipes and permissions need Linux")


def shell(folder: Path, words: str) -> subprocess.CompletedProcess[str]:
    """Run a command line in a shell, with the program as `amp`."""
    script = f'amp() {{ "{sys.executable}" -m amp_rewrite "$@"; }}\n{words}'
    return subprocess.run(["bash", "-c", script], cwd=folder, capture_output=True, text=True, timeout=120)


# -- foreign files ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("words", [(), ("--dry-run",)])
def test_a_report_never_replaces_a_file_unasked(cage: Cage, folder: Path, words: tuple[str, ...]) -> None:
    (folder / "package.json").write_text("{}")
    outcome = cage.run("m.onnx", "-o", "out.onnx", "--report", "package.json", *words, folder=folder)

    assert outcome.refused and "--overwrite" in outcome.err
    assert (folder / "package.json").read_text() == "{}" and not (folder / "out.onnx").exists()
    again = cage.run("m.onnx", "-o", "out.onnx", "--report", "package.json", "--overwrite", *words, folder=folder)
    assert again.code == 0 and json.loads((folder / "package.json").read_text())["schema"]


@pytest.mark.parametrize("linked", [False, True])
def test_a_report_never_replaces_the_weights_of_its_model(cage: Cage, tmp_path: Path, linked: bool) -> None:
    model = sound()
    model.graph.initializer[0].CopyFrom(numpy_helper.from_array(np.ones((4, 3), np.float32), "w"))
    onnx.save(model, tmp_path / "m.onnx", save_as_external_data=True, location="w.json", size_threshold=0)
    before = (tmp_path / "w.json").read_bytes()
    name = "r.json" if linked else "w.json"
    if linked:
        (tmp_path / name).symlink_to("w.json")
    outcome = cage.run("m.onnx", "-o", "out.onnx", "--report", name, "--overwrite", folder=tmp_path)

    assert outcome.refused and (tmp_path / "w.json").read_bytes() == before


# -- pipes ------------------------------------------------------------------------------------------------------


PIPES = {
    "a scratch file": (".amp-rewrite.0123456789abcdef.tmp", ("m.onnx", "-o", "out.onnx")),
    "a data file": ("w.bin", ("m.onnx", "-o", "out.onnx")),
    "the model": ("pipe.onnx", ("pipe.onnx", "-o", "out.onnx")),
    "settings": ("amp.toml", ("m.onnx", "-o", "out.onnx")),
    "a list": ("pipe.yaml", ("m.onnx", "-o", "out.onnx", "--lists", "pipe.yaml")),
    "batches": ("data.npz", ("calibrate", "m.onnx", "--data", "data.npz", "-o", "r.json")),
}


@pytest.mark.parametrize("name", PIPES)
def test_a_pipe_in_place_of_a_file_is_refused_at_once(cage: Cage, folder: Path, name: str) -> None:
    file, words = PIPES[name]
    os.mkfifo(folder / file)
    os.utime(folder / file, (1, 1))
    outcome = cage.run(*words, "-q", folder=folder)
    assert outcome.code in (0, 2), outcome


# -- links and permissions --------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", [0o640, 0o400])
@pytest.mark.parametrize("external", [False, True])
def test_a_replaced_file_keeps_its_permissions(folder: Path, mode: int, external: bool) -> None:
    out, model = folder / "out.onnx", Model.load(net(size=30))
    model.save(out)
    out.chmod(mode)
    model.save(out, overwrite=True, external_data=external)
    write_whole(folder / "new.json", b"{}")
    written = [file for file in folder.iterdir() if file.name.startswith("out")]

    assert len(written) == 1 + external
    assert {stat.S_IMODE(file.stat().st_mode) for file in written} == {mode}
    umask = os.umask(0o022)
    os.umask(umask)
    assert stat.S_IMODE((folder / "new.json").stat().st_mode) == 0o666 & ~umask


def test_a_private_model_is_never_readable_by_others_while_written(tmp_path: Path, monkeypatch) -> None:
    out, model, seen = tmp_path / "out.onnx", Model.load(net(size=30)), []
    model.save(out)
    out.chmod(0o600)
    opened = os.open

    def watched(path, *words, **more):
        descriptor = opened(path, *words, **more)
        seen.append((Path(os.fspath(path)).suffix, stat.S_IMODE(os.fstat(descriptor).st_mode)))
        return descriptor

    monkeypatch.setattr(os, "open", watched)
    model.save(out, overwrite=True, external_data=True)
    assert [mode for suffix, mode in seen if suffix == ".tmp"] == [0o600, 0o600]


# -- streams ----------------------------------------------------------------------------------------------------

STREAMS = {
    "amp convert m.onnx -o out.onnx >/dev/full": (2, True),
    "amp convert m.onnx -o out.onnx >&-": (2, True),
    "amp convert m.onnx -o out.onnx 2>&- >/dev/null": (0, True),
    "amp convert m.onnx -q -o out.onnx >&- 2>&- <&-": (0, True),
    "amp convert nowhere.onnx -o out.onnx 2>&-": (2, False),
    "amp --help >/dev/full": (2, False),
}


@pytest.mark.parametrize("words", STREAMS)
def test_a_failing_stream_leaves_no_partial_files(folder: Path, words: str) -> None:
    code, written = STREAMS[words]
    done = shell(folder, words)

    assert done.returncode == code, done
    assert "Traceback" not in done.stderr and "Exception ignored" not in done.stderr, done.stderr
    assert "/dev/full" not in words or done.stderr.endswith("error: output: No space left on device\n")
    assert (folder / "out.onnx").exists() == written
    if written:
        onnx.checker.check_model(str(folder / "out.onnx"))
    assert not list(folder.glob(".amp-rewrite.*"))


# -- the cache of sessions --------------------------------------------------------------------------------------

KEY = "0" * 64


def stored(folder: Path) -> Cache:
    cache = Cache(folder)
    cache.store(KEY, Model.load(sound()), "report")
    assert cache.load(KEY) is not None
    return cache


@pytest.mark.parametrize("mode", [0o770, 0o702])
def test_a_cache_writable_by_others_is_not_used(tmp_path: Path, mode: int) -> None:
    cache = stored(tmp_path)
    (tmp_path / "v1").chmod(mode)

    assert cache.load(KEY) is None
    with pytest.raises(ModelError, match="writable by others"):
        cache.store("1" * 64, Model.load(sound()), "report")
    (tmp_path / "v1").chmod(0o700)
    assert cache.load(KEY) is not None
