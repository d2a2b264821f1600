"""The process that runs models on the device: its driver may die, and each death costs one request."""

from __future__ import annotations

from multiprocessing.connection import Connection
from typing import Any

import onnx

from amp_rewrite.files.model import Model
from amp_rewrite.runtime.runner import CPU, WEBGPU, Runner, SessionOptions
from support import webgpu
from support.child import Child, hush

LIMIT = 120.0
"""Seconds for one request: a shader is compiled for each op and shape."""

Reply = dict[str, Any]


def serve(connection: Connection, talk: str) -> None:
    """Answer requests (model as bytes, feeds or None, provider): assignment and outputs, or an error."""
    hush(talk)
    connection.send(webgpu.absence())
    while (request := connection.recv()) is not None:
        connection.send(answer(*request))


def answer(data: bytes, feeds: dict[str, Any] | None, provider: str) -> Reply:
    """Open a model on a provider, and run it on feeds if there are any."""
    try:
        providers = tuple(dict.fromkeys((provider, CPU)))
        # Without feeds it is about the ops as they stand, of which optimizers would leave some out.
        options = SessionOptions(providers=providers, optimized=feeds is not None)
        runner = Runner.open(Model(onnx.load_from_string(data)), options)
        asked = provider == WEBGPU
        reply: Reply = {"assignment": runner.assignment(), "on_cpu": runner.on_cpu()} if asked else {}
        if feeds is not None:
            reply["outputs"] = runner.run(feeds)
        return reply
    except Exception as error:  # noqa: BLE001 - whatever the runtime raises is an answer
        return {"error": str(error).splitlines()[0][:300]}


class Device(Child):
    """The device behind a process of its own."""

    def __init__(self) -> None:
        super().__init__(serve, LIMIT)

    def ready(self, greeting: Any) -> None:
        if greeting is not None:
            raise SystemExit(f"no WebGPU device: {greeting}")

    def run(self, model: onnx.ModelProto, feeds: dict[str, Any] | None = None, provider: str = WEBGPU) -> Reply:
        """Return assignment and outputs, or an error."""
        reply: Reply = self.ask((model.SerializeToString(), feeds, provider))
        return reply
