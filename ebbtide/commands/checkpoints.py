"""``ebbtide checkpoints``: what a run has saved, and whether it can be used."""

from __future__ import annotations

import dataclasses
import json
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING

import typer
from rich.console import Console
from rich.table import Table

from ebbtide.platform.errors import CheckpointError
from ebbtide.platform.storage import open_storage

if TYPE_CHECKING:
    from ebbtide.train.manifest import CheckpointInfo


def checkpoints(
    run: str = typer.Argument(help="URI of the run: the job's storage, a slash and its name."),
    verify: bool = typer.Option(False, "--verify", help="Read every byte and check it."),
    as_json: bool = typer.Option(False, "--json", help="One JSON document instead of a table."),
) -> None:
    """List the checkpoints of a run, newest step first.

    A run resumes from the highest complete step. One without its manifest, or without a file that
    the manifest names, is incomplete and never used. With --verify a damaged one makes the exit
    code 5.

    Example: [bold]ebbtide checkpoints s3://bucket/runs/stdlib-lm --verify[/bold]
    """
    from ebbtide.train import manifest

    storage = open_storage(run)
    found = manifest.list_checkpoints(storage)
    if not found:
        raise CheckpointError(f"{storage.uri}: no checkpoints; give STORAGE/NAME of the job file")
    if verify:
        found = [manifest.verify(storage, info) for info in found]
    if as_json:
        listed = [dataclasses.asdict(info) | {"name": info.name} for info in found]
        newest = next((info.name for info in found if info.state == "complete"), None)
        document = {"run": storage.uri, "newest": newest, "checkpoints": listed}
        typer.echo(json.dumps(document, indent=2))
    else:
        console = Console(soft_wrap=True)
        console.print(_table(storage.uri, found))
        for info in found:
            if info.problem:
                console.print(f"{info.name} is {info.state}: {info.problem}", highlight=False)
    damaged = [info for info in found if info.state == "corrupt"]
    if verify and damaged:
        raise CheckpointError(
            f"{len(damaged)} of {len(found)} checkpoints are corrupt: "
            + "; ".join(f"{info.name}: {info.problem}" for info in damaged)
        )


def _table(uri: str, found: Sequence[CheckpointInfo]) -> Table:
    table = Table(title=f"checkpoints of {uri}", box=None, title_justify="left")
    for name in ("step", "size", "val loss"):
        table.add_column(name, justify="right", no_wrap=True)
    for name in ("saved", "name", "state"):
        table.add_column(name, no_wrap=True)
    for info in found:
        loss = info.validation_loss
        table.add_row(
            str(info.step),
            f"{info.size_bytes / 1e6:.1f} MB",
            "" if loss is None else f"{loss:.4f}",
            time.strftime("%m-%d %H:%M:%S", time.localtime(info.time_s)),
            info.name,
            info.state,
        )
    return table
