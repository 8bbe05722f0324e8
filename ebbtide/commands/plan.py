"""``ebbtide plan``: what a model takes before any of it is bought."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer
from rich import box
from rich.console import Console
from rich.table import Table

from ebbtide.platform.errors import ConfigError

if TYPE_CHECKING:
    from ebbtide.platform.prices import Catalogue
    from ebbtide.serve.plan import Estimate

app = typer.Typer(no_args_is_help=True, help="What a model takes before any of it is bought.")


@app.callback()
def entry() -> None:
    """Make ``serve`` a command of its own, though it is the only one yet."""


@app.command()
def serve(
    model: Path = typer.Argument(help="An exported model, or its config.json."),
    parameters: float | None = typer.Option(
        None, "--parameters", help="How many, as 8e9; by default what the export says."
    ),
    context: int = typer.Option(4096, "--context", min=1, help="Tokens of a sequence in use."),
    catalogue: Path | None = typer.Option(None, "--catalogue", help="Prices of yours."),
    as_json: bool = typer.Option(False, "--json", help="One JSON document instead of a table."),
) -> None:
    """Estimate memory, speed and cost of one replica on each kind of hardware, cheapest first.

    Estimates are from published peaks and not measured; the cost is that of output tokens at the
    full batch, on demand, where the catalogue has a price.

    Example: [bold]ebbtide plan serve ~/.ebbtide/export/stdlib-lm --context 512[/bold]
    """
    from ebbtide.platform.prices import load_catalogue
    from ebbtide.serve.plan import shape, table

    config, known = _read(model)
    count = parameters or known
    if not count:
        raise ConfigError(f"{model}: no ebbtide.json says how many parameters; give --parameters")
    rows = table(shape(config, int(count)), context, _prices(load_catalogue(catalogue)))
    if as_json:
        typer.echo(json.dumps([asdict(row) for row in rows], indent=2))
    else:
        Console(soft_wrap=True).print(_table(rows))


def _read(model: Path) -> tuple[dict[str, Any], int | None]:
    """The configuration, and the number of parameters if the export's manifest has it."""
    file = model.expanduser()
    folder = file if file.is_dir() else file.parent
    file = file / "config.json" if file.is_dir() else file
    try:
        config = json.loads(file.read_text(encoding="utf-8"))
        manifest = folder / "ebbtide.json"
        told = json.loads(manifest.read_text(encoding="utf-8")) if manifest.is_file() else {}
    except (OSError, ValueError) as error:
        raise ConfigError(f"{file}: cannot be read as a model's configuration: {error}") from error
    if not isinstance(config, dict) or "num_attention_heads" not in (
        config.get("text_config") or config
    ):
        raise ConfigError(f"{file}: is not the configuration of a decoder with attention")
    return config, told.get("parameters")


def _prices(catalogue: Catalogue) -> dict[str, float | None]:
    """Dollars an hour of one device by its name: the cheapest instance's on-demand price."""
    found: dict[str, float | None] = {}
    for name, entry in catalogue.instance_types.items():
        usd = catalogue.price(name, "on_demand")
        if not entry.gpus or entry.gpu is None or usd is None:
            continue
        gpu = f"A100-{entry.gpu_memory_gb:g}GB" if entry.gpu == "A100" else entry.gpu
        each = float(usd) / entry.gpus
        found[gpu] = min(each, found.get(gpu) or each)
    return found


def _table(rows: list[Estimate]) -> Table:
    shown = Table(box=box.SIMPLE_HEAD, caption="estimated from published peaks, not measured")
    for title in ("hardware", "weights"):
        shown.add_column(title)
    for title in ("devices", "weights GB", "KV tokens", "sequences"):
        shown.add_column(title, justify="right")
    for title in ("tokens/s", "gap ms", "prefill tokens/s", "$/1M tokens"):
        shown.add_column(title, justify="right")
    for row in rows:
        usd = row.usd_per_million_tokens
        shown.add_row(
            row.hardware,
            row.weights,
            str(row.num_devices),
            f"{row.weights_gb:.1f}",
            f"{row.kv_tokens:,}",
            str(row.num_sequences),
            f"{row.output_tokens_per_s:,.0f}",
            f"{row.gap_ms:.1f}",
            f"{row.prefill_tokens_per_s:,.0f}",
            "unknown" if usd is None else f"{usd:.2f}",
        )
    return shown
