"""Emulation without roundings inside kernels: each low op computes in float32 and only rounds its result."""

from typing import Any
from unittest.mock import patch

from amp_rewrite.files.model import Model, ModelSource
from amp_rewrite.rewrite import emulate as emulation


def rounded_once(model: ModelSource, **options: Any) -> Model:
    """Emulate a model on a device whose kernels do not round inside."""
    with patch.object(emulation, "CUDA", {}):
        return emulation.emulate(model, **options)
