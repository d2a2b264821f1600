"""Models that are written as text: ONNX's own syntax (.onnxtxt), protobuf's (.textproto) and JSON."""

from __future__ import annotations

import itertools
import re
from pathlib import Path

import onnx
from google.protobuf import json_format, text_format  # type: ignore[import-untyped]
from google.protobuf.message import DecodeError  # type: ignore[import-untyped]
from onnx import ModelProto
from onnx.parser import ParseError
from onnx.parser import parse_model as _parsed

from amp_rewrite.errors import ModelError
from amp_rewrite.files.function_expansion import all_nodes
from amp_rewrite.files.regular_files import open_regular

_DEEPEST = 200  # protobuf nests a third as many graphs
# What C++ exceptions of onnx's parser become: numbers that are none, or too large; ValueError: not UTF-8, too.
_STANDARD_ERRORS = (RuntimeError, ValueError, IndexError, ArithmeticError)

# Text in quotes and comments, in which brackets count for nothing; the arrow of a graph, which closes nothing.
_BRACKETS = re.compile(r'"(?:[^"\\]|\\.)*+(?:"|\Z)|#[^\n]*|=>|[(\[{<>}\])]', re.DOTALL)
# A node's name in brackets, its outputs, and its op; what is skipped; else one character.
_NAMED = re.compile(
    r"""(?P<skipped>"(?:[^"\\]|\\.)*+(?:"|\Z) | \#[^\n]* | \s+)
      | \[ \s* "?+ (?P<name>(?<=")[^"\\]*+ | [A-Za-z_]\w*+) "?+ \s* \]
        (?P<outputs>(?:[\s\w,] | \#[^\n]*)*+ = \s*+) (?P<op>[A-Za-z_][\w.]*+)
      | (?P<other>.)""",
    re.DOTALL | re.VERBOSE | re.ASCII,
)


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
        reason = " ".join(str(cause).split())[:200]
        raise ModelError(f"{path} is not a model in {format_} format: {reason}") from cause


def parse_model(text: str) -> ModelProto:
    """Return the model of a text in ONNX's syntax; nodes may have names, which onnx's parser reads from 1.18 on.

    `[name] y = Relu (x)`. Raise onnx.parser.ParseError for other text.
    """
    try:
        return _parsed(text)
    except ParseError:
        names: list[str] = []
        mark = next(mark for n in itertools.count() if (mark := f"__named{n}_") not in text)
        marked = _marked(text, mark, names)
        if not names:
            raise
    model = _parsed(marked)
    for holder in (model.graph, *model.functions):
        for node in all_nodes(holder.node):
            op, found, at = node.op_type.rpartition(mark)
            if found:
                node.op_type, node.name = op, names[int(at)]
    return model


def _marked(text: str, mark: str, names: list[str]) -> str:
    """Return the text with the names of nodes moved to `names`, and a mark and their positions there behind the ops.

    An input that is left out, `""`, becomes nothing, which older parsers read.
    """
    pieces, before, opened = [], "", "."
    for match in _NAMED.finditer(text):
        piece = match.group()
        if match["name"] and before in "{)>":  # where a node begins; elsewhere brackets hold dimensions or lists
            piece = f"{match['outputs']}{match['op']}{mark}{len(names)}"
            names.append(match["name"])
        if piece == '""' and opened[-1] == "(":
            piece = ""
        if match["other"] and piece in "([{":
            opened += piece
        elif match["other"] and piece in ")]}":
            opened = opened[:-1] or "."
        if not match["skipped"]:
            before = piece[-1]
        pieces.append(piece)
    return "".join(pieces)


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
