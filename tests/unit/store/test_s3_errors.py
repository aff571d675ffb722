"""Name the operation that an object store has refused, not the clean-up after it."""

from __future__ import annotations

from typing import Any

import pytest

from torchrec_checknrun.errors import StorageFailed
from torchrec_checknrun.store import s3
from torchrec_checknrun.store.new_file import NewFile


class Bucket:
    """A bucket whose user may neither upload parts nor abort an upload."""

    def split_path(self, path: str) -> tuple[str, str, None]:
        bucket, _, key = path.partition("/")
        return bucket, key, None

    def call_s3(self, method: str, **values: Any) -> dict[str, Any]:
        if method == "create_multipart_upload":
            return {"UploadId": "1"}
        raise PermissionError(f"{method} is refused")

    def invalidate_cache(self, path: str) -> None:
        pass


def test_a_refused_upload_whose_abortion_is_refused_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(s3, "PART_BYTES", 10)
    file = NewFile(s3.S3Upload(Bucket(), "bucket/key"), "rank-00000.bin")
    file.write(bytes(15))
    with pytest.raises((StorageFailed, PermissionError), match="upload_part is refused"):
        file.commit()
    file.drop()
