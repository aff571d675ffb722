"""All errors that users meet. Messages name the thing, the expectation and the remedy."""

from __future__ import annotations


class CheckNRunError(Exception):
    """Base class of all errors this package raises for its users."""


class CheckpointNotFound(CheckNRunError):
    """No committed checkpoint where one is required."""


class CheckpointExists(CheckNRunError):
    """A checkpoint directory that holds files already: each is written once, never reused."""


class CorruptCheckpoint(CheckNRunError):
    """A stored file that differs from its manifest or index (size, checksum or layout).

    Attributes:
        checkpoint: the id of the checkpoint that the file is part of; empty where that is unknown.
    """

    checkpoint = ""


class ChainBroken(CheckNRunError):
    """A chain whose needed checkpoint (a parent) is missing, damaged or was replaced."""


class UnsupportedFormat(CheckNRunError):
    """A checkpoint in a format version that this release can't read."""


class IncompatibleCheckpoint(CheckNRunError):
    """A sound checkpoint that doesn't fit this model; names table or key, saved and wanted."""


class UnsupportedState(CheckNRunError):
    """A state object that can't be stored: one of its values needs pickle, or differs between ranks
    without being declared so; names the object and the key.
    """


class UnsupportedTable(CheckNRunError):
    """A table in a TorchRec kernel whose rows this package can't track."""


class InvalidPlan(CheckNRunError):
    """Ranks' plans that don't form one checkpoint: two write the same rows, or rows are missing."""


class SaveFailed(CheckNRunError):
    """A checkpoint that was not committed; its rows stay marked and are part of the next one."""


class SaveDeferred(CheckNRunError):
    """An explicit save that was deferred, since gradients wait for their optimizer."""


class StorageFailed(OSError):
    """An operation that the storage refused or didn't answer; names operation, path and remedy."""


class StorageUnreachable(StorageFailed):
    """A storage that didn't answer any of several tries: its content is unknown."""


class RootInUse(CheckNRunError):
    """A root that another trainer writes to, or has taken over from this one."""


class RootNotShared(CheckNRunError):
    """A root under whose name ranks see different storage: for example, each machine's own disk."""


class ClaimDamaged(CheckNRunError):
    """A claim (the record of which checkpoints count) that can't be read or was deleted:
    ``checknrun repair`` shows the remains and rewrites the claim.
    """


class ModelPartlyRestored(CheckNRunError):
    """A restore that failed after it had begun to change the model: training must not go on."""


class StoreUnreachable(CheckNRunError):
    """A key-value store of the job's ranks that doesn't answer: a peer has probably died."""


class ImagesRefused(CheckNRunError):
    """Images, or copies in memory, that this machine or this model can't have: too little shared
    memory, tables that don't live in CPU memory, too much state beside them.
    """
