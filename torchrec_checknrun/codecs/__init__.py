"""Turn rows into bytes and back. A codec knows no tables, ranks or files: tensors in, tensors out.

A chunk's index entry holds the name, version and options of its codec, so that old chunks stay
readable when a codec changes. Read ``base.py`` first, then ``rowwise.py``, the codec used most.

A codec that must know all rows before it encodes the first one is settled over all ranks: each rank
surveys the rows that it is about to write, rank 0 merges the surveys and settles every codec once,
and all ranks encode with the settled codecs.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from copy import deepcopy
from importlib.metadata import entry_points
from typing import TypeVar

from torchrec_checknrun.codecs.base import (
    NO_CONTEXT,
    Codec,
    CodecSpec,
    Encoded,
    Method,
    Parameters,
    RowContext,
    Sample,
    SampledRows,
    Survey,
)
from torchrec_checknrun.codecs.chained import Chained
from torchrec_checknrun.codecs.delta import Delta
from torchrec_checknrun.codecs.fisher import Fisher
from torchrec_checknrun.codecs.importance import ImportanceWeighted
from torchrec_checknrun.codecs.kmeans import KMeans
from torchrec_checknrun.codecs.lc import LcCheckpoint
from torchrec_checknrun.codecs.plain import Bf16, Exact, Fp16
from torchrec_checknrun.codecs.rowwise import Rowwise
from torchrec_checknrun.errors import UnsupportedFormat

C = TypeVar("C", bound=type[Codec])

Surveys = dict[str, Survey]
"""Surveys by ``key_of`` their codec: tables with equal codecs share one."""

Settled = Mapping[str, Codec]
"""Settled codecs by ``key_of`` the codec that was surveyed."""

ENTRY_POINTS = "torchrec_checknrun.codecs"
"""The group of entry points that name codecs of other packages."""

_CODECS: dict[str, type[Codec]] = {
    codec.name: codec
    for codec in (
        Exact,
        Fp16,
        Bf16,
        Rowwise,
        ImportanceWeighted,
        KMeans,
        Fisher,
        Delta,
        LcCheckpoint,
    )
}


def register(codec: C) -> C:
    """Make a codec from outside of this package readable; also a class decorator.

    A restore finds a chunk's codec by name. A process knows the name once the module that calls
    ``register`` has been imported: import it in the training script, before ``restore()``. For
    processes that import nothing of yours (``checknrun verify``, ``compact`` …), declare an entry
    point in the package that holds the codec; the codec is then found wherever that package is
    installed, without ``register``::

        [project.entry-points."torchrec_checknrun.codecs"]
        my_codec = "my_package.my_module:MyCodec"

    Raises:
        ValueError: the class lacks ``name``, ``version`` or ``lossy``, or another class has the
            name.
    """
    if not (isinstance(codec, type) and issubclass(codec, Codec)):
        raise ValueError(f"{codec!r} is not a codec: inherit from torchrec_checknrun.codecs.Codec")
    for attribute, kind in (("name", str), ("version", int), ("lossy", bool)):
        if type(getattr(codec, attribute, None)) is not kind:
            raise ValueError(
                f"codec {codec.__qualname__} needs a class attribute {attribute!r} of type "
                f"{kind.__name__}: add it"
            )
    known = _CODECS.setdefault(codec.name, codec)
    if (known.__module__, known.__qualname__) != (codec.__module__, codec.__qualname__):
        raise ValueError(
            f"codec name {codec.name!r} belongs to {known.__module__}.{known.__qualname__}: give "
            f"{codec.__module__}.{codec.__qualname__} another name"
        )
    _CODECS[codec.name] = codec
    return codec


def codec_from_spec(spec: CodecSpec) -> Codec:
    """Build the codec that wrote a chunk.

    Raises:
        UnsupportedFormat: codec, version or options are unknown here, or the codec's entry point
            can't be loaded.
    """
    name = spec.get("name")
    if isinstance(name, str) and name not in _CODECS:
        for entry in entry_points(group=ENTRY_POINTS, name=name):
            try:
                register(entry.load())
            except Exception as error:  # the checkpoint is not damaged: the environment is
                raise UnsupportedFormat(
                    f"codec {name!r} can't be loaded from its entry point {entry.value!r}: fix or "
                    f"reinstall the package that declares it ({error!r})"
                ) from error
    if not isinstance(name, str) or name not in _CODECS:
        raise UnsupportedFormat(
            f"codec {name!r} is unknown to this release (it has {sorted(_CODECS)}): "
            "read the checkpoint with the torchrec_checknrun release that wrote it, or a newer "
            "one; if the codec is of another package, import the module that registers it, or "
            f"declare it as an entry point of the group {ENTRY_POINTS!r}"
        )
    kind, version = _CODECS[name], spec.get("version")
    if type(version) is not int or not 1 <= version <= kind.version:
        raise UnsupportedFormat(
            f"codec {name!r} version {version!r} is unknown (this release reads 1 to "
            f"{kind.version}): upgrade the package that has the codec"
        )
    try:
        return kind.from_spec(spec)
    except (ValueError, TypeError, LookupError, ArithmeticError) as error:
        raise UnsupportedFormat(f"codec {name!r}: {error}") from error


def key_of(codec: Codec) -> str:
    """Return a text that equal codecs share: the codec's spec in canonical JSON."""
    return json.dumps(codec.spec(), sort_keys=True)


def add_survey(surveys: Surveys, codec: Codec, found: Survey) -> None:
    """Merge a codec's survey of one more shard into a rank's surveys."""
    key = key_of(codec)
    if key in surveys:
        surveys[key].merge(found)
    else:
        surveys[key] = found


def settle(surveys: Iterable[Mapping[str, Survey]]) -> dict[str, Codec]:
    """Merge all ranks' surveys, which stay as they are, and settle each surveyed codec."""
    merged: Surveys = {}
    for of_rank in surveys:
        for key, found in of_rank.items():
            if key in merged:
                merged[key].merge(found)
            else:
                merged[key] = deepcopy(found)
    return {key: codec_from_spec(json.loads(key)).settle(whole) for key, whole in merged.items()}


__all__ = [
    "NO_CONTEXT",
    "Bf16",
    "Chained",
    "Codec",
    "CodecSpec",
    "Delta",
    "Encoded",
    "Exact",
    "Fisher",
    "Fp16",
    "ImportanceWeighted",
    "KMeans",
    "LcCheckpoint",
    "Method",
    "Parameters",
    "RowContext",
    "Rowwise",
    "Sample",
    "SampledRows",
    "Settled",
    "Survey",
    "Surveys",
    "add_survey",
    "codec_from_spec",
    "key_of",
    "register",
    "settle",
]
