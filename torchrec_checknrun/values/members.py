"""Store members of enumerations by name, without pickle.

A member is looked for in the modules that the program has imported, and only in enumerations: for a
checkpoint's sake nothing is imported, called or made.
"""

from __future__ import annotations

import sys
from dataclasses import astuple, dataclass
from enum import Enum, EnumMeta
from reprlib import repr as shown
from types import ModuleType

MEMBER = "enum"
"""The name of a member's node."""


@dataclass(frozen=True)
class AbsentMember:
    """A member of an enumeration that this process lacks, as tools see it that show a state.

    Attributes:
        module, kind: of the enumeration, by its qualified name.
        member: the member's name.
    """

    module: str
    kind: str
    member: str


def encode_member(value: Enum | AbsentMember) -> list[str] | None:
    """Return the content of a member's node; None if the member can't be found by its name, as one
    of a local class, or a combination of flags.
    """
    if isinstance(value, AbsentMember):
        return list(astuple(value))
    kind = type(value)
    content = [kind.__module__, kind.__qualname__, value._name_]
    return content if all(content) and decode_member(content) is value else None


def decode_member(content: object) -> Enum | AbsentMember:
    """Return the member that a node's content names.

    Raises:
        ValueError: the content is malformed.
    """
    if type(content) is not list or len(content) != 3 or {type(each) for each in content} != {str}:
        raise ValueError(f"{shown(content)} is not a member of an enumeration")
    module, kind, name = content
    found: object = sys.modules.get(module)
    for part in kind.split("."):
        found = vars(found).get(part) if isinstance(found, (ModuleType, type)) else None
    member = found.__members__.get(name) if isinstance(found, EnumMeta) else None
    return member if isinstance(member, Enum) else AbsentMember(module, kind, name)
