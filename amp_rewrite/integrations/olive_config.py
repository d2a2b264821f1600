"""The entry of the pass `AmpRewrite` in a package configuration of Olive. Olive itself is not imported."""

from __future__ import annotations

import json
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from amp_rewrite.errors import ConfigError

PASS = "AmpRewrite"


def pass_entry() -> dict[str, Any]:
    """Return the entry of the pass, as `passes` of a package configuration holds it by name.

    Example:
        >>> from amp_rewrite.integrations.olive_config import pass_entry
        >>> pass_entry()["module_path"]
        'amp_rewrite.integrations.olive.AmpRewrite'
    """
    return {
        "module_path": f"amp_rewrite.integrations.olive.{PASS}",
        "supported_providers": ["*"],
        "supported_accelerators": ["*"],
        "supported_precisions": ["fp16", "bf16"],
        "supported_algorithms": [],
        "supported_quantization_encodings": [],
    }


def package_config() -> dict[str, Any]:
    """Return the package configuration of the installed Olive, with this package's pass in it.

    Olive takes one package configuration instead of its own, so this one has all passes of Olive, too.

    Raises:
        ConfigError: Olive is not installed, or its configuration has another form.
    """
    spec = find_spec("olive")
    own = None if spec is None or spec.origin is None else Path(spec.origin).with_name("olive_config.json")
    if own is None or not own.is_file():
        raise ConfigError(
            "Olive is not installed here, so its passes are not known; pip install olive-ai, or print this package's"
            " entry alone with --entry"
        )
    config: dict[str, Any] = json.loads(own.read_text("utf-8"))
    if not isinstance(config.get("passes"), dict):
        raise ConfigError(f"{own} has no passes, so it is not of a known release; add the entry that --entry prints")
    return {**config, "passes": {**config["passes"], PASS: pass_entry()}}
