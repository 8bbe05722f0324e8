"""``ebbtide checkpoints``: what a run has saved, and whether it can be used."""

from __future__ import annotations

import dataclasses
import json
import time
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import typer
from rich.console import Console
from rich.table import Table

from ebbtide.platform.errors import CheckpointError, EbbtideError
from ebbtide.platform.storage import Storage, open_storage

if TYPE_CHECKING:
    from ebbtide.train.manifest import CheckpointInfo


_INNER = {"is_pinned", "is_committed", "written_s"}
_WORDS = {"best": "pinned (best)", "user": "pinned"}


def checkpoints(
    run: str = typer.Argument(help="URI of the run: the job's storage, a slash and its name."),
    verify: bool = typer.Option(False, "--verify", help="Read every byte and check it."),
    as_json: bool = typer.Option(False, "--json", help="One JSON document instead of a table."),
    pin: int | None = typer.Option(None, help="Never delete the checkpoint of this step."),
    unpin: int | None = typer.Option(None, help="Let the run delete it again."),
) -> None:
    """List the checkpoints of a run, newest step first.

    A run resumes from the highest complete step. One without its manifest, or without a file that
    the manifest names, is incomplete and never used. The run keeps the newest ones, that of the
    best validation loss, and what is pinned here. With --verify a damaged one makes the exit code
    5.

    Example: [bold]ebbtide checkpoints s3://bucket/runs/stdlib-lm --verify[/bold]
    """
    from ebbtide.train import manifest, marks

    storage = open_storage(run)
    found = manifest.list_checkpoints(storage)
    if not found:
        raise CheckpointError(f"{storage.uri}: no checkpoints; give STORAGE/NAME of the job file")
    for step, is_pinned in ((pin, True), (unpin, False)):
        if step is not None:
            marks.pin(storage, _at(found, storage.uri, step), is_pinned=is_pinned)
            found = manifest.list_checkpoints(storage)
    if verify:
        found = [manifest.verify(storage, info) for info in found]
    pinned = _pinned(storage, found)
    if as_json:
        listed = [_as_json(info, pinned.get(info.name)) for info in found]
        newest = next((info.name for info in found if info.state == "complete"), None)
        document = {"run": storage.uri, "newest": newest, "checkpoints": listed}
        typer.echo(json.dumps(document, indent=2))
    else:
        console = Console(soft_wrap=True)
        console.print(_table(storage.uri, found, pinned))
        for info in found:
            if info.problem:
                console.print(f"{info.name} is {info.state}: {info.problem}", highlight=False)
    damaged = [info for info in found if info.state == "corrupt"]
    if verify and damaged:
        raise CheckpointError(
            f"{len(damaged)} of {len(found)} checkpoints are corrupt: "
            + "; ".join(f"{info.name}: {info.problem}" for info in damaged)
        )


def _at(found: Sequence[CheckpointInfo], uri: str, step: int) -> CheckpointInfo:
    for info in found:
        if info.step == step and info.state == "complete":
            return info
    steps = ", ".join(str(info.step) for info in found if info.state == "complete")
    raise CheckpointError(f"{uri}: no complete checkpoint of step {step}; there are {steps}")


def _pinned(storage: Storage, found: Sequence[CheckpointInfo]) -> dict[str, str]:
    """Why checkpoints are kept however old they get, by name: "best" or "user"."""
    from ebbtide.train import manifest, retention

    pinned = {info.name: "user" for info in found if info.is_pinned and info.state == "complete"}
    newest = next((info for info in found if info.state == "complete"), None)
    champion = retention.best(found)
    if newest is None or champion is None:
        return pinned
    try:
        checkpoint = storage.child(f"{manifest.FOLDER}/{newest.name}")
        description = manifest.read_manifest(checkpoint)
        if not manifest.read_train_config(checkpoint, description).checkpoint.keep_best:
            return pinned
    except EbbtideError:  # gone or damaged since the listing; --verify tells
        pass
    return {champion.name: "best", **pinned}


def _as_json(info: CheckpointInfo, pinned: str | None) -> dict[str, Any]:
    values = dataclasses.asdict(info) | {"name": info.name, "pinned": pinned}
    return {key: value for key, value in values.items() if key not in _INNER}


def _table(uri: str, found: Sequence[CheckpointInfo], pinned: Mapping[str, str]) -> Table:
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
            _WORDS[pinned[info.name]] if info.name in pinned else info.state,
        )
    return table
