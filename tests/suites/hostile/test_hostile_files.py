"""Faulty files, folders and disks: a conversion leaves either the old output or the new one."""

import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import onnx
import pytest

from suites.fuzz.cage import Cage, Outcome
from suites.hostile.given import attempt, files, net, weights

pytestmark = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="limits and mounts need Linux")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "in").mkdir()
    onnx.save(net(), tmp_path / "in" / "m.onnx")
    return tmp_path / "in"


def convert(cage: Cage, folder: Path, *words: str) -> Outcome:
    return attempt(cage, folder, "m.onnx", "-q", *words)


# -- disks and paths --------------------------------------------------------------------------------------------


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    """Mount an empty disk of 2 MB."""
    place = tmp_path / "disk"
    place.mkdir()
    mount = shutil.which("mount")
    done = mount and subprocess.run([mount, "-t", "tmpfs", "-o", "size=2m", "tmpfs", place], capture_output=True)
    if not done or done.returncode:
        pytest.skip("mounting a tmpfs needs root")
    yield place
    subprocess.run(["umount", place], check=True)


@pytest.mark.parametrize("external", ["false", "true"])
def test_a_full_disk_is_one_line_and_leaves_the_old_model(cage: Cage, folder: Path, disk: Path, external: str) -> None:
    (disk / "out.onnx").write_bytes(b"the old model")
    (disk / "ballast").write_bytes(bytes(1_500_000))
    before = files(disk)
    outcome = convert(cage, folder, "-o", str(disk / "out.onnx"), "--overwrite", "--set", f"external-data={external}")

    assert outcome.refused and "No space left on device" in outcome.err, outcome
    assert files(disk) == before


def test_a_read_only_disk_is_one_line(cage: Cage, folder: Path, disk: Path) -> None:
    subprocess.run(["mount", "-o", "remount,ro", disk], check=True)
    outcome = convert(cage, folder, "-o", str(disk / "out.onnx"))

    assert outcome.refused and "Read-only file system" in outcome.err, outcome


PLACES = {
    "a file for a folder": ("m.onnx/out.onnx", "cannot create the folder m.onnx: File exists"),
    "the folder of the input": (".", "would be written over m.onnx, itself"),
    "a device": ("/dev/null", "not a regular file"),
    "a long name": ("o" * 300 + ".onnx", "File name too long"),
    "the input": ("m.onnx", "is the input"),
    "the input by another name": ("../in/m.onnx", "is the input"),
    "a link to the input": ("link.onnx", "exists"),
    "a link to nowhere": ("dangling.onnx", "exists"),
}


@pytest.mark.parametrize("name", PLACES)
def test_an_impossible_output_path_is_refused(cage: Cage, folder: Path, name: str) -> None:
    place, fact = PLACES[name]
    (folder / "link.onnx").symlink_to("m.onnx")
    (folder / "dangling.onnx").symlink_to("nowhere.onnx")
    before = files(folder)
    outcome = convert(cage, folder, "-o", place)

    assert outcome.refused and fact in outcome.err, outcome
    assert files(folder) == before


def test_an_output_link_is_replaced_but_not_its_target(cage: Cage, folder: Path) -> None:
    """Otherwise a foreign link could make us overwrite a file elsewhere."""
    victim = folder.parent / "victim"
    victim.write_bytes(b"precious")
    (folder / "out.onnx").symlink_to(victim)
    outcome = convert(cage, folder, "-o", "out.onnx", "--overwrite")

    assert outcome.code == 0, outcome
    assert victim.read_bytes() == b"precious"
    assert not (folder / "out.onnx").is_symlink()


# -- killed and concurrent processes ----------------------------------------------------------------------------

# Writes net 1 over net 0, once for each n in a process that is killed at its n-th file system call.
DYING = """
import itertools, os, signal, sys
from amp_rewrite.files.model import Model
new, old, folder, external = sys.argv[1:]
new, old, external = Model.load(new), Model.load(old), external == "True"
def dying(target, remaining):
    def hook(event, arguments):
        nonlocal remaining
        if event in ("open", "os.rename", "os.remove", "os.truncate"):
            remaining -= 1
            if not remaining:
                os.kill(os.getpid(), signal.SIGKILL)
    sys.addaudithook(hook)
    new.save(target, overwrite=True, external_data=external)
    os._exit(0)
for when in itertools.count(1):
    target = f"{folder}/{when}/out.onnx"
    os.mkdir(os.path.dirname(target))
    old.save(target, external_data=external)
    child = os.fork()
    if not child:
        dying(target, when)
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    if code != -signal.SIGKILL:
        sys.exit(code)
"""


def state(folder: Path) -> str:
    """Check that the output is whole and return which one it is."""
    read = weights(onnx.load(folder / "out.onnx"))
    assert read in (weights(net(0)), weights(net(1)))
    return "old" if read == weights(net(0)) else "new"


def start(*words: str | Path) -> subprocess.Popen[bytes]:
    return subprocess.Popen([sys.executable, "-c", *map(str, words)], stderr=subprocess.DEVNULL)


@pytest.mark.parametrize("external", [False, True])
def test_a_save_killed_at_any_step_leaves_the_old_model_or_the_new_one(tmp_path: Path, external: bool) -> None:
    models = [tmp_path / "new.onnx", tmp_path / "old.onnx"]
    for seed, path in zip((1, 0), models, strict=True):
        onnx.save(net(seed), path)
    (tmp_path / "out").mkdir()
    assert start(DYING, *models, tmp_path / "out", str(external)).wait(120) == 0
    states = [state(tmp_path / "out" / str(when + 1)) for when in range(len(list((tmp_path / "out").iterdir())))]
    steps = 4 if not external else 8
    assert len(states) > steps, "the hook missed most steps of a save"
    assert states == sorted(states, reverse=True) and set(states) == {"old", "new"}


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupt_ends_a_conversion_quietly_and_leaves_nothing(folder: Path, number: int) -> None:
    program = (
        "import os, signal, sys\nfrom amp_rewrite.__main__ import main\n"
        f"signal.signal({number:d}, signal.SIG_DFL)\n"  # shells ignore it in background jobs
        "def hook(event, arguments):\n"
        "    if event == 'open' and str(arguments[0]).endswith('.tmp'):\n"
        f"        os.kill(os.getpid(), {number:d})\n"
        "sys.addaudithook(hook)\nsys.argv[1:] = ['m.onnx', '-q']\nmain()\n"
    )
    done = subprocess.run([sys.executable, "-c", program], cwd=folder, capture_output=True, text=True, timeout=60)

    assert (done.returncode, done.stdout, done.stderr) == (130, "", "")
    assert list(files(folder)) == ["m.onnx"]


def test_two_processes_writing_the_same_output_leave_one_whole_model(tmp_path: Path) -> None:
    """They alternate between two models, so that each keeps finding the other's files outdated."""
    for seed in (0, 1):
        onnx.save(net(seed), tmp_path / f"{seed}.onnx")
    out = tmp_path / "out"
    out.mkdir()
    program = (
        "import sys\nfrom pathlib import Path\nfrom amp_rewrite.files.model import Model\n"
        "models = [Model.load(path) for path in sys.argv[2:]]\n"
        "for i in range(6):\n    models[i % 2].save(sys.argv[1], overwrite=True, external_data=True)\n"
    )
    models = [tmp_path / "0.onnx", tmp_path / "1.onnx"]
    writers = [start(program, out / "out.onnx", *order) for order in (models, models[::-1])]

    assert [writer.wait(120) for writer in writers] == [0, 0]
    state(out)
    assert len(files(out)) == 2
