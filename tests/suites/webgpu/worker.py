"""The process that runs models on the device; a crash of its driver costs only one request."""

import ctypes
import json
import os
import sys
from collections import Counter, defaultdict
from functools import cache
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import onnx

import amp_rewrite
from amp_rewrite.files.model import Model
from amp_rewrite.runtime.runner import CPU, WEBGPU, Runner, SessionOptions, webgpu_works
from support.child import Child, hush
from support.paths import ROOT

DEVICE = ROOT / "build" / "webgpu" / "device.json"
"""Mesa's software device, if `make webgpu` has prepared it; otherwise a real device is used."""
BOUND = 4e-3
"""The largest error of a model converted for the device, relative to the largest float32 value."""
LIMIT = 120.0
"""Seconds for one request: a shader is compiled for each op and shape."""

Reply = dict[str, Any]


def serve(connection: Connection, talk: str) -> None:
    """Answer requests: the name of a function below, and its arguments."""
    hush(talk)
    connection.send(absence())
    while (request := connection.recv()) is not None:
        function, *arguments = request
        connection.send({"answer": answer, "verified": verified}[function](*arguments))


@cache
def absence() -> str | None:
    """Make the device available to this process; return the reason if there is none."""
    config = json.loads(DEVICE.read_text("utf-8")) if DEVICE.exists() else None
    if config is not None and os.environ.get("VK_DRIVER_FILES", config["driver"]) == config["driver"]:
        if not all(Path(library).exists() for library in config["libraries"] if library):
            return "build/webgpu is incomplete; remove it and run make webgpu"
        sys.path.append(str(DEVICE.with_name("site")))
        for library in filter(None, config["libraries"]):
            ctypes.CDLL(library, mode=ctypes.RTLD_GLOBAL)
        os.environ |= {"VK_DRIVER_FILES": config["driver"], "ORT_WEBGPU_EP_ALLOW_SOFTWARE_ADAPTER": "1"}
    return None if webgpu_works() else "no WebGPU device runs float16 here; make webgpu prepares one"


def answer(data: bytes, feeds: dict[str, Any] | None, provider: str, optimized: bool) -> Reply:
    """Open a model on a provider and run it on feeds, if any."""
    try:
        providers = tuple(dict.fromkeys((provider, CPU)))
        options = SessionOptions(providers=providers, optimized=optimized)
        runner = Runner.open(Model(onnx.load_from_string(data)), options)
        reply: Reply = {}
        if provider == WEBGPU:
            parts = runner.inner.get_provider_graph_assignment_info()
            on_cpu = {node.name for part in parts if part.ep_name == CPU for node in part.get_nodes()}
            counts: dict[str, Counter[str]] = defaultdict(Counter)
            for part in parts:
                counts[part.ep_name].update(map(kind, part.get_nodes()))
            reply = {"assignment": {provider: dict(kinds) for provider, kinds in counts.items()}, "on_cpu": on_cpu}
        if feeds is not None:
            reply["outputs"] = runner.run(feeds)
        return reply
    except Exception as error:  # noqa: BLE001 - any error of the runtime is an answer
        return {"error": str(error).splitlines()[0][:300]}


def kind(node: Any) -> str:
    """Return the kind of a placed node; onnxruntime moves channels-last ones to an internal domain."""
    return node.op_type if node.domain in ("", "ai.onnx", "com.ms.internal.nhwc") else f"{node.domain}::{node.op_type}"


def verified(path: str, target: str, feeds: dict[str, Any], emulate: bool | None) -> Reply:
    """Convert a model for a target and verify the result."""
    converted = amp_rewrite.convert(path, target=target)
    verdict = amp_rewrite.verify(path, converted.result, feeds, tolerance=BOUND, emulate=emulate)
    return {"ok": verdict.ok, "reference": verdict.reference.as_, "candidate": verdict.candidate.as_}


class Device(Child):
    """The device in a separate process. `absence`: the reason if there is none."""

    def __init__(self) -> None:
        super().__init__(serve, LIMIT)
        self.absence: str | None = None
        self.start()

    def ready(self, greeting: Any) -> None:
        self.absence = greeting

    def run(self, model: onnx.ModelProto, feeds: dict[str, Any] | None = None, provider: str = WEBGPU) -> Reply:
        """Return assignment and outputs, or an error.

        Without feeds, optimizers are off, because they would remove some ops.
        """
        reply: Reply = self.ask(("answer", model.SerializeToString(), feeds, provider, feeds is not None))
        return reply

    def opened(self, model: onnx.ModelProto) -> Reply:
        """Return the assignment in an optimized session, or an error, without running it."""
        reply: Reply = self.ask(("answer", model.SerializeToString(), None, WEBGPU, True))
        return reply
