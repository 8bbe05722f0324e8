"""A server that speaks AWS's two price interfaces as they are documented, on a real socket."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qs
from xml.sax.saxutils import escape

_NAMESPACE = "http://ec2.amazonaws.com/doc/2016-11-15/"


class PriceServer(ThreadingHTTPServer):
    """``spot``: (type, zone, timestamp, dollars); ``on_demand``: (type, region, dollars).

    Spot prices come two a page. ``requests`` are what was asked for; with ``refuse`` every answer
    is AWS's for a lack of rights.
    """

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.spot: list[tuple[str, str, str, str]] = []
        self.on_demand: list[tuple[str, str, str]] = []
        self.requests: list[str] = []
        self.refuse = False
        self.garbage = False

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"


@contextmanager
def price_server() -> Iterator[PriceServer]:
    """A server at work."""
    with PriceServer() as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True)
        thread.start()
        try:
            yield server
        finally:
            server.shutdown()
            thread.join()


class _Handler(BaseHTTPRequestHandler):
    server: PriceServer
    protocol_version = "HTTP/1.1"

    def log_message(self, format: str, *args: Any) -> None:  # noqa: A002
        return None

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"])).decode()
        signed_for = self.headers["Authorization"].split("/")[3]
        target = self.headers.get("X-Amz-Target")
        if target is not None:
            assert (target, signed_for) == ("AWSPriceListService.GetProducts", "pricing")
            self._products(json.loads(body))
        else:
            form = {name: values[0] for name, values in parse_qs(body).items()}
            assert (form["Action"], signed_for) == ("DescribeSpotPriceHistory", "ec2")
            assert form["ProductDescription.1"] == "Linux/UNIX"
            self._spot(form)

    def _spot(self, form: dict[str, str]) -> None:
        kind, start = form["InstanceType.1"], int(form.get("NextToken", "0"))
        self.server.requests.append(f"spot {kind} {start}")
        if self.server.refuse:
            error = (
                "<Response><Errors><Error><Code>UnauthorizedOperation</Code><Message>You are not "
                "authorized</Message></Error></Errors><RequestID>r</RequestID></Response>"
            )
            return self._answer(403, "text/xml", error)
        found = [each for each in self.server.spot if each[0] == kind]
        page = found[start : start + 2]
        items = "".join(
            f"<item><instanceType>{escape(t)}</instanceType><productDescription>Linux/UNIX"
            f"</productDescription><spotPrice>{usd}</spotPrice><timestamp>{at}</timestamp>"
            f"<availabilityZone>{zone}</availabilityZone></item>"
            for t, zone, at, usd in page
        )
        token = str(start + 2) if start + 2 < len(found) else ""
        self._answer(
            200,
            "text/xml",
            f'<DescribeSpotPriceHistoryResponse xmlns="{_NAMESPACE}"><requestId>r</requestId>'
            f"<spotPriceHistorySet>{items}</spotPriceHistorySet><nextToken>{token}</nextToken>"
            "</DescribeSpotPriceHistoryResponse>",
        )

    def _products(self, request: dict[str, Any]) -> None:
        wanted = {each["Field"]: each["Value"] for each in request["Filters"]}
        kind, region = wanted["instanceType"], wanted["regionCode"]
        assert request["ServiceCode"] == "AmazonEC2"
        assert wanted["operatingSystem"] == "Linux"
        self.server.requests.append(f"on_demand {kind}")
        if self.server.refuse:
            error = {"__type": "AccessDeniedException", "Message": "not authorized"}
            return self._answer(400, "application/x-amz-json-1.1", json.dumps(error))
        found = [usd for t, r, usd in self.server.on_demand if (t, r) == (kind, region)]
        products = [json.dumps(_product(kind, usd)) for usd in found]
        if self.server.garbage:
            products = ['{"product": {}}']
        answer = {"FormatVersion": "aws_v1", "PriceList": products}
        self._answer(200, "application/x-amz-json-1.1", json.dumps(answer))

    def _answer(self, status: int, kind: str, text: str) -> None:
        data = text.encode()
        self.send_response(status)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)


def _product(kind: str, usd: str) -> dict[str, Any]:
    """One entry of the price list, with the reserved terms that come beside."""
    rate = {"unit": "Hrs", "pricePerUnit": {"USD": usd}, "description": f"${usd} per hour"}
    free = {"unit": "Quantity", "pricePerUnit": {"USD": "900.0"}}
    return {
        "product": {"sku": "S", "attributes": {"instanceType": kind}},
        "terms": {
            "OnDemand": {"S.T": {"priceDimensions": {"S.T.R": rate, "S.T.Q": free}}},
            "Reserved": {"S.U": {"priceDimensions": {"S.U.R": rate | {"pricePerUnit": {}}}}},
        },
    }
