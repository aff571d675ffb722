"""Ask a plain HTTP server in an open loop: latencies count from when a request was due."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import numpy as np
import pytest

from recipes.benchmarks.open_loop import AnswerFailed, Load, post

BODIES = [b"fast", b"fast", b"fast", b"slow"]
SLOW_SECONDS = 0.2


class Handler(BaseHTTPRequestHandler):
    """Echoes what is asked."""

    protocol_version = "HTTP/1.1"

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["content-length"]))
        if body == b"slow":
            time.sleep(SLOW_SECONDS)
        self.send_response(500 if body == b"wrong" else 200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *arguments: object) -> None:
        pass


class Server(ThreadingHTTPServer):
    """Lets as many clients wait for it as come at once: the system refuses others."""

    request_queue_size = 1024


@contextmanager
def serving(handler: type[Handler]) -> Iterator[int]:
    """Serve within the block; yield the port."""
    with Server(("127.0.0.1", 0), handler) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        try:
            yield server.server_address[1]
        finally:
            server.shutdown()
            thread.join()


@pytest.fixture
def port() -> Iterator[int]:
    with serving(Handler) as found:
        yield found


def load_of(port: int, bodies: list[bytes]) -> Load:
    return Load("127.0.0.1", port, [post("127.0.0.1", port, "/predict", body) for body in bodies])


def test_slow_answers_hold_no_other_request_up(port: int) -> None:
    load = load_of(port, BODIES)
    load.per_second = 100.0
    latencies = np.array(load.ask_during(time.sleep, 1.0))
    slow = np.arange(len(latencies)) % 4 == 3
    assert latencies[slow].min() >= SLOW_SECONDS
    assert np.median(latencies[~slow]) < SLOW_SECONDS


def test_a_request_counts_from_when_it_was_due(port: int) -> None:
    """A client that is held up itself does not hide the time."""
    load = load_of(port, [b"fast"])
    load.per_second = 200.0

    def what(seconds: float) -> None:
        time.sleep(0.1)
        until = time.perf_counter() + seconds
        while time.perf_counter() < until:  # holds Python's lock, for the most part
            pass

    assert load.ask_during(time.sleep, 0.1)
    assert max(load.ask_during(what, 0.3)) > 0.004


def test_capacity_counts_all_clients(port: int) -> None:
    load = load_of(port, [b"slow"])
    alone = load.find_capacity(1.0, 1)
    assert 0 < alone <= 1 / SLOW_SECONDS + 1  # one answer may come after the end
    assert load.find_capacity(1.0, 4) > 2 * alone


@pytest.mark.parametrize("how", ["open", "closed"])
def test_an_error_ends_the_measurement(port: int, how: str) -> None:
    load = load_of(port, [b"fast", b"wrong"])
    load.per_second = 100.0
    ask: dict[str, Callable[[], object]] = {
        "open": lambda: load.ask_during(time.sleep, 0.1),
        "closed": lambda: load.find_capacity(0.1, 2),
    }
    with pytest.raises(AnswerFailed, match="500"):
        ask[how]()


def test_a_server_that_hangs_up_is_called_again(port: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Servers end connections that were idle for some seconds; a request on one gets no answer."""
    monkeypatch.setattr(Handler, "timeout", 0.5)
    load = load_of(port, [b"fast"])
    load.per_second = 1.0
    assert len(load.ask_during(time.sleep, 4.0)) > 2


class Once(Handler):
    """Hangs up at the second request of a connection, without an answer."""

    answered = False

    def parse_request(self) -> bool:
        if self.answered:
            self.close_connection = True
            return False
        self.answered = True
        return super().parse_request()


def test_a_request_that_meets_the_end_of_a_connection_is_sent_again() -> None:
    with serving(Once) as port:
        load = load_of(port, [b"fast"])
        load.per_second = 20.0
        assert len(load.ask_during(time.sleep, 1.0)) > 2


class Silent(Handler):
    """Hangs up at the first request."""

    def parse_request(self) -> bool:
        self.close_connection = True
        return False


def test_a_server_that_never_answers_is_an_error() -> None:
    with serving(Silent) as port:
        load = load_of(port, [b"fast"])
        load.per_second = 20.0
        with pytest.raises(AnswerFailed, match="hung up"):
            load.ask_during(time.sleep, 0.5)
