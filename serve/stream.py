"""One streamed answer, kept so that another worker can go on with it where one was lost.

Workers are asked for the ids of the tokens behind each chunk. Promises: what a client receives is
what a single undisturbed worker would have sent, with one ``id``, every character once and whole,
and usage counted over all workers; a request that cannot be continued exactly says why
(:func:`bound_by`). Greedy streams go on with the very tokens that were to come. Sampled ones go on
with others that are as likely; a seed is advanced, not continued, as vLLM keeps its state to
itself.

Two things make the seam exact. A continuation starts after the last token whose text is known to
be whole, so that what a worker held back of a character is generated again. And stop strings are
held back here, not by the workers, which are told to leave them in.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

Kind = Literal["completion", "chat"]
Json = dict[str, Any]

PATHS: Mapping[Kind, str] = {"completion": "/v1/completions", "chat": "/v1/chat/completions"}

_PLAIN = {
    "model",
    "stream",
    "stream_options",
    "user",
    "n",
    "max_tokens",
    "max_completion_tokens",
} | {
    *("temperature", "top_p", "top_k", "min_p", "seed", "stop", "stop_token_ids", "ignore_eos"),
    *("min_tokens", "repetition_penalty", "logit_bias", "allowed_token_ids", "priority"),
    *("include_stop_str_in_output", "skip_special_tokens", "spaces_between_special_tokens"),
    *("return_token_ids", "cache_salt"),
}
"""Fields that mean the same when the first tokens of the answer are part of the prompt."""
_OF_THE_PROMPT = {"prompt", "messages", "add_special_tokens", "add_generation_prompt"} | {
    *("chat_template", "chat_template_kwargs", "truncate_prompt_tokens", "documents"),
}
"""Fields that have done their work once the prompt's token ids are known."""
_HARMLESS: Mapping[str, tuple[Any, ...]] = {
    "n": (1,),
    "echo": (False,),
    "tool_choice": ("none",),
    "response_format": ({"type": "text"},),
    "use_beam_search": (False,),
    "frequency_penalty": (0,),
    "presence_penalty": (0,),
    "tools": ([],),
    "bad_words": ([],),
    "suffix": ("",),
}


_NUMBERS = ("temperature", "seed", "min_tokens", "max_tokens", "max_completion_tokens")


def bound_by(request: Json) -> str | None:
    """The first field because of which only the worker that began the answer can end it, if any."""
    for name, value in request.items():
        if value is None or value in _HARMLESS.get(name, ()):
            continue
        if name == "logprobs" and value is False:  # 0 is another thing
            continue
        if name in _NUMBERS and not isinstance(value, int | float):
            return name
        if name == "n" or name not in _PLAIN | _OF_THE_PROMPT | {"kv_transfer_params"}:
            return name
    prompt = request.get("prompt")
    several = isinstance(prompt, list) and bool(prompt) and not isinstance(prompt[0], int)
    return "prompt" if several else None


def stop_strings(request: Json) -> list[str]:
    """The stop strings that have to be taken out of the answer here."""
    stop = request.get("stop") or []
    found = [stop] if isinstance(stop, str) else stop
    if request.get("include_stop_str_in_output") or not isinstance(found, list):
        return []
    return [each for each in found if isinstance(each, str) and each]


@dataclass
class Stream:
    """The state of one answer with one choice. ``max_model_len`` bounds answers without a limit."""

    kind: Kind
    request: Json
    max_model_len: int = 0
    prompt_ids: list[int] = field(default_factory=list)
    finish_reason: str | None = None
    num_moves: int = 0
    _head: Json = field(default_factory=dict)
    _ids: list[int] = field(default_factory=list)
    _text: str = ""
    _settled: tuple[int, int] = (0, 0)  # tokens, and the characters that are all their text
    _sent: int = 0  # characters of _text that the client has
    _ids_sent: int = 0
    _base: int = 0  # tokens that the present worker got as its prompt
    _stop_reason: Any = None
    is_cut: bool = False
    """Whether the text ended here, at a stop string that its worker cannot see whole."""

    def __post_init__(self) -> None:
        self._bound = bound_by(self.request)
        self._stops = [] if self._bound else stop_strings(self.request)
        self._wants_ids = bool(self.request.get("return_token_ids"))

    @property
    def has_begun(self) -> bool:
        """Whether the client has received any of it."""
        return bool(self._head)

    @property
    def num_tokens(self) -> int:
        """Tokens of the answer so far."""
        return len(self._ids)

    @property
    def can_move(self) -> bool:
        """Whether another worker can go on; a sampled answer's ids cannot be taken back."""
        if not self.has_begun:
            return True
        retracts = self._ids_sent > self._settled[0] and not self._is_greedy
        return bool(self.prompt_ids) and self._bound is None and not retracts

    @property
    def _is_greedy(self) -> bool:
        return self.request.get("temperature") == 0

    def first_request(self) -> Json:
        """What the first worker is asked for."""
        asked = {**self.request, "return_token_ids": True}
        if self._stops:
            asked["include_stop_str_in_output"] = True
        return asked

    def move(self) -> tuple[str, Json]:
        """Path and body for the worker that goes on. Only if :attr:`can_move`."""
        self.num_moves += 1
        if not self.has_begun or not self.prompt_ids:
            return PATHS[self.kind], self.first_request()
        self._base, num_characters = self._settled
        self._ids, self._text = self._ids[: self._base], self._text[:num_characters]
        body = {name: value for name, value in self.request.items() if name in _PLAIN}
        limit = self._limit()
        body |= {"prompt": self.prompt_ids + self._ids, "max_tokens": limit - self._base}
        body |= {"return_token_ids": True, "add_special_tokens": False}
        body.pop("max_completion_tokens", None)
        if self.request.get("min_tokens"):
            body["min_tokens"] = max(0, self.request["min_tokens"] - self._base)
        if self.request.get("seed") is not None:
            body["seed"] = self.request["seed"] + self._base
        if self._stops:
            body["include_stop_str_in_output"] = True
        return PATHS["completion"], body

    def _limit(self) -> int:
        for name in ("max_completion_tokens", "max_tokens"):
            if (limit := self.request.get(name)) is not None:
                return int(limit)
        room = self.max_model_len - len(self.prompt_ids)
        is_absent = self.kind == "completion" and "max_tokens" not in self.request
        return min(16, room) if is_absent else room

    def take(self, chunk: Json) -> Json | None:
        """A worker's chunk as the client is to see it; None if it is not to see it."""
        prompt_ids, is_first = self._take_prompt_ids(chunk), not self._head
        if is_first:
            self._head = {key: chunk.get(key) for key in ("id", "object", "created", "model")}
        if not chunk["choices"]:
            return {**chunk, **self._head, "usage": self._counted(chunk["usage"])}
        (choice,) = chunk["choices"]
        ids = choice.get("token_ids") or []
        self._ids += ids
        text = self._text_of(choice)
        if self._bound:
            return self._chunk(chunk, choice, text, ids, prompt_ids)
        self._text += text
        if text and (len(ids) == 1 or not self._is_greedy):
            # of several tokens, the last may be a part of a character that is still to come
            self._settled = len(self._ids), len(self._text)
        self.finish_reason = choice.get("finish_reason")
        self._stop_reason = choice.get("stop_reason")
        self._stop()
        shown, new_ids = self._release(), self._ids[self._ids_sent :]
        says = shown or self.finish_reason or (self._wants_ids and new_ids)
        if self.num_moves and not is_first and not says:
            return None
        self._ids_sent = max(self._ids_sent, len(self._ids)) if self._wants_ids else 0
        return self._chunk(chunk, choice, shown, new_ids, prompt_ids)

    def _take_prompt_ids(self, chunk: Json) -> list[int] | None:
        choice = chunk["choices"][0] if chunk["choices"] else {}
        found = choice.get("prompt_token_ids") or chunk.get("prompt_token_ids")
        if found and not self.prompt_ids:
            self.prompt_ids = list(found)
            return self.prompt_ids
        return None

    def _text_of(self, choice: Json) -> str:
        if "delta" not in choice:
            return choice["text"] or ""
        delta = choice["delta"]
        if any(value for name, value in delta.items() if name not in ("role", "content")):
            self._bound = self._bound or "parsed output"  # reasoning, or a call of a tool
        return delta.get("content") or ""

    def _stop(self) -> None:
        """Take a stop string out of the end; find one that began at another worker."""
        if self.finish_reason == "stop" and self._stops and isinstance(self._stop_reason, str):
            self._text = self._text.removesuffix(self._stop_reason)
        elif self._stops and self.num_moves and self.finish_reason is None:
            if len(self._ids) <= (self.request.get("min_tokens") or 0):
                return
            found = [(self._text.find(each, self._sent), each) for each in self._stops]
            if ends := [(at + len(each), at, each) for at, each in found if at >= 0]:
                _, at, self._stop_reason = min(ends)
                self._text, self.finish_reason, self.is_cut = self._text[:at], "stop", True

    def _release(self) -> str:
        """The text that can be shown now: all but what could be the beginning of a stop string."""
        held = max(map(len, self._stops)) - 1 if self._stops and not self.finish_reason else 0
        start, self._sent = self._sent, max(self._sent, len(self._text) - held)
        return self._text[start : self._sent]

    def _chunk(
        self, chunk: Json, choice: Json, text: str, ids: list[int], prompt_ids: list[int] | None
    ) -> Json:
        shown = {key: value for key, value in choice.items() if key != "text"}
        result = {**chunk, **self._head, "choices": [shown]}
        if not self._bound:
            shown["finish_reason"] = self.finish_reason
            if "stop_reason" in choice or self._stop_reason is not None:
                shown["stop_reason"] = self._stop_reason
        if "token_ids" in choice:
            shown["token_ids"] = ids if self._wants_ids else None
        for place in (shown, result):
            if "prompt_token_ids" in place:
                place["prompt_token_ids"] = prompt_ids if self._wants_ids else None
        if self.kind == "completion":
            shown["text"] = text
        else:
            delta = dict(choice.get("delta") or {"content": ""})
            if text or delta.get("content") is not None:
                delta["content"] = text
            shown["delta"] = delta
            shown.pop("prompt_token_ids", None)
        if chunk.get("usage"):
            result["usage"] = self._counted(chunk["usage"])
        return result

    def _counted(self, usage: Json) -> Json:
        return {**usage, **self._totals()} if self.num_moves else usage

    def _totals(self) -> Json:
        prompt, answer = len(self.prompt_ids), len(self._ids)
        return {
            "prompt_tokens": prompt,
            "completion_tokens": answer,
            "total_tokens": prompt + answer,
        }

    def owed(self) -> list[Json]:
        """The chunks that are still to come after the one that ended the text, if its worker is
        lost then, or was left because a stop string was found here.
        """
        options = self.request.get("stream_options") or {}
        if not options.get("include_usage"):
            return []
        return [{**self._head, "choices": [], "usage": self._totals()}]
