"""Find FBGEMM's inference kernels in TorchRec's modules, unsharded or sharded, and in what
TorchScript makes of them.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from torchrec_checknrun.errors import UnsupportedTable

_KERNELS = (
    "IntNBitTableBatchedEmbeddingBagsCodegen",
    "IntNBitTableBatchedEmbeddingBagsCodegenWithLength",
)


def refuse_frozen(model: nn.Module) -> None:
    """Refuse a scripted model whose weights are constants of its code.

    Raises:
        UnsupportedTable: says what to give instead.
    """
    if not isinstance(model, torch.jit.ScriptModule):
        return
    kernels = [m for m in model.modules() if _type_name(m) in _KERNELS]
    if any(not hasattr(kernel, "feature_names") for kernel in kernels) or not model.state_dict():
        raise UnsupportedTable(
            "the model is frozen (torch.jit.freeze, optimize_for_inference): its tables are "
            "constants of the code, which can't be followed. Give the scripted model without that"
        )


def find_kernels(model: nn.Module) -> Iterator[tuple[str, Any, Any]]:
    """Yield the inference kernels of a model: the owner's path, the kernel, and the configuration
    of its shards, None if the kernel is not sharded.

    Raises:
        UnsupportedTable: a kernel is of a kind that can't be followed.
    """
    seen: set[int] = set()
    for path, module in model.named_modules():
        configs = getattr(module, "_tbes_configs", None) or {}
        hidden = list(getattr(module, "_emb_modules", None) or ()) + list(configs)
        held = [(path, kernel) for kernel in hidden]
        if _type_name(module) in _KERNELS or _is_other_kernel(module):
            owner = path.rpartition(".")[0]
            held.append((owner.removesuffix("tbes").rstrip("."), module))
        for owner, kernel in held:
            if not (_type_name(kernel) in _KERNELS or _is_other_kernel(kernel)):
                continue
            where = _address(kernel)
            if where in seen:
                continue
            seen.add(where)
            if _type_name(kernel) not in _KERNELS:
                raise UnsupportedTable(
                    f"{owner or 'the model'} has tables in {_type_name(kernel)}, which can't be "
                    "followed: give a model made by quantize_inference_model, or an unsharded one"
                )
            yield owner, kernel, configs.get(kernel)


def _type_name(module: object) -> str:
    return str(getattr(module, "original_name", type(module).__name__))


def _is_other_kernel(module: object) -> bool:
    """Tell whether a module is a kernel of FBGEMM's that holds tables in a way of its own."""
    name = _type_name(module)
    return name.startswith(("SplitTableBatched", "DenseTableBatched", "SSDTableBatched")) or (
        name.startswith(("KVEmbedding", "IntNBit", "SSDIntNBit")) and name not in _KERNELS
    )


def _address(kernel: Any) -> int:
    """Return what two views of one kernel have in common: its memory, or itself."""
    weights = getattr(kernel, "weights_host", None)
    if weights is not None and weights.numel():
        return int(weights.data_ptr())
    return id(kernel)
