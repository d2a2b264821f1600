"""Features under test that need a newer onnx or onnxruntime.

Tests of a feature are skipped below its version, with a reason. `pattern` matches the failures of such tests, `tests`
parts of their ids. docs/how-to/install.md documents the same for users.
"""

import functools
import re
from dataclasses import dataclass
from importlib import metadata

from amp_rewrite.runtime.kernels import release_number


@dataclass(frozen=True, slots=True)
class Feature:
    """A feature tested only from `version` of `package` on, and the way to recognize its tests."""

    package: str
    version: str
    name: str
    pattern: str = ""
    tests: tuple[str, ...] = ()

    @property
    def lacking(self) -> bool:
        """True if the installed version is older."""
        number = release_number(installed(self.package))
        return bool(number) and number < release_number(self.version)

    @property
    def reason(self) -> str:
        return f"needs {self.package} >= {self.version}: {self.name}"


@functools.cache
def installed(package: str) -> str:
    names = (package, f"{package}-gpu")
    return next((d.version for name in names for d in metadata.distributions(name=name)), "")


FEATURES = (
    Feature(
        "onnx",
        "1.23",
        "models of all opsets up to 26",
        r"imports ai\.onnx opset \d+, but onnx \S+ knows 1 to \d+|^Unsupported opset-version\."
        r"|No schema registered for '\w+' version '\d+'|No registered schema for operator"
        r"|cannot move a model to opset \d+; use auto|No Op registered for \w+ with domain_version"
        r"|has no type that can be inferred; check the case|No opset import for domain ''",
        ("test_no_operator_changes_a_bit_under_any_shift",),
    ),
    Feature(
        "onnx",
        "1.23",
        "shapes behind Pad and TopK whose sizes are not stated as lists",
        r"'pads' input must be a 1D|K input must be a one-dimensional tensor",
        (
            "test_every_case_is_valid_opens_and_computes_the_same_in_every_mode",
            "test_heads_repeated_for_groups_of_queries_are_read_unrepeated",
            "test_the_default_of_an_input_stays_a_default",
            "test_axes_become_an_attribute_at_an_older_opset",
        ),
    ),
    Feature(
        "onnxruntime",
        "1.31",
        "running models of all opsets up to 26, and arrays by DLPack",
        r"Opset \d+ is under development|it knows the opsets of ai\.onnx (up to|below)|[Uu]nsupported model IR version"
        r"|Could not find an implementation for|Current official support for domain ai\.onnx is till opset",
        ("test_every_template_between_two_products", "test_tensors_of_other_libraries_are_bound_without_a_copy"),
    ),
    Feature(
        "onnxruntime",
        "1.27",
        "float32 LayerNormalization of values far from zero on the CPU",
        "",
        ("test_fusions.py::test_results_match_float32", "lost_digits hit"),
    ),
    Feature(
        "onnxruntime",
        "1.31",
        "bfloat16 inside function bodies on the CPU",
        r"bound to different types \(tensor\(bfloat16\) and tensor\(float\)",
    ),
    Feature(
        "onnxruntime",
        "1.31",
        "Attention with fewer key heads than query heads on the CPU",
        r"results differ by up to",
        ("test_standard_attention_becomes_the_runtimes_own",),
    ),
    Feature(
        "onnxruntime",
        "1.31",
        "all integer kernels between quantizers on the CPU",
        "",
        (
            "test_every_integer_kernel_is_kept",
            "test_a_dequantized_weight_has_the_type_of_its_readers",
            "test_a_bias_between_quantizers_of_float16",
        ),
    ),
    Feature(
        "onnxruntime",
        "1.31",
        "norms that return their sum",
        "",
        ("a fused norm that gives its sum",),
    ),
    Feature(
        "onnxruntime",
        "1.31",
        "the newest kernel table as the default target",
        "",
        (
            "test_processes_and_executors_give_the_same_files",
            "test_converting_needs_no_thread",
            "test_an_op_without_a_kernel_is_a_finding",
        ),
    ),
)
LACKING = tuple(feature for feature in FEATURES if feature.lacking)


def reason_of(failure: BaseException) -> str | None:
    """Return the missing feature that made a test fail; None for other failures."""
    if isinstance(failure, BaseExceptionGroup):  # the failures of several examples
        reasons = [reason_of(inner) for inner in failure.exceptions]
        return reasons[0] if all(reasons) else None
    found = (feature.reason for feature in LACKING if feature.pattern and re.search(feature.pattern, str(failure)))
    return next(found, None)


def reason_for(test: str) -> str | None:
    """Return why a test is skipped by its id; None if it runs."""
    return next((feature.reason for feature in LACKING if any(part in test for part in feature.tests)), None)
