"""Words of other tools, and what they are called here."""

from __future__ import annotations

import click

from amp_rewrite.errors import nearest

KNOWN_AS = {
    "--to": ("--dtype", "--type", "--precision", "--data-type"),
    "--to float16": ("--fp16", "--half", "--float16", "--f16"),
    "--to bfloat16": ("--bf16", "--bfloat16"),
    "--output": ("--out", "--out-file", "--output-file", "--output-model", "--output-path", "--save"),
    "--overwrite": ("--force", "--yes", "--replace"),
    "--data": ("--input-data", "--inputs", "--calibration-data", "--dataset", "--calib"),
    "--keep": ("--exclude", "--op-block-list", "--node-block-list", "--blocklist", "--denylist", "--nodes-to-exclude"),
    "--lower": ("--include", "--allowlist", "--op-allow-list"),
    "--io": ("--keep-io-types", "--io-types", "--input-type", "--inputs-dtype"),
    "--target ort-cuda": ("--cuda", "--gpu", "--ort-cuda"),
    "--target tensorrt": ("--trt", "--tensorrt"),
    "--target": ("--runtime", "--device", "--backend", "--ep"),
    "--opset": ("--opset-version", "--target-opset"),
    "--tolerance": ("--tol", "--accuracy"),
    "--fuse none": ("--no-fuse", "--no-fusion", "--disable-fusion"),
    "--dry-run": ("--check", "--simulate", "--no-write"),
    "--external-data": ("--save-as-external-data", "--all-tensors-to-one-file", "--use-external-data-format"),
}
"""Options of other tools, by what they are here; docs/reference/commands.md lists them."""
_MEANT = {word: option for option, words in KNOWN_AS.items() for word in words}


def closest_option(word: str, command: click.Command | None) -> str | None:
    """Return the option of a command that an unknown word probably means; None if none resembles it."""
    options = [param for param in command.params if isinstance(param, click.Option)] if command else []
    own = [name for option in options for name in (*option.opts, *option.secondary_opts)]
    spelled = word.replace("_", "-").lower()
    known = _MEANT.get(spelled)
    if known is not None and known.partition(" ")[0] in own:
        return known
    return next(iter(nearest(spelled, [name for name in own if name.startswith("--")])), None)
