"""Wait for a served model's GPUs, where predictions and writes run behind the threads that launch
them, each thread's in a stream of its own.

Whoever has left ``read`` may have kernels in a queue that still read the copy; rows that a follower
has written may still be on their way. No event of one stream would tell of all of them.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch


def gpus_of(tensors: Iterable[torch.Tensor]) -> frozenset[torch.device]:
    """Return the GPUs that hold tensors."""
    return frozenset(tensor.device for tensor in tensors if tensor.is_cuda)


def finish(gpus: Iterable[torch.device]) -> None:
    """Wait until all that was launched before, by any thread and in any stream, has run.

    Raises:
        RuntimeError: a kernel that was launched has failed, perhaps long ago.
    """
    for gpu in gpus:
        torch.cuda.synchronize(gpu)
