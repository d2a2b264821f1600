"""What all tests share: settings of random tests; for older packages, ONNX text and skips that name what is too old.

A test that meets a model, an operator or a call which the installed version does not know is skipped with that version.
Each row below holds for versions older than the one that it names; with those and newer ones, the test fails.
"""

from __future__ import annotations

import re
from collections.abc import Generator
from importlib import metadata
from typing import Any

import onnx.numpy_helper
import onnx.parser
import pytest
from hypothesis import HealthCheck, settings

from amp_rewrite.files import arrays
from amp_rewrite.files.text import parse_model

onnx.parser.parse_model = parse_model  # onnx 1.17 reads no names of nodes
onnx.numpy_helper.from_array = arrays.from_array  # onnx below 1.19 knows no types of ml_dtypes
onnx.numpy_helper.to_array = arrays.to_array

# The same examples on each machine, however slow it is.
settings.register_profile(
    "project", deadline=None, derandomize=True, database=None, suppress_health_check=[HealthCheck.too_slow]
)
settings.load_profile("project")

NEEDS = (
    (r"imports ai\.onnx opset \d+, but onnx \S+ knows 1 to \d+", "onnx", "1.23", "a model of a newer opset"),
    (r"^Unsupported opset-version\.", "onnx", "1.23", "a model of a newer opset"),
    (r"No schema registered for '\w+' version '\d+'", "onnx", "1.23", "an operator of a newer opset"),
    (r"Unable to convert type dtype\(u?int\d\) into TensorProto", "onnx", "1.19", "tensors of types below a byte"),
    (r"Opset \d+ is under development|it knows the opsets of ai\.onnx below", "onnxruntime", "1.31", "a newer opset"),
    (r"[Uu]nsupported model IR version", "onnxruntime", "1.31", "a newer IR version"),
    (r"cannot get file size: No such file or directory", "onnxruntime", "1.22", "weights below another folder"),
)


def installed(package: str) -> tuple[int, ...]:
    names = (package, f"{package}-gpu")
    found = next((d.version for name in names for d in metadata.distributions(name=name)), "0")
    return tuple(map(int, re.findall(r"\d+", found)[:2]))


OLD = tuple(
    (p, f"{package} {to} is needed: {what}")
    for p, package, to, what in NEEDS
    if installed(package) < tuple(map(int, to.split(".")))
)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[Any]) -> Generator[None, Any, Any]:
    """Turn a failure for an old version into a skip."""
    report = yield
    if OLD and report.failed and call.excinfo is not None:
        text = str(call.excinfo.value)
        needed = next((why for pattern, why in OLD if re.search(pattern, text)), None)
        if needed is not None:
            report.outcome, report.longrepr = "skipped", (str(item.path), item.location[1] or 0, needed)
    return report
