"""Configurations beside models: those that name files follow the rule for names."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from amp_rewrite import convert_many
from support.repositories import net

CONFIG: dict[str, Any] = {
    "model": {
        "type": "whisper",
        "decoder": {"filename": "decoder.onnx", "pipeline": [{"first": {"filename": "sub/first.onnx"}}]},
        "encoder": {"filename": "encoder.onnx"},
        "adapter": {"filename": "absent.onnx"},
    },
    "search": {"max_length": 64, "name": "decoder.onnx"},
}


@pytest.fixture
def src(tmp_path: Path) -> Path:
    for name in ("decoder.onnx", "encoder.onnx", "sub/first.onnx"):
        net(tmp_path / "src" / name)
    (tmp_path / "src" / "genai_config.json").write_text(json.dumps(CONFIG))
    return tmp_path / "src"


def config_of(out: Path) -> Any:
    return json.loads((out / "genai_config.json").read_text())


def test_a_genai_config_names_the_results(src: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    for _ in range(2):  # the second run finds its own copy
        assert all(not outcome.rc for outcome in convert_many(src, out=out, name="{stem}_{type}.onnx", resume=True))
    expected = json.loads(json.dumps(CONFIG))
    expected["model"]["decoder"]["filename"] = "decoder_float16.onnx"
    expected["model"]["decoder"]["pipeline"][0]["first"]["filename"] = "sub/first_float16.onnx"
    expected["model"]["encoder"]["filename"] = "encoder_float16.onnx"
    assert config_of(out) == expected


def test_a_genai_config_that_is_right_is_copied_byte_for_byte(src: Path, tmp_path: Path) -> None:
    assert all(not outcome.rc for outcome in convert_many(src, out=tmp_path / "out"))
    assert (tmp_path / "out" / "genai_config.json").read_bytes() == (src / "genai_config.json").read_bytes()


@pytest.mark.parametrize("content", [b"{", b"\xff", b"[" * 100_000, b"[1, null]"])
def test_a_genai_config_that_cannot_be_read_is_copied(src: Path, tmp_path: Path, content: bytes) -> None:
    (src / "genai_config.json").write_bytes(content)
    assert all(not outcome.rc for outcome in convert_many(src, out=tmp_path / "out", name="{stem}_fp16.onnx"))
    assert (tmp_path / "out" / "genai_config.json").read_bytes() == content


def test_a_genai_config_beside_both_models_stays(src: Path) -> None:
    before = (src / "genai_config.json").read_bytes()
    assert all(not outcome.rc for outcome in convert_many(src, out=src, name="{stem}_fp16.onnx"))
    assert (src / "genai_config.json").read_bytes() == before


def test_another_copy_of_a_config_is_not_taken_for_ours(src: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    out.mkdir()
    (out / "genai_config.json").write_text("{}")
    failed = [outcome for outcome in convert_many(src, out=out, name="{stem}_fp16.onnx", resume=True) if outcome.rc]
    assert "genai_config.json exists and differs" in failed[0].error and config_of(out) == {}
