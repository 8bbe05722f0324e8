"""Groups of one process share gloo's thread. Fails by name when torch changes what is replaced."""

from __future__ import annotations

import os
import subprocess
import sys

_CODE = """
import os, torch, torch.distributed as dist
from pathlib import Path
from ebbtide.serve import gloo_loop
assert gloo_loop.install(), "torch has changed; see gloo_loop.install"
assert gloo_loop.install(), "a second call changes nothing"
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
groups = [dist.new_group([0], backend="gloo") for _ in range(4)]
for group in (None, *groups):
    value = torch.ones(3)
    dist.all_reduce(value, group=group)
    dist.barrier(group=group)
    gathered = [torch.zeros(3)]
    dist.all_gather(gathered, value, group=group)
    assert gathered[0].tolist() == value.tolist() == [1, 1, 1]
names = [path.read_text().strip() for path in Path("/proc/self/task").glob("*/comm")]
assert names.count("gloo_tcp_loop") == 1, names
dist.destroy_process_group()
"""


def test_groups_of_one_process_have_one_thread_for_gloo() -> None:
    done = subprocess.run(
        [sys.executable, "-c", _CODE], env={**os.environ, "GLOO_SOCKET_IFNAME": "lo"}
    )
    assert done.returncode == 0
