"""Functions with the signatures of other converters, so only an import changes: see docs/how-to/migrating.md."""

from amp_rewrite.compat.float16 import (
    DEFAULT_OP_BLOCK_LIST,
    convert_float_to_float16,
    convert_float_to_float16_model_path,
)
from amp_rewrite.compat.mixed_precision import auto_convert_mixed_precision, auto_convert_mixed_precision_model_path

__all__ = [
    "DEFAULT_OP_BLOCK_LIST",
    "auto_convert_mixed_precision",
    "auto_convert_mixed_precision_model_path",
    "convert_float_to_float16",
    "convert_float_to_float16_model_path",
]
