"""Options of parameter groups, written into live groups."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from torchrec_checknrun.dense.param_groups import set_option


@pytest.mark.parametrize("saved", [0.1, torch.tensor(0.1, dtype=torch.float64)])
def test_a_rate_in_double_precision_keeps_all_digits(saved: Any) -> None:
    rate = torch.tensor(0.5, dtype=torch.float64)
    group = {"lr": rate}
    set_option(group, "lr", saved)
    assert group["lr"] is rate
    assert rate.item() == 0.1


@pytest.mark.parametrize("saved", [None, "cosine"])
def test_other_values_replace_a_tensor(saved: Any) -> None:
    group = {"schedule": torch.tensor(0.5)}
    set_option(group, "schedule", saved)
    assert group == {"schedule": saved}
