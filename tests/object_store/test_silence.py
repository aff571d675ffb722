"""End every operation, and name it, when an object store takes requests and answers none."""

from __future__ import annotations

import time
from collections.abc import Callable

import pytest

from tests.object_store.conftest import use
from tests.object_store.fault_proxy import Fault, FaultProxy
from torchrec_checknrun.errors import StorageUnreachable
from torchrec_checknrun.store.folder import Folder

TIMEOUT = 2.0


def write(folder: Folder) -> None:
    with folder.write("rank-00000.bin") as file:
        file.write(b"x")


@pytest.mark.parametrize(
    ("act", "method"),
    [
        (Folder.names, "GET"),
        (lambda folder: folder.put("manifest.json", b"{}", new=True), "PUT"),
        (write, "PUT"),
        (lambda folder: folder.read("a.json"), "GET"),
    ],
)
def test_every_operation_ends(
    bucket: str,
    proxy: FaultProxy,
    monkeypatch: pytest.MonkeyPatch,
    act: Callable[[Folder], object],
    method: str,
) -> None:
    use(monkeypatch, proxy.url)
    folder = Folder(f"{bucket}/run")
    folder.put("a.json", b"{}")
    folder.patience.timeout_seconds = TIMEOUT

    def choose(asked: str, path: str) -> Fault | None:
        return "silence" if asked == method else None

    proxy.choose = choose
    started = time.monotonic()
    with pytest.raises(StorageUnreachable, match=r"run.*nothing was heard from the storage"):
        act(folder)
    assert time.monotonic() - started < 30  # on a busy machine
