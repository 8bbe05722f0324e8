"""``ebbtide tune FILE`` runs a sweep; ``ebbtide tune pool`` is about what it runs on."""

from __future__ import annotations

import contextlib
import gc
import json
from collections.abc import Collection, Iterable, Iterator
from typing import TYPE_CHECKING, Any

import typer
from typer.core import TyperGroup

from ebbtide.commands import stdout

if TYPE_CHECKING:
    from rich.table import Table

    from ebbtide.tune.results import SweepResult

_SWEEP = "run"
_COLLECT_AFTER = 50_000
"""New objects after which Python looks for cycles. By default it goes through all of what is
imported a dozen times on the way to the first trial, and finds none."""
_NAMESPACE = typer.Option("ebbtide-pool", "--namespace", help="The pool's name (pool.namespace).")
_ADDRESS = typer.Option(None, "--address", help="Ray cluster; default: RAY_ADDRESS, else local.")
_CLUSTER = typer.Option(
    "auto", "--address", envvar="RAY_ADDRESS", help="Ray cluster; default: the one running here."
)
_JSON = typer.Option(False, "--json", help="One JSON document instead of a table.")


class _SweepByDefault(TyperGroup):
    """A group whose first argument may be a job file: then it is a sweep. (A file whose name is a
    command's is written ./NAME.)"""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        if args and args[0] not in {*self.commands, *ctx.help_option_names}:
            args = [_SWEEP, *args]
        return super().parse_args(ctx, args)


app = typer.Typer(
    cls=_SweepByDefault,
    no_args_is_help=True,
    rich_markup_mode="rich",
)
pool_app = typer.Typer(help="The evaluators that sweeps run on.", no_args_is_help=True)
app.add_typer(pool_app, name="pool")


@app.callback(subcommand_metavar="FILE [OPTIONS] | pool COMMAND | evaluate CHECKPOINT...")
def tune() -> None:
    """Search for the best training job (FILE), on evaluators that stay warm (pool).

    Example: [bold]ebbtide tune examples/stdlib-lm/tune.yaml[/bold]
    """


@app.command(_SWEEP)
def run(
    file: str = typer.Argument(metavar="FILE", help="The sweep's YAML file."),
    address: str | None = _ADDRESS,
    overrides: list[str] = typer.Option(
        [], "--set", metavar="KEY=VALUE", help="Set a value of the sweep's file. May be repeated."
    ),
    out: str | None = typer.Option(
        None, "--out", help="Where the best train.yaml goes (default: beside the results)."
    ),
    as_json: bool = _JSON,
) -> None:
    """Run a sweep over a training job and write the best [bold]train.yaml[/bold].

    A sweep that was killed continues, and one that has finished says so. Prints every trial with
    its values, its metric and, if it failed, the reason; a failed trial is never the best. Exits
    with 9 if no trial succeeds. The evaluators stay warm for the next sweep on the same cluster:
    see [bold]ebbtide tune pool --help[/bold].

    Example: [bold]ebbtide tune examples/stdlib-lm/tune.yaml --set num_samples=8[/bold]
    """
    gc.set_threshold(_COLLECT_AFTER)
    from ebbtide.tune.job import run_sweep
    from ebbtide.tune.space import read_sweep

    sweep = read_sweep(file, overrides)
    with stdout.reserved():
        result = run_sweep(sweep, address=address, out=out)
    if as_json:
        typer.echo(json.dumps(result.document(), indent=1))
        return
    from rich.console import Console

    console = Console()
    console.print(results_table(result))
    for line in closing_lines(result, is_job=sweep.base is not None):
        console.print(line, highlight=False, soft_wrap=True)


def closing_lines(result: SweepResult, *, is_job: bool) -> list[str]:
    """What else there is to say of a sweep with a best trial."""
    from ebbtide.platform.account import usd_text
    from ebbtide.platform.storage import join
    from ebbtide.tune.output import PAGE

    cost = "unknown" if result.usd is None else usd_text(result.usd)
    cost += " (partial)" if result.partial else ""
    lines = [
        f"took {result.seconds:.1f} s, cost {cost}; {result.saved_s:.0f} s of start-up not paid",
        f"page: {join(result.uri, PAGE)}",
        f"best: {'ebbtide train ' if is_job else ''}{result.best_file}",
    ]
    return [f"ended early: {result.limit}", *lines] if result.limit is not None else lines


def results_table(result: SweepResult) -> Table:
    best = result.best
    keys = list(dict.fromkeys(key for trial in result.trials for key in trial.values))
    columns = ("trial", *keys, "step", result.metric, "seconds", "status")
    table = _table(columns, {"status"}, f"{result.name} ({result.uri})")
    for trial in result.trials:
        step = trial.reports[-1].get("step") if trial.reports else None
        status = f"failed: {trial.reason}" if trial.status == "failed" else trial.status
        table.add_row(
            str(trial.number),
            *(_text(trial.values.get(key)) for key in keys),
            _text(step),
            _text(trial.metric),
            f"{trial.seconds:.1f}",
            f"{status}, best" if trial is best else status,
            style="bold" if trial is best else None,
        )
    return table


def _table(columns: Iterable[str], left: Collection[str], title: str | None = None) -> Table:
    """An empty table; the columns not in ``left`` are to the right."""
    from rich import box
    from rich.table import Table

    table = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD)
    for column in columns:
        table.add_column(column, justify="left" if column in left else "right")
    return table


def _print(table: Table) -> None:
    from rich.console import Console

    Console().print(table)


def _text(value: object) -> str:
    if value is None:
        return "-"
    return f"{value:.6g}" if isinstance(value, float) else str(value)


@app.command()
def evaluate(
    checkpoints: list[str] = typer.Argument(
        metavar="CHECKPOINT", help="URIs of checkpoints, runs (their newest one) or exports."
    ),
    base: str | None = typer.Option(
        None, "--base", help="Training job whose data and validation are used (default: its own)."
    ),
    suite: str | None = typer.Option(
        None, "--suite", help="YAML file of tasks to score by (default: the validation loss)."
    ),
    size: int = typer.Option(2, "--size", min=1, help="How many are scored at a time."),
    namespace: str = _NAMESPACE,
    address: str | None = _ADDRESS,
    as_json: bool = _JSON,
) -> None:
    """Score checkpoints and exports on the pool by the tasks of a suite, best first.

    Without --suite by their validation loss. A score that cannot be had is listed with the reason;
    exits with 9 if there is none.

    Example: [bold]ebbtide tune evaluate ~/.ebbtide/runs/a ~/.ebbtide/runs/b[/bold]
    """
    from ebbtide.platform.config import load
    from ebbtide.train.config import TrainConfig
    from ebbtide.tune.config import PoolConfig
    from ebbtide.tune.evaluate import VALIDATION
    from ebbtide.tune.evaluate import evaluate as score
    from ebbtide.tune.suite import Suite

    job = None if base is None else load(base, TrainConfig)
    tasks = VALIDATION if suite is None else load(suite, Suite)
    pool = PoolConfig(size=size, namespace=namespace)
    with stdout.reserved():
        found = score(checkpoints, tasks, job, pool=pool, address=address)
    rows = [each.row(tasks.tasks) for each in found]
    if as_json:
        typer.echo(json.dumps(rows, indent=1))
        return
    table = _table(rows[0], {"checkpoint", "reason"})
    for row in rows:
        table.add_row(*(_text(value) for value in row.values()))
    _print(table)


@pool_app.command()
def up(
    size: int = typer.Option(2, "--size", "--max", min=1, help="How many evaluators at most."),
    at_least: int = typer.Option(0, "--min", min=0, help="How many of them stay for good."),
    idle_timeout_s: float = typer.Option(
        1800.0, "--idle-timeout", min=1.0, help="Seconds without a sweep that end the others."
    ),
    cpus: float = typer.Option(1.0, "--cpus", min=0.001, help="CPUs of a node that one needs."),
    namespace: str = _NAMESPACE,
    address: str = _CLUSTER,
    as_json: bool = _JSON,
) -> None:
    """Start evaluators ahead of a sweep and wait until they are warm.

    Those beyond --min end when no sweep has used them for --idle-timeout seconds; a sweep starts
    what it lacks.

    Example: [bold]ebbtide tune pool up --size 4 --min 1[/bold]
    """
    from ebbtide.tune import members
    from ebbtide.tune.config import PoolConfig

    config = PoolConfig(
        size=size, min=at_least, idle_timeout_s=idle_timeout_s, cpus=cpus, namespace=namespace
    )
    with _connected(address):
        found = members.up(config)
    _show(found, as_json)


@pool_app.command()
def status(namespace: str = _NAMESPACE, address: str = _CLUSTER, as_json: bool = _JSON) -> None:
    """Show the evaluators, and what each of them runs.

    Example: [bold]ebbtide tune pool status[/bold]
    """
    from ebbtide.tune import members

    with _connected(address):
        found = members.status(namespace)
    _show(found, as_json)


@pool_app.command()
def down(namespace: str = _NAMESPACE, address: str = _CLUSTER, as_json: bool = _JSON) -> None:
    """End the evaluators; a sweep that runs on them starts new ones.

    Example: [bold]ebbtide tune pool down[/bold]
    """
    from ebbtide.tune import members

    with _connected(address):
        ended = members.down(namespace)
    typer.echo(json.dumps({"ended": ended}) if as_json else f"{ended} evaluators ended")


def _show(members: list[dict[str, Any]], as_json: bool) -> None:
    if as_json:
        typer.echo(json.dumps(members, indent=1))
        return
    names = ("evaluator", "node", "sweep", "trial")
    table = _table(("evaluator", "node", "process", "sweep", "trial", "trials run"), names)
    for member in members:
        if member["answers"]:
            table.add_row(
                member["name"],
                member["node_id"][:8],
                str(member["pid"]),
                member["sweep_id"] or "-",
                member["trial_id"] or "-",
                str(member["trials_run"]),
            )
        else:
            table.add_row(member["name"], "does not answer", "-", "-", "-", "-")
    _print(table)


@contextlib.contextmanager
def _connected(address: str) -> Iterator[None]:
    from ebbtide.train.ray_connection import connected

    with stdout.reserved(), connected(address):
        yield
