"""Where an engine and its replica have the sockets between them and other files of a process's
life, so that these do not stay behind.

vLLM, torch and multiprocessing make them in the machine's temporary folder, which nobody removes
when a process is killed. Here each replica has a folder for its own, which goes with it. What a
killed one left is removed by the next that starts there (:mod:`ebbtide.platform.scratch`), and at
the end of its endpoint, if that is on the same machine. What is compiled stays for the next engine.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

from ebbtide.platform.scratch import scratch_folder

VARIABLE = "VLLM_RPC_BASE_PATH"
"""By which vLLM knows the folder; read whenever it makes a socket."""
TEMPORARY = "TMPDIR"
"""By which Python's and other libraries do, in the processes that are started from here on."""
_SHORT = Path("/tmp")
_LONGEST_PARENT = 107 - len("/ebbtide-scratch-zmq-01234567-01234567/") - 36
"""The kernel's longest path of a socket, without the folder's own name and vLLM's of 36
characters."""


@contextlib.contextmanager
def socket_folder(token: str) -> Iterator[None]:
    """Have this process and the engine that it starts use a folder of their own, removed at the
    end. One that the environment names already is used as it is. ``token`` is the endpoint's
    secret. Raises OSError."""
    if VARIABLE in os.environ:
        yield
        return
    from torch._inductor.runtime.cache_dir_utils import cache_dir  # late: it imports torch

    with scratch_folder(_purpose(token), _parent()) as folder:
        os.environ[VARIABLE] = str(folder)
        before = os.environ.get(TEMPORARY)
        if folder.parent == Path(tempfile.gettempdir()):
            cache_dir()  # names that of torch's compiled kernels: it is not to go with the folder
            os.environ[TEMPORARY] = str(folder)
        try:
            yield
        finally:
            del os.environ[VARIABLE]
            os.environ.pop(TEMPORARY, None)
            if before is not None:
                os.environ[TEMPORARY] = before


def remove_left(token: str) -> None:
    """Remove what the replicas of an endpoint that has ended have left on this machine."""
    for folder in _parent().glob(f"ebbtide-scratch-{_purpose(token)}-*"):
        shutil.rmtree(folder, ignore_errors=True)


def _purpose(token: str) -> str:
    return f"zmq-{hashlib.sha256(token.encode()).hexdigest()[:8]}"


def _parent() -> Path:
    found = Path(tempfile.gettempdir())
    return found if len(str(found)) <= _LONGEST_PARENT else _SHORT
