"""Workers are forked from one process with its imports done, and are what started ones are."""

from __future__ import annotations

import os
import selectors
import signal
import socket
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import ray

from ebbtide.platform.local_cluster import LocalCluster
from ebbtide.platform.ray_seam import fork_client, fork_server, forked
from tests.platform.ray_seam.forking import LIMIT_S, WORKER, Node, imports, lives, until


def test_workers_are_forked_from_one_process_that_has_imported(node: Node) -> None:
    node.environment[fork_client.MODULES] = "heavy,numpy"
    one, first = node.start(RAY_WORKER_ID="1")
    two, second = node.start(RAY_WORKER_ID="2")
    assert imports(node) == 1
    assert first["parent"] == second["parent"] not in (one, two, node.shell.pid)
    for client, report in ((one, first), (two, second)):
        assert report["group"] == client != report["pid"]
        assert report["modules"] == ["heavy"] and report["state"] == []
        assert report["name"] == "__main__" and report["argv"][0] == "worker.py"
        assert report["folder"] == str(node.folder) and report["handler"]
    assert second["environment"]["RAY_WORKER_ID"] == "2"
    assert "HOME" not in second["environment"]
    assert first["random"] != second["random"] and first["numpy"] != second["numpy"]
    assert (node.folder / "report2.out").read_text() == "said on stdout\n"
    assert node.errors(2) == "said on stderr\n"


def test_a_worker_ends_with_its_client_and_a_client_with_its_worker(node: Node) -> None:
    one, first = node.start()
    two, second = node.start()
    os.kill(one, signal.SIGKILL)
    until(lambda: not lives(first["pid"]))
    os.kill(second["pid"], signal.SIGKILL)
    until(lambda: not lives(two))


def test_a_worker_that_lets_none_of_its_threads_run_ends_with_its_client(node: Node) -> None:
    busy = WORKER.replace("signal.pause()", "pass")
    node.module("worker", f"import sys; sys.setswitchinterval(1e6)\n{busy}")
    client, report = node.start()
    os.kill(client, signal.SIGKILL)
    until(lambda: not lives(report["pid"]))


def test_workers_outlive_the_fork_server_and_the_next_one_starts_another(node: Node) -> None:
    client, first = node.start()
    os.kill(first["parent"], signal.SIGKILL)
    until(lambda: not lives(first["parent"]))
    _, second = node.start()
    assert lives(client) and lives(first["pid"])
    assert second["parent"] != first["parent"] and imports(node) == 2


def test_a_worker_whose_server_dies_once_it_is_forked_is_not_started_again(node: Node) -> None:
    dies = (
        "import os\nforks = []\ndef forked():\n    forks.append(1)\n"
        "    if len(forks) == 4: os.kill(os.getpid(), 9)\n"  # the first that is a worker
        "os.register_at_fork(after_in_parent=forked)\n"
    )
    node.module("heavy", f"{dies}state = []\n")
    ends = WORKER.replace("    signal.pause()", "    break") + "open('ends', 'a').write('once ')\n"
    node.module("worker", ends)
    client, report = node.start()
    until(lambda: not lives(client))
    assert report["pid"] != client and (node.folder / "ends").read_text() == "once "


def test_all_ends_with_the_raylet(node: Node) -> None:
    _, report = node.start()
    node.shell.kill()
    until(lambda: not lives(report["parent"]))


def test_what_was_imported_under_one_environment_is_not_forked_into_another(node: Node) -> None:
    _, first = node.start(OMP_NUM_THREADS="1")
    _, second = node.start(OMP_NUM_THREADS="2")
    assert first["parent"] != second["parent"] and imports(node) == 2


def test_a_module_that_cannot_be_imported_is_told_of_and_left_out(node: Node) -> None:
    node.module("broken", "raise RuntimeError('not here')\n")
    node.environment[fork_client.MODULES] = "broken,heavy"
    client, report = node.start()
    assert report["modules"] == ["heavy"] and report["pid"] != client
    assert "broken cannot be imported ahead of time" in node.errors(1)


def test_modules_are_imported_from_where_a_started_process_has_them(node: Node) -> None:
    modules = node.folder / "modules"
    modules.mkdir()
    (node.folder / "heavy.py").rename(modules / "heavy.py")
    node.module("selectors", "raise RuntimeError('not this one')\n")
    node.environment["PYTHONPATH"] = os.pathsep.join([str(modules), *filter(None, sys.path)])
    for safe in ("", "1"):
        client, report = node.start(PYTHONSAFEPATH=safe)
        assert report["pid"] != client, node.errors(node.count)
        assert report["path"].count(str(node.folder)) == (not safe)
        assert str(modules) in report["path"]
        assert any(path.endswith("ray/thirdparty_files") for path in report["path"])


def test_what_imports_say_is_said_once(node: Node) -> None:
    node.module("heavy", "state = []\nprint('imported')\n")
    node.start()
    node.start()
    said = [(node.folder / f"report{number}.out").read_text().split("\n") for number in (1, 2)]
    assert said == [["imported", "said on stdout", ""], ["said on stdout", ""]]


def test_a_process_with_a_thread_is_not_forked(node: Node) -> None:
    node.module(
        "threads", "import threading, time\nthreading.Thread(target=time.sleep, args=(99,)).start()"
    )
    node.environment[fork_client.MODULES] = "threads"
    client, report = node.start()
    assert report["pid"] == client and report["modules"] == []
    assert "started, not forked: the imported modules have started a thread" in node.errors(1)


def test_a_library_that_sees_to_forks_itself_may_have_threads(node: Node) -> None:
    """NumPy's OpenBLAS has as many threads as the machine has cores."""
    node.environment |= {fork_client.MODULES: "numpy", "OPENBLAS_NUM_THREADS": "4"}
    client, report = node.start()
    assert report["pid"] != client, node.errors(1)


def test_a_server_that_ends_while_it_imports_costs_a_fork_only(node: Node) -> None:
    node.module("broken", "import os\nos._exit(1)\n")
    node.environment[fork_client.MODULES] = "broken"
    client, report = node.start()
    assert report["pid"] == client
    assert "started, not forked" in node.errors(1)


def test_a_client_that_says_nonsense_or_nothing_does_no_harm(node: Node) -> None:
    _, first = node.start()
    (address,) = (
        line.split()[-1]
        for line in Path("/proc/net/unix").read_text().splitlines()
        if "@ebbtide-fork-" in line
        and line.split()[5] == "01"
        and _owner(line.split()[6]) == first["parent"]
    )
    for said in (b"\0\0\0\2[]", b"\0\0\0\2{}", b"\0\0\0\x09no", b""):
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as client:
            client.connect("\0" + address[1:])
            client.sendall(said)
    _, second = node.start()
    assert second["parent"] == first["parent"]


@pytest.mark.parametrize("other", ["pid", "mnt"])
def test_a_container_in_the_same_network_has_servers_of_its_own(
    monkeypatch: pytest.MonkeyPatch, other: str
) -> None:
    ours = fork_client.address({}, 1)
    assert fork_client.address({}, 1) == ours
    read = os.readlink
    monkeypatch.setattr(os, "readlink", lambda path: read(path) + "0" * path.endswith(other))
    assert fork_client.address({}, 1) != ours


READ = os.readlink
OTHERS: list[tuple[str, Callable[..., Any]]] = [
    ("getuid", lambda: os.geteuid() + 1),
    ("readlink", lambda path: READ(path) + path * path.endswith("pid")),
    ("readlink", lambda path: READ(path) + path * path.endswith("mnt")),
    ("readlink", lambda path: READ(path.replace("self", "0"))),
]
"""Functions of ``os`` that make every other process one of another user or container."""


@pytest.mark.parametrize("function", OTHERS)
def test_others_who_have_taken_the_name_of_a_server_are_told_nothing(
    monkeypatch: pytest.MonkeyPatch, function: tuple[str, Callable[..., Any]]
) -> None:
    name = f"ebbtide-test-{os.getpid()}"
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listener:
        listener.bind(f"\0{name}")
        listener.listen()
        with monkeypatch.context() as patch:
            patch.setattr(os, *function)
            refused = fork_client.fork(name, ["worker.py"], fork_client.STANDARD_STREAMS)
        assert refused == "the fork server is another user's, or another container's"
        with listener.accept()[0] as connection:
            assert connection.recv(1) == b""


@pytest.mark.parametrize("function", OTHERS)
def test_a_request_of_others_is_not_read(
    monkeypatch: pytest.MonkeyPatch, function: tuple[str, Callable[..., Any]]
) -> None:
    server, client = socket.socketpair()
    with server, client:
        client.sendall(b"\0\0\0\2{}")
        with monkeypatch.context() as patch:
            patch.setattr(os, *function)
            assert forked.receive(server) is None
        assert server.recv(100) == b"\0\0\0\2{}"


@pytest.mark.ray
def test_ray_takes_a_fork_for_a_worker(cluster: LocalCluster) -> None:
    from ebbtide.platform.ray_seam.workers import HOOK_VARIABLE, forked_environment, is_busy_worker

    ray.init(address=cluster.address, log_to_driver=False)
    hook = {HOOK_VARIABLE: f"{__name__}.{_remember.__name__}"}
    environment = forked_environment(hook, ["decimal"])
    environment["env_vars"]["PYTHONPATH"] = os.pathsep.join(filter(None, sys.path))
    here = ray.util.scheduling_strategies.NodeAffinitySchedulingStrategy(
        next(
            node["NodeID"] for node in ray.nodes() if node["Alive"] and "CPU" in node["Resources"]
        ),
        soft=False,
    )

    class Worker:
        def told(self) -> tuple[int, int, bool]:
            return os.getpid(), os.getppid(), "EBBTIDE_TEST_HOOK" in os.environ

    options = {"num_cpus": 0, "runtime_env": environment, "scheduling_strategy": here}
    actor = ray.remote(**options)(Worker)
    workers = [actor.remote() for _ in range(2)]
    (one, parent, first), (two, same, second) = ray.get([w.told.remote() for w in workers])
    assert parent == same and one != two and first and second
    assert fork_client.SERVER in Path(f"/proc/{parent}/cmdline").read_text()
    assert is_busy_worker(Path(f"/proc/{one}/cmdline").read_text())
    ray.kill(workers[0])
    until(lambda: not lives(one))
    assert ray.get(workers[1].told.remote())[0] == two


def _remember() -> None:
    os.environ["EBBTIDE_TEST_HOOK"] = "1"


@pytest.mark.ray
def test_a_node_without_this_python_starts_workers_with_its_own(
    cluster: LocalCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    from ebbtide.platform.ray_seam.workers import forked_environment

    ray.init(address=cluster.address, log_to_driver=False)
    with monkeypatch.context() as patch:
        patch.setattr(sys, "executable", "/no/such/python")
        environment = forked_environment({"NAME": "text"}, ["json"])
    assert "py_executable" in environment
    asked = ray.remote(num_cpus=1, runtime_env=environment)(lambda: (sys.executable, os.getppid()))
    python, parent = ray.get(asked.remote(), timeout=LIMIT_S)
    assert python == sys.executable
    assert fork_client.SERVER not in Path(f"/proc/{parent}/cmdline").read_text()


def test_a_server_that_cannot_fork_says_so_and_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    name = f"ebbtide-test-{os.getpid()}"
    tried: list[int] = []

    def fork() -> int:
        tried.append(1)
        raise BlockingIOError("Resource temporarily unavailable")

    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(f"\0{name}")
        listener.listen()
        reader = ThreadPoolExecutor(1).submit(fork_client.fork, name, ["worker.py"], [0, 1, 2])
        monkeypatch.setattr(fork_server, "why_not", lambda: "")
        monkeypatch.setattr(os, "fork", fork)
        server = fork_server.Server(listener, -1, 1.0)
        assert server._fork(selectors.DefaultSelector()) is None and tried
    assert "cannot fork" in reader.result(LIMIT_S)


@pytest.mark.ray
def test_a_job_with_a_python_of_its_own_has_its_workers_started(cluster: LocalCluster) -> None:
    from ebbtide.platform.ray_seam.workers import forked_environment

    own = {"py_executable": sys.executable}
    ray.init(address=cluster.address, log_to_driver=False, runtime_env=own)
    assert forked_environment({"NAME": "text"}, ["json"]) == {"env_vars": {"NAME": "text"}}


def test_random_numbers_of_ray_are_drawn_anew_in_every_fork(node: Node) -> None:
    node.environment[fork_client.MODULES] = "actors"
    node.module("actors", "import ray\n@ray.remote\nclass Actor:\n    pass\n")
    draw = "import ray\nreport = {'drawn': ray.UniqueID.from_random().hex(), 'pid': os.getpid()}\n"
    node.module("worker", WORKER.replace("print(", f"{draw}print(", 1))
    (one, first), (_, second) = node.start(), node.start()
    assert first["drawn"] != second["drawn"] and first["pid"] != one, node.errors(1)


def test_a_process_that_has_drawn_random_numbers_is_not_forked(node: Node) -> None:
    node.environment[fork_client.MODULES] = "drawn"
    node.module("drawn", "import ray\nray.UniqueID.from_random()\n")
    client, report = node.start()
    assert report["pid"] == client and "have drawn random numbers" in node.errors(1)


def _owner(inode: str) -> int | None:
    """The process that listens on a socket."""
    for entry in Path("/proc").glob("[0-9]*/fd/*"):
        try:
            if os.readlink(entry) == f"socket:[{inode}]":
                return int(entry.parts[2])
        except OSError:
            continue
    return None
