"""Rows to bytes and back. A codec knows nothing of tables, ranks or files: tensors in, tensors out.

Every codec is found by the name that stands in a checkpoint's chunk index, together with its
parameters and version, so that old chunks stay readable when a codec changes.
"""

from __future__ import annotations

from torchrec_checknrun.codecs.base import Codec, CodecSpec
from torchrec_checknrun.codecs.exact import Exact
from torchrec_checknrun.codecs.rowwise import FusedRowwise
from torchrec_checknrun.errors import UnsupportedFormat

_CODECS: dict[str, type[Exact] | type[FusedRowwise]] = {
    codec.name: codec for codec in (Exact, FusedRowwise)
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


__all__ = ["Codec", "CodecSpec", "Exact", "FusedRowwise", "codec_from_spec"]
