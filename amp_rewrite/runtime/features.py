"""Features that older releases of onnx and onnxruntime lack, and the first release with each.

`tests/support/needs.py` says which tests are skipped for each; docs/how-to/install.md and `amp-rewrite doctor` tell it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from amp_rewrite.runtime.kernels import release_number


@dataclass(frozen=True, slots=True)
class Feature:
    """A feature that is tested with `version` of `package` and later ones; some release before it lacks it."""

    package: str
    version: str
    what: str

    def lacking(self, release: str) -> bool:
        """True if a release of the package is older."""
        number = release_number(release)
        return bool(number) and number < release_number(self.version)


ONNX, ONNXRUNTIME = "onnx", "onnxruntime"
FEATURES: Mapping[str, Feature] = {
    "opsets": Feature(ONNX, "1.23", "models of all opsets up to 26"),
    "inference": Feature(ONNX, "1.23", "shapes behind Pad and TopK whose sizes are not stated as lists"),
    "runtime_opsets": Feature(ONNXRUNTIME, "1.31", "running models of all opsets up to 26, and arrays by DLPack"),
    "stable_norms": Feature(ONNXRUNTIME, "1.27", "float32 LayerNormalization of values far from zero on the CPU"),
    "bfloat16_bodies": Feature(ONNXRUNTIME, "1.31", "bfloat16 inside of function bodies on the CPU"),
    "grouped_attention": Feature(ONNXRUNTIME, "1.31", "Attention with fewer heads of keys than of queries on the CPU"),
    "integer_kernels": Feature(ONNXRUNTIME, "1.31", "all integer kernels between quantizers on the CPU"),
    "half_on_cpu": Feature(
        ONNXRUNTIME,
        "1.31",
        "on the CPU, float16 weights that a caller may override, norms that give their sum, too, and maps of sequences",
    ),
    "newest_kernels": Feature(ONNXRUNTIME, "1.31", "the newest kernel table as the default target"),
}


def lacking(package: str, release: str) -> tuple[Feature, ...]:
    """Return the features that a release of a package lacks."""
    return tuple(f for f in FEATURES.values() if f.package == package and f.lacking(release))
