"""What tests share: real servers and clusters, started once a session."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from ebbtide.platform.local_s3 import LocalS3


@pytest.fixture(scope="session")
def s3_session() -> Iterator[LocalS3]:
    """One SeaweedFS server for the session."""
    with LocalS3() as server:
        yield server


@pytest.fixture
def s3_server(s3_session: LocalS3, monkeypatch: pytest.MonkeyPatch) -> LocalS3:
    """The session's S3 server, with the AWS variables leading to it."""
    for name, value in s3_session.environment.items():
        monkeypatch.setenv(name, value)
    return s3_session
