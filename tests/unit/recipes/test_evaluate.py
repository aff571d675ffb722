"""Compare the exact AUC with a count of all pairs, of which ties count half."""

from __future__ import annotations

import pytest
import torch

from recipes.dlrm_criteo.evaluate import auc


@pytest.mark.parametrize("different", [2, 7, 1000])
def test_the_auc_is_exact(different: int) -> None:
    generator = torch.Generator().manual_seed(different)
    logits = torch.randint(0, different, (300,), generator=generator).double() - different / 2
    labels = (torch.rand(300, generator=generator) * different < logits + different / 2).double()
    found = auc(logits, labels)
    assert found is not None
    above = logits[labels == 1][:, None] - logits[labels == 0][None]
    pairs = (above > 0).double() + (above == 0).double() / 2
    assert found == pytest.approx(pairs.mean().item(), abs=1e-6)
    assert auc(-logits, labels) == pytest.approx(1 - found, abs=1e-6)


def test_one_pair_and_equal_labels() -> None:
    assert auc(torch.tensor([0.0, 1.0]), torch.tensor([0.0, 1.0])) == 1
    assert auc(torch.tensor([1.0, 1.0]), torch.tensor([0.0, 1.0])) == 0.5
    assert auc(torch.tensor([0.0, 1.0]), torch.ones(2)) is None
