"""A worker without a model: vLLM's protocol on a real socket, with faults on demand.

Its "model" answers token ``(last + 1) % 256`` to a token, its tokenizer has one token per byte, and
it detokenizes and stops as vLLM does: whole characters only, stop strings held back.
"""

from __future__ import annotations

import asyncio
import codecs
import itertools
import json
from dataclasses import dataclass, field
from typing import Any

from ebbtide.serve.http_server import HttpServer
from ebbtide.serve.worker_client import ALIVE_PATH, RELEASE_PATH, TOKEN_HEADER

TOKEN = "secret-of-the-endpoint"
TEXT = "höhle 龜🫠 und mehr. " * 40
"""What the model says after a prompt that ends in ``>``, in an endless loop."""
_LOOP = TEXT.encode()


@dataclass
class StandIn:
    """One worker. ``break_after``: tokens after which a stream breaks off, ``how``: reset, end,
    abort, error (an event), hang. ``per_chunk``: as many tokens as a chunk has, in turn, as with
    speculation. ``alive``: what it answers when it is asked for a sign of life, if anything."""

    gap_s: float = 0.0
    break_after: int | None = None
    how: str = "reset"
    per_chunk: tuple[int, ...] = (1,)
    refuse: tuple[int, str] | None = None
    max_model_len: int = 4096
    generation: int = 1
    alive: dict[str, bool] | None = field(default_factory=lambda: {"is_stopped": False})
    num_signs: int = 0
    asked: list[dict[str, Any]] = field(default_factory=list)
    headers: list[dict[str, str]] = field(default_factory=list)
    released: list[dict[str, Any]] = field(default_factory=list)
    num_open: int = 0
    url: str = ""
    _server: HttpServer | None = None

    async def start(self) -> StandIn:
        self._server = HttpServer(self, "127.0.0.1")
        await self._server.start()
        self.url = f"http://127.0.0.1:{self._server.port}"
        return self

    async def stop(self) -> None:
        assert self._server is not None
        await self._server.stop()

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] != "http":
            return
        body = b""
        while True:
            message = await receive()
            body += message.get("body", b"")
            if not message.get("more_body"):
                break
        assert dict(scope["headers"])[TOKEN_HEADER.encode()] == TOKEN.encode()
        if scope["path"] == "/openapi.json":
            paths: dict[str, Any] = {"/v1/completions": {}, "/pause": {}}
            return await _answer(send, 200, {"openapi": "3.1.0", "paths": paths})
        if scope["path"] == ALIVE_PATH:
            self.num_signs += 1
            return await (
                asyncio.sleep(600) if self.alive is None else _answer(send, 200, self.alive)
            )
        request = json.loads(body)
        if scope["path"] == RELEASE_PATH:
            self.released.append(request)
            return await _answer(send, 200, {})
        self.asked.append(request | {"path": scope["path"]})
        self.headers.append({k.decode(): v.decode() for k, v in scope["headers"]})
        if self.refuse is not None:
            status, text = self.refuse
            error = {"message": text, "type": "BadRequestError", "param": None, "code": status}
            return await _answer(send, status, {"error": error})
        self.num_open += 1
        work = asyncio.ensure_future(self._generate(scope["path"], request, send))
        gone = asyncio.ensure_future(receive())
        try:
            await asyncio.wait({work, gone}, return_when=asyncio.FIRST_COMPLETED)
            if work.done():
                await work
        finally:
            self.num_open -= 1
            work.cancel()
            gone.cancel()

    async def _generate(self, path: str, request: dict[str, Any], send: Any) -> None:
        is_chat = path.endswith("chat/completions")
        prompt = _prompt_ids(request)
        limit = request.get("max_tokens") or request.get("max_completion_tokens") or 16
        remote = (request.get("kv_transfer_params") or {}).get("do_remote_decode")
        done = _Detokenizer(prompt, request)
        if not request.get("stream"):
            for count in range(1, limit + 1):
                done.step(count == limit)
                if done.finish_reason:
                    break
            answer: dict[str, Any] = {
                **_head(is_chat),
                "usage": _usage(prompt, done.num_tokens),
                "kv_transfer_params": {"remote_engine_id": self.url} if remote else None,
            }
            choice: dict[str, Any] = {"index": 0, "finish_reason": done.finish_reason}
            if is_chat:
                choice["message"] = {"role": "assistant", "content": done.text}
                answer["prompt_token_ids"] = prompt
            else:
                choice |= {"text": done.text, "prompt_token_ids": prompt}
            return await _answer(send, 200, {**answer, "choices": [choice]})
        await send({"type": "http.response.start", "status": 200, "headers": [(b"x", b"y")]})
        first, sizes = True, itertools.cycle(self.per_chunk)
        text, ids, size = "", list[int](), next(sizes)
        if is_chat:
            chunk = {**_head(True), "prompt_token_ids": prompt}
            delta = {"role": "assistant", "content": ""}
            await _event(send, {**chunk, "choices": [{"index": 0, "delta": delta}]})
        for count in range(1, limit + 1):
            await asyncio.sleep(self.gap_s)
            if self.break_after is not None and count > self.break_after:
                return await self._break(send)
            more, token = done.step(count == limit)
            text, ids = text + more, [*ids, token]
            if len(ids) < size and not done.finish_reason:
                continue
            choice = {"index": 0, "finish_reason": done.finish_reason, "token_ids": ids}
            if done.finish_reason:
                choice["stop_reason"] = done.stop_reason
            if is_chat:
                choice["delta"] = {"content": text}
            else:
                choice |= {"text": text, "prompt_token_ids": prompt if first else None}
            first = False
            await _event(send, {**_head(is_chat), "choices": [choice]})
            text, ids, size = "", [], next(sizes)
            if done.finish_reason:
                break
        if (request.get("stream_options") or {}).get("include_usage"):
            usage = _usage(prompt, done.num_tokens)
            await _event(send, {**_head(is_chat), "choices": [], "usage": usage})
        await send({"type": "http.response.body", "body": b"data: [DONE]\n\n"})

    async def _break(self, send: Any) -> None:
        if self.how == "hang":
            await asyncio.sleep(600)
        if self.how == "abort":
            choice = {"index": 0, "text": "", "delta": {}, "finish_reason": "abort"}
            await _event(send, {**_head(False), "choices": [choice]})
        if self.how == "error":
            await _event(send, {"error": {"message": "EngineCore died", "code": 500}})
        if self.how == "reset":
            raise ConnectionResetError  # the server closes the connection
        await send({"type": "http.response.body", "body": b""})


def says(num_tokens: int, start: int = 0) -> str:
    """What an undisturbed worker says in so many tokens."""
    found = bytes(_LOOP[(start + i) % len(_LOOP)] for i in range(num_tokens))
    return found.decode(errors="ignore")


def _prompt_ids(request: dict[str, Any]) -> list[int]:
    prompt = request.get("prompt")
    if prompt is None:
        prompt = "".join(each["content"] for each in request["messages"]) + ">"
    return prompt if isinstance(prompt, list) else list(prompt.encode())


class _Detokenizer:
    def __init__(self, prompt: list[int], request: dict[str, Any]) -> None:
        marks = [at for at, token in enumerate(prompt) if token == ord(">")]
        self._at = len(prompt) - marks[-1] - 1 if marks else 0
        stop = request.get("stop") or []
        self._stops = [stop] if isinstance(stop, str) else stop
        self._keep = bool(request.get("include_stop_str_in_output"))
        held = bool(self._stops) and not self._keep
        self._held = max(map(len, self._stops)) - 1 if held else 0
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._sent, self.text, self.num_tokens = 0, "", 0
        self.finish_reason: str | None = None
        self.stop_reason: str | None = None

    def step(self, is_last: bool) -> tuple[str, int]:
        token = _LOOP[self._at % len(_LOOP)]
        self._at, self.num_tokens = self._at + 1, self.num_tokens + 1
        before = len(self.text)
        self.text += self._decoder.decode(bytes([token]))
        for stop in self._stops:
            at = self.text.find(stop, max(0, before - len(stop) + 1))
            if at >= 0:
                self.finish_reason, self.stop_reason = "stop", stop
                self.text = self.text[: at + len(stop) if self._keep else at]
        if is_last and not self.finish_reason:
            self.finish_reason = "length"
        end = len(self.text) - (0 if self.finish_reason else self._held)
        start, self._sent = self._sent, max(self._sent, end)
        return self.text[start : self._sent], token


def _head(is_chat: bool) -> dict[str, Any]:
    kind = "chat.completion.chunk" if is_chat else "text_completion"
    return {"id": "of-a-worker", "object": kind, "created": 1, "model": "m"}


def _usage(prompt: list[int], num_tokens: int) -> dict[str, int]:
    total = len(prompt) + num_tokens
    return {
        "prompt_tokens": len(prompt),
        "completion_tokens": num_tokens,
        "total_tokens": total,
    }


async def _event(send: Any, chunk: dict[str, Any]) -> None:
    data = f"data: {json.dumps(chunk)}\n\n".encode()
    await send({"type": "http.response.body", "body": data, "more_body": True})


async def fails(send: Any) -> None:
    """An answer by which a worker says that it is at its end with a request."""
    error = {"message": "no", "type": "InternalServerError", "param": None, "code": 500}
    await _answer(send, 500, {"error": error})


async def _answer(send: Any, status: int, body: dict[str, Any]) -> None:
    headers = [(b"content-type", b"application/json")]
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": json.dumps(body).encode()})
