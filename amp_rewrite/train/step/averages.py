"""The moving averages of parameters that an optimizer keeps among its slots."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from amp_rewrite.errors import TrainingError
from amp_rewrite.settings.loss_scale import Array
from amp_rewrite.train.update.graph import StateVariable
from amp_rewrite.train.update.optimizers.optimizer import AVERAGE


def with_averages(state: Mapping[str, Array], variables: Sequence[StateVariable]) -> dict[str, Array]:
    """Return a state by input name with each parameter replaced by its average. TrainingError if there are none."""
    inputs = {variable.name: variable.input for variable in variables}
    parameters = [name.removeprefix("parameter/") for name in inputs if name.startswith("parameter/")]
    averages = {name: key for name in parameters if (key := inputs.get(f"slot/{name}/{AVERAGE}")) is not None}
    if not averages:
        raise TrainingError("the optimizer keeps no averages; give it ema_momentum, such as AdamW(ema_momentum=0.999)")
    return {**state, **{inputs[f"parameter/{name}"]: np.array(state[key]) for name, key in averages.items()}}
