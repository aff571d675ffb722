"""Read pieces of an image's state."""

from __future__ import annotations

from collections.abc import Sequence

import torch


def joined(pieces: Sequence[torch.Tensor]) -> bytes:
    """Return the bytes of pieces, one after the other."""
    return b"".join(piece.numpy().tobytes() for piece in pieces)
