"""``ebbtide data``: prepared datasets."""

from __future__ import annotations

import json
import time
from typing import TYPE_CHECKING, Any

import typer

if TYPE_CHECKING:
    from ebbtide.train.prepare import PrepareConfig, PrepareResult

app = typer.Typer(help="Prepare text for training.", no_args_is_help=True, rich_markup_mode="rich")


@app.callback()
def data() -> None:
    """Prepare text for training."""


@app.command()
def prepare(
    sources: list[str] = typer.Argument(
        ...,
        metavar="SOURCE",
        help="Text file, directory, glob pattern, .jsonl or .json lines (also .gz, .zst), "
        ".parquet, or s3:// object or prefix.",
        show_default=False,
    ),
    out: str = typer.Option(..., help="Where the dataset goes: a directory or s3:// URI."),
    tokenizer: str | None = typer.Option(
        None, help="A Hugging Face tokenizer.json (or its directory); default: train one."
    ),
    vocab_size: int = typer.Option(4096, min=257, help="Size of a trained tokenizer."),
    text_column: str = typer.Option("text", help="Column of JSON lines and Parquet with the text."),
    glob: list[str] = typer.Option(
        [], help="Take only these files of directories, such as '**/*.py'. May be repeated."
    ),
    exclude: list[str] = typer.Option(
        [], help="Leave out these files and directories, such as site-packages. May be repeated."
    ),
    validation_fraction: float = typer.Option(
        0.05, help="Share of the documents for validation, above 0 and below 1."
    ),
    seed: int = typer.Option(0, min=0, help="Seed of the split and of the tokenizer's sample."),
    max_bytes: int | None = typer.Option(None, min=1, help="Stop after this much text."),
    strict: bool = typer.Option(False, help="Fail on a file or row that is not UTF-8 text."),
    as_json: bool = typer.Option(False, "--json", help="One JSON document instead of a table."),
) -> None:
    """Turn text into token shards with a tokenizer, split into train and validation.

    A document is a text file, a row of JSON lines or a row of Parquet. Files that are binary or
    not UTF-8 are skipped with a warning. The same text and options give the same bytes.

    Example: [bold]ebbtide data prepare src --glob '**/*.py' --exclude tests --out data/src[/bold]
    """
    from ebbtide.train.prepare import prepare as run

    config = _config(
        sources=tuple(sources),
        out=out,
        tokenizer=tokenizer,
        vocab_size=vocab_size,
        text_column=text_column,
        globs=tuple(glob),
        excludes=tuple(exclude),
        validation_fraction=validation_fraction,
        seed=seed,
        max_bytes=max_bytes,
        strict=strict,
    )
    started = time.monotonic()
    with _Bar() as bar:
        result = run(config, bar.update)
    report = {**_summary(result), "seconds": round(time.monotonic() - started, 3)}
    if as_json:
        typer.echo(json.dumps(report, indent=2))
    else:
        _print(report)


def _config(**options: Any) -> PrepareConfig:
    """The options as a configuration. Raises ConfigError with every fault, one a line."""
    from pydantic import ValidationError

    from ebbtide.platform.errors import ConfigError
    from ebbtide.train.prepare import PrepareConfig

    flags = {"sources": "SOURCE", "globs": "--glob", "excludes": "--exclude"}
    try:
        return PrepareConfig(**options)
    except ValidationError as error:
        faults = []
        for fault in error.errors():
            name = str(fault["loc"][0])
            flag = flags.get(name) or "--" + name.replace("_", "-")
            faults.append(f"{flag} {fault['input']!r}: {fault['msg']}")
        raise ConfigError("\n".join(faults)) from error


class _Bar:
    """Progress on stderr; gone when the work is done."""

    def __init__(self) -> None:
        from rich.console import Console
        from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeElapsedColumn

        console = Console(stderr=True)
        self._progress = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            DownloadColumn(),
            TimeElapsedColumn(),
            console=console,
            transient=True,
            disable=not console.is_terminal,
        )
        self._stage = ""
        self._task = self._progress.add_task("", visible=False)

    def __enter__(self) -> _Bar:
        self._progress.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._progress.stop()

    def update(self, stage: str, done_bytes: int, total_bytes: int | None) -> None:
        if stage != self._stage:
            self._stage = stage
            self._progress.remove_task(self._task)
            self._task = self._progress.add_task(stage, total=total_bytes)
        self._progress.update(self._task, completed=done_bytes)


def _summary(result: PrepareResult) -> dict[str, Any]:
    index = result.index
    return {
        "uri": result.uri,
        "already_prepared": result.already,
        "corpus_bytes": index.corpus_bytes,
        "documents": sum(split.documents for split in index.splits.values()),
        "vocab_size": index.vocab_size,
        "unigram_entropy": index.unigram_entropy,
        "skipped": index.skipped,
        "splits": {
            name: {
                "documents": split.documents,
                "tokens": split.tokens,
                "shards": len(split.shards),
            }
            for name, split in index.splits.items()
        },
    }


def _print(report: dict[str, Any]) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table(title=report["uri"])
    for heading in ("split", "documents", "tokens", "shards"):
        table.add_column(heading, justify="left" if heading == "split" else "right")
    for name, split in report["splits"].items():
        table.add_row(name, *(f"{split[key]:,}" for key in ("documents", "tokens", "shards")))
    console = Console()
    console.print(table)
    skipped = ", ".join(f"{count} {reason}" for reason, count in report["skipped"].items())
    console.print(
        f"{report['corpus_bytes'] / 1e6:.2f} MB of text, vocabulary {report['vocab_size']:,}, "
        f"unigram entropy {report['unigram_entropy']:.4f} nats/token"
        + (f", skipped: {skipped}" if skipped else "")
        + (
            "; was already prepared"
            if report["already_prepared"]
            else f"; prepared in {report['seconds']:.1f} s"
        ),
        highlight=False,
    )
