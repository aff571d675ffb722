"""Stand in for a GPU: tensors that say they lie there, and streams that work when they are told to.

Training's stream works at once. Other streams queue copies, which are made when somebody waits for
them: so a test can let training, or the host, come first.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from torchrec_checknrun.marks import gpu_streams
from torchrec_checknrun.model.kernels import Kernel
from torchrec_checknrun.shards import LocalShard

DEVICE = torch.device("cuda", 1)


class GpuTensor(torch.Tensor):
    """A tensor of the CPU's memory that says it lies on a GPU."""

    gpu: FakeGpu
    gathered: Callable[[], torch.Tensor] | None = None
    device = property(lambda self: DEVICE)
    is_cuda = property(lambda self: True)
    is_cpu = property(lambda self: False)

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is torch.Tensor.copy_ and kwargs.get("non_blocking"):
            into, source = args
            cls.gpu.current.queue(lambda: into.copy_(source.content()))
            return into
        found = super().__torch_function__(func, types, args, kwargs)
        if func is torch.Tensor.index_select:
            source, rest = args[0], args[1:]
            found.gathered = lambda: source.content().index_select(*rest)
        return found.as_subclass(torch.Tensor) if func is torch.Tensor.cpu else found

    def content(self) -> torch.Tensor:
        """Return what the memory holds just now, as a tensor of the CPU."""
        return self.as_subclass(torch.Tensor) if self.gathered is None else self.gathered()


class Stream:
    """A queue of work; ``eager``: which is done at once."""

    def __init__(self, gpu: FakeGpu, eager: bool = False) -> None:
        self.device, self._gpu, self._eager = DEVICE, gpu, eager
        self._left: list[Callable[[], object]] = []
        self.queued = self.done = 0
        self._lock = threading.RLock()

    def queue(self, work: Callable[[], object]) -> None:
        self._left.append(work)
        self.queued += 1
        if self._eager:
            self.run(self.queued)

    def run(self, until: int) -> None:
        with self._lock:
            while self.done < until:
                self._left.pop(0)()
                self.done += 1

    def record_event(self) -> Event:
        event = Event(self._gpu)
        event.record(self)
        return event

    def wait_event(self, event: Event) -> None:
        self._gpu.waits.append((self, event))
        self.queue(event.run)

    def wait_stream(self, other: Stream) -> None:
        self.wait_event(other.record_event())

    def synchronize(self) -> None:
        self.record_event().synchronize()


class Event:
    """A place in a stream's queue."""

    device = DEVICE

    def __init__(self, gpu: FakeGpu) -> None:
        self._gpu = gpu
        self.stream: Stream | None = None
        self._at = 0

    def record(self, stream: Stream) -> None:
        if self._gpu.refuses is not None:
            raise self._gpu.refuses
        self.stream, self._at = stream, stream.queued

    def run(self) -> None:
        assert self.stream is not None
        self.stream.run(self._at)

    def query(self) -> bool:
        return self.stream is None or self.stream.done >= self._at

    def synchronize(self) -> None:
        self._gpu.synchronized.append(self._gpu.device)
        if threading.current_thread() is not threading.main_thread():
            self._gpu.may_wait.wait(60)
        if self._gpu.broken is not None:
            raise self._gpu.broken
        self.run()


class FakeGpu:
    """A GPU, as a test sees and directs it.

    Attributes:
        training: training's stream.
        may_wait: cleared, no thread but the main one comes back from an event.
        broken, refuses: raised by those who wait for an event; by those who record one.
        pinned: sizes of registered memory by address.
        no_pinned: the error of memory that can't be registered.
        last_error: the error that the next kernel would report.
        streams: all streams but training's.
        released_early: how often memory was unregistered while copies were on their way.
        waits: streams that were made to wait, each with the event.
        synchronized: devices that were current when somebody waited.
    """

    def __init__(self) -> None:
        self.training = Stream(self, eager=True)
        self._current = threading.local()
        self.may_wait = threading.Event()
        self.may_wait.set()
        self.broken: Exception | None = None
        self.refuses: Exception | None = None
        self.pinned: dict[int, int] = {}
        self.no_pinned: Exception | None = None
        self.last_error: Exception | None = None
        self.streams: list[Stream] = []
        self.released_early = 0
        self.waits: list[tuple[Stream, Event]] = []
        self.synchronized: list[torch.device | None] = []

    @property
    def current(self) -> Stream:
        found: Stream = getattr(self._current, "stream", self.training)
        return found

    @property
    def device(self) -> torch.device | None:
        """Return the calling thread's device; threads begin with none."""
        return getattr(self._current, "device", None)

    @contextmanager
    def held(self) -> Iterator[None]:
        """Let no thread of the background come back from an event before the block ends."""
        self.may_wait.clear()
        try:
            yield
        finally:
            self.may_wait.set()

    @contextmanager
    def _in(self, name: str, value: object) -> Iterator[None]:
        before = vars(self._current).get(name)
        setattr(self._current, name, value)
        try:
            yield
        finally:
            delattr(self._current, name)
            if before is not None:
                setattr(self._current, name, before)

    def _register(self, address: int, size: int, flags: int) -> int:
        if self.no_pinned is not None:
            self.last_error = self.no_pinned
            return 2
        self.pinned[address] = size
        return 0

    def _check(self, result: int) -> None:
        if result:
            assert self.last_error is not None
            raise self.last_error

    def _launch(self) -> None:
        error, self.last_error = self.last_error, None
        if error is not None:
            raise error

    def _unregister(self, address: int) -> int:
        self.released_early += any(stream.done < stream.queued for stream in self.streams)
        del self.pinned[address]
        return 0

    def _stream(self, device: torch.device) -> Stream:
        assert device == DEVICE
        self.streams.append(Stream(self))
        return self.streams[-1]

    def install(self, patch: pytest.MonkeyPatch) -> None:
        """Take the place of ``torch.cuda``."""
        GpuTensor.gpu = self
        gpu_streams._side_stream.cache_clear()
        for name, value in {
            "Stream": self._stream,
            "Event": lambda: Event(self),
            "current_stream": lambda device=None: self.current,
            "stream": lambda stream: self._in("stream", stream),
            "device": lambda device: self._in("device", device),
            "synchronize": lambda device=None: None,
            "check_error": self._check,
            "cudart": lambda: SimpleNamespace(
                cudaHostRegister=self._register, cudaHostUnregister=self._unregister
            ),
        }.items():
            patch.setattr(torch.cuda, name, value)
        self._put_tables_there(patch)

    def _put_tables_there(self, patch: pytest.MonkeyPatch) -> None:
        """Have tables that are found from now on say that they lie on the GPU."""
        zeros, to = torch.zeros, torch.Tensor.to
        make, refer = LocalShard.__post_init__, Kernel._set

        def made(*args: Any, pin_memory: bool = False, **options: Any) -> torch.Tensor:
            if options.get("device") in (DEVICE, "cuda"):
                options["device"] = "cpu"
                self._launch()
            return zeros(*args, **options)

        def moved(tensor: torch.Tensor, *args: Any, **options: Any) -> torch.Tensor:
            if DEVICE in (*args[:1], options.get("device")):
                return tensor
            return to(tensor, *args, **options)

        def there(shard: LocalShard) -> None:
            shard.weight = shard.weight.as_subclass(GpuTensor)
            states = shard.optimizer.items()
            shard.optimizer = {name: state.as_subclass(GpuTensor) for name, state in states}

        def post_init(shard: LocalShard) -> None:
            make(shard)
            there(shard)

        def set_(kernel: Kernel, *args: Any) -> None:
            refer(kernel, *args)
            for shard in kernel.shards:
                there(shard)

        patch.setattr(torch, "zeros", made)
        patch.setattr(torch.Tensor, "to", moved)
        patch.setattr(LocalShard, "__post_init__", post_init)
        patch.setattr(Kernel, "_set", set_)


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeGpu]:
    """Make a GPU for a test; import this where it is wanted."""
    fake = FakeGpu()
    with monkeypatch.context() as patch:
        fake.install(patch)
        yield fake
    gpu_streams._side_stream.cache_clear()
