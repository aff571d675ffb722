"""Describe what managed-collision modules know in a rank file's index, and check such entries."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

import torch

from torchrec_checknrun.boxes import Span
from torchrec_checknrun.errors import CorruptCheckpoint
from torchrec_checknrun.format.checks import as_count
from torchrec_checknrun.format.chunk import EncodedChunk, Entry
from torchrec_checknrun.format.state import encode_state

KIND = "collisions"


NAME = "managed collisions"


_MOST_HISTORY = 1 << 31
"""Ids that a module may have room for between evictions."""


Tensors = dict[str, torch.Tensor]


@dataclass(frozen=True)
class Facts:
    """What an index entry says of one module.

    Attributes:
        rows: of its table, which it maps ids to.
        input_hash_size: raw ids are below this; 0 for any.
        buckets: how often its rows are divided to be dealt to ranks; None if that is their number.
        eviction_interval: in steps; this and the rest is for modules with a history.
        iteration, last_eviction: in steps; -1 before the first.
        history_size: how many ids it has room for between evictions; -1 before the first step.
    """

    rows: Span
    input_hash_size: int
    buckets: int | None
    eviction_interval: int | None = None
    iteration: int = -1
    last_eviction: int = -1
    history_size: int = -1

    @classmethod
    def parse(cls, document: dict[str, Any]) -> Facts:
        """As an index entry has them.

        Raises:
            ValueError: a field is of a wrong type.
        """
        start, stop = document["rows"]
        facts = cls(**{**document, "rows": (start, stop)})
        for name, number in vars(facts).items():
            optional = name in ("buckets", "eviction_interval") and number is None
            if name != "rows" and type(number) is not int and not optional:
                raise ValueError(f"{name} = {number!r}")
        if type(start) is not int or type(stop) is not int:
            raise ValueError(f"rows = {facts.rows}")
        if facts.history_size > _MOST_HISTORY:
            raise ValueError(f"history_size = {facts.history_size}, of {_MOST_HISTORY} at most")
        return facts


@dataclass
class CollisionState:
    """What all modules of a rank know.

    Attributes:
        facts: by the module's state-dict path.
        tensors: the same; what the module has collected since its last eviction.
    """

    facts: dict[str, Facts]
    tensors: dict[str, Tensors]

    def encode(self, rank: int) -> EncodedChunk:
        """As a chunk; its bytes are the live memory's where that can be."""
        tree, pieces = encode_state(self.tensors, NAME)
        facts = {path: asdict(of_module) for path, of_module in self.facts.items()}
        entry: Entry = {"kind": KIND, "name": NAME, "rank": rank, "modules": facts, "tree": tree}
        return EncodedChunk(entry, pieces)


def collision_facts(entry: Entry) -> tuple[int, dict[str, Facts]]:
    """Return the rank that wrote an index entry, and what it says of each module by its path.

    Raises:
        CorruptCheckpoint: a field is missing or of a wrong type.
    """
    try:
        facts = {str(path): Facts.parse(facts) for path, facts in entry["modules"].items()}
        return as_count(entry["rank"]), facts
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise CorruptCheckpoint(f"index entry of {NAME} is malformed: {error!r}") from error
