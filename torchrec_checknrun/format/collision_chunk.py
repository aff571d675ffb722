"""State of managed-collision modules: encode it as a chunk, and check such index entries."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

import torch

from torchrec_checknrun.boxes import Span
from torchrec_checknrun.errors import CorruptCheckpoint
from torchrec_checknrun.format.checks import as_count
from torchrec_checknrun.format.chunk import COLLISIONS, EncodedChunk, Entry
from torchrec_checknrun.format.state import encode_state

NAME = "managed collisions"
"""The chunk's name in index entries and errors."""

_MOST_HISTORY = 1 << 31
"""The most ids that a module may have room for between evictions."""

Tensors = dict[str, torch.Tensor]


@dataclass(frozen=True)
class Facts:
    """The configuration and counters of one module, as in an index entry.

    Attributes:
        rows: of its table, to which the module maps ids.
        input_hash_size: exclusive upper bound of raw ids; 0 for none.
        buckets: parts into which its rows are divided to be dealt to ranks; None if as many as
            ranks.
        eviction_interval: in steps; this and the following are for modules with a history.
        iteration, last_eviction: in steps; -1 before the first.
        history_size: ids that the module has room for between evictions; -1 before the first step.
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
        """Parse one module's part of an index entry.

        Raises:
            ValueError: a field is of a wrong type or out of range.
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
    """The state of all managed-collision modules of a rank.

    Attributes:
        facts: by the module's state-dict path.
        tensors: by the same path, the ids and counts collected since the last eviction.
    """

    facts: dict[str, Facts]
    tensors: dict[str, Tensors]

    def encode(self, rank: int) -> EncodedChunk:
        """Encode the state as a chunk, whose pieces share the live memory where possible."""
        tree, pieces = encode_state(self.tensors, NAME)
        facts = {path: asdict(of_module) for path, of_module in self.facts.items()}
        entry: Entry = {
            "kind": COLLISIONS,
            "name": NAME,
            "rank": rank,
            "modules": facts,
            "tree": tree,
        }
        return EncodedChunk(entry, pieces)


def collision_facts(entry: Entry) -> tuple[int, dict[str, Facts]]:
    """Return the rank that wrote an index entry, and its facts by module path.

    Raises:
        CorruptCheckpoint: a field is missing or of a wrong type.
    """
    try:
        facts = {str(path): Facts.parse(facts) for path, facts in entry["modules"].items()}
        return as_count(entry["rank"]), facts
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise CorruptCheckpoint(f"index entry of {NAME} is malformed: {error!r}") from error
