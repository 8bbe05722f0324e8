"""``ebbtide agent``: tells Ray about the cloud's eviction notices for this machine."""

from __future__ import annotations

import json
import logging
import time
from enum import StrEnum
from typing import TYPE_CHECKING

import typer

if TYPE_CHECKING:
    from ebbtide.platform.node_watch import Report

logger = logging.getLogger(__name__)


class CloudChoice(StrEnum):
    auto = "auto"
    aws = "aws"
    gcp = "gcp"


def agent(
    cloud: CloudChoice = typer.Option(
        CloudChoice.auto, help="Whose machine this is; auto asks the metadata service."
    ),
    node_id: str | None = typer.Option(
        None, help="Drain this Ray node only. Default: every node that runs on this machine."
    ),
    endpoint: str = typer.Option(
        "http://169.254.169.254",
        envvar="EBBTIDE_METADATA_ENDPOINT",
        help="Where the metadata service answers.",
    ),
    as_json: bool = typer.Option(False, "--json", help="One JSON line per event on stdout."),
) -> None:
    """Drain this machine's Ray nodes when its cloud announces an eviction, until SIGTERM.

    Run it on every spot node; cluster.yaml does. It finds the nodes by itself and asks every five
    seconds. A rebalance recommendation is told, and marked in the cluster.

    Example: [bold]ebbtide agent --json[/bold]
    """
    from ebbtide.platform.clock import SystemClock
    from ebbtide.platform.errors import ConfigError
    from ebbtide.platform.metadata_service import connect
    from ebbtide.platform.node_watch import NodeWatch
    from ebbtide.platform.own_nodes import OwnNodes

    if not endpoint.startswith(("http://", "https://")):
        raise ConfigError(f"--endpoint {endpoint}: write http://HOST[:PORT]")
    clock = SystemClock()
    tell = _tell_json if as_json else _tell_people
    NodeWatch(lambda: connect(cloud.value, endpoint, clock), OwnNodes(node_id), tell, clock).run()


def _tell_json(report: Report) -> None:
    line = {"time_s": time.time(), "event": report.event, "message": report.message}
    typer.echo(json.dumps({**line, **report.fields}))


def _tell_people(report: Report) -> None:
    level = logging.WARNING if report.event in ("notice", "trouble") else logging.INFO
    logger.log(level, report.message)
