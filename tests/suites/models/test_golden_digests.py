"""Digests of every exported model's conversions in several modes, to check that refactoring changes no result.

Run as a program to write the current digests: python tests/suites/models/test_golden_digests.py
"""

import hashlib
import json
import re
import sys
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest
from onnx import ModelProto

from amp_rewrite import AmpRewriteError, Report, convert

TESTS = Path(__file__).parents[2]
FILE = TESTS / "golden" / "digests.json"
MODES: dict[str, dict[str, str]] = {
    "float16": {},
    "bfloat16": {"to": "bfloat16"},
    "opset_auto": {"opset": "auto"},
    "tensorflow": {"safety": "none"},
    "onnx_unfused": {"target": "onnx", "fuse": "none"},
    "tensorrt_low": {"target": "tensorrt", "io": "low"},
}
PARTS = ("decisions", "sentences", "model")
WORDS = ("reason", "note", "source", "message")
"""Fields with sentences, which have a separate digest, because rewording changes no decision."""
MODELS = {p.stem: p for p in (*TESTS.glob("models/*.onnx"), *(TESTS.parent / "examples" / "models").glob("*.onnx"))}


def digests(model: Path) -> dict[str, list[str]]:
    """Return the digests of `PARTS` in each mode: report and model without the version and the fingerprint of lists."""
    found = {}
    for mode, options in MODES.items():
        try:
            converted = convert(model, **options)
        except AmpRewriteError as error:
            found[mode] = [type(error).__name__]
        else:
            found[mode] = [digest(part) for part in (*parts(converted.report), unversioned(converted.model))]
    return found


def parts(report: Report) -> tuple[bytes, bytes]:
    """Return the report without sentences, and the sentences, without lines of lists."""
    document: dict[str, Any] = json.loads(report.to_json())
    for field in ("tool", "fingerprint"):
        document["model"].pop(field)
    rows = (*document["rows"], *document["casts"], *document["findings"])
    words = [re.sub(r"(\.yaml):\d+", r"\1", row.pop(word, None) or "") for row in rows for word in WORDS]
    return json.dumps(document, sort_keys=True).encode(), json.dumps(words).encode()


def unversioned(proto: ModelProto) -> bytes:
    for entry in proto.metadata_props:
        if entry.key == "amp_rewrite":
            words = entry.value.split(" ")
            entry.value = " ".join(word for word in words if not word.startswith(("version=", "lists=")))
    return proto.SerializeToString(deterministic=True)


def digest(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()[:16]


STORED: dict[str, Any] = json.loads(FILE.read_text("utf-8")) if FILE.is_file() else {"onnx": "", "models": {}}


def test_every_model_has_its_digests() -> None:
    assert len(MODELS) == 31
    assert STORED["models"].keys() == MODELS.keys()


@pytest.mark.skipif(metadata.version("onnx") != STORED["onnx"], reason=f"digests are from onnx {STORED['onnx']}")
@pytest.mark.parametrize("name", sorted(MODELS))
def test_reports_and_models_are_unchanged(name: str) -> None:
    found, stored = digests(MODELS[name]), STORED["models"][name]
    changed = {mode: [p for p, a, b in zip(PARTS, found[mode], stored[mode], strict=False) if a != b] for mode in MODES}
    hint = "`tools/decisions.py dump` and `compare` show decisions; `make golden` stores the new digests"
    assert found == stored, f"changed: { {mode: parts for mode, parts in changed.items() if parts} }. {hint}"


if __name__ == "__main__":
    current = {"onnx": metadata.version("onnx"), "models": {name: digests(MODELS[name]) for name in sorted(MODELS)}}
    FILE.write_text(json.dumps(current, indent=1) + "\n", "utf-8")
    sys.stdout.write(f"{FILE}: {len(MODELS)} models, {len(MODES)} modes\n")
