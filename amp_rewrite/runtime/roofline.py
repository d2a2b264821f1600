"""Rooflines: peak rates of GPUs from their data sheets, and the resulting lower bound of run times.

Williams, Waterman and Patterson, Roofline: an insightful visual performance model (2009).
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace


@dataclass(frozen=True, slots=True)
class Roof:
    """Peak rates of a GPU: float32 operations outside and float16 ones inside tensor cores, per second, and bytes.

    `tf32`: float32 operations inside tensor cores, which round their inputs to TF32; None if there are none. Rates are
    dense, without sparsity, with sums in float32; a multiplication and an addition are two operations. Tensor cores
    with bfloat16 are as fast in it as in float16. `reached`: the share of `low` that the fastest of many bfloat16
    products reached (github.com/mag-/gpu_benchmark; of the H200, benchmarks/results/gpu.md); 1 for a rate above the
    sheet's, at a higher clock; None without a measurement. `words`: those of the driver's name for it.
    """

    gpu: str
    float32: float
    low: float
    bandwidth: float
    source: str
    bfloat16: bool = True
    tf32: float | None = None
    reached: float | None = None
    words: tuple[str, ...] = ()

    def seconds(self, flops: float, nbytes: float, *, low: bool) -> float:
        """Return the least time for these operations and bytes, whichever takes longer."""
        return max(flops / (self.low if low else self.float32), nbytes / self.bandwidth)

    @property
    def attained(self) -> Roof:
        """The roof with rates of tensor cores that products reach; itself where none is known.

        Other rates stay those of the data sheet: no measurement of all these GPUs is known.
        """
        if self.reached is None:
            return self
        return replace(self, low=self.low * self.reached, tf32=self.tf32 and self.tf32 * self.reached, reached=None)


_UNREAD = "unverified: the document was not at hand"
_AGREES = f"{_UNREAD}; agrees with {{}}"
"""Words for rates that are not read from NVIDIA's own table, and the page of others that has the same."""

_SHEET = "NVIDIA {} Tensor Core GPU data sheet"
_AMPERE = "NVIDIA Ampere GA102 GPU Architecture, table 9"
_ADA = "NVIDIA Ada GPU Architecture, appendix A"
_BLACKWELL = "NVIDIA RTX Blackwell GPU Architecture, appendix A"

_RTX4090 = "https://waredb.com/processor/nvidia-geforce-rtx-4090"
_RTX5090 = "https://www.spheron.network/blog/nvidia-rtx-5090-specs, within 0.4 %"
_ORIN = "http://mzph.cn/web/30785.shtml, which repeats the brief"

# Columns: operations of float32, of float16 in tensor cores and of TF32 in 10^12 a second, bytes in 10^12 a second.
ROOFS: Mapping[str, Roof] = {
    gpu: Roof(
        gpu,
        float32 * 1e12,
        low * 1e12,
        bandwidth * 1e12,
        source,
        tf32 is not None,
        tf32 and tf32 * 1e12,
        reached,
        words,
    )
    for gpu, words, float32, low, tf32, bandwidth, reached, source in (
        ("B200", ("B200",), 75, 2250, 1125, 7.7, None, "NVIDIA Blackwell data sheet, HGX B200, one GPU"),
        ("H200", ("H200",), 67, 989, 494.5, 4.8, 0.81, f"{_SHEET.format('H200')}, SXM"),
        ("H100", ("H100",), 67, 989, 494.5, 3.35, 0.8, f"{_SHEET.format('H100')}, SXM"),
        ("H100-PCIe", ("H100", "PCIe"), 51, 756, 378, 2.0, 0.66, f"{_SHEET.format('H100')}, PCIe"),
        ("A100", ("A100",), 19.5, 312, 156, 1.555, 0.86, f"{_SHEET.format('A100')}, 40 GB"),
        ("A100-80GB", ("A100", "80GB"), 19.5, 312, 156, 2.039, 0.86, f"{_SHEET.format('A100')}, 80 GB SXM"),
        ("A10", ("A10",), 31.2, 125, 62.5, 0.6, None, f"{_SHEET.format('A10')}"),
        ("L40S", ("L40S",), 91.6, 362, 183, 0.864, 0.7, "NVIDIA L40S data sheet"),
        ("L4", ("L4",), 30.3, 121, 60, 0.3, 0.76, f"{_SHEET.format('L4')}"),
        ("T4", ("T4",), 8.1, 65, None, 0.32, None, f"{_SHEET.format('T4')}"),
        ("V100", ("V100",), 15.7, 125, None, 0.9, None, f"{_SHEET.format('V100')}, SXM2"),
        ("RTX3080", ("RTX", "3080"), 29.8, 59.5, 29.8, 0.76, None, f"{_AMPERE}, 10 GB; {_UNREAD}"),
        ("RTX3090", ("RTX", "3090"), 35.6, 71, 35.6, 0.936, 1.0, f"{_AMPERE}; {_UNREAD}"),
        ("RTX4080", ("RTX", "4080"), 48.7, 97.5, 48.7, 0.717, None, f"{_ADA}; {_UNREAD}"),
        ("RTX4090", ("RTX", "4090"), 82.6, 165.2, 82.6, 1.008, 1.0, f"{_ADA}; {_AGREES.format(_RTX4090)}"),
        ("RTX5080", ("RTX", "5080"), 56.3, 112.6, 56.3, 0.96, None, f"{_BLACKWELL}; {_UNREAD}"),
        ("RTX5090", ("RTX", "5090"), 104.8, 209.5, 104.8, 1.792, None, f"{_BLACKWELL}; {_AGREES.format(_RTX5090)}"),
        (
            "Orin",
            ("Orin",),
            5.3,
            42.5,
            21.2,
            0.205,
            None,
            f"NVIDIA Jetson AGX Orin technical brief, 64 GB; {_AGREES.format(_ORIN)}; float16 is half of dense INT8",
        ),
    )
}

COMMON = ("H200", "A100", "L4", "T4", "V100")
"""GPUs to speak of where the machine has none."""

_OTHER_CHIPS = frozenset({"Laptop", "Max", "Ti", "SUPER", "NVL", "Nano", "NX"})
"""Words of the names of other GPUs than those without them."""


def roof_of(gpu: str) -> Roof | None:
    """Return the roof of a GPU by its driver's name for it ("NVIDIA A100-SXM4-40GB"); None if unknown."""
    words = set(re.split(r"[\s-]+", gpu.replace("PCIE", "PCIe")))
    known = [roof for roof in ROOFS.values() if words >= set(roof.words) and not words & _OTHER_CHIPS]
    return max(known, key=lambda roof: len(roof.words), default=None)
