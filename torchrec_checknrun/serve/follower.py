"""Follow a root: look, plan, load, show; in the caller's thread or in one of the follower's own."""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable, Container, Iterator, Mapping
from contextlib import contextmanager
from types import TracebackType

from torch import nn

from torchrec_checknrun.errors import (
    ChainBroken,
    CheckNRunError,
    ClaimDamaged,
    CorruptCheckpoint,
    IncompatibleCheckpoint,
)
from torchrec_checknrun.format.manifest import Manifest
from torchrec_checknrun.ranks import listed
from torchrec_checknrun.root.chain import Chain, newest, resolve
from torchrec_checknrun.root.followers import announced
from torchrec_checknrun.serve.alone import require_alone
from torchrec_checknrun.serve.content import Content, Indexes
from torchrec_checknrun.serve.copies import OneCopy, ReadersStay, TwoCopies, mode_of
from torchrec_checknrun.serve.inference.names import Names, match_names
from torchrec_checknrun.serve.lag import Lag
from torchrec_checknrun.serve.load import Load, Memory
from torchrec_checknrun.serve.looking import start_looking
from torchrec_checknrun.serve.pace import Pace
from torchrec_checknrun.serve.plan import Glance, Plan, is_copy, plan, stays
from torchrec_checknrun.serve.version import Version
from torchrec_checknrun.store.folder import Folder

logger = logging.getLogger(__name__)

MEMORY_BYTES = 256 << 20
"""Rows to hold beside the model, unless the caller says otherwise."""
_LATER = (CorruptCheckpoint, ChainBroken, ClaimDamaged, ReadersStay)
"""Errors of a look that a later one may not meet: what is served stays meanwhile."""
_PLANS = 5
"""Plans of one poll: checkpoints may go while they are read, or be damaged."""
_ANNOUNCED_BYTES = 16 << 20
"""Bytes to read from which on the root is told, so that retention waits."""


class Follower:
    """Keep an inference model at the newest state that a root holds, while it predicts.

    Any process, without a process group; a root may be followed by any number, and need not be
    writable. ``model`` is any module that holds TorchRec's ``EmbeddingBagCollection`` or
    ``EmbeddingCollection``, quantized or not, sharded within this process, or a scripted one.

    Args:
        root: a path or fsspec URL that holds checkpoints or publications.
        model: the model; from now on only to be used through ``read``.
        interval_seconds: the time between two looks of the thread that ``start`` starts.
        on_version: called by whoever polled with each version, once it is visible.
        memory_bytes: rows to hold beside the model while a version is prepared; None: 256 MiB.
        copies: 2: a version is prepared in a second copy of the model, and predictions never wait.
            1: the model is held once, rows are staged, and predictions wait while they are copied
            in.
        share: of one core, above 0 and up to 1, that the thread uses at most while predictions
            follow one another, a hundredth of a second apart or less: it works while none does, and
            rests between blocks of rows otherwise. 1: it never rests. Less disturbs predictions
            less, and a version takes longer to become visible.
        map: the model's name by the saved one, of tables and other values, where they differ by
            more than TorchRec's wrappers.
        strict: refuse a model with names that no checkpoint has; otherwise they keep their values.
        timeout_seconds: limit for each storage operation, and for the wait for predictions that
            began on an earlier version.

    Raises:
        UnsupportedTable, IncompatibleCheckpoint: a table, or a value of the model's state dict,
            can't be followed; names it, and why.
        ValueError: an argument is out of range.
    """

    def __init__(
        self,
        root: str | os.PathLike[str],
        model: nn.Module,
        *,
        interval_seconds: float | None = None,
        on_version: Callable[[Version], object] | None = None,
        memory_bytes: int | None = None,
        copies: int = 2,
        share: float = 0.1,
        map: Mapping[str, str] | None = None,
        strict: bool = True,
        timeout_seconds: float = 60.0,
    ) -> None:
        _check_arguments(interval_seconds, memory_bytes, copies, share, timeout_seconds)
        self._root = Folder(root, timeout_seconds)
        self._interval = interval_seconds
        self._on_version = on_version
        self._budget = MEMORY_BYTES if memory_bytes is None else memory_bytes
        self._map = dict(map or {})
        self._strict = strict
        self._seconds = timeout_seconds
        with mode_of(model):
            self._copies = TwoCopies(model) if copies == 2 else OneCopy(model, self._budget)
        self._indexes = Indexes(self._root)
        self._memory = Memory()
        self._served: tuple[Manifest, ...] = ()
        self._lag = Lag(self._root)
        self._glance = Glance(self._root)
        self._polling = threading.Lock()
        self._pace = Pace(share)
        self._closing = threading.Event()
        self._thread: threading.Thread | None = None

    @contextmanager
    def read(self) -> Iterator[tuple[nn.Module, Version | None]]:
        """Enter the model: everything inside is of one version, whatever is published meanwhile.

        Yields:
            The model, and its version; None if nothing was published yet, and the model is as it
            was given.
        """
        with self.serving(), self._copies.read() as (model, version):
            yield model, version

    @contextmanager
    def serving(self) -> Iterator[None]:
        """Let the follower's thread rest while a block runs, see ``share``, as ``read`` does.

        For a server: around all that it does for a request, before and after the prediction.
        """
        with self._pace.predicting():
            yield

    @property
    def version(self) -> Version | None:
        """Return the version that predictions see that begin now, and how far it is behind; None
        before the first.
        """
        version = self._copies.version
        return None if version is None else self._lag.told(version)

    @property
    def error(self) -> str | None:
        """Return the last error of a look at the root, or a read; None after a look without."""
        return self._lag.error

    def poll(self, *, paced: bool = False) -> Version | None:
        """Look at the root, and show its newest state if that is not served yet.

        While a version is served, errors of the storage, damaged checkpoints and claims change
        nothing: ``version.error`` tells them, and the next poll tries again.

        Args:
            paced: rest as the thread does, see ``share``; otherwise the thread, too, hurries.

        Returns:
            What is served now; None if nothing was ever published.

        Raises:
            IncompatibleCheckpoint, UnsupportedFormat, UnsupportedTable: the newest state doesn't
                fit the model; names what.
            CheckNRunError, OSError: nothing is served yet, and the root can't be read.
        """
        if paced:
            return self._poll()
        with self._pace.hurried():
            return self._poll()

    def _poll(self) -> Version | None:
        with self._polling:
            self._pace.begin()
            before = self._copies.version
            try:
                with mode_of(self._copies.replica.model):
                    self._advance()
            except (*_LATER, OSError) as error:
                self._lag.failed(error)
                if before is None:
                    raise
                logger.warning("%s is served on: %s", before.checkpoint_id, error)
            except CheckNRunError as error:
                self._lag.failed(error)
                raise
            version = self.version
        if version is not None and self._copies.version is not before:
            self._tell(version)
        return version

    def start(self) -> None:
        """Poll in a thread from now on, every ``interval_seconds``, until ``close``, or until
        nobody holds the follower any more.

        The thread has a lower priority than predictions, on Linux. After errors the pauses grow
        up to a minute.

        Raises:
            ValueError: no interval was given.
        """
        if self._interval is None:
            raise ValueError(
                "start() needs an interval: Follower(..., interval_seconds=1), or call poll()"
            )
        if self._thread is None:
            self._thread = start_looking(self, self._closing, self._interval)

    def close(self) -> None:
        """Stop the thread, if any; the version that is served stays, and ``poll`` still looks."""
        self._closing.set()
        thread, self._thread = self._thread, None
        if thread is not None and thread is not threading.current_thread():
            with self._pace.hurried():
                thread.join(self._seconds)
        self._closing = threading.Event()  # that thread may still have to see its own

    def __enter__(self) -> Follower:
        if self._interval is not None:
            self.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def look(self) -> bool:
        """Poll, and return whether that failed; ``error`` tells how, and nothing is raised."""
        try:
            self.poll(paced=True)
        except Exception as error:
            self._lag.failed(error)
            logger.warning("%s can't be followed: %s", self._root, error)
        return self._lag.error is not None

    def _tell(self, version: Version) -> None:
        if self._on_version is not None:
            try:
                self._on_version(version)
            except Exception:
                logger.exception("on_version failed for %s", version.checkpoint_id)

    def _advance(self) -> None:
        """Bring the model to the newest state that can be read.

        Raises:
            ChainBroken, CorruptCheckpoint: newer states are damaged; the served one stays.
        """
        began = time.monotonic()
        head = self._served[-1] if self._served and self._lag.error is None else None
        if self._glance.is_quiet(head):
            self._lag.looked(head)
            return
        unusable: dict[str, Exception] = {}
        for attempt in range(_PLANS):
            known = () if attempt else self._served  # after a failure all must be there
            chain, found = newest(self._root, unusable, known=known)
            problems = listed([*found, *(f"{n}: {e}" for n, e in unusable.items())], "; ")
            if chain is None:
                if problems:
                    raise ChainBroken(f"{self._root} holds no whole chain: {problems}")
                if self._copies.version is not None:
                    raise ChainBroken(f"{self._root} holds no checkpoint any more")
                self._lag.looked(None)
                return
            shown = self._served[-1] if self._served else self._lag.shown
            if stays(self._root, shown, chain, problems):
                self._lag.looked(shown)
                return
            self._pace.rest()
            todo = self._plan(chain, unusable)
            if not todo.current:
                try:
                    self._lag.sees(chain.head)
                    self._load(todo, began)
                except (CorruptCheckpoint, ChainBroken, FileNotFoundError) as error:
                    if self._is_there(todo.chain):
                        unusable[todo.chain.head.id] = error
                    continue
            self._served = todo.chain.manifests
            self._indexes.keep(self._served)
            self._lag.looked(self._served[-1], problems or None)
            self._copies.settle(self._pace.rest)
            return
        why = "; ".join(map(str, unusable.values()))
        raise ChainBroken(f"{self._root}: checkpoints go, or are damaged, as they are read: {why}")

    def _plan(self, chain: Chain, unusable: Container[str]) -> Plan:
        """Plan to read a chain; its original where the head is a copy of what follows the served
        version, which is less to read than the copy.
        """
        todo, head = plan(chain, self._served), chain.head
        if todo.follows or not self._served or not is_copy(head) or head.previous is None:
            return todo
        try:
            original = plan(resolve(self._root, head.previous.id), self._served)
        except CheckNRunError:  # pruned, or damaged
            return todo
        head = original.chain.head
        whole = head.link == chain.head.previous and head.id not in unusable
        return original if whole and original.follows else todo

    def _is_there(self, chain: Chain) -> bool:
        """Tell whether a chain that failed is still in the root, so that it is damaged."""
        try:
            return resolve(self._root, chain.head.id) == chain
        except CheckNRunError:
            return False

    def _load(self, todo: Plan, began: float) -> None:
        """Write a version into the copy that nobody reads, and show it."""
        content = Content(self._root, todo, self._indexes)
        large = content.stored_bytes >= _ANNOUNCED_BYTES
        with announced(self._root, todo.chain.head.id, large) as announcement:

            def before_each() -> None:
                self._pace.rest()
                if announcement is not None:
                    announcement.renew()

            content.each = before_each
            self._write(content, began)

    def _write(self, content: Content, began: float) -> None:
        """Write and show a version."""
        todo, head = content.plan, content.head
        content.check()
        require_alone(self._copies.replica.model, self)
        dense = content.dense()
        for replica in self._copies.replicas:
            replica.bind(head.tables)
        names = self._names(head, dense)
        memory = self._memory if todo.common else Memory()
        rest, closing = self._pace.rest, self._closing.is_set
        target = self._copies.begin(closing, self._seconds, rest)
        load = Load(content, self._copies.replica, target, memory, self._budget, rest)
        try:
            load.run(names, dense)
            version = Version(
                checkpoint_id=head.id,
                step=head.step,
                sequence=head.sequence,
                rows_applied=load.rows,
                rows_encoded=load.encoded,
                bytes_read=content.bytes_read,
                seconds=time.monotonic() - began,
                whole=not todo.common,
                committed_at=self._lag.commit_time(head),
                kept=tuple(names.missing),
            )
            self._lag.error = None  # of an earlier look, of which this version must not tell
            self._copies.show(version, closing, self._seconds)
        except BaseException:
            if memory.links and memory is self._memory:
                self._served = ()  # they are of neither version: all rows are read anew
            raise
        self._memory = memory
        self._served = todo.chain.manifests
        self._lag.shows(head)
        logger.info("%s is served: %d rows", head.id, load.rows)

    def _names(self, head: Manifest, dense: Mapping[str, object]) -> Names:
        """Match the model's names with a checkpoint's.

        Raises:
            IncompatibleCheckpoint: the model has names that the checkpoint lacks.
        """
        replica = self._copies.replica
        names = match_names(replica.tables, replica.dense, head.tables, dense, self._map)
        if not names.tables:
            raise IncompatibleCheckpoint(
                f"the model has no table of {head.id}, which has {sorted(head.tables)[:8]}; it has "
                f"{sorted(replica.tables)[:8]}: give names with map={{saved: model's}}"
            )
        if names.missing and self._strict:
            raise IncompatibleCheckpoint(
                f"{head.id} has no {', '.join(names.missing[:8])} of the model (it has "
                f"{', '.join([*sorted(head.tables), *sorted(dense)][:12])}): a prediction depends "
                "on them. Publish them, name them with map={saved: model's}, or keep the values "
                "they have with strict=False"
            )
        return names


def _check_arguments(
    interval: float | None, memory_bytes: int | None, copies: int, share: float, timeout: float
) -> None:
    if interval is not None and not interval > 0:
        raise ValueError(f"interval_seconds must be positive, such as 1.0, not {interval!r}")
    if memory_bytes is not None and (type(memory_bytes) is not int or memory_bytes < 1):
        raise ValueError(f"memory_bytes must be a number of bytes, not {memory_bytes!r}")
    if copies not in (1, 2):
        raise ValueError(f"copies must be 1 or 2 (the default), not {copies!r}")
    if not 0 < share <= 1:
        raise ValueError(f"share must be above 0 and at most 1, such as 0.1, not {share!r}")
    if not timeout > 0:
        raise ValueError(f"timeout_seconds must be positive, not {timeout!r}")
