"""Models that are written as text: ONNX's own syntax (.onnxtxt), protobuf's (.textproto) and JSON."""

from __future__ import annotations

import re
from pathlib import Path

import onnx
from google.protobuf import json_format, text_format  # type: ignore[import-untyped]
from google.protobuf.message import DecodeError  # type: ignore[import-untyped]
from onnx import ModelProto
from onnx.parser import ParseError, parse_model
from onnx.serialization import registry

from amp_rewrite.errors import ModelError, one_line
from amp_rewrite.files.regular_files import open_regular

_DEEPEST = 200  # protobuf nests a third as many graphs
# What C++ exceptions of onnx's parser become: numbers that are none, or too large; ValueError: not UTF-8, too.
_STANDARD_ERRORS = (RuntimeError, ValueError, IndexError, ArithmeticError)

# Text in quotes and comments, in which brackets count for nothing; the arrow of a graph, which closes nothing.
_BRACKETS = re.compile(r'"(?:[^"\\]|\\.)*+(?:"|\Z)|#[^\n]*|=>|[(\[{<>}\])]', re.DOTALL)


def format_of(path: Path) -> str | None:
    """Return onnx's name for the format of a model as text, by the suffix of its file; None for a binary one."""
    known = registry.get_format_from_file_extension(path.suffix.lower())
    return None if known == "protobuf" else known


def text_model(path: Path, format_: str) -> ModelProto:
    """Return the model in a text file of a format of onnx: "onnxtxt", "textproto" or "json". ModelError if none is."""
    try:
        if format_ == "onnxtxt":
            with open_regular(path) as file:
                text = file.read().decode()
            if _deepest(text) > _DEEPEST:
                raise ModelError(f"{path} is nested deeper than {_DEEPEST} brackets; no model is, write it again")
            return parse_model(text)
        with open_regular(path) as file:
            return onnx.load_model(file, format=format_, load_external_data=False)
    except (
        ParseError,
        text_format.ParseError,
        json_format.ParseError,
        DecodeError,
        *_STANDARD_ERRORS,
    ) as cause:
        reason = one_line(cause)[:200]
        raise ModelError(f"{path} is not a model in {format_} format: {reason}") from cause


def _deepest(text: str) -> int:
    """Return the nesting depth of brackets in ONNX text; onnx's parser recurses without a limit."""
    deepest = depth = 0
    for token in _BRACKETS.finditer(text):
        if text[token.start()] in "([{<":
            depth += 1
            deepest = max(deepest, depth)
        elif text[token.start()] in ")]}>":
            depth = max(0, depth - 1)
    return deepest
