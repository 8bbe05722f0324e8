"""``ebbtide export``: a checkpoint as a directory that transformers and vLLM load."""

from __future__ import annotations

import enum
import json

import typer

from ebbtide.commands import stdout


class _Dtype(enum.StrEnum):
    fp32 = "fp32"
    bf16 = "bf16"


def export(
    checkpoint: str = typer.Argument(
        help="URI of a run (its newest checkpoint) or of one checkpoint."
    ),
    out: str = typer.Option(..., "--out", help="Directory or s3:// URI to write to."),
    dtype: _Dtype = typer.Option(_Dtype.fp32, "--dtype", help="Type of the stored weights."),
    as_json: bool = typer.Option(False, "--json", help="One JSON document instead of a line."),
) -> None:
    """Write a checkpoint as a Hugging Face directory: weights, tokenizer, checksums.

    An output that holds anything but this export is refused, and nothing in it is changed.

    Example: [bold]ebbtide export ~/.ebbtide/runs/stdlib-lm --out ~/.ebbtide/export/stdlib-lm[/bold]
    """
    from transformers.utils import logging

    from ebbtide.train.export import export as write

    logging.disable_progress_bar()
    with stdout.reserved():
        done = write(checkpoint, out, dtype.value)
    if as_json:
        typer.echo(json.dumps({"uri": out, **done.model_dump(mode="json")}, indent=2))
        return
    typer.echo(
        f"{out}: {done.run} at step {done.step}, {done.parameters:,} parameters in {done.dtype}, "
        f"{done.size_bytes:,} bytes in {len(done.files)} files"
    )
