"""Copies in the nodes' memory: whole, on two nodes, and read by any number of ranks."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from ebbtide.platform.errors import StorageError
from ebbtide.platform.storage import open_storage
from ebbtide.train import peers
from ebbtide.train.checkpoint import Checkpoints
from ebbtide.train.config import TrainConfig
from ebbtide.train.memory import Copy, Folder, newest_whole, peer_offset
from ebbtide.train.peers import Moment, PeerMemory
from ebbtide.train.saver import Saver
from ebbtide.train.shard import full
from tests.train.ranks import Ranks

RUN = "file:///a-run-of-test-peers"


@pytest.fixture(autouse=True)
def nothing_left() -> Iterator[None]:
    yield
    for node in "abcdef":
        Folder(RUN, node).remove()


def copy(step: int, rank: int, world_size: int, token: str = "t") -> Copy:
    return Copy(
        token=token,
        job="job",
        step=step,
        rank=rank,
        world_size=world_size,
        tokens_seen=0,
        loss=None,
        validation_loss=None,
        size_bytes=64,
        crc32=0,
        pieces=(),
    )


def test_the_newest_state_that_is_whole_is_found() -> None:
    copies = [copy(7, 0, 2), copy(7, 1, 2), copy(8, 0, 2), copy(6, 0, 1)]
    assert newest_whole(copies) == ("t", 7)
    assert newest_whole([*copies, copy(8, 1, 2)]) == ("t", 8)
    assert newest_whole([copy(8, 0, 2), copy(8, 1, 2, token="other")]) is None
    assert newest_whole([]) is None


@given(st.lists(st.sampled_from("abcd"), min_size=1, max_size=8))
def test_second_copies_are_on_other_nodes_where_that_can_be(nodes: Sequence[str]) -> None:
    offset, size = peer_offset(nodes), len(nodes)
    if len(set(nodes)) == 1:
        assert offset == 0
    if len(set(nodes)) == size > 1:
        assert offset == 1
    if offset:
        assert any(nodes[rank] != nodes[(rank + offset) % size] for rank in range(size))


def test_two_ranks_a_node_have_their_copies_on_the_other() -> None:
    assert peer_offset("aabb") == 2
    assert peer_offset("abab") == 1


def make_state(seed: int) -> dict[str, Tensor]:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    draw = torch.Generator().manual_seed(seed)
    matrix, vector = torch.randn(7, 5, generator=draw), torch.randn(2, generator=draw)
    return {
        "matrix": distribute_tensor(matrix, mesh, [Shard(0)]),
        "half": distribute_tensor(matrix.bfloat16(), mesh, [Shard(0)]),
        "vector": distribute_tensor(vector, mesh, [Shard(0)]),
        "step": torch.tensor(float(seed)),
    }


def whole(state: dict[str, Tensor]) -> list[Tensor]:
    return [full(tensor).clone() for tensor in state.values()]


def keep(nodes: str, seeds: Sequence[int]) -> list[Tensor]:
    """Copies of the states of these seeds, one after the other; the last state."""
    state = make_state(seeds[0])
    kept = PeerMemory(RUN, nodes, state, "abcd", "job")
    assert kept.open()
    group = dist.new_group(backend="gloo")
    for seed in seeds:
        for name, tensor in make_state(seed).items():
            state[name].copy_(tensor)
        slot = kept.copy(None)
        kept.share(slot, Moment(seed, 10 * seed, 0.5, None), group)
    return whole(state)


def keep_without_folder(nodes: str) -> bool:
    """Copies go on after one node's folder was removed under them; whether all were shared."""
    state = make_state(4)
    kept = PeerMemory(RUN, nodes, state, "abcd", "job")
    assert kept.open()
    group = dist.new_group(backend="gloo")
    for seed in (4, 5, 6):
        if seed == 5 and dist.get_rank() == 0:
            kept.folder.remove()
        kept.share(kept.copy(None), Moment(seed, 10 * seed, 0.5, None), group)
    return kept._shared == 3


def load(nodes: str, newer_than: int, job: str = "job") -> tuple[Moment | None, list[Tensor]]:
    state = make_state(0)
    return peers.restore(RUN, nodes, state, job, newer_than), whole(state)


def same(one: Sequence[Tensor], other: Sequence[Tensor]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


@pytest.mark.parametrize("nodes", ["a", "ab", "abc", "abcd"])
@pytest.mark.parametrize("after", ["a", "ba", "dca", "abcd"])
def test_any_number_of_ranks_reads_what_any_number_kept(
    ranks: Ranks, nodes: str, after: str
) -> None:
    left = [node for node in nodes if node in after]
    kept = ranks.run(len(nodes), keep, nodes, [4, 5, 6])[0]
    lost = len(nodes) - len(left)
    for moment, tensors in ranks.run(len(after), load, after, 5):
        if lost <= 1 and left:
            assert moment == Moment(6, 60, 0.5, None)
            assert same(tensors, kept)
        elif moment is not None:  # two neighbours' loss is one too many
            assert same(tensors, kept)


def test_one_lost_node_loses_nothing_and_two_neighbours_do(ranks: Ranks) -> None:
    kept = ranks.run(4, keep, "abcd", [6])[0]
    for lost in "abcd":
        after = "abcd".replace(lost, "")
        assert all(same(tensors, kept) for _, tensors in ranks.run(3, load, after, 5))
    assert ranks.run(2, load, "ac", 5)[0][0] is not None
    assert ranks.run(2, load, "ab", 5)[0][0] is None


def test_nothing_newer_of_the_same_job_is_nothing(ranks: Ranks) -> None:
    ranks.run(2, keep, "ab", [6])
    assert ranks.run(2, load, "ab", 6)[0][0] is None
    assert ranks.run(2, load, "ab", 5, "another")[0][0] is None
    assert ranks.run(1, load, "e", 5)[0][0] is None


def test_a_folder_that_is_removed_costs_its_copies_and_not_the_run(ranks: Ranks) -> None:
    assert all(ranks.run(2, keep_without_folder, "ab"))
    assert not Folder(RUN, "a").found()
    assert ranks.run(2, load, "ab", 5)[0][0] == Moment(6, 60, 0.5, None)


def damage(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[20] ^= 1
    path.write_bytes(bytes(content))


def test_a_damaged_copy_is_replaced_by_the_peers_and_two_by_nothing(ranks: Ranks) -> None:
    kept = ranks.run(2, keep, "ab", [6])[0]
    (own,) = [path for found, path in Folder(RUN, "a").found() if found.rank == 0]
    damage(own)
    assert all(same(tensors, kept) for _, tensors in ranks.run(2, load, "ab", 5))
    (second,) = [path for found, path in Folder(RUN, "b").found() if found.rank == 0]
    damage(second)
    assert ranks.run(2, load, "ab", 5)[0][0] is None


def test_the_copies_of_earlier_attempts_go_when_two_newer_are_whole(ranks: Ranks) -> None:
    ranks.run(2, keep, "ab", [6])
    Folder(RUN, "a").make_slot("old-0", 64).describe(copy(3, 0, 1))
    ranks.run(2, keep, "ab", [7])
    assert any(found.step == 3 for found, _ in Folder(RUN, "a").found())
    ranks.run(2, keep, "ab", [7, 8])
    assert {found.step for found, _ in Folder(RUN, "a").found()} == {7, 8}


def test_what_does_not_fit_is_refused_before_it_is_written() -> None:
    folder = Folder(RUN, "f")
    with pytest.raises(StorageError, match=r"no room for \d+ MB"):
        folder.make_slot("huge", 1 << 50)
    assert not list(folder.path.glob("*.copy"))


def open_without_room(nodes: str) -> tuple[bool, list[str]]:
    state = make_state(0)
    kept = PeerMemory(RUN, nodes, state, "abcd", "job")
    if dist.get_rank() == 1:
        kept._size_bytes = 1 << 50
    opened = kept.open()
    return opened, [path.name for path in kept.folder.path.glob("*")]


def test_a_rank_without_room_is_enough_for_all_to_go_without(ranks: Ranks) -> None:
    assert ranks.run(2, open_without_room, "ab") == [(False, []), (False, [])]


def finish_without_room(nodes: str, run: str) -> bool:
    state = make_state(0)
    kept = PeerMemory(RUN, nodes, state, "abcd", "job")
    kept.folder.make_slot("old-0", 64)  # of an earlier attempt, which had room
    kept._size_bytes = 1 << 50
    config = TrainConfig.model_construct(name="run")
    checkpoints = Checkpoints(open_storage(run), config, "data", "abcd", {})
    Saver(checkpoints, state, kept).forget()
    return kept.folder.path.exists()


def test_a_finished_run_without_room_leaves_nothing_of_earlier_attempts(
    ranks: Ranks, tmp_path: Path
) -> None:
    assert ranks.run(2, finish_without_room, "ab", str(tmp_path)) == [False, False]
