"""Provide roots, a group of one rank, a tracked model and the console tool."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import fsspec
import pytest
import torch.distributed as dist
from torch import nn

from tests.crash.save_sweep import alone
from tests.distributed.models import Job
from tests.unit.chains import new_root, one_thread
from tests.unit.console import Console
from tests.unit.optimizer_changes import Model
from tests.unit.run import deltas
from tests.unit.run.jobs import make_job
from tests.unit.run.lives import Lives
from tests.unit.tracked_model import make_model
from torchrec_checknrun.codecs.kernels import dispatch as kernel
from torchrec_checknrun.store.folder import Folder
from torchrec_checknrun.tracking import TrackedModel, track
from torchrec_checknrun.writers.lease import Lease

NUMPY = [pytest.mark.slow] if kernel.has_extension() else []
"""Tests that NumPy does the same as the compiled kernel always run."""


@pytest.fixture(scope="module", autouse=True)
def _leases() -> Iterator[None]:
    """End the renewals of leases that a module's tests have left open, a killed run's for instance:
    they would come into tests of other modules that count a process's storage operations.
    """
    yield
    for lease in tuple(Lease._held):
        lease._stop.set()


@pytest.fixture(params=["disk", "memory"])
def root(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Folder]:
    if request.param == "disk":
        yield Folder(tmp_path / "my runs")
        return
    folder = Folder("memory://tests/unit/run")
    folder.create()
    yield folder
    fsspec.filesystem("memory").rm("/tests", recursive=True)


@pytest.fixture
def memory_root() -> Iterator[Folder]:
    """Make a root in memory; delete all of these after the test."""
    yield new_root()
    fsspec.filesystem("memory").rm("/tests", recursive=True)


@pytest.fixture
def disk(tmp_path: Path) -> Folder:
    return Folder(tmp_path / "run")


@pytest.fixture(scope="module")
def small_operations() -> Iterator[None]:
    """Use one thread during a module, and delete its roots in memory afterwards."""
    with one_thread():
        yield
    with suppress(FileNotFoundError):
        fsspec.filesystem("memory").rm("/tests", recursive=True)


@pytest.fixture
def console(capsys: pytest.CaptureFixture[str]) -> Console:
    return Console(capsys)


@pytest.fixture(scope="module")
def group() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.fixture
def one_rank() -> Iterator[None]:
    """Run a test in a process group of one rank, with one thread."""
    with alone():
        yield


@pytest.fixture(params=["fp32", "logdelta"])
def state_scheme(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Run a test with tables stored as differences whose optimizer state is exact, or logarithmic
    differences, too.
    """
    monkeypatch.setattr(deltas, "default_scheme", request.param)
    found: str = request.param
    return found


@pytest.fixture
def job(one_rank: None) -> Job:
    return make_job()


@pytest.fixture
def model(group: None) -> nn.Module:
    return make_model()


@pytest.fixture
def tracked(model: nn.Module) -> Iterator[TrackedModel]:
    tracked = track(model)
    yield tracked
    tracked.close()


@pytest.fixture(scope="module", params=["compiled", "numpy"])
def each_kernel(request: pytest.FixtureRequest) -> Iterator[None]:
    """Run a module's tests with the compiled kernel, then with NumPy in its place."""
    yield from _with_kernel(request.param == "compiled")


@pytest.fixture(scope="module", params=["compiled", pytest.param("numpy", marks=NUMPY)])
def either_kernel(request: pytest.FixtureRequest) -> Iterator[None]:
    """Run a module's tests as ``each_kernel`` does; `make test` runs them with one of the two."""
    yield from _with_kernel(request.param == "compiled")


def _with_kernel(compiled: bool) -> Iterator[None]:
    if compiled and not kernel.has_extension():
        pytest.skip("the compiled kernel was not built: there was no C++ compiler")
    with one_thread(), pytest.MonkeyPatch.context() as patch:
        if not compiled:
            patch.setattr(kernel, "has_extension", lambda: False)
        yield


@pytest.fixture
def control_c() -> Iterator[None]:
    """Let an interrupt raise ``KeyboardInterrupt``: shells start jobs that ignore it."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.fixture
def lives(tmp_path: Path) -> Iterator[Lives]:
    """Make a run with images that lives several times."""
    made = Lives(tmp_path)
    yield made
    made.end()


@pytest.fixture
def small_model() -> Iterator[tuple[Model, TrackedModel]]:
    """Provide a dense model that optimizers step, and its tracker."""
    made = Model()
    tracked = TrackedModel(made)
    yield made, tracked
    tracked.close()
