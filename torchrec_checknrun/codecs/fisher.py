"""Round rows to steps that the loss doesn't notice: a step of its own for each row.

A change of a row by a step costs loss in proportion to the row's Fisher information, for which the
sum of its squared gradients stands: row-wise Adagrad's state, or Adam's second moment. So the step
is ``c / sqrt(G)``, rounded to a power of two; rows without such state share the step ``c``. The
rows' integers are in ``delta.rows``; ``codecs.delta`` stores these as differences to what the
checkpoint before restores.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Hashable, Mapping, Sequence
from typing import ClassVar

import numpy as np
import torch

from torchrec_checknrun.codecs.base import (
    NO_CONTEXT,
    Codec,
    CodecSpec,
    Encoded,
    Parameters,
    RowContext,
    Sample,
    Survey,
)
from torchrec_checknrun.codecs.budget import SAMPLE_ROWS, ImportanceSurvey
from torchrec_checknrun.delta import rows as grids
from torchrec_checknrun.delta.references import Restored
from torchrec_checknrun.delta.rows import EXACT, LEAST_EXPONENT, MOST_EXPONENT, Grid

DEFAULT_MEAN_BITS = 3.0
_NUMBERS = ("step", "mean_bits", "loss", "current_loss")
_COUNTS = ("total_steps", "batch_size")
_TOLD = ("current_loss", "total_steps", "batch_size")
"""The arguments that ``loss`` needs beside itself."""
_MOST_BITS = 24.0


class Fisher(Codec):
    """Rows rounded to steps by their weight in the loss, each row by itself.

    Args:
        step: ``c``: the step of a row is ``c / sqrt(G)``, or ``c`` without optimizer state.
        mean_bits: bits per value of trained rows on average, from which ``c`` follows; 3 if
            neither this nor step nor loss is given.
        loss: the relative change of the loss that a restore may cost, from which ``c`` follows,
            given ``current_loss``, ``total_steps`` (that ``G`` has been summed over) and
            ``batch_size``.
        tail: limit steps to the largest learning rate since the base, which keeps the training of
            rare rows.
        constant: ``c``, once it was settled.

    Raises:
        ValueError: options contradict each other, or are out of range.
    """

    name: ClassVar[str] = "fisher"
    lossy: ClassVar[bool] = True
    surveys: ClassVar[bool] = True
    at_once: ClassVar[bool] = True
    value_bits = 8

    def __init__(
        self,
        step: float | None = None,
        mean_bits: float | None = None,
        loss: float | None = None,
        current_loss: float | None = None,
        total_steps: int | None = None,
        batch_size: int | None = None,
        tail: bool = False,
        constant: float | None = None,
    ) -> None:
        self._given: dict[str, float | int | None] = {
            "step": step,
            "mean_bits": mean_bits,
            "loss": loss,
            "current_loss": current_loss,
            "total_steps": total_steps,
            "batch_size": batch_size,
        }
        _check(self._given, tail, constant)
        if step is None and loss is None and mean_bits is None:
            self._given["mean_bits"] = DEFAULT_MEAN_BITS
        self.tail = tail
        self.constant = step if step is not None else constant
        self._rate: float | None = None

    def at_rate(self, rate: float | None) -> Fisher:
        """Return the codec for the largest learning rate since the base; None or 0 if unknown."""
        found = copy.copy(self)
        found._rate = rate
        return found

    def spec(self) -> CodecSpec:
        spec: CodecSpec = {"name": self.name, "version": self.version}
        spec |= {name: value for name, value in self._given.items() if value is not None}
        if self.tail:
            spec["tail"] = True
        if self.constant is not None and self._given["step"] is None:
            spec["constant"] = self.constant
        return spec

    def encode(
        self,
        rows: torch.Tensor,
        ids: torch.Tensor | None = None,
        context: RowContext = NO_CONTEXT,
        out: torch.Tensor | None = None,
    ) -> Encoded:
        weight = rows.detach() if ids is None else rows.detach().index_select(0, ids)
        wanted = self._exponents(weight, context.optimizer)
        payload, after = self._encoded(weight, wanted, context)
        none = torch.empty(0, dtype=torch.int64, device="cpu")

        def restored(positions: torch.Tensor) -> torch.Tensor:
            return grids.values_of(after(positions.numpy()), rows.dtype)

        return Encoded(payload, self._parameters(), none, restored)

    def _encoded(
        self, weight: torch.Tensor, wanted: np.ndarray, context: RowContext
    ) -> tuple[torch.Tensor, Restored]:
        payload, after = grids.encode(weight, wanted)
        return payload, after.at

    def _parameters(self) -> Parameters:
        return {}

    def decode(
        self, data: torch.Tensor, parameters: Parameters, rows: int, start: int, out: torch.Tensor
    ) -> None:
        chosen = np.arange(start, start + len(out))
        found = grids.apply(data, rows, out.shape[1], chosen=chosen)
        out.copy_(grids.values_of(found, out.dtype))

    def scatter(
        self,
        data: torch.Tensor,
        parameters: Parameters,
        rows: int,
        positions: torch.Tensor,
        ids: torch.Tensor,
        out: torch.Tensor,
    ) -> bool:
        found = grids.apply(data, rows, out.shape[1], chosen=positions.numpy())
        values = grids.values_of(found, out.dtype)
        out.index_copy_(0, ids.to(out.device), values.to(out.device))
        return True

    def select(
        self,
        data: torch.Tensor,
        parameters: Parameters,
        rows: int,
        dim: int,
        positions: torch.Tensor,
    ) -> tuple[torch.Tensor, Parameters] | None:
        found = grids.apply(data, rows, dim, chosen=positions.numpy())
        return grids.encode_grid(found), {}

    def family(self, parameters: Parameters, dim: int) -> Hashable | None:
        """Join rows that stand alone, whatever their steps are: each has its own exponent."""
        return None if self.needs_base(parameters) else self.name

    def join(
        self,
        blocks: Sequence[tuple[torch.Tensor, Parameters, int]],
        places: Sequence[torch.Tensor],
        dim: int,
    ) -> tuple[torch.Tensor, Parameters]:
        found = Grid.empty(sum(rows for _, _, rows in blocks), dim)
        for (data, _, rows), place in zip(blocks, places, strict=True):
            part, at = grids.apply(data, rows, dim), place.numpy()
            found.kind[at], found.exponent[at] = part.kind, part.exponent
            found.codes[at] = part.codes
        return grids.encode_grid(found), {}

    def survey(self, sample: Sample) -> ImportanceSurvey | None:
        if self.constant is not None:
            return None
        found, part = ImportanceSurvey(), sample(SAMPLE_ROWS)
        if not part.count or not len(part.weight):
            return None
        weight, sums = part.weight.float().cpu(), _sums(part.optimizer)
        sums = torch.ones(len(weight)) if sums is None else sums
        sound = torch.isfinite(weight).all(dim=1)
        found.add(weight[sound], sums.cpu()[sound], part.count / len(part.weight))
        return found

    def settle(self, survey: Survey) -> Fisher:
        assert isinstance(survey, ImportanceSurvey)
        found = copy.copy(self)
        found.constant = _constant(survey, self._given)
        return found

    def _exponents(self, weight: torch.Tensor, optimizer: Mapping[str, torch.Tensor]) -> np.ndarray:
        """Return the exponents of the rows' steps, ``(n,)`` int16; ``EXACT`` for untrained rows."""
        constant, sums = self.constant, _sums(optimizer)
        if constant is None:
            constant = self._constant_of(weight, sums)
        if constant is None:
            return np.full(len(weight), EXACT, np.int16)
        most = MOST_EXPONENT
        if self.tail and self._rate:  # never by zero: a warm-up starts there
            most = min(most, math.floor(math.log2(self._rate)))
        if sums is None:
            one = min(max(round(math.log2(constant)), LEAST_EXPONENT), most)
            return np.full(len(weight), one, np.int16)
        known = sums.detach().to("cpu", torch.float64).numpy()
        trained = (known > 0) & np.isfinite(known)
        wanted = np.rint(math.log2(constant) - 0.5 * np.log2(np.where(trained, known, 1.0)))
        wanted = wanted.clip(LEAST_EXPONENT, most).astype(np.int16)
        return np.where(trained, wanted, EXACT).astype(np.int16)

    def _constant_of(self, weight: torch.Tensor, sums: torch.Tensor | None) -> float | None:
        """Find the constant for these rows alone: nobody has settled the codec."""
        survey, cpu = ImportanceSurvey(), weight.float().cpu()
        sums = torch.ones(len(cpu)) if sums is None else sums.cpu()
        sound = torch.isfinite(cpu).all(dim=1)
        survey.add(cpu[sound], sums[sound])
        return _constant(survey, self._given)


def refuse_untold(given: Mapping[str, object]) -> None:
    """Refuse a target of the loss without what it needs.

    Raises:
        ValueError: names what is missing, and ``step`` as the way without.
    """
    missing = [name for name in _TOLD if given.get(name) is None]
    if given.get("loss") is not None and missing:
        raise ValueError(
            f"loss={given['loss']!r} chooses the steps from the job's current loss, and needs "
            f"{', '.join(missing)} as well (loss=1e-5, current_loss=0.45, total_steps=10_000, "
            "batch_size=4096); without these give step=, the step of the rows, or mean_bits="
        )


def _check(given: Mapping[str, object], tail: object, constant: object) -> None:
    for name in (*_NUMBERS, *_COUNTS):
        value, kinds = given[name], (int,) if name in _COUNTS else (int, float)
        if value is None:
            continue
        if not isinstance(value, kinds) or isinstance(value, bool) or not 0 < value < math.inf:
            what = "whole number" if name in _COUNTS else "number"
            raise ValueError(f"{name} must be a positive {what}, not {value!r}")
    if not isinstance(tail, bool):
        raise ValueError(f"tail must be True or False, not {tail!r}")
    if constant is not None and not (
        type(constant) in (int, float) and 0 < float(str(constant)) < math.inf
    ):
        raise ValueError(f"constant must be a positive number, not {constant!r}")
    chosen = [name for name in ("step", "mean_bits", "loss") if given[name] is not None]
    if len(chosen) > 1:
        raise ValueError(f"{' and '.join(chosen)} all choose the steps: give one of them")
    bits = given["mean_bits"]
    if isinstance(bits, (int, float)) and bits > _MOST_BITS:
        raise ValueError(f"mean_bits must be at most {_MOST_BITS:g}, not {bits!r}")
    refuse_untold(given)
    if given["loss"] is None and any(given[name] is not None for name in _TOLD):
        raise ValueError(f"{', '.join(_TOLD)} are for loss=: give loss= as well, or leave them out")


def _sums(optimizer: Mapping[str, torch.Tensor]) -> torch.Tensor | None:
    """Return each row's sum (or mean) of squared gradients, ``(n,)``; None if none is kept."""
    state = optimizer.get("exp_avg_sq")
    if state is None:
        state = optimizer.get("momentum1", optimizer.get("sum"))
    if state is None or not state.is_floating_point():
        return None
    if state.dim() == 1:
        return None if bool((state < 0).any()) else state
    if "exp_avg_sq" not in optimizer and bool((state < 0).any()):
        return None  # a momentum
    return state.float().mean(dim=1)


def _constant(survey: ImportanceSurvey, given: Mapping[str, float | int | None]) -> float | None:
    """Choose ``c`` for the surveyed rows; None if none is trained."""
    values = float(survey.scores.sum())
    if not values:
        return None
    mean_bits, loss = given["mean_bits"], given["loss"]
    if mean_bits is not None:
        return float(2.0 ** survey.step_for_budget(mean_bits))
    told = [given[name] for name in _TOLD]
    assert loss is not None
    level, steps, batch = (float(value) for value in told if value is not None)
    return math.sqrt(24.0 * steps * loss * level / (batch * values))
