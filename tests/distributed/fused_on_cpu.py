"""Build fused optimizers that FBGEMM has for GPUs only on a CPU: with state, but untrainable."""

from __future__ import annotations

import ast
import inspect
import textwrap
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

import pytest
from fbgemm_gpu import split_table_batched_embeddings_ops_training as fbgemm

KERNEL = fbgemm.SplitTableBatchedEmbeddingBagsCodegen


class _Change(ast.NodeTransformer):
    """A rewrite of a constructor that drops its refusal and keeps ``super()`` working outside."""

    def __init__(self) -> None:
        self.removed = 0

    def visit_Assert(self, node: ast.Assert) -> ast.stmt:
        if node.msg is None or "not supported in CPU mode" not in ast.unparse(node.msg):
            return node
        self.removed += 1
        return ast.Pass()

    def visit_Call(self, node: ast.Call) -> ast.AST:
        if isinstance(node.func, ast.Name) and node.func.id == "super" and not node.args:
            return ast.parse(f"super({KERNEL.__name__}, self)", mode="eval").body
        return self.generic_visit(node)


@cache
def _without_refusal() -> Callable[..., None]:
    """Return the kernel's constructor without its assertion that the optimizer trains on a CPU."""
    constructor = textwrap.indent(textwrap.dedent(inspect.getsource(KERNEL.__init__)), "    ")
    tree = ast.parse(f"class {KERNEL.__name__}:\n{constructor}")
    change = _Change()
    tree = ast.fix_missing_locations(change.visit(tree))
    assert change.removed == 1
    found: dict[str, Any] = {}
    exec(compile(tree, fbgemm.__file__, "exec"), vars(fbgemm), found)
    changed: Callable[..., None] = found[KERNEL.__name__].__init__
    return changed


@contextmanager
def any_fused_optimizer() -> Iterator[None]:
    """Let the block build kernels with any fused optimizer on a CPU; they can't train."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(KERNEL, "__init__", _without_refusal())
        yield
