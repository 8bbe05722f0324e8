"""A suite: what checkpoints are scored by, each task by itself. Read from a YAML file."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, Field, model_validator

from ebbtide.platform.config import Config
from ebbtide.train.config import Positive, Uri
from ebbtide.tune.results import Trial

SCORE = "score"
_OWN = ("checkpoint", "step", "seconds", "reason")


def _is_free(name: str) -> str:
    if name in _OWN:
        raise ValueError(f"is a column of its own; name no task {name}")
    return name


TaskName = Annotated[str, AfterValidator(_is_free)]


class Task(Config):
    """One number for a checkpoint: the validation loss on ``data``, or what a ``scorer`` says.

    ``data`` is a prepared dataset (default: that of the checkpoint's own run) of which the first
    ``sequences`` of ``split`` are used, ``sequence_length`` tokens each; what is left out is as in
    the run. ``scorer`` is ``module:function``, called with the model, ready to evaluate, the job
    and the ``options``, importable from where the command is called. ``mode`` says which is better.
    """

    data: Uri | None = None
    split: Literal["train", "validation"] = "validation"
    sequences: Positive | None = None
    sequence_length: Positive | None = None
    scorer: Annotated[str, Field(pattern=r"^[\w.]+:\w+$")] | None = None
    options: dict[str, Any] = {}
    mode: Literal["min", "max"] = "min"

    @model_validator(mode="after")
    def _is_one(self) -> Task:
        if self.scorer is None and self.options:
            raise ValueError("options are for a scorer; set scorer")
        if self.scorer is not None and (self.data or self.sequences or self.sequence_length):
            raise ValueError("a scorer gets options; remove data, sequences and sequence_length")
        return self


class Suite(Config):
    """Tasks by name; checkpoints are ranked by the first."""

    tasks: Annotated[dict[TaskName, Task], Field(min_length=1)]


@dataclass
class Scores:
    """A checkpoint's score by task, the reason for each that is missing, and what they took."""

    checkpoint: str
    step: float | None = None
    scores: dict[str, float] = field(default_factory=dict)
    reasons: dict[str, str] = field(default_factory=dict)
    seconds: float = 0.0

    def row(self, tasks: Iterable[str]) -> dict[str, Any]:
        """As one flat row."""
        reasons = [f"{task}: {reason}" for task, reason in self.reasons.items()]
        return {
            "checkpoint": self.checkpoint,
            "step": self.step,
            **{task: self.scores.get(task) for task in tasks},
            "seconds": self.seconds,
            "reason": "; ".join(reasons) or None,
        }


def ranked(
    suite: Suite, trials: Sequence[Trial], uri: str, task: str, faults: Mapping[str, str]
) -> list[Scores]:
    """The scores by checkpoint, best first. ``uri`` and ``task`` are keys of trials' values;
    ``faults`` say why other checkpoints were not tried."""
    found: dict[str, Scores] = {}
    for trial in trials:
        scores = found.setdefault(trial.values[uri], Scores(trial.values[uri]))
        scores.seconds += trial.seconds
        if trial.usable and trial.metric is not None:
            scores.scores[trial.values[task]] = trial.metric
            scores.step = trial.reports[-1]["step"]
        else:
            scores.reasons[trial.values[task]] = trial.reason or "no result"
    for checkpoint, why in faults.items():
        found[checkpoint] = Scores(checkpoint, reasons=dict.fromkeys(suite.tasks, why))
    first, task_of_first = next(iter(suite.tasks.items()))
    sign = 1 if task_of_first.mode == "min" else -1
    return sorted(
        found.values(),
        key=lambda each: (first not in each.scores, sign * each.scores.get(first, 0.0)),
    )
