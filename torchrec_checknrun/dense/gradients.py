"""Notice dense gradients that wait for their optimizer, which a checkpoint would lose.

Fused tables are updated within backward, dense parameters only when their optimizer steps. With
gradient accumulation, or a gradient scaler that skips a step, a checkpoint would not hold the
gradients accumulated so far, though their samples count as trained. So a checkpoint is postponed
until no gradient waits.

The same hooks show whether another optimizer steps these parameters, or others of the model, whose
state no checkpoint has.
"""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from sys import getrefcount
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook

from torchrec_checknrun.dense.optimizers import torch_optimizers, wraps_another
from torchrec_checknrun.dense.references import References
from torchrec_checknrun.dense.tree import all_nodes, inner_optimizers, parameters_of

logger = logging.getLogger(__name__)

_MOST_NAMES = 3


class PendingGradients:
    """A watch on the parameters of optimizers among state objects, and on all optimizers' steps.

    A step of an optimizer applies the gradients of its parameters, except for parameters of inner
    optimizers, which it may leave unstepped.

    Args:
        states: state objects; optimizers among them (torch's, TorchRec's wrappers, users') are
            watched, with all optimizers inside, and those that other objects hold.
        model: a parameter that is no longer one of the model's holds no checkpoint up: its
            optimizer's step would not change the model. Without any there are none.

    Attributes:
        named: the parameters whose gradients waited at the last look.
    """

    def __init__(self, states: Iterable[object], model: nn.Module | None = None) -> None:
        self._states = tuple(states)
        self._model = nn.Module() if model is None else model
        self._watched: dict[int, torch.Tensor] = {}
        """Parameters by ``id``."""
        self._hooks: dict[int, _Hook] = {}
        """Their hooks."""
        self._sharded: set[int] = set()
        """The watched parameters that are DTensors."""
        self._names: dict[int, str] = {}
        """Names of those that were the model's when first seen."""
        self._known: set[int] = set()
        """The optimizers' ids."""
        self._others: dict[int, weakref.ref[Optimizer]] = {}
        """Optimizers, by ``id``, that have stepped since the last look, and were not known."""
        self._examined: dict[int, tuple[weakref.ref[Optimizer], int]] = {}
        """The optimizers looked at since the last new parameter, each with its size: most belong to
        other models. By ``id``: a user's optimizer may have no hash.
        """
        self._told: set[object] = set()
        self._waiting: set[int] = set()
        self.named: list[str] = []
        self._frozen: list[torch.Tensor] = []
        """Parameters that can't have a gradient at present, and aren't watched."""
        self._sizes: list[tuple[weakref.ref[Optimizer], int]] = []
        self._inside: dict[int, list[weakref.ref[Optimizer]]] = {}
        """The optimizers inside each one that has stepped since the last look, by the latter's
        ``id``.
        """
        self._watch()
        self._waiting.clear()  # whether earlier gradients were applied is unknown
        method = weakref.WeakMethod(self._stepped)

        def stepped(optimizer: Optimizer, *_: object) -> None:
            if (call := method()) is not None:
                call(optimizer)

        # Not to be compiled with a step: ranks might come to run other code.
        self._handle = register_optimizer_step_post_hook(torch.compiler.disable(stepped))

    @property
    def waiting(self) -> bool:
        """Return whether a parameter has a gradient that it got since an optimizer last stepped it.

        ``zero_grad`` may have dropped it, if the loss was for other parameters or not finite. A
        parameter that was frozen, or in no optimizer, until now counts as well, as does one whose
        gradient FSDP2 has yet to reduce. One that was replaced in the model doesn't.
        """
        stepped = self._watch()
        self._waiting &= stepped
        self.named = []
        self._warn_of_others()
        sharded = stepped & self._sharded
        if sharded and any(id(p) in sharded for p in _unreduced(self._model.modules())):
            return True
        found = [key for key in self._waiting if has_gradient(self._watched[key])]
        if not found:
            return False
        present = References([parameter for _, parameter in self._model.named_parameters()])
        gone = [k for k in found if k in self._names and self._watched[k] not in present]
        for name in [self._names[key] for key in gone if key not in self._told]:
            logger.warning(
                "a gradient waits in the parameter that was the model's %r, and is replaced: "
                "checkpoints don't hold the gradient. Let the optimizer step the present parameter",
                name,
            )
        self._told.update(gone)
        left = {self._names.get(k, "a parameter beside the model") for k in found if k not in gone}
        self.named = sorted(left)
        return bool(self.named)

    def close(self) -> None:
        """Remove the hooks."""
        self._handle.remove()
        for hook in self._hooks.values():
            hook.remove()

    def _watch(self) -> set[int]:
        """Watch new parameters; return the ids of all that optimizers have now."""
        # Those inside an optimizer are found with it.
        holders = [state for state in self._states if not isinstance(state, Optimizer)]
        optimizers = list(torch_optimizers([*self._states, *_held(holders)]))
        parameters = {id(p): p for o in optimizers for p in parameters_of(o)}
        self._known = set(map(id, optimizers))
        hooks = self._hooks
        unknown = {
            key: parameter
            for key, parameter in parameters.items()
            if (hook := hooks.get(key)) is None or not hook.is_live()
        }
        self._frozen = [p for p in unknown.values() if not _accumulates(p)]
        new = {k: p for k, p in unknown.items() if _accumulates(p)}
        if new:
            self._examined.clear()
            self._names |= {
                id(p): name for name, p in self._model.named_parameters() if id(p) in new
            }
        for key, parameter in new.items():
            self._watched[key] = parameter
            if isinstance(parameter, DTensor):
                self._sharded.add(key)
            self._waiting.add(key)
            if key in self._hooks:
                self._hooks[key].remove()
            self._hooks[key] = _Hook(parameter, self._accumulated)
        self._sizes = [(weakref.ref(o), _size(o)) for o in optimizers]
        self._inside.clear()
        for optimizer in optimizers:
            _announce_steps(optimizer)
        return set(parameters)

    def _accumulated(self, parameter: torch.Tensor) -> None:
        self._waiting.add(id(parameter))

    def _stepped(self, optimizer: Optimizer) -> None:
        if (
            any(map(_accumulates, self._frozen))
            or any((known := of()) is not None and _size(known) != size for of, size in self._sizes)
            or self._has_unheard(optimizer)
        ):
            self._watch()
        if (
            id(optimizer) not in self._known
            and not self._was_examined(optimizer)
            and not wraps_another(optimizer)
        ):
            self._others[id(optimizer)] = weakref.ref(optimizer)
        if not self._waiting:
            return
        stepped = set(map(id, parameters_of(optimizer)))
        if id(optimizer) not in self._inside:
            inside = [node.optimizer for node in all_nodes(optimizer)]
            self._inside[id(optimizer)] = [weakref.ref(o) for o in inside if o is not optimizer]
        for of in self._inside[id(optimizer)]:
            if (inner := of()) is not None:
                stepped.difference_update(map(id, parameters_of(inner)))
        self._waiting -= stepped

    def _was_examined(self, optimizer: Optimizer) -> bool:
        of, size = self._examined.get(id(optimizer), (None, 0))
        return of is not None and of() is optimizer and size == _size(optimizer)

    def _has_unheard(self, optimizer: Optimizer) -> bool:
        """Return whether a known optimizer has a parameter in another's place, or a swapped one."""
        if id(optimizer) not in self._known:
            return False
        hooks = self._hooks
        return any(
            (hook := hooks.get(id(parameter))) is None or hook.content != parameter._cdata
            for parameter in parameters_of(optimizer)
            if _accumulates(parameter)
        )

    def _warn_of_others(self) -> None:
        """Warn, once of each kind, of optimizers that are not saved and step what is: parameters of
        known optimizers, or of the model.
        """
        if not self._others:
            return
        others, self._others = self._others, {}
        held = {id(node.optimizer) for inner in _held(self._states) for node in all_nodes(inner)}
        known = self._known | held
        stepped: dict[str, dict[int, torch.Tensor]] = {}
        for of in others.values():
            if (optimizer := of()) is not None and id(optimizer) not in known:
                key, examined = id(optimizer), self._examined
                gone = partial(_forget, examined, key)
                examined[key] = weakref.ref(optimizer, gone), _size(optimizer)
                own = stepped.setdefault(type(optimizer).__name__, {})
                own.update((id(p), p) for p in parameters_of(optimizer))
        for kind in stepped.keys() - self._told:
            if shared := stepped[kind].keys() & self._watched.keys():
                self._told.add(kind)
                logger.warning(
                    "an optimizer %s steps parameters (%s) whose optimizer among the state objects "
                    "is another one: checkpoints hold that one's state, and none of the %s. Give "
                    "this one to the Checkpointer, or put it in the other's place inside the state "
                    "object",
                    kind,
                    _first(self._names.get(key, "unnamed") for key in shared),
                    kind,
                )
            elif names := [
                name for name, p in self._model.named_parameters() if id(p) in stepped[kind]
            ]:
                self._told.add(kind)
                logger.warning(
                    "an optimizer %s steps parameters of the model (%s) and is not among the state "
                    "objects: unless one of these saves it, a restored run goes on with a new "
                    'one\'s state. Give it to the Checkpointer: state={"optimizer": …}. Optimizers '
                    "applied in backward are in each parameter's _in_backward_optimizers; each "
                    "needs a name of its own",
                    kind,
                    _first(names),
                )


class _Hook:
    """A hook that runs when a parameter gets a gradient.

    ``torch.utils.swap_tensors`` (``Module.to`` and ``load_state_dict`` under
    ``set_swap_module_params_on_conversion``) leaves what runs the hooks with the other tensor, and
    the dict of hooks with this one.

    Attributes:
        content: the address of the parameter's content, which has the hook.
    """

    def __init__(self, parameter: torch.Tensor, run: Callable[[torch.Tensor], None]) -> None:
        self._parameter = parameter
        if parameter._post_accumulate_grad_hooks is not None:  # let them run again after a swap
            parameter._post_accumulate_grad_hooks = parameter._post_accumulate_grad_hooks
        self._handle = parameter.register_post_accumulate_grad_hook(run)
        self.content: int = parameter._cdata
        self._references = getrefcount(parameter._post_accumulate_grad_hooks)

    def is_live(self) -> bool:
        """Return whether the hook would run: the parameter has the content that it had.

        Other content may lie at the same address only once the earlier one is gone, and with it a
        reference to the dict.
        """
        parameter = self._parameter
        return (
            parameter._cdata == self.content
            and getrefcount(parameter._post_accumulate_grad_hooks) >= self._references
        )

    def remove(self) -> None:
        self._handle.remove()


def _forget(known: dict[int, Any], key: int, _: object) -> None:
    known.pop(key, None)


def _first(names: Iterable[str]) -> str:
    """List the first names in the order of the alphabet."""
    found = sorted(names)
    return ", ".join(found[:_MOST_NAMES] + ["…"] * (len(found) > _MOST_NAMES))


def _unreduced(modules: Iterable[nn.Module]) -> Iterator[torch.Tensor]:
    """Yield the sharded parameters whose gradients FSDP2 keeps until it reduces them.

    With ``set_requires_gradient_sync(False)``, as in gradient accumulation, they are no gradients
    of the sharded parameters yet, and run no hooks of these.
    """
    for module in modules:
        if isinstance(module, FSDPModule):
            for group in _groups(module._get_fsdp_state()):
                partly = getattr(group, "_partial_reduce_output", None) is not None
                for parameter in group.fsdp_params:
                    if partly or _is_kept(parameter):
                        yield parameter.sharded_param


def _groups(state: Any) -> list[Any]:
    """Return the state's groups of parameters; older versions of torch have one, or None."""
    groups = getattr(state, "_fsdp_param_groups", None)
    if groups is None:
        groups = [getattr(state, "_fsdp_param_group", None)]
    return [group for group in groups if group is not None]


def _is_kept(parameter: Any) -> bool:
    if getattr(parameter, "unsharded_accumulated_grad", None) is not None:
        return True
    whole = getattr(parameter, "_unsharded_param", None)  # made at the first forward pass
    return whole is not None and whole.grad is not None


def _held(states: Iterable[object]) -> list[Optimizer]:
    """Return the optimizers in attributes of state objects, but for weak proxies of them."""
    held = [inner for state in states for _, inner in inner_optimizers(state)]
    return [inner for inner in held if type(inner) not in weakref.ProxyTypes]


def _accumulates(parameter: torch.Tensor) -> bool:
    return parameter.requires_grad and parameter.is_leaf


def _size(optimizer: Optimizer) -> int:
    return sum(len(group["params"]) for group in optimizer.param_groups)


def _announce_steps(optimizer: Optimizer) -> None:
    """Let an optimizer's class run torch's hooks at each step, as ``Optimizer.__init__`` does.

    ``KeyedOptimizer`` doesn't call that, though a user's subclass may step parameters itself.
    """
    hooks = {"_optimizer_step_pre_hooks", "_optimizer_step_post_hooks"}
    if hooks <= vars(optimizer).keys() and not getattr(type(optimizer).step, "hooked", False):
        optimizer._patch_step_function()


def has_gradient(parameter: torch.Tensor) -> bool:
    """Return whether a step would apply a gradient to this rank's part of a parameter.

    A gradient of zeros, as ``zero_grad(set_to_none=False)`` leaves, counts as none.
    """
    gradient = parameter.grad
    if gradient is None:
        return False
    if isinstance(gradient, DTensor):
        gradient = gradient.to_local()
    if gradient.is_sparse:
        gradient = gradient._values()
    return bool(gradient.any())
