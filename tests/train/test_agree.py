"""Errors that ranks share."""

from __future__ import annotations

import torch.distributed as dist

from ebbtide.platform.errors import DataError, EbbtideError
from ebbtide.train.agree import everywhere, from_first
from tests.train.ranks import Ranks


def caught(job: str) -> str:
    """The error that this rank sees when one rank fails."""

    def fail(rank: int, error: Exception) -> int:
        if dist.get_rank() == rank:
            raise error
        return dist.get_rank()

    try:
        if job == "first":
            from_first(lambda: fail(0, DataError("no data")))
        elif job == "one":
            everywhere(lambda: fail(1, DataError("no data")))
        elif job == "foreign":
            everywhere(lambda: fail(2, KeyError("missing")))
        else:
            return f"{from_first(lambda: fail(9, OSError()))} {everywhere(dist.get_rank)}"
    except EbbtideError as error:
        return f"{type(error).__name__}: {error}"
    return "nothing"


def test_all_ranks_see_the_same(ranks: Ranks) -> None:
    assert ranks.run(3, caught, "none") == ["0 0", "0 1", "0 2"]
    assert ranks.run(3, caught, "first") == ["DataError: no data"] * 3
    assert ranks.run(3, caught, "one") == ["DataError: no data"] * 3
    assert ranks.run(3, caught, "foreign") == ["TrainingError: rank 2: KeyError: 'missing'"] * 3
