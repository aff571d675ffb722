"""Settle codecs over all ranks, for those that must know all rows before they encode the first one.

Each rank surveys the rows that it is about to write, rank 0 merges the surveys and settles every
codec once, and all ranks encode with the settled codecs. The codec's own hooks, ``survey`` and
``settle``, do the work; see ``base.Codec``.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from copy import deepcopy

from torchrec_checknrun.codecs import Codec, Survey, codec_from_spec

Surveys = dict[str, Survey]
"""Surveys by ``key_of`` their codec: tables with equal codecs share one."""

Settled = Mapping[str, Codec]
"""Settled codecs by ``key_of`` the codec that was surveyed."""


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
