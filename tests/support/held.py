"""What the safety rules hold in float32."""

from amp_rewrite.decide.needs.find import find_needs
from amp_rewrite.dtypes import DType
from amp_rewrite.ir.view import View


def held(view: View, to: DType = DType.FLOAT16) -> dict[str, str]:
    """Return the first result of each op that stays float32, with the reason."""
    return {view.ops[op].node.output[0]: why.rule for op, why in find_needs(view, to).pins.items()}
