"""Queries of onnxruntime and the driver in a separate process; calls that may crash are replaced here."""

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import onnxruntime
import pytest

import amp_rewrite
from amp_rewrite.dtypes import DType
from amp_rewrite.errors import MachineError, ModelError
from amp_rewrite.runtime import probes, runner
from amp_rewrite.runtime.gpu import Gpu, Hardware, hardware, why_not_fast
from amp_rewrite.runtime.probes import command, in_subprocess, query_hardware, query_onnxruntime
from support.fake_driver import H200, P100, Driver, Loader

RUN = subprocess.run
STOPPED = "the NVIDIA driver failed to initialize (cuInit returned 999)"


def test_a_subprocess_imports_the_package_and_nothing_from_its_folder() -> None:
    python, *words, program, last = command("run()", "an argument")
    home = str(Path(amp_rewrite.__file__).parents[1])
    assert (python, words, last) == (sys.executable, ["-P", "-c"], "an argument")
    assert program == f"import sys; sys.path.append({home!r}); run()"


@pytest.mark.parametrize(
    ("program", "failure"),
    [
        ("import os; os.kill(os.getpid(), 11)", "it crashed with signal 11 (Segmentation fault)"),
        ("import time; time.sleep(60)", "it did not answer within 1 seconds"),
        (
            "import nothing",
            "it did not answer: the process exited with code 1: ModuleNotFoundError: No module named 'noth",
        ),
        ("raise SystemExit(3)", "it did not answer: the process exited with code 3: it printed nothing"),
    ],
)
def test_a_process_that_dies_or_hangs_is_an_error(program: str, failure: str) -> None:
    with pytest.raises(MachineError) as error:
        in_subprocess(program, subject="it", seconds=1.0 if "sleep" in program else 60.0)
    assert str(error.value).startswith(failure)


def saying(monkeypatch: pytest.MonkeyPatch, program: str) -> None:
    """Replace the program of the separate process."""
    monkeypatch.setattr(subprocess, "run", lambda words, **options: RUN([words[0], "-c", program], **options))


def test_the_driver_is_queried_in_a_process_that_may_crash(monkeypatch: pytest.MonkeyPatch) -> None:
    gpus = [
        {"name": "NVIDIA H200", "capability": [9, 0], "memory": 150 << 30},
        {"name": "Odd", "capability": [8, 0], "memory": None},
    ]
    facts = {"gpus": gpus, "cuda": [13, 2], "unavailable_reason": None}
    saying(monkeypatch, f"print('noise'); print({json.dumps(facts)!r})")
    assert query_hardware() == Hardware((H200, Gpu("Odd", (8, 0))), (13, 2))
    saying(monkeypatch, 'print(\'{"gpus": [], "cuda": null, "unavailable_reason": "none"}\')')
    assert query_hardware() == Hardware(unavailable_reason="none")
    saying(monkeypatch, "import os; os.kill(os.getpid(), 11)")
    ended = "crashed with signal 11 (Segmentation fault)"
    assert query_onnxruntime() == {"failure": f"onnxruntime {ended}"}
    unavailable_reason = query_hardware().unavailable_reason
    assert unavailable_reason == f"the NVIDIA driver {ended}; restart the machine, or reinstall the driver"


@pytest.mark.parametrize(("built", "opening"), [(True, True), (True, False), (False, True)])
def test_cuda_opens_if_the_build_has_it_and_a_model_loads(
    built: bool, opening: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(probes, "has_provider", lambda name: built)
    monkeypatch.setattr(probes, "cuda_works", lambda: opening)
    monkeypatch.setattr(probes, "library_load_error", lambda: "libfoo.so: missing")
    monkeypatch.setattr(probes, "register_plugins", lambda ort: ())
    cuda = getattr(onnxruntime, "cuda_version", None) or None
    assert probes.probe() == {
        "version": onnxruntime.__version__,
        "cuda": cuda,
        "opens": built and opening,
        "unloaded": "libfoo.so: missing" if cuda else None,
        "plugins": [],
    }


@pytest.fixture
def webgpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[SimpleNamespace]:
    """A WebGPU device with the features of a test."""
    device = SimpleNamespace(error=None, assigned=[runner.WEBGPU])

    def run(feeds: Any) -> None:
        if device.error:
            raise ModelError(device.error)

    parts = lambda: [SimpleNamespace(ep_name=name) for name in device.assigned]  # noqa: E731
    opened = SimpleNamespace(run=run, inner=SimpleNamespace(get_provider_graph_assignment_info=parts))
    monkeypatch.setattr(runner.Runner, "open", lambda *_: opened)
    runner.webgpu_works.cache_clear()
    yield device
    runner.webgpu_works.cache_clear()


@pytest.mark.parametrize(
    ("lacks", "opens"), [({}, True), ({"error": "no half"}, False), ({"assigned": ["CPUExecutionProvider"]}, False)]
)
def test_webgpu_opens_if_it_supports_float16(lacks: dict[str, Any], opens: bool, webgpu: SimpleNamespace) -> None:
    vars(webgpu).update(lacks)
    assert runner.webgpu_works() is opens


# -- GPUs ----------------------------------------------------------------------------------------------


def test_gpus_and_their_fast_types_come_from_the_driver() -> None:
    assert hardware(Loader(Driver(H200, P100))) == Hardware((H200, P100), (13, 2), None)
    gpus = [Gpu("G", capability) for capability in ((6, 9), (7, 0), (7, 5), (8, 0), (10, 0))]
    for to, slow in ((DType.FLOAT16, 1), (DType.BFLOAT16, 3)):
        found = [why_not_fast(Hardware((gpu,)), to) is None for gpu in gpus]
        assert found == [False] * slow + [True] * (5 - slow)


UNSEEN = "the NVIDIA driver does not find a GPU; check CUDA_VISIBLE_DEVICES and the devices of the container"


@pytest.mark.parametrize(
    ("loader", "found"),
    [
        (Loader(), Hardware(unavailable_reason="no NVIDIA driver is installed here: libcuda.so.1 cannot be loaded")),
        (Loader(Driver(status=100)), Hardware((), (13, 2), UNSEEN)),
        (Loader(Driver(version=12080)), Hardware((), (12, 8), UNSEEN)),
        (Loader(Driver(status=999)), Hardware((), (13, 2), f"{STOPPED}; run nvidia-smi to check it")),
    ],
)
def test_a_missing_gpu_has_a_reason(loader: Loader, found: Hardware) -> None:
    assert hardware(loader) == found


def test_a_refusal_names_the_gpu_that_would_be_used() -> None:
    machine = Hardware((H200, P100))
    assert why_not_fast(machine, DType.FLOAT16, 1) == (
        "float16 is only fast on GPUs with compute capability 7.0 or higher; this one is Tesla P100, compute capability"
        " 6.0"
    )
    assert why_not_fast(machine, DType.FLOAT16, 0) is None
    assert why_not_fast(machine, DType.FLOAT16, 2) == "there is no GPU 2; the last GPU of this machine is number 1"
    assert why_not_fast(Hardware(unavailable_reason="nobody here"), DType.BFLOAT16) == (
        "nobody here; on a CPU, bfloat16 is slower, not faster"
    )
