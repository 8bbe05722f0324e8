"""The nodes of a cluster as the project sees them: labels, market, and what is announced of them."""

from __future__ import annotations

LABEL_INSTANCE_TYPE = "ebbtide.dev/instance-type"
LABEL_MARKET = "ebbtide.dev/market"
LABEL_ZONE = "ebbtide.dev/zone"
