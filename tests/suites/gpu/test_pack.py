"""The pack for a machine without a network: blanked code, sizes, unpacking, and a whole run in a fresh folder."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import struct
import subprocess
import sys
import time
from pathlib import Path

import pytest

from benchmarks.gpu import fatbin, gpu_pack, gpu_remote
from suites.gpu.conftest import RUN, SMALL, ran
from support.paths import ROOT
from support.stub import folder as stub_folder

# -- code of other GPUs ----------------------------------------------------------------------------------


def entry(kind: int, sm: int, payload: bytes) -> bytes:
    """One entry of a fat binary, with a header of 64 bytes."""
    head = struct.pack("<HHIQ", kind, 0, 64, len(payload)).ljust(28, b"\0") + struct.pack("<I", sm)
    return head.ljust(64, b"\0") + payload


def binary(*entries: bytes) -> bytes:
    """A fat binary with its header."""
    body = b"".join(entries)
    return struct.pack("<IHHQ", fatbin.MAGIC, 1, 16, len(body)) + body


def library(code: bytes, name: bytes = fatbin.SECTION) -> bytes:
    """A 64-bit ELF file with two sections: the code, and the names."""
    names = b"\0" + name + b"\0.shstrtab\0"
    start = 64 + 3 * 64
    header = bytearray(b"\x7fELF\x02\x01\x01".ljust(64, b"\0"))
    struct.pack_into("<Q", header, 40, 64)
    struct.pack_into("<HHH", header, 58, 64, 3, 2)
    sections = [(0, 0, 0), (1, start, len(code)), (2 + len(name), start + len(code), len(names))]
    rows = (struct.pack("<IIQQQQ", n, 1, 0, 0, at, size).ljust(64, b"\0") for n, at, size in sections)
    return bytes(header) + b"".join(rows) + code + names


KEPT, OTHER, SOURCE, ALONE = b"hopper" * 8, b"ampere" * 8, b"virtual " * 8, b"fp8 only" * 8
EXPERTS = b"\0.text._Z4gemmv\0.text._ZN7cutlass9MoeFCGemmEv\0"
CODE = binary(entry(fatbin.ELF, 80, OTHER), entry(fatbin.ELF, 90, KEPT), entry(fatbin.PTX, 90, SOURCE))
CODE += bytes(24) + binary(entry(fatbin.ELF, 90, ALONE))
CODE += binary(entry(fatbin.ELF, 80, OTHER), entry(fatbin.ELF, 90, EXPERTS))


def test_code_of_one_architecture_stays_and_the_rest_becomes_zeros(tmp_path: Path) -> None:
    source, target = tmp_path / "a.so", tmp_path / "b.so"
    source.write_bytes(library(CODE))
    found = fatbin.blanked(source, target)
    expected = library(CODE)
    for gone in (OTHER, SOURCE, ALONE, EXPERTS):
        expected = expected.replace(gone, bytes(len(gone)))
    assert target.read_bytes() == expected
    assert source.read_bytes() == library(CODE)
    hopper = len(KEPT) + len(ALONE) + len(EXPERTS)
    assert found["bytes"] == {"elf sm_80": 2 * len(OTHER), "elf sm_90": hopper, "ptx sm_90": len(SOURCE)}
    assert (found["kept"], found["unused"]) == (len(KEPT), len(EXPERTS))


@pytest.mark.parametrize(
    ("name", "unused"),
    [
        ("_ZN11onnxruntime3llm7kernels13fpA_intB_gemv6kernelE", True),
        ("_ZN11onnxruntime7contrib4cuda4H12814grp4_bf16_int810kernel_mhaE", True),
        ("_ZN11onnxruntime7contrib4cuda4H12810grp4_fp16_10kernel_mhaE", False),
        ("_ZN11onnxruntime5flash16flash_fwd_kernelE", False),
        ("_ZN11onnxruntime4cuda20softmax_warp_forwardI6__halfE", False),
    ],
)
def test_kernels_that_no_row_runs_are_known_by_name(name: str, unused: bool) -> None:
    code = b"\0.shstrtab\0.text." + name.encode() + b"\0.nv.info\0"
    assert fatbin.is_unused(code) is unused
    with contextlib.suppress(ImportError):
        import zstandard

        assert fatbin.is_unused(zstandard.ZstdCompressor().compress(code)) is unused


@pytest.mark.parametrize(
    ("content", "keep", "said"),
    [
        (b"text", [90], "the file is not a 64-bit ELF file"),
        (library(CODE, b".text"), [90], "the file has no section .nv_fatbin: it holds no code for a GPU"),
        (library(CODE), [75], "the file has no code for sm_75, only elf sm_80, elf sm_90, ptx sm_90"),
        (library(binary(entry(9, 90, KEPT))), [90], "unknown entry at 0x110: kind 9, header 64, payload 48"),
    ],
)
def test_a_library_of_another_form_is_refused(content: bytes, keep: list[int], said: str, tmp_path: Path) -> None:
    (tmp_path / "a.so").write_bytes(content)
    with pytest.raises(fatbin.FormatError) as error:
        fatbin.blanked(tmp_path / "a.so", tmp_path / "b.so", keep)
    assert str(error.value) == said


# -- the pack ----------------------------------------------------------------------------------------------


def test_a_pack_that_is_too_large_names_its_largest_files(tmp_path: Path) -> None:
    files = [tmp_path / f"{number}" for number in range(12)]
    for number, path in enumerate(files):
        path.write_bytes(bytes(1000 * number))
    assert gpu_pack.refusal(files, 0.066) == ""
    said = gpu_pack.refusal(files, 0.0659).splitlines()
    assert said[0] == "0.1 MB are more than 0.0659; leave out some of these, for example skeletons of a model:"
    assert [line.split()[-1] for line in said[1:]] == [str(path) for path in reversed(files[4:])]


def test_a_pack_beyond_its_limit_is_refused_by_the_command(skeletons: Path, tmp_path: Path) -> None:
    command = [sys.executable, RUN, "gpu_pack", str(skeletons), "--out", str(tmp_path / "p"), "--no-runtime"]
    done = subprocess.run([*command, "--megabytes", "1"], capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert "MB are more than 1; leave out some of these" in done.stderr


@pytest.fixture(scope="module")
def away(skeletons: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with what travels: the checkout's files that matter, and the pack without the runtime."""
    folder = tmp_path_factory.mktemp("away")
    said = ran("gpu_pack", skeletons, "--out", folder / ".gpu", "--no-runtime")
    assert f"{SMALL}: float32, amp, amp_contrib, amp_bf16, amp_bf16_opset, amp_opset, amp_io_low" in said
    assert "  not made: occ: no interpreter for it was named; add --peers PYTHON" in said
    for name in ("amp_rewrite", "lists", "benchmarks"):
        shutil.copytree(ROOT / name, folder / name, ignore=shutil.ignore_patterns("__pycache__", "results"))
    return folder


def remote(away: Path, place: Path, *words: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run steps as the machine would: from the fresh folder, with nothing of this checkout."""
    places = {"--dest": place / "dest", "--models": place / "models", "--out": place / "out"}
    command = [sys.executable, "benchmarks/run.py", "gpu_remote", *words[:1]]
    command += [str(word) for pair in places.items() for word in pair] + list(words[1:])
    clean = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"} | environment
    return subprocess.run(command, cwd=away, env=clean, capture_output=True, text=True, check=False)


def test_a_pack_is_unpacked_and_measured_in_a_fresh_folder(away: Path, tmp_path: Path) -> None:
    words = ("--", "--provider", "cpu", "--tiny", "--kinds", "latency", "variants")
    done = remote(away, tmp_path, "gpu", *words)
    assert done.returncode == 0, done.stdout + done.stderr
    told = json.loads((tmp_path / "out" / "gpu.json").read_text("utf-8"))
    rows = {job["name"]: job["row"] for job in told["rows"]}
    latency = rows[f"latency {SMALL}"]
    assert {"float32", "amp", "amp_contrib", "amp_opset", "amp_io_low"} <= set(latency["time"])
    assert latency["faults"]["occ"] == "not made: no interpreter for it was named; add --peers PYTHON"
    assert set(rows[f"variants {SMALL}"]["time"]) >= {"amp plain", "amp graph"}
    page = (tmp_path / "out" / "gpu.md").read_text("utf-8")
    assert f"| {SMALL} | amp-rewrite | " in page
    assert "$ nproc" in (tmp_path / "out" / "preflight.txt").read_text("utf-8")
    again = remote(away, tmp_path, "gpu", *words)
    assert again.returncode == 0
    assert not [line for line in again.stdout.splitlines() if "latency" in line]  # nothing is measured twice


def test_a_file_that_did_not_arrive_whole_is_named(away: Path, tmp_path: Path) -> None:
    broken = tmp_path / "pack"
    shutil.copytree(away / ".gpu", broken)
    (broken / "skeletons" / f"{SMALL}.tar.xz").write_bytes(b"cut")
    done = remote(away, tmp_path, "setup", "--pack", str(broken))
    assert done.returncode == 1
    assert f"skeletons/{SMALL}.tar.xz did not arrive as it was packed" in done.stdout


def test_a_step_that_takes_too_long_is_stopped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "pack.json").write_text("{}")
    place = gpu_remote.Remote(tmp_path, tmp_path, tmp_path, tmp_path)
    wait, limits = subprocess.Popen.wait, list[float | None]()

    def late(process: subprocess.Popen[str], timeout: float | None = None) -> int:
        """Let the time be up as soon as the step has said something."""
        limits.append(timeout)
        if len(limits) > 1:
            return wait(process, timeout)
        while not (tmp_path / "log.txt").exists():
            time.sleep(0.01)
        raise subprocess.TimeoutExpired(process.args, timeout or 0)

    monkeypatch.setattr(subprocess.Popen, "wait", late)
    assert place.ran(["-c", "import time; print('begun', flush=True); time.sleep(600)"], 1.0) == -signal.SIGTERM
    assert limits[:2] == [1.0, gpu_remote.GRACE]
    log = [line.partition("] ")[2] for line in (tmp_path / "log.txt").read_text("utf-8").splitlines()]
    assert log == ["begun", "stopped after 1 s"]


@pytest.mark.stub
def test_all_ways_open_and_run_on_stand_ins_for_the_cuda_libraries(away: Path, tmp_path: Path) -> None:
    """What opens, is bound and is recorded is real; nothing is computed, so that no number is."""
    libraries, reason = stub_folder()
    if libraries is None:
        pytest.skip(reason)
    words = ("--libraries", str(libraries), "--", "--tiny", "--kinds", "latency", "variants")
    done = remote(away, tmp_path, "gpu", *words)
    assert done.returncode == 0, done.stdout + done.stderr
    told = json.loads((tmp_path / "out" / "gpu.json").read_text("utf-8"))
    rows = {job["name"]: job["row"] for job in told["rows"]}
    ours = {"float32", "tf32", "amp", "amp_contrib", "amp_bf16", "amp_bf16_opset", "amp_opset", "amp_io_low"}
    assert set(rows[f"latency {SMALL}"]["time"]) == ours
    settings = {f"{way} {word}" for way in ("tf32", "amp", "amp_contrib") for word in ("plain", "graph")}
    assert set(rows[f"variants {SMALL}"]["time"]) | set(rows[f"variants {SMALL}"]["faults"]) == settings
    assert "no time here means anything" in (tmp_path / "out" / "gpu.md").read_text("utf-8")
