"""Write the values of a checkpoint that are no tensors as JSON that any parser takes."""

from __future__ import annotations

import json
import math
from collections import deque
from collections.abc import Mapping
from typing import Any

import numpy as np

from torchrec_checknrun.root.chain import Chain
from torchrec_checknrun.values.plain_values import readable, sorted_members
from torchrec_checknrun.values.state import encode_state


def values_json(chain: Chain, values: Mapping[str, Any], tables: Mapping[str, str]) -> bytes:
    """Encode values by name, with the checkpoint that they are of.

    Args:
        tables: by table, the form in which its rows were written.
    """
    document = {
        "checkpoint": chain.head.id,
        "step": chain.head.step,
        "tables": tables,
        "values": _readable(values),
    }
    return json.dumps(document, indent=2, allow_nan=False).encode()


def _readable(value: Any) -> Any:
    """Convert a value to JSON's types; what has none there is keyed by its own type's name."""
    if isinstance(value, (set, frozenset)):
        value = {type(value).__name__: sorted_members(value, "", encode_state)}
    elif isinstance(value, (np.generic, np.ndarray)):
        value = value.tolist()
    if value is None or isinstance(value, (int, str)):
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else {"float": str(value)}
    if isinstance(value, Mapping):
        return {str(name): _readable(item) for name, item in value.items()}
    if isinstance(value, (list, tuple, deque)):
        return [_readable(item) for item in value]
    return {"hex": value.hex()} if isinstance(value, bytes) else _readable(readable(value))
