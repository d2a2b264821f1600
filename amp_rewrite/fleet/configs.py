"""Configurations that name model files: `genai_config.json` of onnxruntime-genai follows a rule for names."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from amp_rewrite.errors import ModelError
from amp_rewrite.files.regular_files import open_regular
from amp_rewrite.fleet.urls import real, url_of

GENAI = "genai_config.json"
_KEY = "filename"
_LARGEST = 1 << 24  # bytes


def _read(source: Path) -> bytes:
    if url_of(source):
        from amp_rewrite.fleet.remote import read

        return read(source, _LARGEST)
    with open_regular(source) as file:
        return file.read(_LARGEST)


def with_new_names(source: Path, target: Path, targets: Mapping[str, Path]) -> bytes | None:
    """Return a configuration that names results instead of sources; None if nothing changes.

    Each "filename" of `genai_config.json` is a path beside it. `targets`: results by the real paths of sources. Types
    are not written there: onnxruntime-genai takes those of caches and logits from the model.
    """
    if source.name != GENAI:
        return None
    try:
        config = json.loads(_read(source))
    except (OSError, ValueError, RecursionError, ModelError):
        return None  # copied as it is
    changed = False

    def renamed(part: Any) -> Any:
        nonlocal changed
        if isinstance(part, list):
            return [renamed(item) for item in part]
        if not isinstance(part, dict):
            return part
        out = {key: renamed(value) for key, value in part.items()}
        if isinstance(name := part.get(_KEY), str) and (path := targets.get(real(source.parent / name))):
            out[_KEY] = Path(os.path.relpath(path, target.parent)).as_posix()
            changed = changed or out[_KEY] != name
        return out

    config = renamed(config)
    return json.dumps(config, indent=4, ensure_ascii=False).encode() if changed else None
