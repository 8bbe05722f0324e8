"""What a request had: its tokens, and the stages of its way with their times."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from ebbtide.serve.fleet import Worker

StageName = Literal["queue", "prefill", "transfer", "decode"]


@dataclass(frozen=True)
class Stage:
    """A part of a request's way: until there was a worker for it, at a prefill worker, from asking
    a decode worker to its first token (``prefill`` too if it computes the prompt itself), and from
    then on to the last. Times are of the monotonic clock.
    """

    name: StageName
    worker: str
    start_s: float
    end_s: float

    @property
    def seconds(self) -> float:
        return self.end_s - self.start_s


@dataclass
class Cost:
    """The tokens of one request, and when the first and the last were sent.

    Those of a prompt whose client has left before its worker counted them are estimated.
    ``stages`` are what it went through, in order; ``headers`` what its workers are told of a trace.
    """

    num_prompt_tokens: int = 0
    num_output_tokens: int = 0
    first_s: float = 0.0
    last_s: float = 0.0
    began_s: float = field(default_factory=time.monotonic)
    stages: list[Stage] = field(default_factory=list)
    headers: Mapping[str, str] = field(default_factory=dict)

    def passed(self, name: StageName, worker: Worker, began_s: float, end_s: float) -> None:
        """A stage has ended. What was before the first one is the queue."""
        if not self.stages:
            self.stages.append(Stage("queue", worker.last.worker_id, self.began_s, began_s))
        self.stages.append(Stage(name, worker.last.worker_id, began_s, max(began_s, end_s)))
