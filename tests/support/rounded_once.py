"""The emulation without what kernels round inside: each low op computes in float32 and rounds its result alone."""

from typing import Any
from unittest.mock import patch

from amp_rewrite.files.model import Model, ModelSource
from amp_rewrite.rewrite import emulate as emulation


def rounded_once(model: ModelSource, **options: Any) -> Model:
    """The twin of a device with no such kernels."""
    with patch.object(emulation, "CUDA", {}):
        return emulation.emulate(model, **options)
