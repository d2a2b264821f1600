"""Errors of onnxruntime as one line: its prefix and place go, what is unclear gets other words, and each a remedy."""

from __future__ import annotations

import pytest

from amp_rewrite.runtime.installation import error_text

LOOK = "`amp-rewrite report MODEL` shows what it is made of"
NEWER = "install a newer onnxruntime, or bring the model to an older opset with onnx.version_converter"


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("[ONNXRuntimeError] : 1 : FAIL : node 'a' : no such\n  shape.", f"node 'a' : no such shape; {LOOK}"),
        ("a : b : c : d", f"a : b : c : d; {LOOK}"),
        ("/onnxruntime_src/core/graph.cc:12 Status(int) const it ends", f"it ends; {LOOK}"),
        ("x" * 400, f"{'x' * 400}; {LOOK}"),
        ("x" * 401, f"{'x' * 400} …; {LOOK}"),
        ("Could not find an implementation for Sin", "Could not find an implementation for Sin; emulate(model) runs"),
        (
            "official support for domain ai.onnx is till opset 26.",
            f"official support for domain ai.onnx is till opset 26; {NEWER}",
        ),
        ('Unknown provider option: "size"', 'Unknown provider option: "size"; check it against onnxruntime\'s page'),
        ("max supported IR version: 13", "max supported IR version: 13; install a newer onnxruntime"),
    ],
)
def test_an_error_is_a_line_of_clear_words_and_a_remedy(text: str, line: str) -> None:
    assert error_text("open", RuntimeError(text)).startswith(line)


def test_the_remedy_of_a_run_is_about_what_is_fed() -> None:
    assert error_text("run", RuntimeError("odd")) == "odd; check what is fed against the model's inputs"
