"""The conversion behind a model, as its metadata state it."""

from __future__ import annotations

from amp_rewrite.errors import PolicyError
from amp_rewrite.files.model import Model
from amp_rewrite.settings.choices import Target

METADATA_KEY = "amp_rewrite"
"""Key of the metadata entry of a converted model: version, type, lists and settings."""


def target_of(model: Model) -> Target | None:
    """Return the target that a model was converted for; None for a model that does not say."""
    entry = next((p.value for p in model.proto.metadata_props if p.key == METADATA_KEY), "")
    stated = next((word.removeprefix("target=") for word in entry.split() if word.startswith("target=")), None)
    if stated is None:
        return None
    try:
        return Target.parse(stated)
    except PolicyError:  # of a later version
        return None
