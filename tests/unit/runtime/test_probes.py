"""What a process of its own tells about onnxruntime; what may end a process is replaced here."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import onnxruntime
import pytest

from amp_rewrite.errors import ModelError
from amp_rewrite.runtime import probes, runner


@pytest.mark.parametrize(("provider", "preloads"), [("CPUExecutionProvider", 0), ("CUDAExecutionProvider", 1)])
def test_a_model_is_opened_plainly_without_fallback(
    provider: str, preloads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[Any] = []
    monkeypatch.setattr(probes, "preload_once", lambda: calls.append("preload"))
    monkeypatch.setattr(
        onnxruntime, "InferenceSession", lambda path, settings, *given, **more: calls.append((path, given, more))
    )
    probes.open_plainly("m.onnx", provider, "A", "B")
    session = ("m.onnx", ([provider],), {"disabled_optimizers": ["A", "B"], "enable_fallback": 0})
    assert calls == ["preload"] * preloads + [session]


@pytest.mark.parametrize(("built", "opening"), [(True, True), (True, False), (False, True)])
def test_cuda_opens_where_a_build_has_it_and_a_model_opens(
    built: bool, opening: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(probes, "has_provider", lambda name: built)
    monkeypatch.setattr(probes, "cuda_opens", lambda: opening)
    monkeypatch.setattr(probes, "registered", lambda ort: ())
    told = probes.probe()
    assert told.pop("cuda") in (getattr(onnxruntime, "cuda_version", None) or None,)
    assert told == {
        "version": onnxruntime.__version__,
        "providers": onnxruntime.get_available_providers(),
        "opens": built and opening,
        "plugins": [],
    }


@pytest.fixture
def webgpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[SimpleNamespace]:
    """A device of WebGPU; tests say what it lacks."""
    device = SimpleNamespace(absence=None, error=None, assigned=[runner.WEBGPU])

    def run(feeds: Any) -> None:
        if device.error:
            raise ModelError(device.error)

    parts = lambda: [SimpleNamespace(ep_name=name) for name in device.assigned]  # noqa: E731
    opened = SimpleNamespace(run=run, inner=SimpleNamespace(get_provider_graph_assignment_info=parts))
    monkeypatch.setattr(runner, "absence", lambda ort: device.absence)
    monkeypatch.setattr(runner.Runner, "open", lambda *_: opened)
    for cached in (runner.webgpu_absence, runner.webgpu_opens):
        cached.cache_clear()
    yield device
    for cached in (runner.webgpu_absence, runner.webgpu_opens):
        cached.cache_clear()


@pytest.mark.parametrize(
    ("lacks", "told"),
    [
        ({}, None),
        ({"absence": "no adapter"}, "no adapter"),
        ({"error": "no half"}, "the WebGPU device does not run float16: no half"),
        ({"assigned": ["CPUExecutionProvider"]}, "the WebGPU device does not take float16"),
    ],
)
def test_webgpu_opens_where_it_takes_float16(lacks: dict[str, Any], told: str | None, webgpu: SimpleNamespace) -> None:
    vars(webgpu).update(lacks)
    assert (runner.webgpu_absence(), runner.webgpu_opens()) == (told, told is None)


@pytest.mark.parametrize(
    ("release", "lost", "preloaded"),
    [
        (12, (), None),
        (12, ("libcublasLt.so.12",), {"cuda": True, "cudnn": False}),
        (12, ("libcudnn.so.9",), {"cuda": False, "cudnn": True}),
        (None, ("libcudnn.so.9",), None),
    ],
)
def test_libraries_that_the_loader_does_not_find_are_loaded_first(
    release: int | None, lost: tuple[str, ...], preloaded: dict[str, bool] | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[dict[str, bool]] = []
    ort = SimpleNamespace(preload_dlls=lambda **given: calls.append(given))
    monkeypatch.setattr(runner, "installed_onnxruntime", lambda: ort)
    monkeypatch.setattr(runner, "cuda_release", lambda: release)
    monkeypatch.setattr(runner, "loads", lambda name: name not in lost)
    runner.preload_once.__wrapped__()
    assert calls == ([] if preloaded is None else [preloaded])
