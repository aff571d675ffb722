"""Refuse a model that two followers of a process would write to: their versions would be mixed."""

from __future__ import annotations

import weakref

from torch import nn

from torchrec_checknrun.errors import UnsupportedTable

_FOLLOWED: weakref.WeakValueDictionary[int, object] = weakref.WeakValueDictionary()
"""By the address of a model that versions are written to, its follower."""


def require_alone(model: nn.Module, follower: object) -> None:
    """Note that a follower writes to a model, and to all its parts.

    Raises:
        UnsupportedTable: another one does; says what to do.
    """
    for part in model.modules():
        if _FOLLOWED.get(id(part), follower) is not follower:
            raise UnsupportedTable(
                f"{type(model).__name__} has parts that another Follower of this process keeps "
                "up to date: share that one, or give each a model of its own (copy.deepcopy)"
            )
    for part in model.modules():
        _FOLLOWED[id(part)] = follower
