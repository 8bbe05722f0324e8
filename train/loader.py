"""A rank's share of each step's micro-batches, read one step ahead in the background."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ebbtide.train.generation import Generation
from ebbtide.train.order import SampleOrder


class Sequences(Protocol):
    """Numbered sequences of one length, such as :class:`ebbtide.train.dataset.TokenDataset`."""

    @property
    def num_sequences(self) -> int:
        """How many there are."""

    def sequence(self, i: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Inputs and labels of one, ``int64[sequence_length]`` each."""


@dataclass(frozen=True)
class MicroBatch:
    """One pass: int64 ``[micro_sequences, sequence_length]``.

    A surplus pass has no number; it runs on whatever data so that this rank joins the collectives.
    """

    number: int | None
    inputs: Tensor
    labels: Tensor


def read_sequences(dataset: Sequences, ids: Sequence[int] | NDArray[Any]) -> tuple[Tensor, Tensor]:
    """Inputs and labels of some sequences, stacked."""
    pairs = [dataset.sequence(int(i)) for i in ids]
    inputs, labels = (np.stack(arrays) for arrays in zip(*pairs, strict=True))
    return torch.from_numpy(inputs), torch.from_numpy(labels)


def share_out(
    dataset: Sequences, micro_batches: Sequence[Sequence[int]] | NDArray[Any], of: Generation
) -> list[MicroBatch]:
    """This rank's passes over numbered micro-batches, one a round; surplus ones repeat one."""
    passes = []
    for number in of.share(len(micro_batches)):
        inputs, labels = read_sequences(dataset, micro_batches[number or 0])
        passes.append(MicroBatch(number, inputs, labels))
    return passes


class StepLoader:
    """Reads a rank's passes of a step, and meanwhile those of the next."""

    def __init__(
        self,
        dataset: Sequences,
        order: SampleOrder,
        micro_sequences: int,
        generation: Generation,
        steps: int,
    ) -> None:
        self._dataset, self._order = dataset, order
        self._micro_sequences, self._generation, self._steps = micro_sequences, generation, steps
        self._reader = ThreadPoolExecutor(1, thread_name_prefix="ebbtide-loader")
        self._ahead: dict[int, Future[list[MicroBatch]]] = {}

    def take(self, step: int) -> list[MicroBatch]:
        """The passes of a 0-based step. Raises what reading raised."""
        wanted = self._ahead.pop(step, None) or self._reader.submit(self._read, step)
        if step + 1 < self._steps:
            self._ahead[step + 1] = self._reader.submit(self._read, step + 1)
        return wanted.result()

    def close(self) -> None:
        """Stop reading ahead; waits for nothing but the read at work."""
        self._reader.shutdown(wait=True, cancel_futures=True)

    def _read(self, step: int) -> list[MicroBatch]:
        micro_batches = self._order.sample_ids(step).reshape(-1, self._micro_sequences)
        return share_out(self._dataset, micro_batches, self._generation)
