"""Store bytes as a lossless difference to the same bytes of the parent checkpoint.

Dense parameters and optimizer state change in every step, but by little: XOR with what they were
leaves the upper bytes of most values zero. Those of a block lie together, and zstd packs them.
"""

from __future__ import annotations

import numpy as np
import xxhash
import zstandard

from torchrec_checknrun.format.entries import Difference

BLOCK_BYTES = 1 << 18
"""Bytes whose values' bytes are sorted together; the last block may be shorter."""
WIDTHS = (1, 2, 4, 8)
"""Bytes of a value."""
_LEVEL = 1


def difference(
    content: memoryview, parent: memoryview, width: int
) -> tuple[bytes, Difference] | None:
    """Encode the difference of two contents of one length; None if that is not smaller.

    Args:
        width: bytes of a value, one of ``WIDTHS``.
    """
    if len(content) != len(parent) or not len(content):
        return None
    own, before = (np.frombuffer(each, dtype=np.uint8) for each in (content, parent))
    compressor = zstandard.ZstdCompressor(level=_LEVEL).compressobj(size=len(content))
    parts, size = [], 0
    for start in range(0, len(own), BLOCK_BYTES):
        block = own[start : start + BLOCK_BYTES] ^ before[start : start + BLOCK_BYTES]
        parts.append(compressor.compress(_planes(block, width).tobytes()))
        size += len(parts[-1])
        if size >= len(content):
            return None
    data = b"".join((*parts, compressor.flush()))
    if len(data) >= len(content):
        return None
    return data, Difference(
        parent=xxhash.xxh3_64_hexdigest(parent),
        content=xxhash.xxh3_64_hexdigest(content),
        raw=len(content),
        width=width,
    )


def restored(data: memoryview, parent: memoryview, known: Difference) -> memoryview:
    """Decode a difference.

    Args:
        parent: the content that ``known.parent`` is the checksum of.

    Raises:
        ValueError: the bytes are not such a difference, or of another content.
    """
    if len(parent) != known.raw or known.width not in WIDTHS:
        raise ValueError(f"a difference of {known.raw} bytes to {len(parent)}")
    content = np.frombuffer(parent, dtype=np.uint8).copy()
    try:
        if zstandard.get_frame_parameters(data).content_size != known.raw:
            raise ValueError(f"a frame of another size than {known.raw} bytes")
        with zstandard.ZstdDecompressor().stream_reader(data) as reader:
            for start in range(0, known.raw, BLOCK_BYTES):
                block = content[start : start + BLOCK_BYTES]
                planes = reader.read(len(block))
                if len(planes) != len(block):
                    raise ValueError("a frame that ends early")
                block ^= _values(np.frombuffer(planes, dtype=np.uint8), known.width)
    except zstandard.ZstdError as error:
        raise ValueError(f"a difference can't be decompressed: {error}") from error
    if (checksum := xxhash.xxh3_64_hexdigest(content.data)) != known.content:
        raise ValueError(f"content with checksum {checksum}, expected {known.content}")
    return content.data


def _planes(block: np.ndarray, width: int) -> np.ndarray:
    """Sort a block's bytes: the first ones of all values, then the second ones, …; what makes no
    whole value follows.
    """
    whole = len(block) // width * width
    return np.concatenate((block[:whole].reshape(-1, width).T.reshape(-1), block[whole:]))


def _values(planes: np.ndarray, width: int) -> np.ndarray:
    """Undo ``_planes``."""
    whole = len(planes) // width * width
    return np.concatenate((planes[:whole].reshape(width, -1).T.reshape(-1), planes[whole:]))
