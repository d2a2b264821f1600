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
# Python's forms of C++ exceptions in onnx's parser: malformed or too large numbers; ValueError also for invalid UTF-8.
_STANDARD_ERRORS = (RuntimeError, ValueError, IndexError, ArithmeticError)

# Quoted text and comments, whose brackets do not count; the arrow of a graph, whose ">" is not a bracket; and brackets.
_BRACKETS = re.compile(r'"(?:[^"\\]|\\.)*+(?:"|\Z)|#[^\n]*|=>|[(\[{<>}\])]', re.DOTALL)


def format_of(path: Path) -> str | None:
    """Return onnx's name for the format of a model as text, by the suffix of its file; None for a binary one."""
    known = registry.get_format_from_file_extension(path.suffix.lower())
    return None if known == "protobuf" else known


def text_model(path: Path, format_: str) -> ModelProto:
    """Return the model in a text file of onnx: "onnxtxt", "textproto" or "json". ModelError if it holds no model."""
    try:
        if format_ == "onnxtxt":
            with open_regular(path) as file:
                text = file.read().decode()
            if _deepest(text) > _DEEPEST:
                raise ModelError(f"{path} is nested deeper than {_DEEPEST} brackets; no model is, write it again")
            return parse_model(text)
        with open_regular(path) as file:
            return onnx.load_model(file, format=format_, load_external_data=False)
    except (ParseError, text_format.ParseError, json_format.ParseError, DecodeError, *_STANDARD_ERRORS) as cause:
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
