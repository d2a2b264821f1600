"""`amp-rewrite olive-config`: the configuration with which Microsoft Olive finds this package's pass."""

from __future__ import annotations

import json
from pathlib import Path

from amp_rewrite.cli import parameters, terminal
from amp_rewrite.cli.page import write_file
from amp_rewrite.settings.options import OUTPUT


@parameters.command(
    parameters.flag("--entry", "Print the entry of the pass alone.", OUTPUT),
    parameters.option(
        "-o --output", "FILE", "The file to write, replaced if it exists.", OUTPUT, type=parameters.FILE_OUT
    ),
)
def olive_config(entry: bool, output: Path | None) -> None:
    """Print a package configuration of Microsoft Olive with the pass AmpRewrite in it.

    It has the passes of the installed Olive, too, since `olive run --package-config` takes it instead of its own.
    """
    from amp_rewrite.integrations.olive_config import PASS, package_config, pass_entry

    text = json.dumps({PASS: pass_entry()} if entry else package_config(), indent=2) + "\n"
    if output is None:
        terminal.show(text)
    else:
        write_file(output, text, "the configuration was made")
