"""Save and restore the optimizers of one state object: the outermost, and those hidden inside.

An optimizer that holds another one in an attribute (SAM's ``base_optimizer``, Lookahead's base)
keeps state of its own beside the inner one's, and torch's state dict shows only its own.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cached_property
from typing import Any

from torch.optim import Optimizer

from torchrec_checknrun.dense.optimizer import DenseOptimizer
from torchrec_checknrun.dense.tree import hidden_optimizers
from torchrec_checknrun.errors import IncompatibleCheckpoint
from torchrec_checknrun.format.row_chunk import RowForms
from torchrec_checknrun.values.state import Tree, tree_items

INNER = "inner"
"""Key of the hidden optimizers' stored forms, by identity and attribute."""
_OWN = "own"
"""Key of the state dict of an optimizer whose state dict has a form of its own."""


class NestedOptimizer:
    """A dense optimizer and those hidden inside it, in the stored form of ``DenseOptimizer``.

    Args:
        is_known: recognizes optimizers with torch's or TorchRec's state dict; hidden optimizers
            with another one are stored as that state dict.
        dense: makes the ``DenseOptimizer`` of a known optimizer.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        is_known: Callable[[object], bool],
        dense: Callable[[Optimizer], DenseOptimizer],
    ) -> None:
        self._outer = dense(optimizer)
        self._is_known, self._dense = is_known, dense

    @cached_property
    def _inner(self) -> dict[str, DenseOptimizer | _OwnForm]:
        """Return the hidden optimizers, in the nest as the outermost one has last seen it."""
        return {
            path: self._dense(hidden) if self._is_known(hidden) else _OwnForm(hidden)
            for path, hidden in hidden_optimizers(self._outer.nest).items()
        }

    def stored(self) -> dict[str, Any]:
        """Return the state in the stored form, with the live tensors."""
        content = self._outer.stored()
        if self._inner:
            content[INNER] = {path: inner.stored() for path, inner in self._inner.items()}
        return content

    def fit(
        self,
        tree: Tree,
        path: str,
        tables: Mapping[str, RowForms | None],
        skipped: list[str] | None,
    ) -> dict[str, Any]:
        """Make the live state match a checkpoint's, see ``DenseStates.fit``.

        Raises:
            IncompatibleCheckpoint: checkpoint and live optimizer hold different inner optimizers.
        """
        saved = tree_items(tree_items(tree).get(INNER))
        if saved.keys() != self._inner.keys():
            message = (
                f"{path}.{INNER}: the checkpoint has optimizers {sorted(map(str, saved))} inside "
                f"this one, and there are {sorted(self._inner)} now"
            )
            if skipped is None:
                raise IncompatibleCheckpoint(
                    f"{message}: build it as it was when the checkpoint was saved, or keep the "
                    "state of those that differ with strict=False"
                )
            skipped.append(f"state {message}: those that differ keep their state")
        content = self._outer.fit(tree, path, tables, skipped)
        inner = {
            name: optimizer.fit(saved[name], f"{path}.{INNER}.{name}", tables, skipped)
            for name, optimizer in self._inner.items()
            if name in saved
        }
        return {**content, INNER: inner} if inner else content

    def load(self, content: dict[str, Any]) -> None:
        """Load the restored state; ``finish`` writes the rest."""
        restored = dict(content)
        inner = restored.pop(INNER, None) or {}
        self._outer.load(restored)
        for path, optimizer in self._inner.items():
            if path in inner:
                optimizer.load(inner[path])

    def finish(self, name: str) -> None:
        """Write wrappers' values and group options, see ``DenseOptimizer.finish``."""
        self._outer.finish(name)
        for path, optimizer in self._inner.items():
            optimizer.finish(f"{name}.{path}")

    def undo(self) -> None:
        """Put the live state back as it was before ``fit``."""
        for optimizer in reversed((self._outer, *self._inner.values())):
            optimizer.undo()


class _OwnForm:
    """A hidden optimizer whose state dict has another form than torch's and TorchRec's."""

    def __init__(self, optimizer: Optimizer) -> None:
        self._optimizer = optimizer

    def stored(self) -> dict[str, Any]:
        return {_OWN: self._optimizer.state_dict()}

    def fit(self, *_: object) -> dict[str, Any]:
        return {_OWN: None}  # restored as stored, not into live tensors

    def load(self, content: dict[str, Any]) -> None:
        self._optimizer.load_state_dict(content[_OWN])

    def finish(self, name: str) -> None:
        """Do nothing: the state dict holds everything."""

    def undo(self) -> None:
        """Do nothing: ``fit`` made nothing."""
