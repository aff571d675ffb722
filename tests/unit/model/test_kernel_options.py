"""Store the numbers of a fused kernel's optimizer, from whichever release of FBGEMM."""

from __future__ import annotations

from collections import namedtuple
from types import SimpleNamespace
from typing import Any

import torch
from fbgemm_gpu.split_embedding_codegen_lookup_invokers.lookup_args import OptimizerArgs

from torchrec_checknrun.model import progress as module
from torchrec_checknrun.model.progress import kernel_options, set_kernel_options

FIXED = {
    *("stochastic_rounding", "gradient_clipping", "weight_decay_mode", "counter_halflife"),
    *("adjustment_iter", "adjustment_ub", "learning_rate_mode", "grad_sum_decay"),
    *("tail_id_threshold", "is_tail_id_thresh_ratio", "total_hash_size"),
    *("weight_norm_coefficient", "regularization_mode", "use_rowwise_bias_correction"),
    "lower_bound",  # the kernel uses its gwd_lower_bound, which is stored
}
"""Hyperparameters that are fixed when a kernel is built: FBGEMM has no setter for them."""


def test_no_number_of_this_fbgemm_is_overlooked() -> None:
    assert set(OptimizerArgs._fields) <= {*module._HYPERPARAMETERS, *FIXED}


def kernel(**numbers: float) -> Any:
    """Make a kernel with given hyperparameters."""
    arguments = namedtuple("arguments", numbers.keys())(**numbers)
    rate = SimpleNamespace(value=0.1)
    return SimpleNamespace(
        optimizer_args=arguments,
        iter_cpu=torch.zeros(1, dtype=torch.int64),
        get_learning_rate=lambda: rate.value,
        set_learning_rate=lambda value: setattr(rate, "value", value),
    )


def test_numbers_of_rowwise_rmsprop_come_back() -> None:
    saved = kernel(eps=0.1, ar_alpha=0.5, ema_beta=0.9, min_shrinkage=0.2)
    again = kernel(eps=0.2, ar_alpha=0.0, ema_beta=0.99, min_shrinkage=0.1)
    set_kernel_options(again, {}, {"table": kernel_options(saved, {})})
    assert again.optimizer_args._asdict() == saved.optimizer_args._asdict()


def test_numbers_that_this_fbgemm_does_not_have_are_left_out() -> None:
    saved = kernel(eps=0.1, ar_alpha=0.5, ema_beta=0.9, min_shrinkage=0.2)
    again = kernel(eps=0.2)
    set_kernel_options(again, {}, {"table": kernel_options(saved, {})})
    assert again.optimizer_args._asdict() == {"eps": 0.1}


def test_an_infinite_option_comes_back_into_a_tensor() -> None:
    bound = torch.tensor(1.0)
    options = kernel_options(kernel(), {"bound": torch.tensor(float("inf"))})
    set_kernel_options(kernel(), {"bound": bound}, {"table": options})
    assert bound == float("inf")
