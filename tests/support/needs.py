"""What older packages lack: the one table of features of tests that need a newer onnx or onnxruntime.

A row holds for versions below the one that it names: tests that meet the feature are skipped there and say so; with
that version and newer ones they run. `pattern` finds tests by the words of their failure; others name the row, as
`pytestmark = needs("attention_nodes")`.
"""

from __future__ import annotations

import functools
import re
from dataclasses import dataclass
from importlib import metadata

import pytest


@dataclass(frozen=True, slots=True)
class Need:
    """A feature that `package` has from `version` on, and the words of failures without it."""

    package: str
    version: str
    feature: str
    pattern: str = ""

    @property
    def lacking(self) -> bool:
        """True if the installed version is older."""
        return installed(self.package) < tuple(map(int, self.version.split(".")))

    @property
    def reason(self) -> str:
        return f"needs {self.package} >= {self.version}: {self.feature}"


@functools.cache
def installed(package: str) -> tuple[int, ...]:
    names = (package, f"{package}-gpu")
    found = next((d.version for name in names for d in metadata.distributions(name=name)), "0")
    return tuple(map(int, re.findall(r"\d+", found)[:2]))


NEEDS = {
    "newer_opsets": Need(
        "onnx",
        "1.23",
        "models and operators of newer opsets",
        r"imports ai\.onnx opset \d+, but onnx \S+ knows 1 to \d+|^Unsupported opset-version\."
        r"|No schema registered for '\w+' version '\d+'|No registered schema for operator"
        r"|cannot move a model to opset \d+; use auto|No Op registered for \w+ with domain_version"
        r"|has no type that can be inferred; check the case",
    ),
    "small_types": Need(
        "onnx", "1.19", "tensors of types below a byte", r"Unable to convert type dtype\(u?int\d\) into TensorProto"
    ),
    "newer_runtime": Need(
        "onnxruntime",
        "1.31",
        "models of a newer opset or IR version",
        r"Opset \d+ is under development|it knows the opsets of ai\.onnx (up to|below)|[Uu]nsupported model IR version",
    ),
    "weights_elsewhere": Need(
        "onnxruntime",
        "1.22",
        "weights below another folder",
        r"cannot get file size: No such file or directory|should be stored in \S+, but it doesn't exist",
    ),
}


def needs(feature: str) -> pytest.MarkDecorator:
    """Return the mark of tests that need a feature of the table."""
    need = NEEDS[feature]
    return pytest.mark.skipif(need.lacking, reason=need.reason)


LACKING = tuple((need.pattern, need.reason) for need in NEEDS.values() if need.lacking and need.pattern)
