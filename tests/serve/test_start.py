"""``ebbtide serve`` that does not come up: an engine that fails, and signals while it starts."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil  # type: ignore[import-untyped]  # its stubs are a package of their own
import pytest

from ebbtide.platform.ports import free_run
from tests.serve.conftest import engines, shared_memory
from tests.serve.served import family
from tests.serve.tiny_model import MAX_MODEL_LEN

pytestmark = [pytest.mark.ray, pytest.mark.vllm, pytest.mark.slow]

_START_LIMIT_S = 300.0
_END_LIMIT_S = 60.0


class Starting:
    """The command on its way up, with all the processes it has started so far."""

    def __init__(self, exported: Path, folder: Path, **overrides: object) -> None:
        job = {
            "name": "tide",
            "model": {"uri": str(exported), "max_model_len": MAX_MODEL_LEN},
            "http": {"port": free_run(1)},
            "prefill": {"kv_cache_gb": 0.125},
            "decode": {"kv_cache_gb": 0.125},
            **overrides,
        }
        (folder / "serve.yaml").write_text(json.dumps(job))
        self._segments = shared_memory()
        self._log = folder / "log"
        with self._log.open("w") as errors:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "ebbtide", "serve", str(folder / "serve.yaml")],
                stdout=subprocess.PIPE,
                stderr=errors,
            )
        self._family: dict[int, psutil.Process] = {}

    @property
    def log(self) -> str:
        return self._log.read_text()

    @property
    def folders(self) -> list[Path]:
        """Of its cluster."""
        return list(Path(tempfile.gettempdir()).glob(f"eb-ray-{self.process.pid}-*"))

    def family(self) -> list[psutil.Process]:
        for child in family(self.process.pid):
            self._family[child.pid] = child
        return list(self._family.values())

    def wait_until(self, condition: Callable[[], bool]) -> None:
        deadline_s = time.monotonic() + _START_LIMIT_S
        while not condition():
            assert self.process.poll() is None and time.monotonic() < deadline_s, self.log
            time.sleep(0.1)

    def has_engine(self) -> bool:
        return bool(engines(self.family()))

    def assert_nothing_is_left(self) -> None:
        assert self.process.stdout is not None and self.process.stdout.read() == b""
        _, alive = psutil.wait_procs(list(self._family.values()), timeout=10)
        assert alive == []
        assert self.folders == []
        assert shared_memory() <= self._segments


@pytest.fixture
def start(exported: Path, tmp_path: Path) -> Iterator[Callable[..., Starting]]:
    """Starts the command; whatever a test does, its process is gone afterwards."""
    started: list[Starting] = []

    def begin(**overrides: object) -> Starting:
        started.append(Starting(exported, tmp_path, **overrides))
        return started[-1]

    yield begin
    for each in started:
        each.process.kill()
        each.process.wait()
        assert each.process.stdout is not None
        each.process.stdout.close()


def test_an_engine_that_does_not_start_says_why_in_one_line(
    start: Callable[..., Starting],
) -> None:
    starting = start(prefill={"kv_cache_gb": 1e-5})
    while starting.process.poll() is None:
        starting.family()
        time.sleep(0.2)
    assert starting.process.returncode == 8, starting.log
    last = starting.log.splitlines()[-1]
    assert last.startswith("error: tide could not be started: ValueError: No available memory")
    assert not any(word in starting.log for word in ("Traceback", "ray::", "(raylet)"))
    starting.assert_nothing_is_left()


@pytest.mark.parametrize(
    ("moment", "number", "code"),
    [("the cluster starts", signal.SIGINT, 130), ("an engine loads", signal.SIGTERM, 143)],
)
def test_a_signal_while_it_starts_leaves_nothing(
    start: Callable[..., Starting], moment: str, number: signal.Signals, code: int
) -> None:
    starting = start()
    arrived = {
        "the cluster starts": lambda: bool(starting.folders),
        "an engine loads": starting.has_engine,
    }
    starting.wait_until(arrived[moment])
    starting.family()
    for _ in range(2):  # an impatient one
        starting.process.send_signal(number)
    assert starting.process.wait(_END_LIMIT_S) == code, starting.log
    starting.assert_nothing_is_left()
