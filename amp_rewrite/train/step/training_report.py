"""The report of a training step: its parameters with reasons, its loss, and the type of each op."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass

from amp_rewrite.decide.sizes import ALIGNED, better_size, misaligned
from amp_rewrite.dtypes import DType
from amp_rewrite.errors import count
from amp_rewrite.files.model import Model
from amp_rewrite.ir.view import View
from amp_rewrite.reports.report import Report
from amp_rewrite.reports.result import Result
from amp_rewrite.reports.rows import Row
from amp_rewrite.train.objective.parameters import FROZEN, TRAINED, ParameterRow

_WIDTH = 60
"""Most characters of a name before its shape."""


def model_name(model: Model) -> str:
    """Return the name of a model for people: its file's, else its graph's."""
    return model.path.name if model.path is not None else model.proto.graph.name or "model"


@dataclass(frozen=True, repr=False)
class TrainingReport(Result):
    """The report of a training step: its parameters, its loss, and its conversion.

    Attributes:
        model: the model's name.
        loss: the loss as text.
        parameters: each float32 initializer with its role.
        notes: how the loss reads its prediction, and what else was changed to train the model.
        conversion: the type of each op; None under a policy that lowers nothing.

    Example:
        >>> from amp_rewrite.train import training_step
        >>> step = training_step("model.onnx", loss="cross_entropy(probability, label)", policy="float32")
        >>> step.report.notes
        ("cross_entropy reads the logits 'linear_2' in place of 'probability', which a Softmax computes",)
        >>> [row.name for row in step.report.trained][:2]
        ['first.weight', 'first.bias']
    """

    model: str
    loss: str
    parameters: tuple[ParameterRow, ...]
    notes: tuple[str, ...]
    conversion: Report | None

    @property
    def trained(self) -> tuple[ParameterRow, ...]:
        """The trained parameters."""
        return tuple(row for row in self.parameters if row.role == TRAINED)

    @property
    def rows(self) -> tuple[Row, ...]:
        """The ops of the conversion; none under policy float32."""
        return () if self.conversion is None else tuple(self.conversion.rows)

    @property
    def brief(self) -> str:
        """Model, loss, and number of trained parameters."""
        numbers = sum(row.size for row in self.trained)
        parameters = count(len(self.trained), "parameter")
        return f"{self.model}: trains {parameters} of {count(numbers, 'number')} by {self.loss}"

    def table(self) -> str:
        """Return the table of parameters and the notes as text."""
        lines = []
        for role, words in ((TRAINED, "trained"), (FROZEN, "not trained")):
            own = [row for row in self.parameters if row.role == role]
            if own:
                numbers = sum(row.size for row in own)
                lines.append(f"  {words}: {len(own)} of {count(numbers, 'number')}")
                width = min(max(len(row.name) for row in own), _WIDTH)
                lines += [f"    {row.name:<{width}}  {list(row.shape)!s:<14} {row.why}".rstrip() for row in own]
        lines += [f"  note: {note}" for note in self.notes]
        return "\n".join(lines) + "\n"

    def text(self, *, verbose: bool = False, command: str = "") -> str:
        """Return the table of parameters, and the summary of the conversion. Ends with a newline.

        Args:
            verbose: add every row of the conversion.
            command: the next step after the conversion.
        """
        converted = "" if self.conversion is None else "\n" + self.conversion.text(verbose=verbose, command=command)
        return f"{self.brief}\n{self.table()}{converted}"

    def to_json(self) -> str:
        """Return JSON: model, loss, notes, parameters, and the report of the conversion."""
        data = {
            "model": self.model,
            "loss": self.loss,
            "notes": self.notes,
            "parameters": [asdict(row) for row in self.parameters],
            "conversion": None if self.conversion is None else self.conversion.to_dict(),
        }
        return json.dumps(data, indent=2, ensure_ascii=False) + "\n"


def size_hints(model: Model, low: DType | None) -> tuple[str, ...]:
    """Return one sentence on the fixed dimensions of a lowered step besides multiples of 8; none without any."""
    sizes = [] if low is None else sorted({size for _, _, size in misaligned(View.of(model), low)})
    if low is None or not sizes:
        return ()
    pads = ", ".join(f"{size} (pad to {better_size(size)})" for size in sizes[:4])
    more = f" and {len(sizes) - 4} more" if len(sizes) > 4 else ""
    return (
        f"products in {low.spelling} have dimensions that are not multiples of {ALIGNED}: {pads}{more}; tensor cores"
        f" run best on multiples of {ALIGNED}, and below 256 on powers of two",
    )
