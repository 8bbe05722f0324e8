"""Ray's coordinator of resource requests, taught to look at labels when it reserves nodes.

The coordinator passes the labels of a request on to the autoscaler, but reserves whatever nodes are
there, so a run that asks for spot nodes would be given the on-demand ones that it wants to leave.
It is one detached actor a cluster, shared by all jobs. Promises: requests without labels are served
as before; teaching it again changes nothing. It forgets when its process is restarted.
"""

from __future__ import annotations

from typing import Any

import ray
import ray.exceptions

from ebbtide.platform.errors import ClusterError

_TIMEOUT_S = 10.0


def teach_labels(coordinator: Any) -> None:
    """Have the coordinator reserve only nodes with the labels that are asked for.

    Raises ClusterError if it does not answer.
    """

    def teach(actor: Any) -> None:  # nested: it travels by value, and needs none of our modules
        import dataclasses
        from importlib import import_module

        module: Any = import_module(type(actor).__module__)
        if hasattr(module, "ebbtide_labels"):
            return
        labels = module.ebbtide_labels = {}
        look, reserve = actor._get_cluster_nodes, module._compute_reservations

        def look_at_labels() -> Any:
            nodes = look()
            labels.clear()
            labels.update({node["NodeID"]: node.get("Labels") or {} for node in nodes})
            return nodes

        def reserve_by_labels(ongoing_request: Any, node_resources: Any) -> Any:
            selectors = ongoing_request.requested_label_selectors
            if not any(selectors):
                return reserve(ongoing_request=ongoing_request, node_resources=node_resources)
            left = {node: dict(resources) for node, resources in node_resources.items()}
            found: dict[str, dict[str, float]] = {}
            bundles = zip(ongoing_request.requested_resources, selectors, strict=True)
            for bundle, selector in bundles:
                one = dataclasses.replace(
                    ongoing_request,
                    requested_resources=[bundle],
                    requested_label_selectors=[selector],
                )
                able = {
                    node: resources
                    for node, resources in left.items()
                    if selector.items() <= labels.get(node, {}).items()
                }
                for node, taken in reserve(ongoing_request=one, node_resources=able).items():
                    module._subtract_bundle_in_place(left[node], taken)
                    module._add_bundle_in_place(found.setdefault(node, {}), taken)
            return found

        actor._get_cluster_nodes = look_at_labels
        module._compute_reservations = reserve_by_labels

    try:
        ray.get(coordinator.__ray_call__.remote(teach), timeout=_TIMEOUT_S)
    except ray.exceptions.RayError as error:
        raise ClusterError(
            f"the cluster's coordinator of resources does not answer: {error}"
        ) from (error)
