"""Send every error between ranks, if necessary as another one with the same text."""

from __future__ import annotations

import pickle
import sys
import threading
from datetime import timedelta
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from torchrec_checknrun.errors import SaveFailed, StorageFailed
from torchrec_checknrun.ranks import Ranks, gloo_beside, picklable, picklable_errors


class TwoArguments(Exception):
    """An error that can be pickled but not unpickled."""

    def __init__(self, path: str, why: str) -> None:
        super().__init__(f"{path}: {why}")


class Holds(OSError):
    """An error with an attribute that can't be pickled."""

    def __init__(self) -> None:
        super().__init__("connection lost")
        self.lock = threading.Lock()


class Mute(Exception):
    def __init__(self) -> None:
        self.lock = threading.Lock()

    def __str__(self) -> str:
        raise ValueError("no words")


@pytest.mark.parametrize(
    "error",
    [SaveFailed("no"), StorageFailed(28, "full"), ValueError(1, 2), FileNotFoundError(2, "a", "b")],
)
def test_what_can_be_sent_is(error: Exception) -> None:
    assert picklable(error) is error


@pytest.mark.parametrize(
    ("error", "kind", "says"),
    [
        (TwoArguments("a", "b"), RuntimeError, "TwoArguments: a: b"),
        (Holds(), OSError, "Holds: connection lost"),
        (Mute(), RuntimeError, "Mute"),
    ],
)
def test_what_cannot_be_sent_is_told(error: Exception, kind: type[Exception], says: str) -> None:
    sent = pickle.loads(pickle.dumps(picklable(error)))
    assert type(sent) is kind
    assert says in str(sent)


def test_a_block_s_errors() -> None:
    with pytest.raises(OSError, match="connection lost") as caught, picklable_errors():
        raise Holds
    assert isinstance(caught.value.__cause__, Holds)
    with pytest.raises(SaveFailed, match="no"), picklable_errors():
        raise SaveFailed("no")


@pytest.mark.parametrize(("backend", "own"), [("gloo", True), ("cuda:gloo", False)])
def test_tensors_of_the_cpu_have_a_group(backend: str, own: bool) -> None:
    """A job of one backend for GPUs, such as ``init_process_group("nccl")``, has none for these."""
    assert gloo_beside() is None, "no process group at all"
    for _ in range(2):  # a later job of the same process
        dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
        try:
            group = gloo_beside()
            assert (group is None) is own
            dist.all_reduce(torch.ones(1), group=group)
            assert gloo_beside() is group, "made once"
        finally:
            dist.destroy_process_group()


def test_a_group_is_made_anew(monkeypatch: pytest.MonkeyPatch, one_rank: None) -> None:
    ranks = Ranks(timedelta(seconds=60))
    try:
        before, groups = ranks.group, len(dist.distributed_c10d._world.pg_map)
        ranks.parted = True
        with monkeypatch.context() as patch:
            patch.setattr(dist, "new_group", mock.Mock(side_effect=RuntimeError("timed out")))
            with pytest.raises(RuntimeError) as raised:
                ranks.meet_again()
        if sys.version_info >= (3, 11):
            assert "another rank has ended" in str(vars(raised.value)["__notes__"])
        assert (ranks.group, ranks.parted) == (before, True)
        ranks.meet_again()
        assert (ranks.group is before, ranks.parted) == (False, False)
        assert len(dist.distributed_c10d._world.pg_map) == groups
    finally:
        ranks.close()
