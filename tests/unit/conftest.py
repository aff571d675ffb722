"""What tests of whole checkpoints in memory, and of the console tool, begin with."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress

import fsspec
import pytest

from tests.unit.chains import one_thread
from tests.unit.console import Console


@pytest.fixture(scope="module")
def small_operations() -> Iterator[None]:
    """For modules with roots in memory, which are gone afterwards."""
    with one_thread():
        yield
    with suppress(FileNotFoundError):
        fsspec.filesystem("memory").rm("/tests", recursive=True)


@pytest.fixture
def console(capsys: pytest.CaptureFixture[str]) -> Console:
    return Console(capsys)
