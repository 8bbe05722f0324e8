"""Where a request's prompt is computed: on a prefill worker, or on the decode worker itself.

A pure decision over the request. Splitting hands one prompt's keys and values to one sequence, so
what has several prompts or several sequences, or needs the prompt's own logits, stays together.
"""

from __future__ import annotations

from typing import Any, Literal, Protocol


class CompletionLike(Protocol):
    """The fields of OpenAI's completion and chat requests that decide; those absent are None."""

    n: int | None


def prefill_where(request: CompletionLike) -> Literal["remote", "local"]:
    """``remote`` to split the request, ``local`` to leave it whole to the decode worker."""
    several = num_prompts(getattr(request, "prompt", None)) > 1 or (request.n or 1) > 1
    echoes = (
        bool(getattr(request, "echo", False)) and getattr(request, "logprobs", None) is not None
    )
    of_prompt = getattr(request, "prompt_logprobs", None) is not None or echoes
    beams = bool(getattr(request, "use_beam_search", False))
    return "local" if several or of_prompt or beams else "remote"


def num_prompts(prompt: Any) -> int:
    """How many prompts ``prompt`` holds: text or token ids are one, a list of such is many."""
    if isinstance(prompt, list) and prompt and not isinstance(prompt[0], int):
        return len(prompt)
    return 1
