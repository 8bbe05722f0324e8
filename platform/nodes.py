"""The Ray labels by which a node says what it is and what it costs."""

from __future__ import annotations

LABEL_INSTANCE_TYPE = "ebbtide.dev/instance-type"
LABEL_MARKET = "ebbtide.dev/market"
LABEL_ZONE = "ebbtide.dev/zone"
