"""Skip tests that script a quantized model where FBGEMM's own kernels can't be."""

from __future__ import annotations

import fbgemm_gpu  # noqa: F401  # registers the operations
import pytest
import torch

SCRIPTS = pytest.mark.skipif(
    not hasattr(torch.ops.fbgemm, "linearize_cache_indices"),
    reason="TorchScript can't compile the quantized kernels of this FBGEMM on a CPU (1.4)",
)
