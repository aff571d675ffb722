"""Upload a file to S3 while it is written: several parts at a time, and visible only as a whole.

s3fs alone would send one part after another; requests, credentials and the event loop are its own.
"""

from __future__ import annotations

import errno
from collections import deque
from concurrent.futures import Future
from typing import Any

from torchrec_checknrun.errors import StorageFailed
from torchrec_checknrun.store.retry import retrying
from torchrec_checknrun.threads import Threads

PART_BYTES = 16 << 20
_AT_ONCE = 4
_DOUBLE_AFTER = 1000
"""Parts of one size before the size doubles: S3 allows 10,000 parts, so a file may have 16 TB."""


class S3Upload:
    """A new object, written from its beginning to its end.

    Memory: five parts of 16 MiB, of 32 MiB after the first 16 GB, and so on.

    Args:
        filesystem: an ``s3fs.S3FileSystem``.
        path: bucket and key.
    """

    def __init__(self, filesystem: Any, path: str) -> None:
        self._fs = filesystem
        self._path = path
        bucket, self._key, _ = filesystem.split_path(path)
        self._bucket = bucket
        self._buffer = bytearray()
        self._position = 0
        self._upload: str | None = None
        self._parts = self._part_sizes = 0
        self._on_way: deque[Future[dict[str, Any]]] = deque()
        self._sent: list[dict[str, Any]] = []
        self._threads = Threads(_AT_ONCE, "checknrun-upload")

    def write(self, view: memoryview) -> int:
        """Take all bytes; send parts as they fill up."""
        self._buffer += view
        self._position += len(view)
        while len(self._buffer) >= (size := self._part_bytes()):
            part = bytes(memoryview(self._buffer)[:size])
            del self._buffer[:size]
            self._send(part)
        return len(view)

    def commit(self) -> int:
        """Send the rest and make the object visible; return its number of bytes. After an error,
        ``discard`` is still to be called.

        Raises:
            StorageFailed: the store did not confirm exactly the parts that were sent.
        """
        if self._upload is None:
            data = bytes(self._buffer)
            self._call("put_object", Body=data)
        else:
            if self._buffer:
                self._send(bytes(self._buffer))
            while self._on_way:
                self._sent.append(self._on_way.popleft().result())
            self._require_parts()
            self._complete()
        self._end()
        return self._position

    def discard(self) -> None:
        """Remove all parts of the object."""
        self._threads.close(cancel=True)
        if self._upload is not None:
            upload, self._upload = self._upload, None
            self._call("abort_multipart_upload", UploadId=upload)
        self._end()

    def _end(self) -> None:
        self._threads.close()
        self._buffer = bytearray()
        self._fs.invalidate_cache(self._path)

    def _part_bytes(self) -> int:
        return PART_BYTES << (self._parts // _DOUBLE_AFTER)

    def _send(self, part: bytes) -> None:
        if self._upload is None:
            self._upload = self._call("create_multipart_upload")["UploadId"]
        self._parts += 1
        self._part_sizes += len(part)
        number, upload = self._parts, self._upload

        def send() -> dict[str, Any]:
            done = self._call("upload_part", PartNumber=number, UploadId=upload, Body=part)
            return {"PartNumber": number, "ETag": done["ETag"]}

        while len(self._on_way) >= _AT_ONCE:
            self._sent.append(self._on_way.popleft().result())
        self._on_way.append(self._threads.submit(send))

    def _require_parts(self) -> None:
        numbers = [part["PartNumber"] for part in self._sent if part["ETag"]]
        if numbers != list(range(1, self._parts + 1)) or self._part_sizes != self._position:
            raise StorageFailed(
                errno.EIO,
                f"s3://{self._path}: of {self._position} bytes in {self._parts} parts, "
                f"{self._part_sizes} bytes were sent and {len(numbers)} parts are confirmed",
            )

    def _complete(self) -> None:
        """Complete the upload; if the answer is lost, the object exists and the upload does not."""
        upload = self._upload

        def complete() -> None:
            try:
                self._fs.call_s3(
                    "complete_multipart_upload",
                    Bucket=self._bucket,
                    Key=self._key,
                    UploadId=upload,
                    MultipartUpload={"Parts": self._sent},
                )
            except FileNotFoundError:
                self._fs.invalidate_cache(self._path)
                if self._fs.info(self._path)["size"] != self._position:
                    raise

        retrying(complete, f"finishing {self._path}")

    def _call(self, method: str, **values: Any) -> Any:
        return retrying(
            lambda: self._fs.call_s3(method, Bucket=self._bucket, Key=self._key, **values),
            f"{method} of s3://{self._path}",
        )
