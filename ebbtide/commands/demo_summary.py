"""What the demo ends with: ``summary.json``, a table, and the picture of the run."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from pydantic import BaseModel
from rich import box
from rich.table import Table

from ebbtide.commands.demo_chaos import Disturbances
from ebbtide.platform.report import Mark, loss_curve_png
from ebbtide.train.events import Event
from ebbtide.train.history import History


class Summary(BaseModel):
    """The demo's figures. Losses and entropy are in nats per token, times in seconds."""

    parameters: int
    corpus_bytes: int
    steps: int
    world_sizes: list[int]
    attempts: int
    steps_lost_notice: int
    steps_lost_kill: int
    kill_to_step_s: float
    loss_first: float
    loss_last: float
    valid_loss: float
    unigram_entropy: float
    tokens_per_s: float
    cost_usd: float | None
    cost_on_demand_usd: float | None
    learning_rate: float
    completion: str
    completion_matches_transformers: bool
    demo_s: float


def tokens_per_s(history: History) -> float:
    """Tokens of kept steps over the time from the first attempt's start to the last step."""
    steps = [history.kept[number] for number in sorted(history.kept)]
    duration_s = steps[-1].time_s - history.attempts[0].began_s
    return sum(step.tokens for step in steps) / duration_s


def draw(path: Path, events: Sequence[Event], done: Disturbances, unigram_entropy: float) -> None:
    """The loss curve with the evictions marked, as a PNG."""
    history = History(events)
    steps = sorted(history.kept)
    loss_curve_png(
        path,
        steps,
        [history.kept[step].loss for step in steps],
        marks=[
            Mark(done.notice_step, "notice"),
            Mark(done.kill_step, "kill"),
            Mark(done.growth_step, "growth"),
        ],
        validation=[(event.step, event.loss) for event in events if event.kind == "validation"],
        world_sizes=[
            (attempt.first_step - 1, attempt.world_size)
            for attempt in history.attempts
            if attempt.first_step is not None
        ],
        reference=("unigram entropy", unigram_entropy),
        title="Trained on spot nodes: an eviction, a kill, a node added",
    )


def table(summary: Summary) -> Table:
    """The summary as people read it."""
    shown = Table(title="ebbtide demo", title_justify="left", box=box.SIMPLE_HEAD)
    shown.add_column("what", no_wrap=True)
    shown.add_column("figure")
    saved = ""
    if summary.cost_usd is not None and summary.cost_on_demand_usd:
        saved = f" ({1 - summary.cost_usd / summary.cost_on_demand_usd:.0%} less)"
    below = summary.unigram_entropy - summary.valid_loss
    rows = {
        "model": f"{summary.parameters:,} parameters",
        "corpus": f"{summary.corpus_bytes / 1e6:.1f} MB of Python's standard library",
        "learning rate": f"{summary.learning_rate:g}, chosen by a sweep on warm evaluators",
        "steps": f"{summary.steps} in {summary.attempts} attempts",
        "workers": " → ".join(map(str, summary.world_sizes)),
        "eviction notice": f"{summary.steps_lost_notice} steps lost",
        "SIGKILL": f"{summary.steps_lost_kill} steps lost, "
        f"next step after {summary.kill_to_step_s:.1f} s",
        "training loss": f"{summary.loss_first:.3f} → {summary.loss_last:.3f} nats per token",
        "validation loss": f"{summary.valid_loss:.3f}, {below:.3f} below the unigram entropy "
        f"({summary.unigram_entropy:.3f})",
        "throughput": f"{summary.tokens_per_s:,.0f} tokens/s, restarts included",
        "cost": f"{_usd(summary.cost_usd)} on spot, {_usd(summary.cost_on_demand_usd)} on demand"
        + saved,
        "completion": repr(summary.completion),
        "same as transformers": "yes" if summary.completion_matches_transformers else "NO",
        "time": f"{summary.demo_s / 60:.1f} minutes",
    }
    for name, figure in rows.items():
        shown.add_row(name, figure)
    return shown


def _usd(dollars: float | None) -> str:
    return "unknown" if dollars is None else f"${dollars:.4f}"
