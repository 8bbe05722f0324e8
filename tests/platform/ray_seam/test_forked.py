"""What a fork starts itself is forked from the same server, and is what a started one would be."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

from ebbtide.platform.ray_seam import fork_client
from tests.platform.ray_seam.forking import WORKER, Node, imports, lives, until

CHILD = """
import json, multiprocessing, os, sys, time
state = []

def child(path, pipe):
    me = {"pid": os.getpid(), "parent": os.getppid(), "group": os.getpgid(0), "state": state,
          "title": open("/proc/self/comm").read(), "argv": sys.argv, "variable": os.environ["SET"],
          "nice": os.nice(0), "processors": [*os.sched_getaffinity(0)],
          "other": os.environ.get("OTHER")}
    pipe.send(me)
    if pipe.recv() == "end":
        sys.exit(3)
    time.sleep(600)
"""
PARENT = """
import json, multiprocessing, os, sys
sys.path.insert(0, os.getcwd())
from ebbtide.platform.ray_seam import forked
import heavy

def main():
    report = {"is_fork": forked.fork_children(), "pid": os.getpid(), "group": os.getpgid(0)}
    heavy.state.append("changed here")
    os.environ["SET"] = "later"
    children, ends = report["children"], report["ends"] = [], []
    context = multiprocessing.get_context("spawn")
    for how in ("end", "terminate", "kill"):
        ours, theirs = context.Pipe()
        process = context.Process(target=heavy.child, args=("x", theirs))
        process.start()
        children.append(ours.recv() | {"started": process.pid})
        assert process.is_alive()
        ours.send(how)
        if how != "end":
            getattr(process, how)()
        process.join(60)
        ends.append(process.exitcode)
    os.write(os.open(sys.argv[1] + ".new", os.O_WRONLY | os.O_CREAT), json.dumps(report).encode())
    os.rename(sys.argv[1] + ".new", sys.argv[1])

if __name__ == "__main__":
    main()
"""


def test_what_a_fork_starts_by_multiprocessing_is_forked_too(node: Node) -> None:
    node.module("heavy", "open('imported', 'a').write('once ')\n" + CHILD)
    node.module("worker", PARENT)
    _, report = node.start()
    assert report["is_fork"] and imports(node) == 1, node.errors(1)
    assert report["ends"] == [3, -signal.SIGTERM, -signal.SIGKILL]
    for child in report["children"]:
        assert child["pid"] != child["started"] and child["parent"] != report["pid"]
        assert child["group"] == report["group"]
        assert child["state"] == [] and child["variable"] == "later"
        until(lambda pid=child["pid"]: not lives(pid))  # type: ignore[misc]


def test_a_child_has_the_niceness_and_the_processors_of_its_parent(node: Node) -> None:
    """Ray's workers lower their own priority; vLLM binds its engines to the cores of a node."""
    node.module("heavy", CHILD)
    one = max(os.sched_getaffinity(0))
    takes = f"os.nice(3); os.sched_setaffinity(0, [{one}])\n"
    node.module("worker", PARENT.replace("context =", f"{takes}    context =", 1))
    _, report = node.start()
    for child in report["children"]:
        assert child["nice"] == min(19, os.nice(0) + 3) and child["processors"] == [one]


def test_a_child_has_the_variables_of_its_parent_where_imports_set_others(node: Node) -> None:
    node.module("heavy", f"import os\nos.environ['SET'] = os.environ['OTHER'] = 'early'\n{CHILD}")
    node.module("worker", PARENT.replace('"later"', '"later"; del os.environ["OTHER"]'))
    _, report = node.start()
    assert {child["variable"] for child in report["children"]} == {"later"}
    assert {child["other"] for child in report["children"]} == {"early"}


@pytest.mark.parametrize(
    "descriptors", [[*range(fork_client.MAX_DESCRIPTORS + 1)], [fork_client.HIGH_DESCRIPTOR]]
)
def test_what_a_fork_cannot_be_given_is_not_asked_for(descriptors: list[int]) -> None:
    assert "descriptors" in fork_client.fork("no such server", ["worker.py"], descriptors)


def test_children_are_started_where_the_server_is_gone(node: Node) -> None:
    node.module("heavy", "open('imported', 'a').write('once ')\n" + CHILD)
    kill = "server = os.getppid(); os.kill(server, 9)\n    while os.getppid() == server: pass\n"
    node.module("worker", PARENT.replace("context =", f"{kill}    context =", 1))
    _, report = node.start()
    assert report["ends"] == [3, -signal.SIGTERM, -signal.SIGKILL] and imports(node) == 4
    assert [each["pid"] for each in report["children"]] == [
        each["started"] for each in report["children"]
    ]
    assert "started, not forked" in node.errors(1)


def test_a_resource_tracker_is_found_by_its_command_line(node: Node) -> None:
    """The end of a session waits for it: killed, it would leave what the others have left."""
    track = (
        "from multiprocessing import resource_tracker\n"
        "from ebbtide.platform.ray_seam import forked\n"
        "assert forked.fork_children()\nresource_tracker.ensure_running()\n"
        "report = {'tracker': resource_tracker._resource_tracker._pid}\n"
    )
    node.module("worker", WORKER.replace("print(", f"{track}print(", 1))
    _, report = node.start()
    until(lambda: "it is a resource tracker" in node.errors(1))
    command = Path(f"/proc/{report['tracker']}/cmdline")

    def is_a_tracker() -> bool:
        said = command.read_text()  # empty for a moment, while it becomes one
        return fork_client.TRACKER in said and "fork_client" not in said

    until(is_a_tracker)
