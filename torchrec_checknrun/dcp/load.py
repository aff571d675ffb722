"""Restore through ``dcp.load``: a planner and a storage reader of this package's format."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, NoReturn

import torch
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlan, ReadItem
from torch.distributed.checkpoint.planner import LoadPlanner as DcpLoadPlanner
from torch.distributed.checkpoint.storage import StorageReader as DcpStorageReader
from torch.futures import Future

from torchrec_checknrun.errors import CheckNRunError, IncompatibleCheckpoint, InvalidPlan
from torchrec_checknrun.format.chunk import Path, name_of
from torchrec_checknrun.format.state_tree import leaves
from torchrec_checknrun.model.tracked import TrackedModel
from torchrec_checknrun.ranks import picklable_errors
from torchrec_checknrun.restore.chunks import ChainContent, read_content
from torchrec_checknrun.restore.fit import Fit
from torchrec_checknrun.restore.plan import ChainRestore
from torchrec_checknrun.restore.states import Merge, Owners
from torchrec_checknrun.root.chain import resolve
from torchrec_checknrun.store.folder import Folder
from torchrec_checknrun.values.state import SHARDED

logger = logging.getLogger(__name__)

_AS_SAVED = Fit()


@dataclass(frozen=True)
class _Opened:
    """A chain to load, and the folder that holds it."""

    root: Folder
    content: ChainContent


class LoadPlanner(DcpLoadPlanner):
    """A planner that restores a checkpoint of this package, for ``dcp.load(…, planner=…)``.

    Args:
        tracked: from ``track(model)``: rows are restored into its shards, and its marks start
            over. None: rows are restored into the tables of the state dict.
        per_rank: merge functions of states of which each rank has its own, by name, for another
            number of ranks; None or absent: such a state is an error on another number of ranks.
        fit: allowed differences between checkpoint and model: ``Fit(strict=False)`` and the like,
            as ``Checkpointer.restore`` allows them by arguments of their own.
        dry_run: read, verify and decode everything, but change nothing.
    """

    def __init__(
        self,
        tracked: TrackedModel | None = None,
        *,
        per_rank: Mapping[str, Merge | None] | None = None,
        fit: Fit = _AS_SAVED,
        dry_run: bool = False,
    ) -> None:
        self._restore = ChainRestore(tracked, Owners(per_rank or {}), fit, dry_run=dry_run)

    @property
    def skipped(self) -> list[str]:
        """Return descriptions of tables and values on one side only, where ``fit`` allows that."""
        return self._restore.skipped

    @picklable_errors()  # DCP sends errors to rank 0
    def set_up_planner(
        self,
        state_dict: dict[str, Any],
        metadata: Metadata | None = None,
        is_coordinator: bool = False,
    ) -> None:
        found = metadata.planner_data if metadata else None
        if isinstance(found, Exception):
            raise found
        if not isinstance(found, _Opened):
            raise IncompatibleCheckpoint(
                "LoadPlanner reads checkpoints of this package's format: pass "
                "storage_reader=StorageReader(path) to dcp.load as well"
            )
        self._restore.plan(found.content, state_dict)
        self._opened, self._live = found, state_dict

    @picklable_errors()
    def create_local_plan(self) -> LoadPlan:
        """Build what tables stored as differences restore to, before a row is touched."""
        links = bool(self._opened.content.chain.head.deltas)
        counted = self._restore.build(self._opened.root) if links else None
        return LoadPlan([_read_item(key) for key in self._restore.keys], planner_data=counted)

    @picklable_errors()
    def create_global_plan(self, global_plan: list[LoadPlan]) -> list[LoadPlan]:
        """Compare the digests of what all ranks have built with the checkpoint's."""
        if self._opened.content.chain.head.deltas:
            self._restore.check_digests(plan.planner_data for plan in global_plan)
        return global_plan

    def finish_plan(self, central_plan: LoadPlan) -> LoadPlan:
        return central_plan

    def load(self, root: Folder) -> None:
        """Read and load all planned chunks, for ``StorageReader``; see ``ChainRestore.load``."""
        before = dict(_tensors(self._live))
        self._restore.load(root)
        _warn_of_layouts(before, self._live)

    def load_bytes(self, read_item: ReadItem, value: object) -> None:
        raise AssertionError("StorageReader has the planner load all chunks by itself")

    def resolve_tensor(self, read_item: ReadItem) -> torch.Tensor:
        raise AssertionError("this format has no tensor items")

    def commit_tensor(self, read_item: ReadItem, tensor: torch.Tensor) -> None:
        raise AssertionError("this format has no tensor items")


def _tensors(state_dict: dict[str, Any]) -> Iterator[tuple[Path, torch.Tensor]]:
    """Yield the plain tensors of a state dict, each with its path."""
    for path, leaf in leaves(state_dict, (torch.Tensor,)):
        if not isinstance(leaf, SHARDED):
            yield path, leaf


def _warn_of_layouts(before: Mapping[Path, torch.Tensor], state_dict: dict[str, Any]) -> None:
    """Warn of tensors that only the checkpoint had, and that may be the state of one of another
    order in memory.

    Fused optimizers walk through the memory of a parameter and its state side by side, and a state
    dict doesn't say whose state a tensor is.
    """
    like = {tuple(t.shape): (path, _order(t)) for path, t in before.items()}
    found = []
    for path, tensor in _tensors(state_dict):
        if path not in before and tuple(tensor.shape) in like:
            other, order = like[tuple(tensor.shape)]
            if _order(tensor) != order:
                found.append((name_of(path), name_of(other)))
    if found:
        logger.warning(
            "%d tensors were not in the state dict and come back in another order in memory, as "
            "%s, than %s of the same shape has: torch's fused optimizers would train with the "
            "state of other elements. Make the optimizer's state before dcp.load, by a step on "
            "gradients of zero, or use Checkpointer, which keeps the order in memory",
            len(found),
            *found[0],
        )


def _order(tensor: torch.Tensor) -> list[int]:
    """Return a tensor's strides but for those of dimensions with one value, which mean nothing."""
    pairs = zip(tensor.stride(), tensor.shape, strict=True)
    return [stride for stride, size in pairs if size > 1]


class StorageReader(DcpStorageReader):
    """A reader of a checkpoint and its parents, for ``dcp.load(…, storage_reader=…)``.

    Args:
        path: the checkpoint's directory, a path or fsspec URL; an open folder keeps its
            ``timeout_seconds``.
    """

    def __init__(self, path: str | os.PathLike[str] | Folder) -> None:
        self._folder = path if isinstance(path, Folder) else Folder(path)

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        return bool(os.fspath(checkpoint_id))

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        if checkpoint_id is not None:
            self._folder = Folder(checkpoint_id)

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """Read the chain's indexes; an error is raised by the planner, with its own type."""
        found: _Opened | CheckNRunError | OSError
        try:
            root = self._folder.parent
            found = _Opened(root, read_content(root, resolve(root, self._folder.name)))
        except (CheckNRunError, OSError) as error:
            found = error  # DCP would replace an exception by a message of its own
        return Metadata(_ForLoadPlannerOnly(), planner_data=found)

    def set_up_storage_reader(
        self, metadata: Metadata, is_coordinator: bool, *args: Any, **kwargs: Any
    ) -> None:
        pass

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        return plan

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        return plans

    @picklable_errors()  # DCP sends errors to all ranks
    def read_data(self, plan: LoadPlan, planner: DcpLoadPlanner) -> Future[None]:
        if not isinstance(planner, LoadPlanner):
            _refuse_planner()
        planner.load(self._folder.parent)
        done: Future[None] = Future()
        done.set_result(None)
        return done


class _ForLoadPlannerOnly(dict[str, Any]):
    """State-dict metadata that refuses DCP's own planner, which would otherwise load nothing or
    name a missing key instead of the wrong planner.
    """

    def _refuse(self, *_: object) -> NoReturn:
        _refuse_planner()

    keys = items = __iter__ = __contains__ = __getitem__ = _refuse


def _refuse_planner() -> NoReturn:
    raise InvalidPlan(
        "StorageReader reads checkpoints for this package's LoadPlanner: pass "
        "planner=LoadPlanner() to dcp.load as well"
    )


def _read_item(key: str) -> ReadItem:
    index, nothing = MetadataIndex(key), torch.Size((0,))
    return ReadItem(LoadItemType.BYTE_IO, index, nothing, index, nothing, nothing)
