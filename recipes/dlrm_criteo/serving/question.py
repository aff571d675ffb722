"""Read requests for predictions: whatever is sent, it becomes samples or an error with a reason."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated

import numpy as np
from pydantic import BaseModel, ConfigDict, Field, FiniteFloat, ValidationError
from torchrec.datasets.criteo import CAT_FEATURE_COUNT, DEFAULT_CAT_NAMES, INT_FEATURE_COUNT

from recipes.dlrm_criteo.samples import Samples

MOST_ERRORS = 10
"""Errors that an answer tells of."""
_LARGEST_ID = 2**63 - 1


class BadQuestion(ValueError):
    """A request that can't be answered.

    Attributes:
        errors: a field and what was expected of it, each.
    """

    def __init__(self, errors: Sequence[tuple[str, str]]) -> None:
        self.errors = errors[:MOST_ERRORS]
        super().__init__("; ".join(f"{field}: {message}" for field, message in self.errors))


class Question(BaseModel):
    """Samples to predict, one entry each in both lists."""

    model_config = ConfigDict(strict=True, extra="forbid")

    dense: list[
        Annotated[
            list[FiniteFloat],
            Field(min_length=INT_FEATURE_COUNT, max_length=INT_FEATURE_COUNT),
        ]
    ] = Field(min_length=1, description="numerical features, log-transformed as in training")
    ids: list[
        Annotated[
            list[Annotated[int, Field(ge=0, le=_LARGEST_ID)]],
            Field(min_length=CAT_FEATURE_COUNT, max_length=CAT_FEATURE_COUNT),
        ]
    ] = Field(min_length=1, description="rows of the tables, one of each")


def read(body: bytes, rows: Sequence[int], most: int) -> Samples:
    """Return the samples of a request, with labels of zero.

    Args:
        rows: of each feature's table.
        most: samples of a request.

    Raises:
        BadQuestion: names the fields, and what was expected.
    """
    try:
        question = Question.model_validate_json(body)
    except ValidationError as error:
        found = error.errors(include_url=False, include_context=False, include_input=False)
        raise BadQuestion(
            [(".".join(map(str, each["loc"])) or "body", each["msg"]) for each in found]
        ) from None
    count = len(question.dense)
    if len(question.ids) != count:
        raise BadQuestion([("ids", f"has {len(question.ids)} samples, and dense has {count}")])
    if count > most:
        raise BadQuestion([("dense", f"has {count} samples; send at most {most} at once")])
    with np.errstate(over="ignore"):
        dense = np.array(question.dense, np.float64).astype(np.float32)
    sparse = np.array(question.ids, np.int64)
    errors = [
        (f"dense.{sample}.{feature}", "is too large for fp32")
        for sample, feature in np.argwhere(~np.isfinite(dense))[:MOST_ERRORS]
    ]
    errors += [
        (
            f"ids.{sample}.{feature}",
            f"is {sparse[sample, feature]}; {DEFAULT_CAT_NAMES[feature]} has {rows[feature]} rows",
        )
        for sample, feature in np.argwhere(sparse >= np.asarray(rows))[:MOST_ERRORS]
    ]
    if errors:
        raise BadQuestion(errors)
    return Samples(dense, sparse, np.zeros(count, np.float32))
