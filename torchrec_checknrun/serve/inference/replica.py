"""Hold one copy of an inference model: its tables, and the tensors of its dense part, by name."""

from __future__ import annotations

import copy
import io
from collections.abc import Collection, Iterator

import torch
from torch import nn

from torchrec_checknrun.errors import IncompatibleCheckpoint, UnsupportedTable
from torchrec_checknrun.serve.inference.collisions import check_collisions
from torchrec_checknrun.serve.inference.gpus import finish, gpus_of
from torchrec_checknrun.serve.inference.kernels import find_kernels, refuse_frozen
from torchrec_checknrun.serve.inference.tables import (
    KINDS,
    ServedTable,
    float_table,
    memory_of,
    quantized_tables,
)
from torchrec_checknrun.values.own_loading import load_again
from torchrec_checknrun.values.state import is_sharded

_WEIGHT = ".weight"


class Replica:
    """A model, with its tables and dense tensors by name.

    Args:
        model: in memory, on any device.

    Attributes:
        tables: by path; complete after ``bind``.
        dense: tensors by name in the state dict; complete after ``bind``.

    Raises:
        UnsupportedTable: a table can't be followed; names it, and why.
    """

    def __init__(self, model: nn.Module) -> None:
        refuse_frozen(model)
        self.model = model
        self._quantized = {table.path: table for table in quantized_tables(model)}
        self._state = self._plain_state()
        self.tables: dict[str, ServedTable] = dict(self._quantized)
        self.dense: dict[str, torch.Tensor] = {}
        parts = [part.memory for table in self._quantized.values() for part in table.parts]
        self._gpus = gpus_of([*self._state.values(), *parts])
        check_collisions(model)

    def _plain_state(self) -> dict[str, torch.Tensor]:
        """Return the state dict without what belongs to kernels."""
        own = memory_of(self._quantized)
        inside = {
            f"{t.owner}.{kind}.{t.name}.".lstrip(".")
            for t in self._quantized.values()
            for kind in KINDS
        }
        kernels = {id(kernel) for _, kernel, _ in find_kernels(self.model)}
        inside |= {
            f"{path}."
            for path, module in self.model.named_modules()
            if id(module) in kernels or path.rpartition(".")[0].endswith("tbes")
        }
        found, again = {}, self.model.state_dict()  # both are held: copies lie apart
        for name, value in self.model.state_dict().items():
            if name.startswith(tuple(inside)):
                continue
            if not isinstance(value, torch.Tensor):
                raise IncompatibleCheckpoint(
                    f"{name!r} of the model is a {type(value).__name__}, and only tensors are "
                    "followed: keep it out of the state dict of the model that is served"
                )
            if is_sharded(value):
                raise UnsupportedTable(
                    f"{name!r} is sharded for training: give a model made by "
                    "quantize_inference_model, or an unsharded one"
                )
            if value.numel() and value.untyped_storage().data_ptr() in own:
                continue
            if name not in again or again[name].data_ptr() != value.data_ptr():
                raise UnsupportedTable(
                    f"{name!r} in the model's state dict is a copy, made anew at each call (by a "
                    "hook?): what is written to it would not reach the model. Serve a model whose "
                    "state dict shows its own tensors"
                )
            found[name] = value
        return found

    def bind(self, saved: Collection[str]) -> None:
        """Tell unquantized tables from the dense part by a checkpoint's tables.

        Args:
            saved: the tables' full names.
        """
        self.tables, self.dense = dict(self._quantized), {}
        for name, tensor in self._state.items():
            path = name.removesuffix(_WEIGHT)
            in_collection = len(parts := path.split(".")) > 1 and parts[-2] in KINDS
            if name.endswith(_WEIGHT) and (in_collection or path in saved):
                self.tables[path] = float_table(path, tensor)
            else:
                self.dense[name] = tensor

    def load_again(self) -> None:
        """Let modules compute what they compute from values that they load; call this once the
        dense tensors were written. Parts of the model load no tables.

        Raises:
            IncompatibleCheckpoint: a module refuses the values.
        """
        memory = frozenset(value.untyped_storage().data_ptr() for value in self.dense.values())
        try:
            load_again(self.model, memory)
        except Exception as error:
            raise IncompatibleCheckpoint(
                f"the model's own loading (hooks, set_extra_state) refused the values of a version "
                f"with {error!r}: serve the model that is trained"
            ) from error

    def finish(self) -> None:
        """Wait until all work that was launched on the model's GPUs has run; see ``gpus``.

        Raises:
            RuntimeError: a GPU has failed.
        """
        finish(self._gpus)

    def address(self, name: str) -> int:
        """Return where the values of a table or dense tensor begin; 0 for those without any."""
        table = self.tables.get(name)
        return (self.dense[name] if table is None else table.parts[0].memory).data_ptr()

    def another(self) -> Replica:
        """Copy the model; its tables and dense tensors get memory of their own.

        Raises:
            UnsupportedTable: the model can't be copied.
        """
        model = self.model
        try:
            if isinstance(model, torch.jit.ScriptModule):
                # A deep copy would separate tensors that share memory.
                file = io.BytesIO()
                torch.jit.save(model, file)
                file.seek(0)
                other = Replica(torch.jit.load(file))
            else:
                # The state dict shows a kernel's parts by these; predictions don't use them.
                views = {id(one): one for m in model.modules() for one in _sharded(vars(m), 3)}
                other = Replica(copy.deepcopy(model, views))
        except (RuntimeError, TypeError, ValueError, AttributeError) as error:
            raise UnsupportedTable(
                f"{type(model).__name__} can't be copied ({error}): follow with copies=1, which "
                "holds the model once and lets predictions wait while rows are copied in"
            ) from error
        same = self._layout() == other._layout()
        if not same or memory_of(self._quantized) & memory_of(other._quantized):
            raise UnsupportedTable(
                f"a copy of {type(model).__name__} has other tables, or shares their memory: "
                "follow with copies=1"
            )
        return other

    def _layout(self) -> object:
        tables = {
            path: (table.form, [(p.first, p.rows, p.columns) for p in table.parts])
            for path, table in self._quantized.items()
        }
        return tables, {name: (v.dtype, v.shape) for name, v in self._state.items()}


def _sharded(value: object, depth: int) -> Iterator[object]:
    """Yield the sharded tensors in a value, and in containers within it down to a depth."""
    if is_sharded(value):
        yield value
    elif depth and isinstance(value, (dict, list, tuple)):
        for item in value.values() if isinstance(value, dict) else value:
            yield from _sharded(item, depth - 1)
