"""Which beginnings of prompts a worker has seen, and so probably still has in its cache.

Prompts are cut into blocks; a block's key covers all before it, so that a prompt's known length is
found block by block. The least recently used blocks are forgotten. No tokenizer: a block is
characters of the text (or the same number of token ids), and :class:`Ratio` learns what that is in
tokens.
"""

from __future__ import annotations

import json
from collections import OrderedDict
from typing import Any

BLOCK = 64
MAX_BLOCKS = 1024
"""Of one prompt; longer ones are told apart by their beginnings."""


def units(request: dict[str, Any]) -> str | list[int]:
    """What a prompt is made of: its text, or its token ids."""
    if (messages := request.get("messages")) is not None:
        return json.dumps(messages, ensure_ascii=False)
    prompt = request.get("prompt")
    if isinstance(prompt, list):
        if all(isinstance(token, int) for token in prompt):
            return prompt
        return json.dumps(prompt, ensure_ascii=False)
    return prompt if isinstance(prompt, str) else ""


def keys(prompt: str | list[int]) -> list[int]:
    """The keys of a prompt's whole blocks, in order."""
    found, before = [], 0
    for start in range(0, min(len(prompt), BLOCK * MAX_BLOCKS) - BLOCK + 1, BLOCK):
        block = prompt[start : start + BLOCK]
        before = hash((before, block if isinstance(block, str) else tuple(block)))
        found.append(before)
    return found


class Prefixes:
    """The blocks that one worker has seen, at most ``capacity``."""

    def __init__(self, capacity: int = 65_536) -> None:
        self._seen: OrderedDict[int, None] = OrderedDict()
        self._capacity = capacity

    def add(self, prompt_keys: list[int]) -> None:
        """The worker computes this prompt now."""
        for key in prompt_keys:
            self._seen[key] = None
            self._seen.move_to_end(key)
        while len(self._seen) > self._capacity:
            self._seen.popitem(last=False)

    def known(self, prompt_keys: list[int]) -> int:
        """How many units of a prompt's beginning the worker has seen."""
        for index, key in enumerate(prompt_keys):
            if key not in self._seen:
                return index * BLOCK
        return len(prompt_keys) * BLOCK


class Ratio:
    """Tokens per character, learned from the prompts that workers have counted."""

    def __init__(self, tokens_per_unit: float = 0.25) -> None:
        self._value, self._is_guess = tokens_per_unit, True

    def learn(self, prompt: str | list[int], num_tokens: int) -> None:
        """A worker has counted a prompt's tokens."""
        if isinstance(prompt, str) and len(prompt) >= 16:
            found = num_tokens / len(prompt)
            self._value = found if self._is_guess else 0.9 * self._value + 0.1 * found
            self._is_guess = False

    def tokens(self, prompt: str | list[int], num_units: int) -> int:
        """About how many tokens a number of the prompt's units are."""
        return round(num_units * self._value) if isinstance(prompt, str) else num_units
