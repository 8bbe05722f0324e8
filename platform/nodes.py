"""The Ray labels by which a node says what it is and what it costs."""

from __future__ import annotations

LABEL_INSTANCE_TYPE = "ebbtide.dev/instance-type"
LABEL_MARKET = "ebbtide.dev/market"
LABEL_ZONE = "ebbtide.dev/zone"
LABEL_NODE_ID = "ray.io/node-id"
"""Every node's own, by Ray."""
LABEL_LOCAL_NODE = "ebbtide.dev/local-node"
"""A node of :class:`ebbtide.platform.local_cluster.LocalCluster`, with its name."""
