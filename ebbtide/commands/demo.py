"""``ebbtide demo``: the whole of ebbtide on one machine, in a few minutes."""

from __future__ import annotations

import contextlib
import fcntl
import shutil
from collections.abc import Iterator
from pathlib import Path

import typer

from ebbtide.platform.errors import AlreadyExists

_MARKER = ".ebbtide-demo"
_KEPT = {"data", _MARKER}  # prepared data is the same each time


def demo(
    out: Path = typer.Option(
        Path(".ebbtide/demo"), "--out", help="Directory for everything that the demo makes."
    ),
    steps: int = typer.Option(240, "--steps", min=40, help="How many steps to train."),
    as_json: bool = typer.Option(False, "--json", help="Print summary.json instead of a table."),
) -> None:
    """Train, lose nodes, tune, export and serve on this machine, and show what it cost.

    Starts a Ray cluster of its own (one head, four nodes of one CPU) and ends it afterwards, also
    on Ctrl-C. Leaves [bold]summary.json[/bold], [bold]loss.png[/bold], the run and the exported
    model under --out; what an earlier demo left there is replaced.

    Example: [bold]ebbtide demo --out .ebbtide/demo[/bold]
    """
    from rich.console import Console

    from ebbtide.commands.demo_run import Demo
    from ebbtide.commands.demo_summary import table

    with _claimed(out.absolute()) as folder:
        summary = Demo(folder, steps, Console(stderr=True)).run()
        text = summary.model_dump_json(indent=2)
        (folder / "summary.json").write_text(text + "\n")
    if as_json:
        typer.echo(text)
        return
    console = Console()
    console.print(table(summary))
    console.print(f"loss curve: {out / 'loss.png'}   figures: {out / 'summary.json'}")


@contextlib.contextmanager
def _claimed(folder: Path) -> Iterator[Path]:
    """The folder, emptied of an earlier demo, for this demo alone.

    Raises AlreadyExists if it holds anything else, or if another demo is at work in it.
    """
    marker = folder / _MARKER
    if folder.exists() and not marker.exists() and any(folder.iterdir()):
        raise AlreadyExists(f"{folder} holds other data; choose another --out")
    folder.mkdir(parents=True, exist_ok=True)
    with marker.open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise AlreadyExists(f"another demo is at work in {folder}") from error
        for path in folder.iterdir():
            if path.name not in _KEPT:
                shutil.rmtree(path) if path.is_dir() else path.unlink()
        yield folder
