"""Sessions of onnxruntime with inputs and outputs on the device, and the GPU's state."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import onnxruntime as ort

from amp_rewrite.files.model import Model
from amp_rewrite.runtime.providers import cuda_options
from benchmarks.gpu.gpu_ways import WAYS

CUDA, CPU = "CUDAExecutionProvider", "CPUExecutionProvider"
FLOATS = {"tensor(float)": np.float32, "tensor(float16)": np.float16, "tensor(bfloat16)": ml_dtypes.bfloat16}
QUIET = 4
Array = np.ndarray[Any, Any]


class Opened:
    """An open model bound to one batch; `run` neither allocates nor copies between host and GPU.

    `graph`: record the run as a CUDA graph, with outputs at fixed addresses. `more`: options of the CUDA provider.
    """

    def __init__(self, file: Path, batch: Mapping[str, Array], provider: str, *, graph: bool = False, **more: str):
        options = ort.SessionOptions()
        options.log_severity_level = QUIET
        self.device = "cuda" if provider == CUDA else "cpu"
        chosen: list[Any] = [CPU]
        if provider == CUDA:
            recorded = {"enable_cuda_graph": "1"} if graph else {}
            settings = {**cuda_options(Model.load(file)).stated, **recorded, **more}
            chosen = [(CUDA, settings), CPU]
        self.session = ort.InferenceSession(str(file), options, providers=chosen, enable_fallback=0)
        opened = self.session.get_providers()[0]
        if opened != provider:
            raise RuntimeError(f"{provider} does not work here, only {opened}; run `amp-rewrite doctor` for the reason")
        self.binding = self.session.io_binding()
        self.kept: list[Any] = []
        for port in self.session.get_inputs():
            value = self._value(batch[port.name], port.type)
            self.kept.append(value)
            self.binding.bind_ortvalue_input(port.name, value)
        shapes = _output_shapes(file, batch, provider, more) if graph and provider == CUDA else None
        for port in self.session.get_outputs():
            if shapes is None:
                self.binding.bind_output(port.name, self.device, 0)
                continue
            room = ort.OrtValue.ortvalue_from_shape_and_type(*shapes[port.name], self.device, 0)
            self.kept.append(room)
            self.binding.bind_ortvalue_output(port.name, room)

    def _value(self, array: Array, declared: str) -> Any:
        """Return an input on the device, in its declared type."""
        wanted = FLOATS.get(declared)
        array = np.ascontiguousarray(array if wanted is None or array.dtype.kind != "f" else array.astype(wanted))
        if wanted is ml_dtypes.bfloat16:
            return ort.OrtValue.ortvalue_from_numpy_with_onnx_type(array.view(np.uint16), 16)
        return ort.OrtValue.ortvalue_from_numpy(array, self.device, 0)

    def run(self) -> None:
        """Run once, and wait for completion."""
        self.session.run_with_iobinding(self.binding)
        self.binding.synchronize_outputs()

    def start(self) -> None:
        """Run once, without waiting for the GPU."""
        self.session.run_with_iobinding(self.binding)

    def outputs(self) -> list[Array]:
        """Return the outputs of the last run in float32; outputs in a type that numpy lacks are empty."""
        found = []
        for value in self.binding.get_outputs():
            try:
                found.append(np.asarray(value.numpy()).astype(np.float32))
            except RuntimeError:  # bfloat16
                found.append(np.zeros(0, np.float32))
        return found


def _output_shapes(file: Path, batch: Mapping[str, Array], provider: str, more: Mapping[str, str]) -> dict[str, Any]:
    """Return the shape and ONNX type of each output, from a plain run."""
    plain = Opened(file, batch, provider, **more)
    plain.run()
    ports, found = plain.session.get_outputs(), plain.binding.get_outputs()
    return {port.name: (value.shape(), value.element_type()) for port, value in zip(ports, found, strict=True)}


def open_way(
    way: str, file: Path, batch: Mapping[str, Array], provider: str, *, graph: bool = False, **more: str
) -> Opened:
    """Open a way's file with the way's settings."""
    settings = {**WAYS[way].provider, **more} if provider == CUDA else {}
    return Opened(file, batch, provider, graph=graph and provider == CUDA, **settings)


def batch_of(folder: Path, model: str) -> dict[str, Array]:
    """Return the batch of a grown model."""
    with np.load(folder / f"{model}.npz") as stored:
        return {key: stored[key] for key in stored.files}


class Card:
    """The first GPU's clocks, power, temperature and energy, from NVIDIA's management library; None without it."""

    def __init__(self) -> None:
        self.nvml: Any = None
        with contextlib.suppress(Exception):  # without library, driver or GPU; its errors have no common base class
            import pynvml

            pynvml.nvmlInit()
            self.handle = pynvml.nvmlDeviceGetHandleByIndex(0)
            pynvml.nvmlDeviceGetTotalEnergyConsumption(self.handle)
            self.nvml = pynvml

    def now(self) -> list[float] | None:
        """Return the clock in MHz, the power in W and the temperature in °C."""
        if self.nvml is None:
            return None
        nvml, handle = self.nvml, self.handle
        return [
            float(nvml.nvmlDeviceGetClockInfo(handle, nvml.NVML_CLOCK_SM)),
            nvml.nvmlDeviceGetPowerUsage(handle) / 1e3,
            float(nvml.nvmlDeviceGetTemperature(handle, nvml.NVML_TEMPERATURE_GPU)),
        ]

    def joules(self) -> float | None:
        """Return the energy since the driver was loaded."""
        return None if self.nvml is None else self.nvml.nvmlDeviceGetTotalEnergyConsumption(self.handle) / 1e3

    def used(self) -> int | None:
        """Return the bytes of memory in use."""
        return None if self.nvml is None else int(self.nvml.nvmlDeviceGetMemoryInfo(self.handle).used)

    def about(self) -> dict[str, Any]:
        """Return constant facts: the name, the limits, and the reasons for low clocks, if any."""
        if self.nvml is None:
            return {}
        nvml, handle = self.nvml, self.handle
        queries = {
            "name": lambda: nvml.nvmlDeviceGetName(handle),
            "power_limit_w": lambda: nvml.nvmlDeviceGetEnforcedPowerLimit(handle) / 1e3,
            "max_sm_mhz": lambda: nvml.nvmlDeviceGetMaxClockInfo(handle, nvml.NVML_CLOCK_SM),
            "throttle": lambda: nvml.nvmlDeviceGetCurrentClocksEventReasons(handle),
        }
        found: dict[str, Any] = {}
        for key, ask in queries.items():
            with contextlib.suppress(Exception):  # a driver or a card may lack any of these
                found[key] = ask()
        return found
