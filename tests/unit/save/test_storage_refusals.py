"""Refuse unsuitable partners, states and files by name, in planners and storage."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp

from tests.unit.entries import decode_stored
from tests.unit.plain_states import State, cause, example, load, save
from torchrec_checknrun.dcp import LoadPlanner, SavePlanner, StorageReader, StorageWriter
from torchrec_checknrun.errors import (
    CheckpointNotFound,
    CorruptCheckpoint,
    IncompatibleCheckpoint,
    InvalidPlan,
    UnsupportedState,
)
from torchrec_checknrun.format.names import MANIFEST_NAME
from torchrec_checknrun.format.reader import read_chunk, read_indexes
from torchrec_checknrun.root.checkpoints import read_manifest
from torchrec_checknrun.store.folder import Folder


class TestPartnersThatDontFit:
    """Refuse planners and storage of other packages by name."""

    def test_dcps_planner_with_our_writer(self, disk: Folder) -> None:
        error = cause(
            lambda: dcp.save(
                {"w": torch.ones(2)},
                storage_writer=StorageWriter((disk / "first").url),
                no_dist=True,
            )
        )
        assert isinstance(error, InvalidPlan)
        assert "planner=SavePlanner()" in str(error)
        assert MANIFEST_NAME not in (disk / "first").names()

    def test_our_planner_with_dcps_writer(self, disk: Folder) -> None:
        """Refuse to write without the index that describes the bytes."""
        error = cause(
            lambda: dcp.save(
                example(),
                checkpoint_id=(disk / "first").url,
                planner=SavePlanner(),
                no_dist=True,
            )
        )
        assert isinstance(error, InvalidPlan)
        assert "storage_writer=StorageWriter(path)" in str(error)

    @pytest.mark.parametrize("partial", [False, True])
    def test_dcps_planner_with_our_reader(self, disk: Folder, partial: bool) -> None:
        save(disk, "first", example())
        error = cause(
            lambda: dcp.load(
                {"weight": torch.zeros(3, 4)},
                storage_reader=StorageReader((disk / "first").url),
                planner=dcp.DefaultLoadPlanner(allow_partial_load=partial),
                no_dist=True,
            )
        )
        assert isinstance(error, InvalidPlan)
        assert "planner=LoadPlanner()" in str(error)

    def test_our_planner_with_dcps_reader(self, disk: Folder) -> None:
        dcp.save({"w": torch.ones(2)}, checkpoint_id=(disk / "first").url, no_dist=True)
        error = cause(
            lambda: dcp.load(
                {"w": torch.zeros(2)},
                checkpoint_id=(disk / "first").url,
                planner=LoadPlanner(),
                no_dist=True,
            )
        )
        assert isinstance(error, IncompatibleCheckpoint)
        assert "storage_reader=StorageReader(path)" in str(error)

    def test_a_checkpoint_of_dcps_own(self, disk: Folder) -> None:
        dcp.save({"w": torch.ones(2)}, checkpoint_id=(disk / "first").url, no_dist=True)
        error = cause(lambda: load(disk, "first", {"w": torch.zeros(2)}))
        assert isinstance(error, CheckpointNotFound)
        assert "'first'" in str(error)


class TestStatesThatDontFit:
    @pytest.mark.parametrize(
        ("live", "message"),
        [
            ({"other": 1}, r"has no state 'other'.* strict=False"),
            ({"weight": torch.zeros(4, 3)}, r"the model wants float32 \[4, 3\]"),
            ({"weight": torch.zeros(3, 4).long()}, "the model wants int64"),
            ({"counter": {"value": 1, "more": 2}}, r"counter\.more is not in .* strict=False"),
        ],
    )
    def test_nothing_is_changed(self, disk: Folder, live: State, message: str) -> None:
        save(disk, "first", example(5.0))
        state: State = {"rng": np.zeros(3), "optimizer": example(0.0)["optimizer"], **live}
        error = cause(lambda: load(disk, "first", state))
        assert isinstance(error, IncompatibleCheckpoint)
        with pytest.raises(IncompatibleCheckpoint, match=message):
            raise error
        assert state["rng"].tolist() == [0, 0, 0]
        assert float(state["optimizer"][0]["step"]) == 0

    def test_what_needs_pickle(self, disk: Folder) -> None:
        error = cause(lambda: save(disk, "first", {"reader": {"open": print}}))
        assert isinstance(error, UnsupportedState)
        assert "reader.open is a " in str(error)
        assert disk.names() == []


class TestDamage:
    def chunks(self, root: Folder, name: str) -> list[Any]:
        return [
            decode_stored(chunk.entry, read_chunk(root, chunk))
            for chunk in read_indexes(root, read_manifest(root, name))
        ]

    def test_every_flipped_byte_is_detected(self, disk: Folder) -> None:
        manifest = save(disk, "first", {"w": torch.arange(7.0), "n": {"a": 1}})
        (file,) = manifest.files
        path = Path(disk.url) / "first" / file.name
        whole = path.read_bytes()
        assert len(self.chunks(disk, "first")) == 2
        for place in range(file.index_offset + file.index_length):
            damaged = bytearray(whole)
            damaged[place] ^= 0x10
            path.write_bytes(damaged)
            with pytest.raises(CorruptCheckpoint, match=file.name):
                self.chunks(disk, "first")

    @pytest.mark.parametrize("what", ["flip", "cut", "longer", "missing"])
    def test_loading_damaged_files(self, disk: Folder, what: str) -> None:
        save(disk, "first", example(5.0))
        path = Path(disk.url) / "first" / "rank-00000.bin"
        whole = path.read_bytes()
        if what == "missing":
            path.unlink()
        else:
            changed = {"flip": bytes([whole[0] ^ 1]) + whole[1:], "cut": whole[:-1]}
            path.write_bytes(changed.get(what, whole + b"\0"))
        error = cause(lambda: load(disk, "first", example(0.0)))
        assert isinstance(error, CorruptCheckpoint)
        assert "rank-00000.bin" in str(error)

    def test_a_missing_manifest(self, disk: Folder) -> None:
        save(disk, "first", example())
        (Path(disk.url) / "first" / MANIFEST_NAME).unlink()
        assert isinstance(cause(lambda: load(disk, "first", example())), CheckpointNotFound)
