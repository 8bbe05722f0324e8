"""The tiny job of the training tests, for the commands that run it."""

from __future__ import annotations

from tests.train.conftest import make_config, tiny

__all__ = ["make_config", "tiny"]
