"""What leaves a rank."""

from __future__ import annotations

from typing import Any

import pytest

from ebbtide.platform.errors import DataError
from ebbtide.train import worker
from ebbtide.train.failures import UserCrash
from ebbtide.train.worker import RankSpec
from tests.train.conftest import MakeConfig


@pytest.mark.parametrize("error", [DataError("shard"), ValueError("boom")])
def test_errors_leave_a_rank_in_a_form_that_travels(
    make_config: MakeConfig, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    def fail(_: RankSpec) -> None:
        raise error

    monkeypatch.setattr(worker, "run_rank", fail)
    function = worker.train_function(RankSpec(make_config(), "/", {}))
    with pytest.raises(Exception) as raised:
        function()
    assert type(raised.value) is (DataError if isinstance(error, DataError) else UserCrash)
    assert str(error) in str(raised.value)


def test_secrets_are_not_shown(make_config: MakeConfig) -> None:
    spec: Any = RankSpec(make_config(), "/", {"AWS_SECRET_ACCESS_KEY": "hidden"})
    assert "hidden" not in repr(spec)
