"""``ebbtide diff``: whether two runs are the same run."""

from __future__ import annotations

import dataclasses
import json

import typer

from ebbtide.platform.errors import CheckpointError


def diff(
    one: str = typer.Argument(help="URI of a run: its storage, a slash and its name."),
    other: str = typer.Argument(help="URI of the run to compare it with."),
    as_json: bool = typer.Option(False, "--json", help="One JSON document."),
) -> None:
    """Say "same run", or name the first step and tensor in which two runs differ (exit code 1).

    Samples, learning rate, loss and gradient norm of every step that both have are compared bit by
    bit, and parameters and optimizer state where both ran with --digest.

    Example: [bold]ebbtide diff s3://bucket/runs/evicted s3://bucket/runs/undisturbed[/bold]
    """
    from ebbtide.train.diff import compare
    from ebbtide.train.events import read_events

    events = {run: read_events(run) for run in (one, other)}
    for run, found_there in events.items():
        if not found_there:
            raise CheckpointError(f"{run}: no run; give STORAGE/NAME of its job file")
    found = compare(events[one], events[other])
    if not found.steps:
        raise CheckpointError(
            f"{one} and {other} have no step in common; there is nothing to compare"
        )
    difference = found.difference
    if as_json:
        document = {"same": difference is None, **dataclasses.asdict(found)}
        typer.echo(json.dumps(document, indent=2))
    elif difference is None:
        compared = "" if found.digests == found.steps else f" (the state at {found.digests})"
        typer.echo(f"same run: {found.steps} steps, bit by bit{compared}")
        for run, more in ((one, found.only_one), (other, found.only_other)):
            if more:
                typer.echo(f"{run} has {more} more steps, which were not compared")
    else:
        typer.echo(
            f"different at step {difference.step}: {difference.what} is {difference.one} in {one}, "
            f"{difference.other} in {other}"
        )
    if difference is not None:
        raise typer.Exit(1)
