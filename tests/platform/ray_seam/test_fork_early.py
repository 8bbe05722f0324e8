"""A node imports while it starts, and its fork servers are forked from that."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from ebbtide.platform.local_cluster import LocalCluster
from ebbtide.platform.ray_seam import fork_client, fork_early
from tests.platform.ray_seam.forking import LIMIT_S, WORKER, Node, ended, imports, lives, until

REFUSED = "imports begin only now"


def early_of(node: Node) -> int:
    """The process with early imports, found by what it listens on."""
    name = node.environment[fork_client.EARLY]
    inode = next(
        line.split()[6]
        for line in Path("/proc/net/unix").read_text().splitlines()
        if line.endswith(f"@{name}") and line.split()[5] == "01"
    )
    for pid in node.processes():
        if any(
            os.readlink(each.path) == f"socket:[{inode}]" for each in os.scandir(f"/proc/{pid}/fd")
        ):
            return pid
    raise AssertionError("no process listens")


def test_a_fork_server_has_what_was_imported_while_the_node_started(early: Node) -> None:
    until((early.folder / "imported").exists)
    client, first = early.start(RAY_WORKER_ID="1", RAY_JOB_ID="01000000")
    _, second = early.start(RAY_WORKER_ID="2", RAY_JOB_ID="01000000")
    assert imports(early) == 1 and REFUSED not in early.errors(1)
    assert first["parent"] == second["parent"] != early_of(early)
    assert first["state"] == ["light"] and client != first["pid"]
    assert first["environment"]["RAY_JOB_ID"] == "01000000"
    assert first["folder"] == str(early.folder)
    assert first["random"] != second["random"]


def test_workers_of_another_job_are_forked_from_a_server_of_their_own(early: Node) -> None:
    _, first = early.start(RAY_JOB_ID="01000000")
    _, second = early.start(RAY_JOB_ID="02000000", AWS_REGION="eu-west-1")
    assert first["parent"] != second["parent"] and imports(early) == 1
    assert second["environment"]["RAY_JOB_ID"] == "02000000"
    assert second["environment"]["AWS_REGION"] == "eu-west-1"
    assert "AWS_REGION" not in first["environment"]


def test_imports_of_one_environment_are_not_used_in_another(early: Node) -> None:
    _, other = early.start(OMP_NUM_THREADS="2")
    assert imports(early) == 2 and other["environment"]["OMP_NUM_THREADS"] == "2"
    assert f"{REFUSED}: those made early have seen other values of OMP_NUM_THREADS" in (
        early.errors(1)
    )


def test_who_needs_other_imports_does_not_wait_for_the_early_ones(tmp_path: Path) -> None:
    (tmp_path / "heavy.py").write_text("state = []\n")
    (tmp_path / "endless.py").write_text(f"import time\ntime.sleep({2 * LIMIT_S})\n")
    with ended(Node(tmp_path, early="endless")) as node:
        _, report = node.start(OMP_NUM_THREADS="2")
    assert report["modules"] == ["heavy"]


def test_a_child_of_an_early_fork_is_found_by_its_name(early: Node) -> None:
    """As vLLM's engines are, which replicas start."""
    titled = "import setproctitle, signal; setproctitle.setproctitle('VLLM::x'); signal.pause()"
    starts = (
        "import subprocess\nfrom ebbtide.platform.ray_seam import forked\n"
        "import multiprocessing.spawn as spawn\nassert forked.fork_children()\n"
        f"subprocess.Popen([spawn.get_executable(), '-c', {titled!r}])\n"
    )
    early.module("worker", starts + WORKER)
    early.start(RAY_JOB_ID="01000000")
    until(lambda: "VLLM::x" in [_name(pid) for pid in early.processes()])


def _name(pid: int) -> str:
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/comm").read_text().strip()
    return ""


def test_signals_that_a_worker_blocks_are_blocked_in_its_fork(early: Node) -> None:
    _, report = early.start()
    masks = {
        line.partition(":")[0]: line.split()[1]
        for line in Path(f"/proc/{report['pid']}/status").read_text().splitlines()
        if line.startswith("Sig")
    }
    client = Path(f"/proc/{early.shell.pid}/status").read_text()
    assert f"SigBlk:\t{masks['SigBlk']}" in client and report["handler"]


def test_the_node_has_no_child_of_which_it_does_not_know(early: Node) -> None:
    os.kill(early_of(early), signal.SIGKILL)
    early.start()
    children = Path(f"/proc/{early.shell.pid}/task/{early.shell.pid}/children").read_text().split()
    assert len(children) == 1  # the client


def test_what_early_imports_set_is_set_in_workers(tmp_path: Path) -> None:
    (tmp_path / "sets.py").write_text("import os\nos.environ['SET'] = 'here'\n")
    with ended(Node(tmp_path, early="sets")) as node:
        _, report = node.start()
    assert report["environment"]["SET"] == "here"


def test_a_node_whose_early_imports_are_killed_imports_later(early: Node) -> None:
    os.kill(early_of(early), signal.SIGKILL)
    _, report = early.start()
    assert report["modules"] == ["heavy"] and f"{REFUSED}: " in early.errors(1)


def test_workers_and_their_server_outlive_the_early_imports(early: Node) -> None:
    client, first = early.start()
    os.kill(early_of(early), signal.SIGKILL)
    _, second = early.start()
    assert first["parent"] == second["parent"]
    os.kill(client, signal.SIGKILL)
    until(lambda: not lives(first["pid"]))
    assert lives(second["pid"])


def test_the_early_imports_end_with_the_node(early: Node) -> None:
    until((early.folder / "imported").exists)
    process = early_of(early)
    early.shell.kill()
    early.shell.communicate()
    until(lambda: not lives(process))


def test_what_cannot_be_run_is_said(tmp_path: Path) -> None:
    start = [sys.executable, "-P", "-m", fork_early.MODULE]
    without = {**os.environ, fork_early.IMPORTED: ""}
    for command, said in (
        ([], "what is to be started?"),
        (["/no/such/ray", "start"], "/no/such/ray cannot be run: No such file or directory"),
    ):
        done = subprocess.run(
            [*start, *command], env=without, capture_output=True, text=True, timeout=LIMIT_S
        )
        assert done.returncode == 1 and said in done.stderr


def test_the_end_of_the_output_is_that_of_the_command() -> None:
    """Who starts a node through SSH waits for that."""
    done = subprocess.run(
        [sys.executable, "-P", "-m", fork_early.MODULE, "echo", "started"],
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "started\n", "")


@pytest.mark.ray
def test_a_node_that_joins_has_imported_for_the_workers_of_a_job(cluster: LocalCluster) -> None:
    from ebbtide.platform.ray_seam.workers import forked_environment, is_busy_worker

    node = cluster.add_node()
    ray.init(address=cluster.address, log_to_driver=False)
    environment = forked_environment({"RAY_TEST": "1"}, ["torch", "ray.train.torch"])

    class Worker:
        def told(self) -> tuple[int, int, str]:
            return os.getpid(), os.getppid(), os.environ[fork_client.EARLY]

    here = NodeAffinitySchedulingStrategy(node.node_id, soft=False)
    options = {"num_cpus": 0, "runtime_env": environment, "scheduling_strategy": here}
    workers = [ray.remote(**options)(Worker).remote() for _ in range(2)]
    (one, parent, name), (two, same, _) = ray.get([each.told.remote() for each in workers])
    assert parent == same and one != two and name.startswith("ebbtide-early-")
    assert is_busy_worker(Path(f"/proc/{one}/cmdline").read_text())
    assert fork_early.MODULE in Path(f"/proc/{parent}/cmdline").read_text()
    ray.kill(workers[0])
    until(lambda: not lives(one))
