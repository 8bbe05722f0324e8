"""``ebbtide serve check``: what quantization and speculation bring, and cost in quality."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer
from rich import box
from rich.console import Console
from rich.table import Table

from ebbtide.commands import stdout
from ebbtide.platform.errors import ConfigError, DataError, ServeError

if TYPE_CHECKING:
    from ebbtide.serve.check import Sequences
    from ebbtide.serve.config import ServeConfig

_MOST_TOKENS = 512
_FEWEST_TOKENS = 8


def check(
    file: Path = typer.Argument(help="The job file of an endpoint."),
    data: str | None = typer.Option(
        None,
        "--data",
        help="A prepared dataset, whose validation shard is the text; by default the text is "
        "sampled from the model as it is.",
    ),
    sequences: int = typer.Option(
        64, "--sequences", min=1, help=f"How many, of up to {_MOST_TOKENS} tokens each."
    ),
    max_increase: float = typer.Option(
        0.02, "--max-increase", min=0, help="Of the perplexity by quantization: 0.02 is 2%."
    ),
    overrides: list[str] = typer.Option(
        [], "--set", metavar="KEY=VALUE", help="Override a key of the job file; repeatable."
    ),
    as_json: bool = typer.Option(False, "--json", help="One JSON document instead of a table."),
) -> None:
    """Compare a model as it is with its quantized weights and with speculation, as FILE says.

    One engine after the other runs on this machine. Exits with 8 when quality is lost: when the
    perplexity rises by more than is allowed, or greedy answers differ with speculation.

    Example: [bold]ebbtide serve check serve.yaml --set quantization=int8[/bold]
    """
    from ebbtide.platform.config import load
    from ebbtide.serve import check as checking
    from ebbtide.serve import local_model
    from ebbtide.serve.config import ServeConfig

    config = local_model.absolute(load(file, ServeConfig, overrides))
    if config.quantization is None and config.speculation is None:
        raise ConfigError(
            f"{file}: has neither quantization nor speculation; give one of them, for example "
            "--set quantization=int8"
        )
    local_model.check(config)
    length = local_model.max_model_len(config) - 1
    if length < _FEWEST_TOKENS:
        raise ServeError(
            f"model.max_model_len is {length + 1}; it takes {_FEWEST_TOKENS + 1} to compare"
        )
    text = checking.Text(sequences, min(_MOST_TOKENS, length))
    if data is not None:
        found = _validation(data, sequences, text.length, local_model.vocab_size(config))
        text = checking.Text(len(found), text.length, found)
    with stdout.reserved():
        measured = checking.measure(config, text, _starter(config))
    result = {"model": config.model.uri, "data": data, **checking.report(measured, text.num_tokens)}
    fault = checking.fault(result, max_increase)
    if as_json:
        typer.echo(json.dumps({**result, "fault": fault}, indent=2))
    else:
        Console(soft_wrap=True).print(_table(result))
    if fault is not None:
        raise ServeError(f"{config.model.uri}: {fault}")


def _starter(config: ServeConfig) -> Any:
    """Engines with the environment of a decode worker of an endpoint on this machine."""
    from ebbtide.serve.engine import Site, environment

    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    os.environ.update(environment(config, "decode", Site({}, True, (), "")))
    from ebbtide.serve.check_engine import OfflineEngine

    return OfflineEngine


def _validation(uri: str, count: int, length: int, vocab_size: int) -> Sequences:
    """The first sequences of a dataset's validation shard. Raises DataError."""
    from ebbtide.train.dataset import TokenDataset

    dataset = TokenDataset(uri, "validation", length)
    if dataset.index.vocab_size > vocab_size:
        raise DataError(
            f"{uri}: has tokens up to {dataset.index.vocab_size - 1}, but the model knows "
            f"{vocab_size}; give the dataset that it was trained on"
        )
    whole = max(1, dataset.num_sequences - 1)  # the last one is filled up
    return [dataset.sequence(i)[0].tolist() for i in range(min(count, whole))]


def _table(result: dict[str, Any]) -> Table:
    text = "the validation shard" if result["data"] else "text of the model's own"
    shown = Table(box=box.SIMPLE_HEAD, caption=f"on {result['tokens']:,} tokens of {text}")
    shown.add_column("")
    names = [name for name in ("plain", "quantized", "speculative") if name in result]
    for name in names:
        shown.add_column(name, justify="right")
    for title, key, form in (
        ("perplexity", "perplexity", "{:.4f}"),
        ("increase", "perplexity_increase", "{:+.2%}"),
        ("tokens/s, one client", "tokens_per_s", "{:,.0f}"),
        ("times as fast", "speedup", "{:.2f}"),
        ("tokens/s, 16 at once", "batch_tokens_per_s", "{:,.0f}"),
        ("guesses accepted", "acceptance_rate", "{:.1%}"),
        ("mean accepted length", "mean_accepted_length", "{:.2f}"),
    ):
        values = [result[name].get(key) for name in names]
        if any(value is not None for value in values):
            shown.add_row(title, *("" if v is None else form.format(v) for v in values))
    for title in ("identical", "ties", "different"):
        values = [result[name].get("answers", {}).get(title) for name in names]
        shown.add_row(f"greedy answers {title}", *("" if v is None else str(v) for v in values))
    return shown
