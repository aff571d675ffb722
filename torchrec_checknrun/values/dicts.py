"""Store the standard library's dicts that do more than plain ones as what they are.

``update`` of a Counter adds counts, and a plain dict's replaces them: a Counter that came back as a
plain dict would go on with wrong counts, in silence. A defaultdict comes back where its factory is
a type of Python's; users' own types of dicts come back plain, but for those that the restored
object holds already.
"""

from __future__ import annotations

from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

KIND = "kind"
"""The field of a dict's node that names its type."""
_FACTORIES = (bool, int, float, complex, str, bytes, list, tuple, set, frozenset, dict, deque)
_FACTORIES_OF_DICTS = (Counter, OrderedDict, defaultdict)
_KINDS: dict[str, Callable[[], dict[Any, Any]]] = {
    "OrderedDict": OrderedDict,
    "Counter": Counter,
    "defaultdict": defaultdict,
    **{
        f"defaultdict({factory.__name__})": partial(defaultdict, factory)
        for factory in (*_FACTORIES, *_FACTORIES_OF_DICTS)
    },
}


def kind_of(value: Mapping[Any, Any]) -> str | None:
    """Return the name of a dict's type; None for a plain one, and for types that are not stored.

    A module's state dict counts as plain: it is ordered for its metadata's sake only.
    """
    kind = type(value)
    if kind is OrderedDict:
        return None if hasattr(value, "_metadata") else kind.__name__
    if kind is Counter:
        return kind.__name__
    if isinstance(value, defaultdict) and kind is defaultdict:
        factory = value.default_factory
        name = "" if factory is None else f"({getattr(factory, '__name__', '')})"
        made = _KINDS.get(f"{kind.__name__}{name}")
        same = factory is None or (isinstance(made, partial) and made.args == (factory,))
        return f"{kind.__name__}{name}" if same else None
    return None


def is_kind(name: object) -> bool:
    """Return whether ``kind_of`` returns a name."""
    return isinstance(name, str) and name in _KINDS


def of_kind(name: str | None, items: dict[Any, Any]) -> dict[Any, Any]:
    """Return a dict of the named type with the items; the plain dict itself for None."""
    if name is None:
        return items
    made = _KINDS[name]()
    made.update(items)
    return made


def like(value: Mapping[Any, Any], items: dict[Any, Any]) -> dict[Any, Any]:
    """Return items as a dict of another one's type, if that is stored, else as they are."""
    return items if type(value) is dict else of_kind(kind_of(value), items)
