"""Every error a user can meet, in one place: each names the thing, the expectation, the remedy."""

from __future__ import annotations


class CheckNRunError(Exception):
    """Base of all errors this package raises for its users."""


class CheckpointNotFound(CheckNRunError):
    """No committed checkpoint where one was asked for."""


class CheckpointExists(CheckNRunError):
    """A checkpoint directory is written once: this one already holds something."""


class CorruptCheckpoint(CheckNRunError):
    """A stored file differs from what its manifest or index says (size, checksum or layout)."""


class ChainBroken(CheckNRunError):
    """A checkpoint that a restore needs (a parent) is missing, damaged or was replaced."""


class UnsupportedFormat(CheckNRunError):
    """The checkpoint was written in a format version that this release can't read."""


class IncompatibleCheckpoint(CheckNRunError):
    """A sound checkpoint that doesn't fit this model: names table or key, saved and wanted."""


class UnsupportedState(CheckNRunError):
    """A state object can't be stored as it is: it holds a value that needs pickle, or differs
    between ranks without being declared so; names it, and the key.
    """


class UnsupportedTable(CheckNRunError):
    """A table is held by a TorchRec kernel whose rows this package can't track."""


class InvalidPlan(CheckNRunError):
    """The ranks' plans don't form one checkpoint: two write the same rows, or rows are missing."""


class SaveFailed(CheckNRunError):
    """A checkpoint was not committed; its rows stay marked and are part of the next one."""


class SaveDeferred(CheckNRunError):
    """An explicit save was put off, since gradients wait for their optimizer."""


class StorageFailed(OSError):
    """The storage refused an operation or didn't answer: names it, the path and the remedy."""


class StorageUnreachable(StorageFailed):
    """The storage didn't answer, however often it was asked: nothing is known of what it holds."""


class RootInUse(CheckNRunError):
    """Another trainer writes checkpoints to this root, or has taken it over from this one."""


class RootNotShared(CheckNRunError):
    """The ranks see different storage under the root's name: each machine its own disk, say."""


class ClaimDamaged(CheckNRunError):
    """The claim that says which checkpoints count can't be read, or was deleted: ``checknrun
    repair`` shows what there is, and writes it anew.
    """


class ModelPartlyRestored(CheckNRunError):
    """A restore failed after it had begun to change the model: training must not go on."""


class StoreUnreachable(CheckNRunError):
    """The key-value store that the job's ranks share doesn't answer: a peer has probably died."""
