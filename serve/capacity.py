"""Whether a cluster can hold the replicas: a pure decision over bundles and nodes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

Resources = Mapping[str, float]

_NAMES = {"CPU": "CPUs", "GPU": "GPUs"}


def shortfall(bundles: Sequence[Resources], nodes: Sequence[Resources]) -> str | None:
    """None if every bundle finds a place on one node, else what is needed and what is there.

    Places the largest bundles first, each on the first node with room.
    """
    for name in sorted({name for bundle in bundles for name in bundle}):
        needed = sum(bundle.get(name, 0.0) for bundle in bundles)
        found = sum(node.get(name, 0.0) for node in nodes)
        if needed > found:
            return f"needs {needed:g} {_NAMES.get(name, name)}, has {found:g}"
    free = [dict(node) for node in nodes]
    for bundle in sorted(bundles, key=lambda each: sorted(each.items()), reverse=True):
        place = next((node for node in free if _fits(bundle, node)), None)
        if place is None:
            wanted = " and ".join(f"{n:g} {_NAMES.get(k, k)}" for k, n in sorted(bundle.items()))
            return f"needs a node with {wanted} free for each replica, and has too few such nodes"
        for name, amount in bundle.items():
            place[name] -= amount
    return None


def _fits(bundle: Resources, node: Resources) -> bool:
    return all(node.get(name, 0.0) >= amount for name, amount in bundle.items())
