"""Ask a server over HTTP at times that don't depend on its answers, and count from when due.

Client and server share a machine, so a request costs the client little: requests are made before,
one thread waits for all answers, and answers are not looked into.
"""

from __future__ import annotations

import asyncio
import selectors
import time
from collections import deque
from collections.abc import Callable, Coroutine, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

import numpy as np

T = TypeVar("T")

_END = b"\r\n\r\n"
_LENGTH = b"content-length: "


class AnswerFailed(RuntimeError):
    """An answer is not of status 200, or cut off."""


class HungUp(AnswerFailed):
    """The server ended the connection before any answer."""


def post(host: str, port: int, path: str, body: bytes) -> bytes:
    """Return a request that leaves the connection open."""
    head = (
        f"POST {path} HTTP/1.1\r\nHost: {host}:{port}\r\nContent-Type: application/json\r\n"
        f"Content-Length: {len(body)}\r\n\r\n"
    )
    return head.encode() + body


class _Connection(asyncio.Protocol):
    """A connection on which one question is asked at a time."""

    def __init__(self) -> None:
        self._received = b""
        self._answered: asyncio.Future[None] | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self.transport = transport

    def ask(self, request: bytes) -> asyncio.Future[None]:
        """Send a request; return what is done once its answer is there."""
        self._received = b""
        self._answered = asyncio.get_running_loop().create_future()
        self.transport.write(request)
        return self._answered

    def data_received(self, data: bytes) -> None:
        self._received += data
        head, end, body = self._received.partition(_END)
        if not end or self._answered is None:
            return
        length = int(head.lower().partition(_LENGTH)[2].partition(b"\r")[0])
        if len(body) >= length and not self._answered.done():
            if head.split(None, 2)[1] == b"200":
                self._answered.set_result(None)
            else:
                self._answered.set_exception(AnswerFailed(self._received.decode()))

    def connection_lost(self, error: Exception | None) -> None:
        if self._answered is not None and not self._answered.done():
            kind = AnswerFailed if self._received else HungUp
            self._answered.set_exception(kind(f"the server hung up: {error}"))


class Load:
    """Questions for a server.

    Args:
        host, port: of the server.
        requests: whole requests, see ``post``; asked in turn.

    Attributes:
        per_second: requests of the open loop, on average; the times are those of a Poisson process.
    """

    def __init__(self, host: str, port: int, requests: Sequence[bytes]) -> None:
        self._address = host, port
        self._requests = requests
        self._random = np.random.default_rng(1)
        self.per_second = 0.0

    def find_capacity(self, seconds: float, clients: int) -> float:
        """Return the answers a second that clients get who ask one question after the other.

        Raises:
            AnswerFailed: an answer is an error.
        """
        return _run(self._closed_loop(seconds, clients)) / seconds

    async def _closed_loop(self, seconds: float, clients: int) -> int:
        until = time.perf_counter() + seconds

        async def ask() -> int:
            connection, count = await self._connect(), 0
            while time.perf_counter() < until:
                await connection.ask(self._requests[count % len(self._requests)])
                count += 1
            connection.transport.close()
            return count

        return sum(await asyncio.gather(*(ask() for _ in range(clients))))

    def ask_during(self, what: Callable[[float], None], argument: float) -> list[float]:
        """Ask at random times until a function returns; return the latencies in seconds, each from
        when the request was due.

        Raises:
            AnswerFailed: an answer is an error.
        """
        return _run(self._open_loop(what, argument))

    async def _open_loop(self, what: Callable[[float], None], argument: float) -> list[float]:
        free: deque[_Connection] = deque()  # the longest idle first: servers hang up on idle ones

        async def ask(number: int, due: float) -> float:
            while free and free[0].transport.is_closing():
                free.popleft()
            request, idle = self._requests[number % len(self._requests)], bool(free)
            connection = free.popleft() if free else await self._connect()
            try:
                await connection.ask(request)
            except HungUp:
                if not idle:
                    raise
                connection = await self._connect()  # the server was just ending the idle one
                await connection.ask(request)
            free.append(connection)
            return time.perf_counter() - due

        asked: list[asyncio.Task[float]] = []
        with ThreadPoolExecutor(1) as beside:
            done = asyncio.get_running_loop().run_in_executor(beside, what, argument)
            due = time.perf_counter()
            while not done.done():
                due += self._random.exponential(1 / self.per_second)
                await asyncio.sleep(max(0.0, due - time.perf_counter()))
                asked.append(asyncio.create_task(ask(len(asked), due)))
            latencies = await asyncio.gather(*asked)
            await done
        for connection in free:
            connection.transport.close()
        return latencies

    async def _connect(self) -> _Connection:
        _, connection = await asyncio.get_running_loop().create_connection(
            _Connection, *self._address
        )
        return connection


def _run(work: Coroutine[Any, Any, T]) -> T:
    """Run in a loop whose waits are not rounded to milliseconds, as epoll's are."""
    loop = asyncio.SelectorEventLoop(selectors.SelectSelector())
    try:
        return loop.run_until_complete(work)
    finally:
        loop.close()
