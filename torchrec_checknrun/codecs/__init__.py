"""Rows to bytes and back. A codec knows nothing of tables, ranks or files: tensors in, tensors out.

Every codec is found by the name that stands in a checkpoint's chunk index, together with its
parameters and version, so that old chunks stay readable when a codec changes.
"""

from __future__ import annotations

from typing import Protocol

from torchrec_checknrun.codecs.base import (
    NO_CONTEXT,
    Codec,
    CodecSpec,
    Encoded,
    Method,
    Parameters,
    RowContext,
)
from torchrec_checknrun.codecs.importance import ImportanceWeighted
from torchrec_checknrun.codecs.kmeans import KMeans
from torchrec_checknrun.codecs.plain import Bf16, Exact, Fp16
from torchrec_checknrun.codecs.rowwise import Rowwise
from torchrec_checknrun.errors import UnsupportedFormat


class _CodecClass(Protocol):
    name: str

    def from_spec(self, spec: CodecSpec) -> Codec: ...


_CODECS: dict[str, _CodecClass] = {
    codec.name: codec for codec in (Exact, Fp16, Bf16, Rowwise, ImportanceWeighted, KMeans)
}


def codec_from_spec(spec: CodecSpec) -> Codec:
    """The codec that wrote a chunk.

    Raises:
        UnsupportedFormat: this release doesn't know the codec, its version or its parameters.
    """
    name = spec.get("name")
    if not isinstance(name, str) or name not in _CODECS:
        raise UnsupportedFormat(
            f"codec {name!r} is unknown to this release (it has {sorted(_CODECS)}): "
            "read the checkpoint with the torchrec_checknrun release that wrote it, or a newer one"
        )
    return _CODECS[name].from_spec(spec)


__all__ = [
    "NO_CONTEXT",
    "Bf16",
    "Codec",
    "CodecSpec",
    "Encoded",
    "Exact",
    "Fp16",
    "ImportanceWeighted",
    "KMeans",
    "Method",
    "Parameters",
    "RowContext",
    "Rowwise",
    "codec_from_spec",
]
