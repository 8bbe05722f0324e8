"""The warm parent of trials: imports everything once, then forks a child for each trial.

Runs as ``python -m ebbtide.tune.zygote FD MODULE:FUNCTION`` under an evaluator: FD is a Unix socket
to it, the function warms this process up. It holds no Ray and no thread besides its own, since a
fork copies only the calling thread: a lock that another one holds would hang the child. Promises: a
child starts within milliseconds, shares the imports copy-on-write, and dies with the zygote, which
dies with its evaluator.

From the evaluator: ``f`` with a file descriptor attached, for a child that serves its trial over
that socket; ``i`` and a JSON line of module names, to import them for the children to come. To the
evaluator, as JSON lines: ``ready``, ``imported``, ``forked``, ``exited``.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import importlib
import json
import os
import select
import signal
import socket
import sys
import time
from pathlib import Path
from typing import Any

FORK, IMPORT = b"f", b"i"
HUGE_PAGES = "glibc.malloc.hugetlb=1"
"""For GLIBC_TUNABLES: a heap of huge pages is forked, and let go of, in half the time."""
_PR_SET_PDEATHSIG = 1
_libc = ctypes.CDLL(None) if sys.platform == "linux" else None


def warm_up() -> None:
    """Import what a training job needs and touch what torch and transformers load lazily.

    One thread only: a parent that has run an operation on several hangs its children.
    """
    import torch
    from transformers import AutoModelForCausalLM, LlamaConfig

    import ebbtide.train.trial
    import ebbtide.tune.space
    import ebbtide.tune.trial  # noqa: F401  (they stay imported for the children)

    torch.set_num_threads(1)
    state = torch.get_rng_state()
    model = AutoModelForCausalLM.from_config(
        LlamaConfig(
            vocab_size=8,
            hidden_size=8,
            intermediate_size=8,
            num_hidden_layers=1,
            num_attention_heads=1,
            num_key_value_heads=1,
        )
    )
    optimizer = torch.optim.AdamW(model.parameters())
    tokens = torch.zeros((1, 4), dtype=torch.long)
    model(input_ids=tokens, labels=tokens).loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    torch.set_rng_state(state)


def num_threads() -> int:
    """Threads of this process, native ones included (1 where the system does not tell)."""
    with contextlib.suppress(FileNotFoundError):
        return len(list(Path("/proc/self/task").iterdir()))
    return 1


def _die_with_parent() -> None:
    if _libc is not None:
        _libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def _become_child(connection: socket.socket, zygote_pid: int) -> None:
    """In the child: serve one trial and end. Never returns into the zygote's code."""
    from ebbtide.tune.trial import serve

    status = 1
    try:
        os.setpgid(0, 0)  # so that whatever the trial starts can be ended with it
        _die_with_parent()
        if os.getppid() == zygote_pid:
            signal.set_wakeup_fd(-1)
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            gc.enable()
            serve(connection)
            status = 0
    finally:
        os._exit(status)


class Zygote:
    """The loop: fork on request, report the children that have ended."""

    def __init__(self, control: socket.socket) -> None:
        self._control = control
        self._pid = os.getpid()
        self._wake, wake_end = os.pipe()
        os.set_blocking(wake_end, False)
        signal.set_wakeup_fd(wake_end, warn_on_full_buffer=False)
        signal.signal(signal.SIGCHLD, lambda number, frame: None)

    def _send(self, event: str, **fields: Any) -> None:
        self._control.sendall(json.dumps({"event": event, **fields}).encode() + b"\n")

    def run(self, started_s: float) -> None:
        """Until the evaluator is gone."""
        self._send(
            "ready",
            pid=self._pid,
            threads=num_threads(),
            warm_s=round(time.monotonic() - started_s, 3),
        )
        while True:
            readable, _, _ = select.select([self._control.fileno(), self._wake], [], [])
            if self._wake in readable:
                os.read(self._wake, 4096)
                self._reap()
            if self._control.fileno() in readable:
                order, descriptors, _, _ = socket.recv_fds(self._control, 1, 1)
                if order == FORK:
                    self._fork(descriptors[0])
                elif order == IMPORT:
                    self._import()
                else:
                    return

    def _fork(self, descriptor: int) -> None:
        pid = os.fork()
        if pid == 0:
            self._control.close()
            _become_child(socket.socket(fileno=descriptor), self._pid)
        os.close(descriptor)
        self._send("forked", pid=pid)

    def _import(self) -> None:
        line = b""
        while not line.endswith(b"\n"):
            line += self._control.recv(1 << 16)
        for name in json.loads(line):
            with contextlib.suppress(Exception):  # a child that needs it will say why
                importlib.import_module(name)
        gc.freeze()
        self._send("imported", threads=num_threads())

    def _reap(self) -> None:
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return
            if pid == 0:
                return
            self._send("exited", pid=pid, code=os.waitstatus_to_exitcode(status))


def main() -> None:
    started_s = time.monotonic()
    _die_with_parent()
    if os.environ.get("GLIBC_TUNABLES") == HUGE_PAGES:
        del os.environ["GLIBC_TUNABLES"]  # it has had its effect, and is not the trials'
    os.dup2(2, 1)  # what trials print must not mix with the results of the command line
    control = socket.socket(fileno=int(sys.argv[1]))
    module, _, function = sys.argv[2].partition(":")
    getattr(importlib.import_module(module), function)()
    gc.collect()
    gc.freeze()  # the collector would touch, and so copy, every shared page in each child
    with contextlib.suppress(BrokenPipeError, ConnectionResetError):
        Zygote(control).run(started_s)
    os._exit(0)


if __name__ == "__main__":
    main()
