"""Describe the version that a follower serves: its origin, and how far it is behind."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Version:
    """The state of a run that a model holds.

    Attributes:
        checkpoint_id: of the checkpoint, or publication.
        step: optimizer steps of training until then.
        sequence: grows with every attempt in the root; smaller only after the run fell back.
        lag_seconds: between the newest commit that was seen in the root and this one, by the
            store's times, and since that look, by this process's clock.
        lag_steps: training steps between the two.
        rows_applied: written for this version.
        rows_encoded: of these, encoded again: stored in another width, or at 8 bits.
        bytes_read: from the root, of chunks.
        seconds: from the look that found it to the instant it became visible.
        whole: whether all rows were read, not only what had changed since the version before.
        committed_at: when it was committed, by the store's clock, in seconds since 1970; None
            where the store keeps no times.
        error: the last error while the root was looked at, or read; None after a look without.
        kept: names that only the model has, which no checkpoint changes.
    """

    checkpoint_id: str
    step: int
    sequence: int
    lag_seconds: float = 0.0
    lag_steps: int = 0
    rows_applied: int = 0
    rows_encoded: int = 0
    bytes_read: int = 0
    seconds: float = 0.0
    whole: bool = True
    committed_at: float | None = None
    error: str | None = None
    kept: tuple[str, ...] = ()
