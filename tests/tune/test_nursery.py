"""The place where an evaluator's zygotes are kept."""

from __future__ import annotations

import asyncio

import pytest

from ebbtide.platform.errors import TuneError
from ebbtide.tune.nursery import Nursery


def test_a_zygote_that_cannot_warm_up_is_an_error() -> None:
    with asyncio.Runner() as runner, pytest.raises(TuneError, match="could not warm up"):
        runner.run(Nursery("os:_exit").warm())
