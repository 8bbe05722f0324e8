"""``ebbtide prices`` as it is typed."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

from tests.platform.aws_price_server import price_server


def ebbtide(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    kept = {name: value for name, value in os.environ.items() if not name.startswith("AWS_")}
    return subprocess.run(
        [sys.executable, "-m", "ebbtide", *arguments],
        env={**kept, "COLUMNS": "160", **environment},
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )


def test_the_shipped_catalogue_says_whose_prices_it_holds_and_of_when() -> None:
    done = ebbtide("prices", "--json")
    assert done.returncode == 0, done.stderr
    rows = json.loads(done.stdout)
    assert {"aws", "gcp", "lambda", "coreweave"} <= {row["provider"] for row in rows}
    assert all(row["source"] and row["date"] for row in rows)
    unknown = ebbtide("prices", "no-such-type")
    assert unknown.returncode == 10
    assert "no-such-type: not in the catalogue" in unknown.stderr


def test_live_prices_of_aws_stand_beside_the_catalogue_s(tmp_path: Path) -> None:
    with price_server() as server:
        server.spot = [
            ("g6.xlarge", "us-west-2a", "2025-11-30T08:00:00.000Z", "0.3123"),
            ("g6.xlarge", "us-west-2b", "2025-11-30T08:00:00.000Z", "0.2955"),
        ]
        server.on_demand = [("g6.xlarge", "us-west-2", "0.8048000000")]
        settings = {
            "AWS_ENDPOINT_URL_EC2": server.url,
            "AWS_ENDPOINT_URL_PRICING": server.url,
            "AWS_ACCESS_KEY_ID": "key",
            "AWS_SECRET_ACCESS_KEY": "secret",
            "AWS_REGION": "us-west-2",
            "XDG_CACHE_HOME": str(tmp_path),
        }
        done = ebbtide("prices", "g6.xlarge", "--live", **settings)
        assert done.returncode == 0, done.stderr
        shown = " ".join(done.stdout.split())
        assert "on demand now, us-west-2" in shown
        assert "0.8048 a 0.3123, b 0.2955" in shown
