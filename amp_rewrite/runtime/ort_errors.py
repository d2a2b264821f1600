"""Errors of onnxruntime, each as one line with a remedy."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager

from amp_rewrite.errors import ModelError

NO_KERNEL = "Could not find an implementation"
"""onnxruntime's words for a sound op in a type that it has no kernel for."""
_PLACE = re.compile(r"/onnxruntime_src/\S+:\d+ [^)]*\)(?: const)? ")


@contextmanager
def model_errors(what: str) -> Iterator[None]:
    """Raise errors of onnxruntime as ModelError, with one line of text."""
    try:
        yield
    except _refusals() as cause:
        raise ModelError(f"onnxruntime cannot {what} the model: {error_text(what, cause)}") from cause


def error_text(what: str, cause: Exception) -> str:
    """Return the cause, in onnxruntime's words unless they are unclear, and a remedy. `what`: "open" or "run"."""
    text = _text(cause)
    for pattern, fact, remedy in _KNOWN:
        if match := re.search(pattern, text):
            return f"{fact.format(*match.groups()) if fact else text}; {remedy}"
    return f"{text}; {_REMEDIES[what]}"


_REMEDIES = {
    "open": "`amp-rewrite report MODEL` shows what it is made of",
    "run": "check what is fed against the model's inputs",
}
# Pattern of onnxruntime's text, a clearer text if needed, and a remedy.
_KNOWN = (
    (
        r"error: (.*):([^:]+)\(-?\d+\) is not a registered function/op",
        "it knows no op {1!r} of the domain {0!r}",
        "give the model a local function of that name, or put ops that it knows in its place",
    ),
    (
        r"No Op registered for (\S+) with domain_version of (\d+)",
        "it knows no op {0!r} in opset {1}",
        "check the spelling, or import the opset that has it",
    ),
    (
        r"No opset import for domain '([^']*)'",
        "the model uses the domain {0!r}, and imports no opset of it",
        "add it to opset_import",
    ),
    (
        r"two nodes with same node name \((.*)\)",
        "two of its nodes are named {0!r}",
        "give each a name of its own, or none",
    ),
    (r"Duplicate definition of name \((.*)\)", "two of its nodes make {0!r}", "rename what one of them makes"),
    (NO_KERNEL, "", "emulate(model) runs what no kernel of the CPU does"),
    (
        r"official support for domain (\S+) is till opset (\d+)",
        "it knows the opsets of {0} up to {1}",
        "install a newer onnxruntime, or bring the model to an older opset with onnx.version_converter",
    ),
    (
        r'Unknown provider option: "([^"]*)"',
        "a provider has no option {0!r}",
        "check the spelling against onnxruntime's page of that provider, or leave it out",
    ),
    (
        r'Failed to parse provider option "([^"]*)": (?:\S+:\d+ \S+ )?(.*)',
        "provider option {0!r} has a value that it does not take: {1}",
        "give another one, or leave it out",
    ),
    (
        r"Please install TensorRT libraries",
        "it cannot load the libraries of TensorRT",
        "install TensorRT (pip install tensorrt) where the loader finds it, or leave TensorrtExecutionProvider out",
    ),
    (
        r"graph (?:capture )?feature as requested by the user as ",
        "",
        "leave the CUDA graph out (cuda_graph, enable_cuda_graph)",
    ),
    (
        r"Opset (\d+) is under development",
        "it knows the opsets of ai.onnx below {0}",
        "install a newer onnxruntime, or bring the model to an older opset with onnx.version_converter",
    ),
    (r"max supported IR version", "", "install a newer onnxruntime, or export the model again for an older one"),
)


def _text(cause: Exception) -> str:
    text = " ".join(str(cause).split())
    if text.startswith("[ONNXRuntimeError]"):
        text = text.split(" : ", 3)[-1]
    text = _PLACE.sub("", text)
    return f"{text[:400].rstrip('. ')}{' …' if len(text) > 400 else ''}"


def _refusals() -> tuple[type[Exception], ...]:
    """onnxruntime's own exceptions, without a common base class below Exception, and those of its Python side."""
    from onnxruntime.capi import onnxruntime_pybind11_state as state

    own = (e for e in vars(state).values() if isinstance(e, type) and issubclass(e, Exception))
    return (*own, ValueError, RuntimeError, TypeError)
