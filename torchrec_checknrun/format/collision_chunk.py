"""State of managed-collision modules: encode it as a chunk."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from torchrec_checknrun.format.chunk import EncodedChunk
from torchrec_checknrun.format.entries import CollisionsEntry, Facts
from torchrec_checknrun.format.state import encode_state

NAME = "managed collisions"
"""The chunk's name in index entries and errors."""

Tensors = dict[str, torch.Tensor]


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
        return EncodedChunk(
            CollisionsEntry(name=NAME, rank=rank, modules=self.facts, tree=tree), pieces
        )
