"""Rooflines: peak rates of GPUs from their data sheets, and the resulting lower bound of run times.

Williams, Waterman and Patterson, Roofline: an insightful visual performance model (2009).
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Roof:
    """Peak rates of a GPU: float32 operations outside and float16 ones inside tensor cores, per second, and bytes.

    `tf32`: float32 operations inside tensor cores, which round their inputs to TF32; None if there are none. Rates are
    dense, without sparsity; a multiplication and an addition are two operations. Tensor cores with bfloat16 are as fast
    in it as in float16.
    """

    gpu: str
    float32: float
    low: float
    bandwidth: float
    source: str
    bfloat16: bool = True
    tf32: float | None = None

    def seconds(self, flops: float, nbytes: float, *, low: bool) -> float:
        """Return the least time for these operations and bytes, whichever takes longer."""
        return max(flops / (self.low if low else self.float32), nbytes / self.bandwidth)


ROOFS: Mapping[str, Roof] = {
    roof.gpu: roof
    for roof in (
        Roof("H200", 67e12, 989e12, 4.8e12, "NVIDIA H200 Tensor Core GPU data sheet, SXM", tf32=494.5e12),
        Roof("A100", 19.5e12, 312e12, 1.555e12, "NVIDIA A100 Tensor Core GPU data sheet, 40 GB", tf32=156e12),
        Roof("L4", 30.3e12, 121e12, 0.3e12, "NVIDIA L4 Tensor Core GPU data sheet", tf32=60e12),
        Roof("T4", 8.1e12, 65e12, 0.32e12, "NVIDIA T4 Tensor Core GPU data sheet", False),
        Roof("V100", 15.7e12, 125e12, 0.9e12, "NVIDIA V100 Tensor Core GPU data sheet, SXM2", False),
    )
}

START = 0.9e-6
"""Seconds of launch overhead per small kernel in a full stream: 3.8 µs for each of many kernels that run for 2.9 µs, on
a V100 (A. Gray, Getting Started with CUDA Graphs, NVIDIA 2019)."""


def roof_of(gpu: str) -> Roof | None:
    """Return the roof of a GPU by its driver's name for it ("NVIDIA A100-SXM4-40GB"); None if unknown."""
    words = re.split(r"[\s-]+", gpu)
    return next((roof for name, roof in ROOFS.items() if name in words), None)
