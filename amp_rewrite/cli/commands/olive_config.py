"""`amp-rewrite olive-config`: the configuration with which Microsoft Olive finds this package's pass."""

from __future__ import annotations

import json
from pathlib import Path

from amp_rewrite.cli import parameters
from amp_rewrite.cli.page import show_or_write
from amp_rewrite.settings.option import OUTPUT


@parameters.command(parameters.flag("--entry", "Print the entry of the pass alone.", OUTPUT), parameters.text_output)
def olive_config(entry: bool, output: Path | None) -> None:
    """Print a package configuration of Microsoft Olive with the pass AmpRewrite in it.

    It also lists the passes of the installed Olive, because `olive run --package-config` replaces Olive's own file.
    """
    from amp_rewrite.integrations.olive_config import PASS, package_config, pass_entry

    text = json.dumps({PASS: pass_entry()} if entry else package_config(), indent=2) + "\n"
    show_or_write(text, output, "the configuration was made")
