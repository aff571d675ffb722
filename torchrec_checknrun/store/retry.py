"""Retry storage operations after transient errors, with growing, jittered pauses.

Permanent errors (no space, no permission, no such bucket) fail at once, with the remedy.
"""

from __future__ import annotations

import errno
import logging
import math
import os
import re
from collections.abc import Callable, Mapping
from typing import TypeVar

from tenacity import (
    RetryCallState,
    Retrying,
    retry_if_exception,
    stop_after_delay,
    wait_random_exponential,
)

from torchrec_checknrun.errors import CheckNRunError, StorageFailed, StorageUnreachable
from torchrec_checknrun.store.deadlines import given_up

logger = logging.getLogger(__name__)

T = TypeVar("T")

RETRY_SECONDS = 60.0
"""Time limit of an operation's retries; the environment's CHECKNRUN_RETRY_SECONDS overrides it."""
_VARIABLE = "CHECKNRUN_RETRY_SECONDS"
_LONGEST_PAUSE = 10.0
_FIRST_PAUSE = 0.2

_ERRNOS = frozenset(
    {
        *(errno.EAGAIN, errno.EINTR, errno.EBUSY, errno.ESTALE, errno.EREMOTEIO),
        *(errno.ETIMEDOUT, errno.ECONNRESET, errno.ECONNREFUSED, errno.ECONNABORTED, errno.EPIPE),
        *(errno.EHOSTUNREACH, errno.ENETUNREACH, errno.ENETDOWN, errno.ENETRESET),
    }
)
_STATUS = frozenset({408, 429, 500, 502, 503, 504})
_S3_STATUS = _STATUS | {409}
"""Status codes of S3's transient errors: by 409 it tells that two conditional puts have met, others
that a file exists.
"""
_DENIED = frozenset({401, 403})
# Classes of botocore, aiohttp, requests, httpx, azure-core and asyncio, by name: these packages may
# not be installed.
_NAMES = frozenset(
    {
        *("HTTPClientError", "ConnectionError", "ResponseStreamingError"),
        *("ResponseParserError", "ClientConnectionError", "ClientPayloadError", "IncompleteRead"),
        *("ServerTimeoutError", "ChunkedEncodingError", "TransportError"),
        *("ServiceRequestError", "ServiceResponseError"),
        "TimeoutError",  # asyncio's, which fsspec raises: on Python 3.10 another than the built-in
    }
)
_NOT_PERMITTED = (
    "permission was refused: check the owner, the mode or the credentials, and with S3 the clock"
)
_REMEDIES = {
    errno.ENOSPC: "no space is left: free some, or keep fewer checkpoints (`checknrun prune`)",
    errno.EDQUOT: "the quota is used up: free some space, or ask for more",
    errno.EROFS: "the file system is mounted read-only: mount it writable, or use another root",
    errno.EACCES: _NOT_PERMITTED,
    errno.EPERM: _NOT_PERMITTED,
    errno.EFBIG: "the file is larger than the file system or a limit (ulimit -f) allows",
    errno.EMFILE: "this process has too many files open: raise its limit (ulimit -n)",
    errno.ENFILE: "this machine has too many files open: raise its limit (fs.file-max)",
    errno.ENOMEM: "this machine has too little memory left: give it more, or use less",
}
_REFUSED = errno.EREMOTEIO
"""The error number of what stores and their drivers, which are no disks, refuse without one."""
_OF_THE_READER = frozenset(
    {errno.EACCES, errno.EPERM, errno.EMFILE, errno.ENFILE, errno.ENOMEM, _REFUSED}
)
"""Errors of a process that reads, or of its request, not of the files that are read."""
_USER = re.compile(r"""(?<![a-z0-9+.-])([a-z][a-z0-9+.-]*://)[^\s/?#"'<>]*@""", re.IGNORECASE)


def masked(text: str) -> str:
    """Remove users and passwords from the URLs in a text.

    ``abfs://container@account`` has neither, and stays.
    """
    return _USER.sub(lambda m: m[0] if m[1].lower().startswith("abfs") else f"{m[1]}***@", text)


def is_transient(error: BaseException) -> bool:
    """Tell whether the same operation may succeed a little later."""
    if isinstance(error, (TimeoutError, ConnectionError)):
        return True
    if isinstance(error, OSError) and error.errno in _ERRNOS:
        return True
    if _statuses(error) & _STATUS or _s3_status(error) in _S3_STATUS:
        return True
    return any(kind.__name__ in _NAMES for kind in type(error).__mro__)


def _s3_status(error: BaseException) -> int | None:
    """Return the HTTP status of a refusal of S3's; None for other errors.

    s3fs knows the codes of AWS itself, and makes an input/output error of all others, such as those
    of the load balancers before a store.
    """
    response = getattr(error.__cause__, "response", None)
    if not isinstance(response, Mapping):
        return None
    status = response.get("ResponseMetadata", {}).get("HTTPStatusCode")
    return status if isinstance(status, int) else None


def _statuses(error: BaseException) -> set[int]:
    """Return the HTTP statuses that an error, or the answer it keeps, tells."""
    holders = (error, getattr(error, "response", None))
    names = ("status", "status_code", "code")
    told = (getattr(holder, name, None) for holder in holders for name in names)
    return {status for status in told if isinstance(status, int)}


def tells_nothing(error: BaseException) -> bool:
    """Tell whether an error of a read leaves open whether what was to be read is sound: the storage
    didn't answer, or this process may not, or can't just now, read it.
    """
    if isinstance(error, StorageUnreachable):
        return True
    return isinstance(error, OSError) and error.errno in _OF_THE_READER


def retrying(act: Callable[[], T], what: str, most: float = math.inf) -> T:
    """Run a storage operation until it succeeds, fails permanently, or was given up.

    Args:
        act: may be run again after a failure, even one that had an effect.
        what: names the operation and its path in errors and the log.
        most: upper limit of the seconds that the environment allows.

    Raises:
        FileNotFoundError, FileExistsError: raised by ``act``.
        CheckNRunError: the environment's CHECKNRUN_RETRY_SECONDS is no number.
        StorageFailed: any other failure.
    """
    seconds = min(retry_seconds(), most)

    def log(state: RetryCallState) -> None:
        assert state.outcome is not None
        logger.warning(
            "%s failed (%s): retrying in %.1f s",
            masked(what),
            masked(repr(state.outcome.exception())),
            state.next_action.sleep if state.next_action else 0.0,
        )

    first: list[BaseException] = []
    try:
        return act()  # the usual case; Retrying costs more than a small read
    except Exception as error:
        first.append(error)

    def again() -> T:
        if first:
            raise first.pop()
        return act()

    try:
        return Retrying(
            retry=retry_if_exception(lambda error: is_transient(error) and not given_up()),
            wait=wait_random_exponential(multiplier=_FIRST_PAUSE, max=_LONGEST_PAUSE),
            stop=stop_after_delay(seconds),
            before_sleep=log,
            reraise=True,
        )(again)
    except (FileNotFoundError, FileExistsError, CheckNRunError):
        raise
    except Exception as error:
        raise storage_failed(error, what) from error


def storage_failed(error: Exception, what: str) -> Exception:
    """Return the error that users see, with the remedy where one is known."""
    if isinstance(error, (StorageFailed, FileNotFoundError, FileExistsError)):
        return error
    number = error.errno if isinstance(error, OSError) and error.errno else None
    if number is None and (isinstance(error, PermissionError) or _statuses(error) & _DENIED):
        number = errno.EACCES
    if number is None:
        number = _REFUSED
    kind, remedy = StorageFailed, _REMEDIES.get(number)
    if remedy is None and _s3_status(error) is not None:
        number = _REFUSED
    if remedy is None and "NoCredentials" in type(error).__name__:
        remedy = _REMEDIES[errno.EACCES]
    if remedy is None and is_transient(error):
        kind = StorageUnreachable
        remedy = "the storage didn't answer as it should, in several tries: check that it is up"
    detail = f"{type(error).__name__}: {error}"
    message = f"{what}: {remedy} ({detail})" if remedy else f"{what}: {detail}"
    return kind(number, masked(message))


def retry_seconds() -> float:
    """Return how long a failing operation is retried.

    Raises:
        CheckNRunError: the environment's CHECKNRUN_RETRY_SECONDS is no number.
    """
    text = os.environ.get(_VARIABLE) or str(RETRY_SECONDS)
    try:
        seconds = float(text)
    except ValueError:
        seconds = math.nan
    if not seconds >= 0:
        raise CheckNRunError(
            f"the environment variable {_VARIABLE} is {text!r}: set it to the seconds for which a "
            f"failing storage operation is retried, such as {RETRY_SECONDS:g}, or unset it"
        )
    return seconds
