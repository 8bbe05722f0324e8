"""A command on the same machine asks a running endpoint, and is told how it goes."""

from __future__ import annotations

import json
import socket
import stat
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from ebbtide.platform.config import parse
from ebbtide.platform.errors import ClusterError, ServeError
from ebbtide.serve import control
from ebbtide.serve.config import ServeConfig
from ebbtide.serve.control import Ask, Control

WANTED = {"update": "s3://models/new"}


@pytest.fixture(autouse=True)
def base(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "tmp"))
    for place in ("_TEMPORARY", "_SESSIONS"):  # where endpoints that are no test's may be
        monkeypatch.setattr(control, place, tmp_path / "tmp")
    return tmp_path


def config(name: str = "tide", port: int = 8000) -> ServeConfig:
    return parse(f"{{name: {name}, model: {{uri: out}}, http: {{port: {port}}}}}", ServeConfig)


def until(condition: Callable[[], object]) -> None:
    deadline_s = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < deadline_s
        time.sleep(0.005)


@contextmanager
def answering(answer: Callable[[Ask], None], **of: object) -> Iterator[Control]:
    """An endpoint whose loop answers one request."""
    with Control(config(**of)) as found:  # type: ignore[arg-type]

        def loop() -> None:
            asks: list[Ask] = []

            def arrived() -> bool:
                asks.extend(filter(None, [found.next()]))
                return bool(asks)

            until(arrived)
            answer(asks[0])

        looping = threading.Thread(target=loop)
        looping.start()
        yield found
        looping.join()


def asked() -> list[str]:
    return list(control.ask(control.choose(control.running(), None), WANTED))


def test_what_is_wanted_arrives_and_what_is_said_comes_back() -> None:
    def answer(ask: Ask) -> None:
        assert ask.wanted == WANTED and not ask.is_gone
        ask.say("half of it")
        ask.done("all of it")

    with answering(answer):
        assert asked() == ["half of it", "all of it"]
    assert control.running() == {}


def test_an_error_comes_back_with_its_words_and_exit_code() -> None:
    with (
        answering(lambda ask: ask.failed(ClusterError("no room"))),
        pytest.raises(ServeError, match="^no room$") as raised,
    ):
        asked()
    assert raised.value.exit_code == ClusterError.exit_code


def test_a_command_that_goes_away_is_noticed_and_another_is_refused_meanwhile() -> None:
    with answering(lambda ask: until(lambda: ask.is_gone)):
        (path,) = control.running()
        with socket.socket(socket.AF_UNIX) as first:
            first.connect(str(path))
            lines = first.makefile("rb")
            assert json.loads(lines.readline())["name"] == "tide"
            first.sendall(json.dumps(WANTED).encode() + b"\n")

            def refused() -> bool:  # as soon as the first has arrived
                with pytest.raises(ServeError) as raised:
                    list(control.ask(path, WANTED))
                return "under way" in str(raised.value)

            until(refused)
            lines.close()


@contextmanager
def asking(path: Path) -> Iterator[None]:
    """A command that waits for an answer until it goes away."""
    with socket.socket(socket.AF_UNIX) as connection, connection.makefile("rb") as lines:
        connection.connect(str(path))
        lines.readline()
        connection.sendall(json.dumps(WANTED).encode() + b"\n")
        yield


def test_an_update_is_under_way_until_it_has_ended_though_its_command_has_gone() -> None:
    with Control(config()) as found:
        (path,) = control.running()
        asks: list[Ask] = []
        with asking(path):
            until(lambda: asks.extend(filter(None, [found.next()])) or asks)  # type: ignore[func-returns-value]
        until(lambda: asks[0].is_gone)
        with pytest.raises(ServeError, match="another update is under way"):
            list(control.ask(path, WANTED))
        assert found.next() is None
        asks[0].done("all of it")
        with asking(path):
            until(found.next)


def test_what_a_command_wanted_that_has_gone_is_not_begun() -> None:
    with Control(config()) as found:
        (path,) = control.running()
        with asking(path):
            until(lambda: found._last)
        assert found._last is not None
        first = found._last
        until(lambda: first.is_gone)
        assert found.next() is None
        with asking(path):
            until(found.next)


@pytest.mark.parametrize("line", [b"nonsense", b"[1]", b"{}", b'{"update": 1}', b"\xff"])
def test_what_is_no_request_is_refused_in_words(line: bytes) -> None:
    with Control(config()) as found:
        (path,) = control.running()
        with socket.socket(socket.AF_UNIX) as asking:
            asking.connect(str(path))
            lines = asking.makefile("rb")
            lines.readline()
            asking.sendall(line + b"\n")
            assert "not understood" in json.loads(lines.readline())["error"]
            lines.close()
        assert found.next() is None


def test_one_of_several_is_chosen_by_name_or_url(base: Path) -> None:
    with pytest.raises(ServeError, match=f"no endpoint of yours .*{base}/ebbtide, {base}/tmp"):
        control.choose(control.running(), None)
    with Control(config()), Control(config("other", 8001)):
        (base / "ebbtide" / "dead-1.sock").touch()  # of one that was killed
        found = control.running()
        with pytest.raises(ServeError, match="which endpoint"):
            control.choose(found, None)
        with pytest.raises(ServeError, match=r"no endpoint third .* other \(http://127.0.0.1:8001"):
            control.choose(found, "third")
        by_url = control.choose(found, "http://127.0.0.1:8001/v1/")
        assert control.choose(found, "other") == by_url


def test_the_socket_of_an_endpoint_that_lives_is_left_alone() -> None:
    with Control(config()):
        with pytest.raises(ServeError, match="an endpoint of this name and port"):
            Control(config())
        assert len(control.running()) == 1
    with Control(config()):
        assert len(control.running()) == 1


def test_an_endpoint_removes_no_socket_but_its_own() -> None:
    with Control(config()) as first:
        first._path.unlink()
        with Control(config()):
            first.__exit__()
            assert len(control.running()) == 1


@pytest.mark.parametrize("how", ["not there", "too long", "no directory"])
def test_where_no_folder_can_be_is_said_in_words(
    base: Path, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    (base / "file").touch()
    path = {"not there": "a/b", "too long": "x" * 300, "no directory": "file"}[how]
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(base / path))
    with pytest.raises(ServeError, match="XDG_RUNTIME_DIR"):
        control.folder()
    with pytest.raises(ServeError, match="XDG_RUNTIME_DIR"):
        control.choose(control.running(), None)  # they may be elsewhere, and are not


def test_a_folder_that_others_can_enter_is_not_used(base: Path) -> None:
    folder = control.folder()
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    folder.chmod(0o755)
    with pytest.raises(ServeError, match="yours alone"):
        control.folder()


def test_an_endpoint_of_another_environment_is_found(
    base: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Such as one that a timer started, without a session and its variables."""
    (base / "tmp").mkdir()
    monkeypatch.delenv("XDG_RUNTIME_DIR")
    with Control(config()):
        assert len(control.running()) == 1
        monkeypatch.setenv("XDG_RUNTIME_DIR", str(base))
        assert [each["name"] for each in control.running().values()] == ["tide"]
        (base / "link").symlink_to(base / "tmp")
        monkeypatch.setattr(control, "_TEMPORARY", base / "link")
        assert len(control.running()) == 1  # one folder under two names
        control._places()[1].chmod(0o755)  # anybody may have put it there
        assert control.running() == {}
