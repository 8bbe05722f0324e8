"""``ebbtide submit``: a training job as a Ray job, from outside the cluster."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import typer


def submit(
    file: Path = typer.Argument(help="The job file (YAML), inside the working directory."),
    overrides: list[str] = typer.Option(
        [], "--set", metavar="KEY=VALUE", help="Override a key of the file. May be repeated."
    ),
    address: str | None = typer.Option(
        None,
        help="The cluster's dashboard. Default: RAY_API_SERVER_ADDRESS, else "
        "http://127.0.0.1:8265.",
    ),
    working_dir: Path = typer.Option(
        Path("."), help="The directory that travels to the cluster: your code and job files."
    ),
    name: str | None = typer.Option(
        None, help="Name of the Ray job. If there is one already, it is followed instead."
    ),
    no_wait: bool = typer.Option(False, "--no-wait", help="Do not follow the job."),
    as_json: bool = typer.Option(False, "--json", help="One JSON document about the job."),
) -> None:
    """Submit a training job to a Ray cluster, follow its log, and exit as it does.

    The job goes on when this command is interrupted; with --name it can be followed again.

    Example: [bold]ebbtide submit examples/stdlib-lm/train.yaml --address http://head:8265[/bold]
    """
    from ebbtide.platform import config as job_file
    from ebbtide.train.config import TrainConfig

    config = job_file.load(file, TrainConfig, overrides)
    require_lasting(config.data.uri, "data.uri")
    require_lasting(config.storage, "storage")
    command = [_inside(file, working_dir)]
    run_there(command, overrides, address, working_dir, name, no_wait, as_json)


def run_there(
    what: list[str],
    overrides: list[str],
    address: str | None,
    working_dir: Path,
    name: str | None,
    no_wait: bool,
    as_json: bool,
) -> None:
    """Run ``ebbtide train WHAT`` as a Ray job, and exit as it does."""
    from ebbtide.platform.ray_jobs import RayJobs

    command = ["python", "-m", "ebbtide", "train", *what]
    for override in overrides:
        command += ["--set", override]
    jobs = RayJobs(address)
    job_id, is_new = jobs.submit(command, working_dir.resolve(), name)
    state = "submitted" if is_new else "is there already; following it"
    typer.echo(f"job {job_id} {state} ({jobs.address})", err=True)
    if no_wait:
        _report({"job_id": job_id, "submitted": is_new, "status": None, "exit_code": None}, as_json)
        return
    try:
        outcome = jobs.follow(job_id, lambda text: typer.echo(text, nl=False, err=True))
    except KeyboardInterrupt:
        typer.echo(f"the job goes on; follow it again with --name {job_id}", err=True)
        raise
    document = {
        "job_id": job_id,
        "submitted": is_new,
        "status": outcome.status,
        "exit_code": outcome.exit_code,
    }
    _report(document, as_json)
    if not outcome.succeeded:
        typer.echo(f"error: job {job_id} {outcome.status.lower()}: {outcome.message}", err=True)
        sys.exit(_exit_code(outcome.exit_code))


def _exit_code(driver: int | None) -> int:
    """The driver's exit code as a shell would give it; 1 where Ray does not know it."""
    if not driver:
        return 1
    return driver if driver > 0 else 128 - driver


def _report(document: dict[str, object], as_json: bool) -> None:
    if as_json:
        typer.echo(json.dumps(document, indent=2))
    else:
        typer.echo(f"job {document['job_id']}: {document['status'] or 'running'}")


def _inside(file: Path, working_dir: Path) -> str:
    """The file's path within the working directory, which is all that travels."""
    from ebbtide.platform.errors import ConfigError

    relative = os.path.relpath(file.resolve(), working_dir.resolve())
    if relative.startswith(os.pardir):
        raise ConfigError(f"{file} is not inside {working_dir}; give another --working-dir")
    return relative


def require_lasting(uri: str, key: str) -> None:
    """On the cluster a relative path would lie in a temporary copy of the working directory."""
    from ebbtide.platform.errors import ConfigError

    if "://" not in uri and not uri.startswith(("/", "~")):
        raise ConfigError(
            f"{key}: {uri} is relative, and the job runs in a temporary copy of the working "
            "directory; write an absolute path that all nodes share, or s3://bucket/prefix"
            + ("" if key.startswith("-") else f" (--set {key}=...)")
        )
