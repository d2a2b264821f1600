"""`amp-rewrite triton`: the configuration of a model for the Triton Inference Server."""

from __future__ import annotations

from pathlib import Path

import click

from amp_rewrite.cli import parameters
from amp_rewrite.cli.page import show_or_write
from amp_rewrite.cli.parameters import option


@parameters.command(
    parameters.model,
    option("--name", "NAME", "The name of the model in the repository.  [default: that of the file]"),
    option(
        "--max-batch-size",
        "N",
        "The largest batch; 0 for none.  [default: 4 if the model can be batched, else 0]",
        type=click.IntRange(min=0),
    ),
    parameters.text_output,
)
def triton(model: Path, name: str | None, max_batch_size: int | None, output: Path | None) -> None:
    """Print the config.pbtxt of MODEL for the Triton Inference Server.

    MODEL is the converted model; types and dimensions are those of its inputs and outputs. Triton batches it if all of
    them begin with the same symbolic dimension.
    """
    from amp_rewrite.integrations.triton import triton_config

    text = triton_config(model, name=name, max_batch_size=max_batch_size)
    show_or_write(text, output, "the model was read")
