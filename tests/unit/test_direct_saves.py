"""Keep marks between ``dcp.save`` calls, on a model sharded over a group of one."""

import pickle
import shutil
import threading
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.staging import BlockingAsyncStager

from tests.unit.tracked_model import DIM, ROWS, WIDE, make_model, modified, table, train
from torchrec_checknrun import Quantization
from torchrec_checknrun.dcp import Fit, LoadPlanner, SavePlanner, StorageReader, StorageWriter
from torchrec_checknrun.tracking import TrackedModel, track

pytestmark = pytest.mark.usefixtures("group")


class TestDirectSaves:
    """Lose no row between two checkpoints of ``dcp.save``."""

    def save(self, path: Path, tracked: TrackedModel, bits: int | None = None) -> Any:
        planner = SavePlanner(tracked, quantization=Quantization(bits, exact_below_rows=0))
        return dcp.save({}, storage_writer=StorageWriter(path), planner=planner).planner_data

    def check(self, path: Path, model: nn.Module) -> None:
        """Check that the checkpoint equals the model."""
        fresh = make_model()
        other = track(fresh)
        for shard in other.shards:
            shard.write_rows(range(ROWS), torch.zeros(ROWS, shard.rectangle.cols))
        dcp.load({}, storage_reader=StorageReader(path), planner=LoadPlanner(other))
        for name in other.tables:
            assert torch.equal(table(fresh, name), table(model, name))
        other.close()

    def test_full_then_differential(
        self, model: nn.Module, tracked: TrackedModel, tmp_path: Path
    ) -> None:
        train(model, a=[[1, 2]])
        first = self.save(tmp_path / "first", tracked)
        train(model, a=[[5]], shared=[[6]])
        second = self.save(tmp_path / "second", tracked)
        assert (first.kind, second.kind) == ("full", "differential")
        assert second.parent == first.link
        assert second.tables[WIDE].stored_values == DIM
        self.check(tmp_path / "second", model)
        assert modified(tracked)["wide"] == [1, 2, 5]

    def test_marks_are_united_by_a_group_for_the_cpu(
        self, tracked: TrackedModel, tmp_path: Path
    ) -> None:
        beside = mock.Mock()
        with (
            mock.patch("torchrec_checknrun.dcp.save.gloo_beside", return_value=beside),
            mock.patch.object(tracked, "all_reduce_marks") as unite,
        ):
            self.save(tmp_path / "first", tracked)
        unite.assert_called_once_with(beside)

    def test_what_a_chain_builds_on_was_deleted(
        self,
        model: nn.Module,
        tracked: TrackedModel,
        tmp_path: Path,
        caplog: pytest.LogCaptureFixture,
    ) -> None:
        for step in range(2):
            train(model, a=[[step]])
            self.save(tmp_path / str(step), tracked)
        shutil.rmtree(tmp_path / "0")
        train(model, a=[[5]])
        assert self.save(tmp_path / "2", tracked).kind == "full"
        assert "2 is a full checkpoint, since" in caplog.text
        self.check(tmp_path / "2", model)
        shutil.rmtree(tmp_path / "1")
        train(model, a=[[6]])
        assert self.save(tmp_path / "3", tracked).kind == "differential"
        self.check(tmp_path / "3", model)

    def test_a_load_that_allows_differences(self, tracked: TrackedModel, tmp_path: Path) -> None:
        """Skip what only one side has, as the error of a strict load advises."""
        path = tmp_path / "one"
        planner = SavePlanner(tracked)
        dcp.save({"a": {"x": 1}}, storage_writer=StorageWriter(path), planner=planner)
        state = {"a": {"x": 0, "y": 2}, "new": {"z": 3}}
        with pytest.raises(CheckpointException, match="strict=False"):
            dcp.load(state, storage_reader=StorageReader(path), planner=LoadPlanner(tracked))
        allowing = LoadPlanner(tracked, fit=Fit(strict=False))
        dcp.load(state, storage_reader=StorageReader(path), planner=allowing)
        assert state == {"a": {"x": 1, "y": 2}, "new": {"z": 3}}
        wanted = {"state a.y: not in the checkpoint", "state 'new': not in the checkpoint"}
        assert {*allowing.skipped} == wanted

    def test_a_second_save_into_the_same_directory_loses_nothing(
        self, model: nn.Module, tracked: TrackedModel, tmp_path: Path
    ) -> None:
        first = self.save(tmp_path / "first", tracked)
        train(model, a=[[5]])
        with pytest.raises(CheckpointException, match="CheckpointExists"):
            self.save(tmp_path / "first", tracked)
        train(model, a=[[6]])
        second = self.save(tmp_path / "second", tracked)
        assert second.parent == first.link
        assert second.tables[WIDE].stored_values == 2 * DIM
        self.check(tmp_path / "second", model)

    def test_a_failed_save_loses_nothing(
        self,
        model: nn.Module,
        tracked: TrackedModel,
        tmp_path: Path,
        monkeypatch: pytest.MonkeyPatch,
    ) -> None:
        self.save(tmp_path / "first", tracked)
        train(model, a=[[5]])
        with monkeypatch.context() as patched:
            patched.setattr("os.link", lambda *_, **__: 1 / 0)
            with pytest.raises(CheckpointException, match="ZeroDivisionError"):
                self.save(tmp_path / "second", tracked)
        train(model, a=[[6]])
        third = self.save(tmp_path / "third", tracked)
        assert third.tables[WIDE].stored_values == 2 * DIM
        self.check(tmp_path / "third", model)

    def test_a_rise_in_width_needs_a_full_checkpoint(
        self, model: nn.Module, tracked: TrackedModel, tmp_path: Path
    ) -> None:
        """Write a full checkpoint: other rows would stay lossy in an exact one."""
        kinds = []
        for i, bits in enumerate([8, 4, 8, 8, None, 8, None]):
            train(model, a=[[i]])
            kinds.append(self.save(tmp_path / str(i), tracked, bits).kind)
        assert [kind == "full" for kind in kinds] == [True, False, True, False, True, False, True]
        self.check(tmp_path / "6", model)

    def test_a_damaged_checkpoint_is_nobodys_parent(
        self, model: nn.Module, tracked: TrackedModel, tmp_path: Path
    ) -> None:
        first = self.save(tmp_path / "first", tracked)
        train(model, a=[[5]])
        self.save(tmp_path / "second", tracked)
        (tmp_path / "second" / "manifest.json").write_bytes(b"{}")
        train(model, a=[[6]])
        third = self.save(tmp_path / "third", tracked)
        assert third.parent == first.link
        self.check(tmp_path / "third", model)


class LateWriter(StorageWriter):
    """A writer that begins once it is let."""

    def __init__(self, path: Path, begin: threading.Event) -> None:
        super().__init__(path)
        self._begin = begin

    def storage_meta(self) -> Any:
        assert self._begin.wait(60)
        return super().storage_meta()


class TestAsyncSaves:
    """Store what ``dcp.async_save`` has copied, never rows that training changes meanwhile."""

    def save(
        self, state: dict[str, Any], path: Path, planner: SavePlanner, meanwhile: Callable[[], None]
    ) -> Any:
        begin = threading.Event()
        saved = dcp.async_save(
            state,
            planner=planner,
            storage_writer=LateWriter(path, begin),
            async_stager=BlockingAsyncStager(),
        )
        assert isinstance(saved, Future)
        meanwhile()
        begin.set()
        return saved.result(60)

    def test_live_tables_are_refused(
        self, model: nn.Module, tracked: TrackedModel, tmp_path: Path
    ) -> None:
        direct = TestDirectSaves()
        first = direct.save(tmp_path / "first", tracked)
        train(model, a=[[5]])
        with pytest.raises(CheckpointException, match="async_save: training may go on"):
            self.save({}, tmp_path / "second", SavePlanner(tracked), lambda: train(model, a=[[6]]))
        assert not (tmp_path / "second").exists()
        third = direct.save(tmp_path / "third", tracked)
        assert third.parent == first.link
        assert third.tables[WIDE].stored_values == 2 * DIM
        direct.check(tmp_path / "third", model)

    def test_a_state_dict_is_of_the_call(self, model: nn.Module, tmp_path: Path) -> None:
        train(model, a=[[5]], shared=[[6]])
        wanted = table(model, WIDE).clone()
        self.save(
            {"model": model.state_dict()},
            tmp_path / "first",
            SavePlanner(),
            lambda: train(model, a=[[5, 7]]),
        )
        assert not torch.equal(table(model, WIDE), wanted)
        state = {"model": model.state_dict()}
        dcp.load(state, storage_reader=StorageReader(tmp_path / "first"), planner=LoadPlanner())
        assert torch.equal(table(model, WIDE), wanted)


class Unsendable(Exception):
    """An error that can't be pickled, as those of some libraries."""

    def __init__(self) -> None:
        super().__init__()
        self.lock = threading.Lock()


@pytest.mark.parametrize(
    ("step", "call"),
    [
        ("make_global_plan", lambda planner, _: planner.create_global_plan([])),
        ("CheckpointWriter.check", lambda _, writer: writer.prepare_local_plan(None)),
        ("CheckpointWriter.create", lambda _, writer: writer.prepare_global_plan([])),
        ("CheckpointWriter.commit", lambda _, writer: writer.finish(mock.Mock(), [])),
    ],
)
def test_errors_can_be_sent_to_other_ranks(
    step: str,
    call: Callable[[Any, Any], object],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Send errors that DCP can't pickle: ranks would wait forever for them."""
    planner, writer = SavePlanner(), StorageWriter(tmp_path / "one")
    planner._prepared = mock.Mock()
    monkeypatch.setattr(f"torchrec_checknrun.dcp.save.{step}", mock.Mock(side_effect=Unsendable))
    with pytest.raises(Exception, match="Unsendable") as raised:
        call(planner, writer)
    pickle.dumps(raised.value)
