"""The WebGPU device of the tests: Mesa's software device, where `make webgpu` has prepared it, or a real one.

It and the plugin of onnxruntime belong to a process of their own (suites/webgpu/worker.py), so that no other test sees
a provider that onnxruntime does not bring.
"""

import ctypes
import json
import os
import sys
from functools import cache
from pathlib import Path

from amp_rewrite.runtime.runner import webgpu_opens
from support.paths import ROOT

DEVICE = ROOT / "build" / "webgpu" / "device.json"


@cache
def absence() -> str | None:
    """The reason why there is no device; None where there is one, which this process can use from now on."""
    stated = json.loads(DEVICE.read_text("utf-8")) if DEVICE.exists() else None
    if stated is not None and os.environ.get("VK_DRIVER_FILES", stated["driver"]) == stated["driver"]:
        if not all(Path(library).exists() for library in stated["libraries"] if library):
            return "build/webgpu is not whole; remove it and run make webgpu"
        sys.path.append(str(DEVICE.with_name("site")))
        for library in filter(None, stated["libraries"]):
            ctypes.CDLL(library, mode=ctypes.RTLD_GLOBAL)
        os.environ |= {"VK_DRIVER_FILES": stated["driver"], "ORT_WEBGPU_EP_ALLOW_SOFTWARE_ADAPTER": "1"}
    return None if webgpu_opens() else "no WebGPU device runs float16 here; make webgpu prepares one"
