"""The pins of the safety rules."""

from amp_rewrite.decide.needs.find import find_needs
from amp_rewrite.dtypes import DType
from amp_rewrite.ir.view import View


def pinned(view: View, to: DType = DType.FLOAT16) -> dict[str, str]:
    """Map the first result of each pinned op to the reason."""
    return {view.ops[op].node.output[0]: why.rule for op, why in find_needs(view, to).pins.items()}
