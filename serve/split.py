"""Where a request's prompt is computed: on a prefill worker, or on the decode worker itself.

A pure decision over the request and the load. Splitting hands one prompt's keys and values to one
sequence, so what has several prompts or several sequences, or needs the prompt's own logits, stays
together whatever the load. Of the rest, splitting pays where a prompt is long enough to hold up the
streams of the decode worker by more than the hand-over costs.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

Mode = Literal["auto", "split", "colocated"]


@dataclass(frozen=True)
class Load:
    """What the decision is made by, in tokens and requests.

    ``num_new_tokens``: of the prompt, less what the decode worker has in its cache.
    ``num_queued_tokens``: of prompts that the best prefill worker still has to compute.
    ``num_streams``: at the decode worker now.
    """

    num_new_tokens: int
    num_queued_tokens: int
    num_streams: int


def can_split(request: dict[str, Any]) -> bool:
    """Whether a request's prompt can be computed elsewhere at all."""
    several = num_prompts(request.get("prompt")) > 1 or (request.get("n") or 1) != 1
    echoes = bool(request.get("echo")) and request.get("logprobs") is not None
    of_prompt = request.get("prompt_logprobs") is not None or echoes
    return not (several or of_prompt or request.get("use_beam_search"))


def prefill_where(
    request: dict[str, Any], load: Load, mode: Mode, min_tokens: int
) -> Literal["remote", "local"]:
    """``remote`` to split the request, ``local`` to leave it whole to the decode worker.

    ``auto`` splits prompts with ``min_tokens`` new tokens or more, and half as many where other
    streams would be held up; but not when the prefill workers' queue is longer than four times the
    prompt, which the decode worker then has done sooner. ``split`` splits all that can be.
    """
    if mode == "colocated" or not can_split(request):
        return "local"
    if mode == "split":
        return "remote"
    enough = min_tokens if load.num_streams == 0 else min_tokens // 2
    waits = load.num_queued_tokens > 4 * load.num_new_tokens
    return "remote" if load.num_new_tokens >= enough and not waits else "local"


ENOUGH = 500
"""Requests before anything is concluded from them."""


def better_colocated(num_local: int, num_remote: int) -> str | None:
    """Why workers that do everything would serve what was asked so far better, if they would.

    A prefill worker that computes few prompts is a worker less for everything else.
    """
    asked = num_local + num_remote
    if asked < ENOUGH or num_remote > asked / 100:
        return None
    return (
        f"{num_remote} of {asked} prompts were worth a prefill worker; `mode: colocated` would have"
        " its resources answer requests"
    )


def num_prompts(prompt: Any) -> int:
    """How many prompts ``prompt`` holds: text or token ids are one, a list of such is many."""
    if isinstance(prompt, list) and prompt and not isinstance(prompt[0], int):
        return len(prompt)
    return 1


PATIENCE_S = 5.0
"""How long a new request waits for a worker to be known, as after a restart of the router."""


@dataclass
class Settings:
    """How requests are led. ``stall_s``: silence of a worker that owes tokens until it is left.

    While there is no worker, ``max_waiting`` requests wait for up to ``wait_s``; where the number
    of workers ``scales``, also those that lost the last one before a word was said.
    ``may_be_none``: that there is none means only that nobody has asked for a while.
    """

    mode: Mode
    split_min_tokens: int
    stall_s: float
    scales: bool = False
    may_be_none: bool = False
    wait_s: float = PATIENCE_S
    max_waiting: int = 1000
