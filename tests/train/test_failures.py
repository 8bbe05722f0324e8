"""What the errors of the ranks mean."""

from __future__ import annotations

import pickle

import pytest
import torch.distributed as dist

from ebbtide.platform.errors import DataError, StorageError, TrainingError
from ebbtide.platform.ray_seam.decisions import ProcessLost
from ebbtide.train.failures import Cause, PeerLost, UserCrash, classify, portable, to_raise

GLOO = "[gloo/transport/tcp/pair.cc:553] Connection closed by peer [127.0.0.1]:4711"


def test_a_lost_node_is_known_by_the_errors_of_those_it_leaves_behind() -> None:
    failure = classify({0: PeerLost(GLOO), 2: PeerLost(GLOO)}, node_is_lost=True)
    assert failure.cause is Cause.NODE_LOST
    failure = classify({0: PeerLost(GLOO), 1: ProcessLost("died")}, node_is_lost=True)
    assert (failure.cause, failure.rank) == (Cause.NODE_LOST, 1)


def test_a_process_that_dies_on_a_node_that_lives_was_killed() -> None:
    failure = classify({0: PeerLost(GLOO), 1: ProcessLost("died")}, node_is_lost=False)
    assert failure.cause is Cause.KILLED


def test_an_error_of_user_code_outweighs_what_it_does_to_the_others() -> None:
    errors = {0: PeerLost(GLOO), 1: UserCrash("ValueError: boom"), 2: ProcessLost("died")}
    failure = classify(errors, node_is_lost=True)
    assert (failure.cause, failure.message) == (Cause.CRASH, "rank 1: ValueError: boom")
    error = to_raise(failure)
    assert isinstance(error, TrainingError)
    assert "ValueError: boom" in str(error)


def test_an_error_that_would_come_again_is_final_and_keeps_its_type() -> None:
    wrong = DataError("shard 3 is not what the index says")
    failure = classify({0: UserCrash("x"), 1: wrong}, node_is_lost=True)
    assert failure.cause is Cause.FINAL
    assert to_raise(failure) is wrong


def test_storage_may_come_back() -> None:
    assert classify({0: StorageError("503")}, node_is_lost=False).cause is Cause.CRASH


@pytest.mark.parametrize(
    "error",
    [
        RuntimeError(f"[/pytorch/third_party/gloo/{GLOO[1:]}"),
        RuntimeError("NCCL error in: ProcessGroupNCCL.cpp:1234"),
        dist.DistBackendError("no"),
        dist.DistNetworkError("no"),
    ],
)
def test_errors_of_collectives_are_of_a_lost_peer(error: Exception) -> None:
    assert isinstance(portable(error), PeerLost)


class Local(Exception):
    """Cannot be pickled by name elsewhere, and has another signature."""

    def __init__(self, one: int, two: int) -> None:
        super().__init__(f"{one} and {two}")


def test_what_leaves_a_rank_can_be_read_everywhere() -> None:
    sent = portable(Local(1, 2))
    back = pickle.loads(pickle.dumps(sent))
    assert isinstance(back, UserCrash)
    assert str(back) == "Local: 1 and 2"
    own = DataError("x")
    assert portable(own) is own
