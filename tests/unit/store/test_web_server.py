"""Check roots behind a web server, which can be read: with and without ranges of bytes."""

from __future__ import annotations

import functools
import re
import threading
from collections.abc import Iterator
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from tests.unit.console import Console
from tests.unit.small_roots import FILE, ids, put
from torchrec_checknrun.errors import StorageFailed
from torchrec_checknrun.root.chain import newest
from torchrec_checknrun.store.folder import Folder

CONTENT = b"0123456789"


class Plain(SimpleHTTPRequestHandler):
    """Python's own server, which lists folders as HTML and knows no ranges."""

    protocol_version = "HTTP/1.1"

    def log_message(self, format: str, *args: object) -> None:
        """Say nothing."""


class WithRanges(Plain):
    def do_GET(self) -> None:
        path, wanted = Path(self.translate_path(self.path)), self.headers.get("Range", "")
        match = re.fullmatch(r"bytes=(\d+)-(\d*)", wanted)
        if match is None or not path.is_file():
            super().do_GET()
            return
        data = path.read_bytes()
        first, last = int(match[1]), min(int(match[2] or len(data)), len(data) - 1)
        self.send_response(206 if first <= last else 416)
        self.send_header("Content-Length", str(max(0, last + 1 - first)))
        self.end_headers()
        self.wfile.write(data[first : last + 1])


class WithoutSizes(Plain):
    protocol_version = "HTTP/1.0"  # the end of the connection is the file's

    def send_header(self, keyword: str, value: str) -> None:
        """Leave out how long a file is."""
        if keyword != "Content-Length" or not self.path.endswith(".bin"):
            super().send_header(keyword, value)


@pytest.fixture(params=[Plain, WithRanges])
def served(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Folder]:
    with serving(request.param, tmp_path) as url:
        yield Folder(url)


class serving:
    """Serve a folder's content."""

    def __init__(self, kind: type[Plain], folder: Path) -> None:
        handler = functools.partial(kind, directory=str(folder))
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), handler)

    def __enter__(self) -> str:
        threading.Thread(target=self._server.serve_forever, daemon=True).start()
        return f"http://127.0.0.1:{self._server.server_port}/run"

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()
        self._server.server_close()


def test_checkpoints_are_found_and_read(
    served: Folder, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    first = put(Folder(tmp_path / "run"), 1)
    second = put(Folder(tmp_path / "run"), 2, first)
    assert ids(newest(served)[0]) == [first.id, second.id]
    folder = served / first.id
    assert folder.sizes()[FILE.name] == folder.size(FILE.name) == len(CONTENT)
    assert folder.size("no such file") is None
    assert folder.read(FILE.name) == CONTENT
    assert folder.read(FILE.name, 2, 3) == b"234"
    memory = bytearray(4)
    assert folder.read_into(memoryview(memory), FILE.name, 3) == 4
    assert memory == b"3456"
    listed = Console(capsys).json("ls", served.url)
    assert [one["id"] for one in listed["checkpoints"]] == [second.id, first.id], listed


def test_a_part_beyond_the_end(tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / FILE.name).write_bytes(CONTENT)
    with serving(WithRanges, tmp_path) as url:
        assert Folder(url).read(FILE.name, 8, 30) == b"89"
        assert Folder(url).read(FILE.name, 80, 30) == b""


def test_a_server_that_tells_no_sizes(tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / FILE.name).write_bytes(CONTENT)
    with serving(WithoutSizes, tmp_path) as url, pytest.raises(StorageFailed, match="tell its siz"):
        Folder(url).size(FILE.name)
