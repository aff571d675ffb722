"""Run a proxy before the S3 server that answers with errors, late, or not to the end."""

from __future__ import annotations

import http.client
import threading
import time
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Literal
from urllib.parse import urlparse

Fault = Literal["429", "500", "502", "503", "504", "slow", "cut", "lost answer", "silence"]
Choose = Callable[[str, str], Fault | None]
"""Choose the fault of a request, from its method and path."""

_HOP = {"connection", "transfer-encoding", "keep-alive"}


class FaultProxy:
    """A proxy that forwards requests, except where ``choose`` returns a fault.

    Attributes:
        choose: may be changed at any time.
        requests: method and path of all requests received.
        faults: number of spoilt answers.
    """

    def __init__(self, upstream: str, slow_seconds: float = 0.5) -> None:
        self.choose: Choose = lambda method, path: None
        self.requests: list[tuple[str, str]] = []
        self.faults = 0
        self._slow = slow_seconds
        self._closed = threading.Event()
        self._host = urlparse(upstream).netloc
        proxy = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def handle_any(self) -> None:
                proxy._answer(self)

            do_GET = do_PUT = do_POST = do_DELETE = do_HEAD = handle_any

            def log_message(self, format: str, *values: object) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        self.url = f"http://127.0.0.1:{self._server.server_address[1]}"
        threading.Thread(target=self._server.serve_forever, daemon=True).start()

    def close(self) -> None:
        """Stop the proxy."""
        self._closed.set()
        self._server.shutdown()
        self._server.server_close()

    def _answer(self, request: BaseHTTPRequestHandler) -> None:
        method = request.command
        body = _body(request)
        self.requests.append((method, request.path))
        fault = self.choose(method, request.path)
        self.faults += fault is not None
        if fault is not None and fault.isdigit():
            self._refuse(request, int(fault))
            return
        if fault == "silence":
            self._closed.wait()
            request.close_connection = True
            return
        if fault == "slow":
            time.sleep(self._slow)
        try:
            answer, data = self._forward(request, body)
        except OSError:
            self._refuse(request, 503)
            return
        if fault == "lost answer":
            request.close_connection = True
            return
        _pass_on(request, answer, data, cut=fault == "cut")

    def _forward(
        self, request: BaseHTTPRequestHandler, body: bytes
    ) -> tuple[http.client.HTTPResponse, bytes]:
        """Send a request to the server; return the server's answer and the answer's body."""
        # The Host header is part of the signature: forward the one that the client has sent.
        connection = http.client.HTTPConnection(self._host, timeout=60)
        try:
            connection.putrequest(
                request.command, request.path, skip_host=True, skip_accept_encoding=True
            )
            for name, value in request.headers.items():
                if name.lower() not in _HOP:
                    connection.putheader(name, value)
            if body and "Content-Length" not in request.headers:
                connection.putheader("Content-Length", str(len(body)))
            connection.endheaders()
            if body:
                connection.send(body)
            answer = connection.getresponse()
            return answer, answer.read()
        finally:
            connection.close()

    def _refuse(self, request: BaseHTTPRequestHandler, status: int) -> None:
        data = b"<html>by a load balancer before the store</html>"
        if code := {500: "InternalError", 503: "SlowDown"}.get(status):
            data = f"<Error><Code>{code}</Code><Message>by the test</Message></Error>".encode()
        request.send_response(status)
        request.send_header("Content-Type", "application/xml" if code else "text/html")
        request.send_header("Content-Length", str(len(data)))
        request.end_headers()
        if request.command != "HEAD":
            request.wfile.write(data)


def _pass_on(
    request: BaseHTTPRequestHandler, answer: http.client.HTTPResponse, data: bytes, *, cut: bool
) -> None:
    """Give the client an answer; cut the body in half and close the connection on request."""
    head = request.command == "HEAD"
    request.send_response(answer.status)
    for name, value in answer.getheaders():
        if name.lower() not in {*_HOP, "content-length", "date", "server"}:
            request.send_header(name, value)
    length = answer.getheader("Content-Length") if head else str(len(data))
    request.send_header("Content-Length", length or "0")
    request.end_headers()
    if not head:
        request.wfile.write(data[: len(data) // 2] if cut else data)
    if cut:
        request.close_connection = True


def _body(request: BaseHTTPRequestHandler) -> bytes:
    """Return the body as received, perhaps in chunks that the client has signed."""
    if request.headers.get("Expect", "").lower() == "100-continue":
        request.send_response_only(100)
        request.end_headers()
    if "chunked" not in request.headers.get("Transfer-Encoding", ""):
        return request.rfile.read(int(request.headers.get("Content-Length", 0)))
    pieces = []
    while size := int(request.rfile.readline().split(b";")[0], 16):
        pieces.append(request.rfile.read(size))
        request.rfile.readline()
    request.rfile.readline()
    return b"".join(pieces)
