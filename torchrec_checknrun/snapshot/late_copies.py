"""Copy the memory that only an optimizer's step changes while training computes gradients.

Parameters, data-parallel tables among them, and the optimizers' state of their size are most of a
dense part's bytes. Between a cut and the next step of any optimizer nothing writes to them, so the
background copies them first of all; a step that comes earlier makes the copies itself, in torch's
hook before every optimizer's step. Version counters tell of any other write; of one through
``.data``, which has a counter of its own, a sample of the values does.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook

from torchrec_checknrun.errors import SaveFailed
from torchrec_checknrun.model.hand_written import Overwritten, WriteWatch

logger = logging.getLogger(__name__)

LEAST_BYTES = 1 << 16
"""Smaller tensors are copied at the cut, which takes no longer than to remember them."""

_WORDS = 16
"""Words of 8 bytes of each tensor that are compared."""
_WORDS_BY_HAND = 1 << 14
"""The same of a parameter that no optimizer steps: programs write some rows of such ones, in place
of all, and rather through ``.data``.
"""
_WORD_BYTES = 128
"""Bytes of such a parameter for each of its words, at least: a row of 32 floats."""
Span = tuple[int, int]
"""The address of memory, and its size in bytes."""


def _sample(tensor: torch.Tensor, apart: bool, most: int = _WORDS) -> bytes:
    """Return words of a tensor's bytes, from all over it; nothing of a few bytes.

    Args:
        apart: take them from some rows alone, which need not lie side by side.
        most: number of words.
    """
    values = tensor.detach()
    if apart:
        values = values[:: len(values) // _WORDS | 1].contiguous()
    return _words(values.reshape(-1).view(torch.uint8).numpy(), most) if values.nbytes >= 8 else b""


def _words(data: np.ndarray, most: int) -> bytes:
    """Return words of row-major bytes, from all over them; training waits for this at the cut."""
    words = data.data[: len(data) // 8 * 8].cast("Q")  # sooner than NumPy's view
    return words[:: len(words) // most | 1].tobytes()  # odd: of different columns


def stepped_memory(tensors: Iterable[torch.Tensor]) -> dict[Span, torch.Tensor]:
    """Choose the tensors worth to be copied later, of those that only optimizers' steps change.

    Returns:
        By place in CPU memory; a version counter must tell of writes to each.
    """
    return {
        (tensor.data_ptr(), tensor.nbytes): tensor
        for tensor in tensors
        if tensor.nbytes >= LEAST_BYTES
        and tensor.is_cpu
        and tensor.is_contiguous()
        and not tensor.is_inference()
    }


@dataclass(frozen=True)
class _Copy:
    """A copy to be made.

    Attributes:
        source, target: of the same type and shape.
        tensor: the tensor whose memory ``source`` is.
        version: the tensor's, at the cut.
        sample: of the values at the cut.
        words: the most of the sample.
    """

    source: torch.Tensor
    target: torch.Tensor
    tensor: torch.Tensor
    version: int
    sample: bytes
    words: int = _WORDS

    def make(self) -> bool:
        """Make the copy; return whether it is as of the cut."""
        if self.tensor.data_ptr() != self.source.data_ptr():
            return False  # moved to shared memory: what was is free
        self.target.copy_(self.source)
        sample = _sample(self.target, not self.source.is_contiguous(), self.words)
        return self.tensor._version == self.version and sample == self.sample


class _Steps:
    """The hook before all optimizers' steps, which stays: torch walks over the hooks without a lock
    while the background ends copies.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._hooked = False
        self._waiting: tuple[LateCopies, ...] = ()

    def add(self, copies: LateCopies) -> None:
        """Have steps make these copies; call it in the training thread."""
        with self._lock:
            self._waiting = (*self._waiting, copies)
            if not self._hooked:
                register_optimizer_step_pre_hook(torch.compiler.disable(self._before_step))
                self._hooked = True

    def discard(self, copies: LateCopies) -> None:
        """Let steps pass by these copies again."""
        with self._lock:
            self._waiting = tuple(each for each in self._waiting if each is not copies)

    def _before_step(self, optimizer: Optimizer, *_: object) -> None:
        for copies in self._waiting:
            copies.before_change()


_STEPS = _Steps()


class LateCopies:
    """Copies of one checkpoint that are still to be made.

    The training thread adds them at the cut and calls ``begin``; any thread may make them.

    Args:
        stepped: the tensors that may be copied later, by place.
        by_hand: addresses of those among them that no optimizer steps.

    Attributes:
        seconds: how long optimizers' steps have waited.
    """

    def __init__(
        self, stepped: dict[Span, torch.Tensor], by_hand: Collection[int] = frozenset()
    ) -> None:
        self.seconds = 0.0
        self._stepped, self._by_hand = stepped, by_hand
        self._left: list[_Copy] = []
        self._lock = threading.Lock()
        self._failure: SaveFailed | None = None
        self._watches: list[WriteWatch] = []

    def add(self, piece: memoryview, target: torch.Tensor) -> bool:
        """Remember a piece of memory that is to be copied; return False if it must be at once.

        Args:
            target: ``(size,)`` uint8.
        """
        data = np.frombuffer(piece, dtype=np.uint8)
        source = torch.from_numpy(data)
        tensor = self._stepped.get((source.data_ptr(), source.nbytes))
        if tensor is None:
            return False
        most = _WORDS
        if tensor.data_ptr() in self._by_hand:
            most = max(_WORDS, min(_WORDS_BY_HAND, len(data) // _WORD_BYTES))
        words = _words(data, most)
        self._left.append(_Copy(source, target, tensor, tensor._version, words, most))
        return True

    def add_table(
        self, watch: WriteWatch, source: Sequence[torch.Tensor], target: Sequence[torch.Tensor]
    ) -> None:
        """Remember a data-parallel table's tensors, and have other writers make their copies, too.

        Args:
            watch: of the table's kernel.
        """
        for live, own in zip(source, target, strict=True):
            sample = _sample(live, apart=not live.is_contiguous())
            self._left.append(_Copy(live, own, live, live._version, sample))
        watch.late = self.before_change
        self._watches.append(watch)

    def begin(self) -> None:
        """Have optimizers' steps make the copies before they change anything."""
        if self._left:
            _STEPS.add(self)

    def make(self) -> None:
        """Make the copies that are left; wait for those that another thread makes.

        Raises:
            SaveFailed: memory was written by other means than an optimizer's step.
        """
        with self._lock:
            while self._left:
                copy = self._left[-1]
                if not copy.make():
                    self._failure = Overwritten(
                        "a parameter, data-parallel table or optimizer state of shape "
                        f"{tuple(copy.tensor.shape)} was written while it was being saved, and not "
                        "by an optimizer's step(): the checkpoint is not committed, its rows are "
                        "kept for the next one, and from now on everything beside the tables is "
                        "copied before training goes on. If evaluations write averaged weights, or "
                        "an optimizer's train() or eval() does, call them before step() or save(), "
                        "or give staging='copy', so that no process loses its first checkpoint"
                    )
                self._left.pop()
        _STEPS.discard(self)
        if self._failure is not None:
            raise self._failure

    def end(self) -> None:
        """Give up the copies that are left."""
        with self._lock:
            self._left.clear()
            for watch in self._watches:
                watch.late = None
        _STEPS.discard(self)

    @property
    def spoiled(self) -> bool:
        """Return whether memory was written by other means than an optimizer's step."""
        return self._failure is not None

    def before_change(self) -> None:
        """Make the copies that are left, while training waits; never raise an error of its own."""
        started = time.perf_counter()
        try:
            self.make()
        except SaveFailed:
            pass  # the background raises it
        except Exception:
            logger.exception("states could not be copied before an optimizer's step")
            self._failure = SaveFailed("states could not be copied before an optimizer's step")
        finally:
            self.seconds += time.perf_counter() - started
