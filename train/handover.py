"""The whole training state as one file, for another trial of the same node to go on from.

Promises: what begins from it is, bit for bit, what would have gone on; a state that does not fit
the job is refused before anything is written into it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, replace
from pathlib import Path

import torch
from torch import Tensor

from ebbtide.platform.errors import CheckpointError
from ebbtide.train.memory import rows_of
from ebbtide.train.peers import Moment


class Handover:
    """One training's: begins from ``source`` where there is one, and saves when it is asked."""

    def __init__(self, source: str | None = None) -> None:
        self._source = source
        self._state: Mapping[str, Tensor] = {}
        self._moment: Moment | None = None
        self._tokens_before = 0

    def begin(self, state: Mapping[str, Tensor]) -> Moment | None:
        """Fill the state from the source; where it stands then, None for a fresh start.

        Called once, when the training is built. Raises CheckpointError if it does not fit.
        """
        self._state = state
        if self._source is not None:
            found = torch.load(self._source, map_location="cpu", mmap=True, weights_only=True)
            _fill(state, found["state"])
            self._moment = Moment(**found["moment"])
            self._tokens_before = self._moment.tokens_seen
        return self._moment

    def reached(self, moment: Moment) -> None:
        """Where the training stands; its ``tokens_seen`` are those since it began."""
        self._moment = replace(moment, tokens_seen=self._tokens_before + moment.tokens_seen)

    def save(self, path: str) -> None:
        """Write the state as it is now; not while a step is being made."""
        if self._moment is None:
            raise CheckpointError("there is no state to hand over before the first step")
        parts = {name: rows_of(tensor)[1].detach() for name, tensor in self._state.items()}
        with Path(path).open("wb") as file:
            torch.save({"moment": asdict(self._moment), "state": parts}, file)


def _fill(state: Mapping[str, Tensor], found: Mapping[str, Tensor]) -> None:
    parts = {name: rows_of(tensor)[1] for name, tensor in state.items()}
    wrong = {name for name in {*parts, *found} if _shape(parts, name) != _shape(found, name)}
    if wrong:
        raise CheckpointError(
            f"the state to go on from is of another model or optimizer: {min(wrong)} differs; do "
            "not search keys that change it"
        )
    with torch.no_grad():
        for name, part in parts.items():
            part.copy_(found[name])


def _shape(parts: Mapping[str, Tensor], name: str) -> tuple[int, ...] | None:
    return tuple(parts[name].shape) if name in parts else None
