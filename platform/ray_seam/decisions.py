"""What Ray Train's controller asks of a run, in terms that do not need Ray.

An :class:`ebbtide.platform.ray_seam.train.ElasticTrainer` takes a :class:`Scaling` and a
:class:`Judge`; both travel to the controller's actor and live there.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol


class ProcessLost(Exception):
    """A rank's process is gone: killed, crashed, or its node is."""


@dataclass(frozen=True)
class NodeOffer:
    """A node that Ray reserves for the run, and how many workers fit on it.

    ``deadline_s`` is when a draining node is to be taken away (epoch seconds), if that is known.
    ``warm``: processes of the run have been prepared there. ``labels`` are the node's; where labels
    are asked for, every other node is named too, with no workers.
    """

    node_id: str
    workers: int
    draining: bool = False
    reachable: bool = True
    deadline_s: float | None = None
    warm: bool = False
    labels: Mapping[str, str] = field(default_factory=dict)


class Scaling(Protocol):
    """Decides how many workers there are, and on which nodes."""

    def to_start(self, nodes: Sequence[NodeOffer]) -> int | None:
        """How many workers to start, no group running; None to ask again in half a second."""

    def to_resize(self, nodes: Sequence[NodeOffer]) -> int | None:
        """How many to go on with; None to leave the group alone. The group is killed at once."""

    def to_place(self, workers: int) -> Sequence[str]:
        """The node (id) of each of so many workers, in any order; none: wherever there is room."""

    def has_left(self) -> bool:
        """Whether the running group has done what it was asked to, and is to be ended without
        delay. Asked often while it runs, and cheap as long as nothing was asked of it."""

    def to_request(self, nodes: Sequence[NodeOffer]) -> Sequence[Mapping[str, str]]:
        """The workers to reserve resources for, and to ask the cluster's autoscaler for: for each
        the labels that its node must have."""


class Judge(Protocol):
    """Decides whether the run goes on after a failure."""

    def go_on(self, errors: Mapping[int, Exception]) -> bool:
        """Restart, or end with these errors (by rank; :class:`ProcessLost` for a dead one)."""
