"""S3 (and what speaks its protocol) behind :class:`~ebbtide.platform.storage.Storage`, over boto3.

Endpoint, region and credentials are those of the standard AWS variables (``AWS_ENDPOINT_URL``,
``AWS_REGION``, ``AWS_ACCESS_KEY_ID``, ...) and files. Transient faults are retried by botocore with
growing gaps; what stays broken is mapped to the error tree with what to do.
"""

from __future__ import annotations

import contextlib
import os
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import boto3
import botocore.config
import botocore.exceptions
from boto3.exceptions import Boto3Error, S3UploadFailedError
from boto3.s3.transfer import TransferConfig

from ebbtide.platform.errors import (
    AccessError,
    AlreadyExists,
    EbbtideError,
    NotFound,
    StorageError,
    Unreachable,
)
from ebbtide.platform.storage import Listing, ObjectInfo, Upload, Uploads, check_key

_MAX_ATTEMPTS = 6
_CONNECT_TIMEOUT_S = 5
_READ_TIMEOUT_S = 60
_PART_BYTES = 16 * 2**20
_TRANSFER = TransferConfig(multipart_threshold=_PART_BYTES, multipart_chunksize=_PART_BYTES)
"""Ten parts of a file at a time, up and down; each is tried again by itself."""

_ACCESS = {
    "AccessDenied": "permission denied; allow s3:GetObject, PutObject, DeleteObject and ListBucket",
    "403": "permission denied; check the credentials and the bucket's policy",
    "InvalidAccessKeyId": "the access key is not known; check AWS_ACCESS_KEY_ID",
    "SignatureDoesNotMatch": "the secret key is wrong; check AWS_SECRET_ACCESS_KEY",
    "ExpiredToken": "the session token has expired; renew the credentials",
    "NoSuchBucket": "no such bucket; create it or correct the URI",
    "RequestTimeTooSkewed": "clock skew: this machine's clock is not the server's; set it",
    "PermanentRedirect": "the bucket is in another region; set AWS_REGION",
    "AuthorizationHeaderMalformed": "the region is wrong; set AWS_REGION",
}
_MISSING = {"NoSuchKey", "NoSuchUpload", "404", "NotFound"}
_BROKEN_BODIES = (
    botocore.exceptions.IncompleteReadError,
    botocore.exceptions.ReadTimeoutError,
    botocore.exceptions.ResponseStreamingError,
)
"""How an answer ends that is cut off; botocore's retries are over when its body begins."""
_LOST = {"PreconditionFailed", "412", "ConditionalRequestConflict", "409"}
_SETTINGS: dict[type[Exception], str] = {
    botocore.exceptions.ProfileNotFound: "correct or unset AWS_PROFILE",
    botocore.exceptions.PartialCredentialsError: "set both AWS_ACCESS_KEY_ID and "
    "AWS_SECRET_ACCESS_KEY, or neither",
    botocore.exceptions.ConfigParseError: "correct this file of AWS settings",
    botocore.exceptions.InvalidRegionError: "correct AWS_REGION",
    botocore.exceptions.CredentialRetrievalError: "renew the credentials, or set others",
}
"""What to do about settings that botocore names itself."""


def map_error(error: Exception, where: str) -> EbbtideError:
    """The error of ebbtide's tree for one of boto3's; ``where`` names URI and operation."""
    if isinstance(error, S3UploadFailedError) and isinstance(error.__context__, Exception):
        error = error.__context__
    if isinstance(error, botocore.exceptions.ClientError):
        code = str(error.response.get("Error", {}).get("Code", ""))
        if code in _MISSING:
            return NotFound(f"{where}: not there")
        if code in _LOST:
            return AlreadyExists(f"{where}: exists already")
        if code in _ACCESS:
            return AccessError(f"{where}: {_ACCESS[code]}")
        return StorageError(f"{where}: the server answered {code or error}")
    if isinstance(error, botocore.exceptions.NoCredentialsError):
        return AccessError(
            f"{where}: no credentials; set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, "
            "or give the machine an instance profile"
        )
    if isinstance(error, botocore.exceptions.NoRegionError):
        return AccessError(f"{where}: no region; set AWS_REGION")
    for kind, hint in _SETTINGS.items():
        if isinstance(error, kind):
            return AccessError(f"{where}: {str(error).rstrip('.')}; {hint}")
    if isinstance(error, botocore.exceptions.ParamValidationError):
        return AccessError(
            f"{where}: not a bucket's name or a key that S3 takes; correct the URI "
            "(s3://bucket/prefix; a bucket's name has lower-case letters, digits, '.' and '-')"
        )
    if isinstance(error, botocore.exceptions.EndpointConnectionError):
        return Unreachable(f"{where}: {error}; check AWS_ENDPOINT_URL")
    if isinstance(error, ValueError):
        return AccessError(f"{where}: {error}; check AWS_ENDPOINT_URL")
    return StorageError(f"{where}: {error}")


_lock = threading.Lock()
_clients: dict[tuple[Any, ...], Any] = {}


def _client() -> Any:
    """This process's client for the AWS variables as they are now; making one takes half a second.

    boto3's clients may be shared between threads, not with a forked process.
    """
    settings = tuple(sorted(item for item in os.environ.items() if item[0].startswith("AWS_")))
    key = (os.getpid(), os.environ.get("HOME"), settings)
    with _lock:
        if key not in _clients:
            session = boto3.session.Session()
            region = session.region_name or os.environ.get("AWS_REGION")
            if region is None and os.environ.get("AWS_ENDPOINT_URL"):
                region = "us-east-1"  # what S3-compatible servers expect when none is set
            _clients[key] = session.client(
                "s3",
                region_name=region,
                config=botocore.config.Config(
                    retries={"mode": "standard", "max_attempts": _MAX_ATTEMPTS},
                    connect_timeout=_CONNECT_TIMEOUT_S,
                    read_timeout=_READ_TIMEOUT_S,
                ),
            )
        return _clients[key]


class S3Storage:
    """Objects of one bucket under a prefix. Travels between processes as its URI."""

    def __init__(self, bucket: str, prefix: str) -> None:
        self._bucket, self._prefix = bucket, prefix

    @property
    def uri(self) -> str:
        return f"s3://{self._bucket}/{self._prefix}".rstrip("/")

    @contextlib.contextmanager
    def _mapped(self, what: str) -> Iterator[None]:
        try:
            yield
        except (botocore.exceptions.BotoCoreError, botocore.exceptions.ClientError) as error:
            raise map_error(error, f"{self.uri}: cannot {what}") from error
        except (Boto3Error, ValueError) as error:
            raise map_error(error, f"{self.uri}: cannot {what}") from error

    def _key(self, key: str) -> str:
        check_key(key)
        return f"{self._prefix}/{key}" if self._prefix else key

    def put(self, key: str, data: bytes, *, if_absent: bool = False) -> None:
        condition = {"IfNoneMatch": "*"} if if_absent else {}
        with self._mapped(f"write {key}"):
            _client().put_object(Bucket=self._bucket, Key=self._key(key), Body=data, **condition)

    def put_file(self, key: str, path: Path) -> None:
        def upload() -> None:
            with self._mapped(f"write {key}"):
                _client().upload_file(str(path), self._bucket, self._key(key), Config=_TRANSFER)

        try:
            upload()
        except NotFound:  # it was completed, the answer lost, and the repetition found it gone
            upload()

    def get(self, key: str) -> bytes:
        with self._mapped(f"read {key}"):
            return self._read(key)

    def _read(self, key: str, **options: str) -> bytes:
        """An object's bytes; an answer that is cut off is asked for again."""
        for attempts_left in reversed(range(_MAX_ATTEMPTS)):
            answer = _client().get_object(Bucket=self._bucket, Key=self._key(key), **options)
            try:
                return bytes(answer["Body"].read())
            except _BROKEN_BODIES:
                if not attempts_left:
                    raise
        raise AssertionError("the last attempt returns or raises")

    def get_range(self, key: str, start: int, length: int) -> bytes:
        if length <= 0:
            return b""
        with self._mapped(f"read {key}"):
            return self._read(key, Range=f"bytes={start}-{start + length - 1}")

    def get_file(self, key: str, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        handle, name = tempfile.mkstemp(prefix=".staged-", dir=path.parent)
        os.close(handle)
        try:
            with self._mapped(f"read {key}"):
                _client().download_file(self._bucket, self._key(key), name, Config=_TRANSFER)
            os.replace(name, path)
        finally:
            Path(name).unlink(missing_ok=True)

    def size(self, key: str) -> int:
        with self._mapped(f"read {key}"):
            answer = _client().head_object(Bucket=self._bucket, Key=self._key(key))
            return int(answer["ContentLength"])

    def list(self, prefix: str = "") -> Listing:
        root = f"{self._prefix}/" if self._prefix else ""
        found = []
        with self._mapped("list"):
            pages = _client().get_paginator("list_objects_v2")
            for page in pages.paginate(Bucket=self._bucket, Prefix=root + prefix):
                for entry in page.get("Contents", []):
                    found.append(
                        ObjectInfo(
                            entry["Key"].removeprefix(root),
                            int(entry["Size"]),
                            entry["LastModified"].timestamp(),
                        )
                    )
        return sorted(found, key=lambda info: info.key)

    def delete(self, key: str) -> None:
        with self._mapped(f"delete {key}"):
            _client().delete_object(Bucket=self._bucket, Key=self._key(key))

    def uploads(self, prefix: str = "") -> Uploads:
        root = f"{self._prefix}/" if self._prefix else ""
        found = []
        with self._mapped("list the uploads (s3:ListBucketMultipartUploads)"):
            pages = _client().get_paginator("list_multipart_uploads")
            for page in pages.paginate(Bucket=self._bucket, Prefix=root + prefix):
                for entry in page.get("Uploads", []):
                    key = entry["Key"].removeprefix(root)
                    begun_s = entry["Initiated"].timestamp()
                    found.append(Upload(key, begun_s, entry["UploadId"]))
        return found

    def abort(self, upload: Upload) -> None:
        try:
            with self._mapped(f"abort the upload of {upload.key} (s3:AbortMultipartUpload)"):
                _client().abort_multipart_upload(
                    Bucket=self._bucket, Key=self._key(upload.key), UploadId=upload.id
                )
        except NotFound:
            return

    def child(self, prefix: str) -> S3Storage:
        return S3Storage(self._bucket, self._key(prefix.rstrip("/")))
