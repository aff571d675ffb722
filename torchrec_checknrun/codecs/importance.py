"""Give more bits to rows that the loss cares about, fewer to the rest.

The accumulator of row-wise Adagrad is a row's empirical Fisher information: how much the loss
changes when the row does. Multiplied by the row's squared norm it is the cost of a relative error
there. So the width of a row, 2, 4 or 8 bits, is ``log2(G / median G) / 2 + log2(rms(row))`` plus a
constant; the constant is an option, or follows from a budget of bits. For a checkpoint
``budget.ImportanceSurvey`` finds the constant over all tables; a codec that was not settled, over
the block it encodes.
"""

from __future__ import annotations

import functools
import json
import logging
import math
from collections.abc import Mapping, Sequence
from typing import ClassVar

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
    join_rows,
    output,
    select_rows,
)
from torchrec_checknrun.codecs.budget import (
    BORDERS,
    ROW_WIDTHS,
    SAMPLE_ROWS,
    ImportanceSurvey,
    importance,
)
from torchrec_checknrun.codecs.rowwise import Rowwise

logger = logging.getLogger(__name__)

DEFAULT_MEAN_BITS = 4.0
_BAND = 0.25
"""The most that quantizing changes a row's score by."""
_NO_ERROR, _AN_ERROR = 1e-4, 1e-2
"""Relative error of a row that was on a grid already, and of one that was not, at half its bits."""


class ImportanceWeighted(Codec):
    """Adaptive rows of 2, 4 and 8 bits, grouped by width within a block.

    Block layout: two bits per row for its width (the first row in the lowest bits), then the rows
    of 2, of 4 and of 8 bits, each group in order.

    Args:
        offset: the constant; one more gives every row a bit more.
        mean_bits: a budget instead of a constant: the most bits per value on average over the
            rows, not counting scale and bias. 4 if neither is given.
        constant: added to ``log2(G) / 2 + log2(rms(row))`` of all rows that are written together,
            once it was settled; None: found for each block.

    Raises:
        ValueError: both are given, mean_bits is outside 2 to 8, or offset is not finite.
    """

    name: ClassVar[str] = "importance"
    lossy: ClassVar[bool] = True
    surveys: ClassVar[bool] = True

    def __init__(
        self,
        offset: float | None = None,
        mean_bits: float | None = None,
        constant: float | None = None,
    ) -> None:
        for name, value in (("offset", offset), ("mean_bits", mean_bits), ("constant", constant)):
            if not (value is None or isinstance(value, (int, float))) or isinstance(value, bool):
                raise ValueError(f"{name} must be a number, not {value!r}")
        if offset is not None and mean_bits is not None:
            raise ValueError("give offset or mean_bits, not both")
        if offset is not None and not math.isfinite(offset):
            raise ValueError(f"offset must be finite, not {offset}")
        if mean_bits is not None and not 2 <= mean_bits <= 8:
            raise ValueError(f"mean_bits must be between 2 and 8, not {mean_bits}")
        self.offset = offset
        self.mean_bits = DEFAULT_MEAN_BITS if offset is None and mean_bits is None else mean_bits
        self.constant = constant

    @property
    def value_bits(self) -> int:
        """Return the bits of a row without a known importance."""
        return 4 if self.mean_bits is None else self._fixed_width

    @property
    def _fixed_width(self) -> int:
        assert self.mean_bits is not None
        return max(width for width in ROW_WIDTHS if width <= self.mean_bits)

    def encode(
        self,
        rows: torch.Tensor,
        ids: torch.Tensor | None = None,
        context: RowContext = NO_CONTEXT,
        out: torch.Tensor | None = None,
    ) -> Encoded:
        rows = rows.detach()
        if ids is None:
            ids = torch.arange(len(rows), device=rows.device)
        widths = self._widths(rows, ids, context.optimizer)
        kinds = torch.bucketize(widths, torch.tensor(ROW_WIDTHS, device="cpu")).to(torch.uint8)
        parts = [_pack_kinds(kinds)]
        groups: list[Parameters] = []
        exceptions = []
        for kind, bits in enumerate(ROW_WIDTHS):
            members = (kinds == kind).nonzero().view(-1)
            encoded = Rowwise(bits).encode(rows, ids[members.to(ids.device)])
            parts.append(encoded.data.view(-1))
            groups.append({"rows": len(members), **encoded.parameters})
            exceptions.append(members[encoded.exceptions])
        data = output(sum(part.numel() for part in parts), out)
        torch.cat(parts, out=data)
        return Encoded(data, {"groups": groups}, torch.cat(exceptions).sort().values)

    def decode(
        self, data: torch.Tensor, parameters: Parameters, rows: int, start: int, out: torch.Tensor
    ) -> None:
        kinds = _unpack_kinds(data, rows)
        wanted = kinds[start : start + len(out)]
        groups = _groups(data, parameters, kinds, out.shape[1])
        for kind, (bits, (group, count, part)) in enumerate(zip(ROW_WIDTHS, groups, strict=True)):
            members = (wanted == kind).nonzero().view(-1)
            if len(members):
                before = int((kinds[:start] == kind).sum())
                values = torch.empty((len(members), out.shape[1]), dtype=out.dtype, device="cpu")
                Rowwise(bits).decode(part, group, count, before, values)
                out.index_copy_(0, members.to(out.device), values.to(out.device))

    def select(
        self,
        data: torch.Tensor,
        parameters: Parameters,
        rows: int,
        dim: int,
        positions: torch.Tensor,
    ) -> tuple[torch.Tensor, Parameters]:
        kinds = _unpack_kinds(data, rows)
        wanted = kinds[positions]
        parts, chosen = [_pack_kinds(wanted)], []
        groups = _groups(data, parameters, kinds, dim)
        for kind, (bits, (group, count, part)) in enumerate(zip(ROW_WIDTHS, groups, strict=True)):
            members = (kinds == kind).nonzero().view(-1)
            of_kind = torch.searchsorted(members, positions[wanted == kind])
            if len(of_kind):
                size = Rowwise(bits).row_bytes(dim)
                parts.append(select_rows(part, count, size, of_kind))
            chosen.append({**group, "rows": len(of_kind)})
        return torch.cat(parts), {"groups": chosen}

    def family(self, parameters: Parameters, dim: int) -> str | None:
        groups = parameters.get("groups")
        if not isinstance(groups, list):
            return None
        # The constant that widths were chosen by makes no difference to rows that have one.
        exponents = [group.get("exponent", 0) for group in groups]
        return json.dumps([self.name, exponents])

    def join(
        self,
        blocks: Sequence[tuple[torch.Tensor, Parameters, int]],
        places: Sequence[torch.Tensor],
        dim: int,
    ) -> tuple[torch.Tensor, Parameters]:
        every = [_unpack_kinds(data, rows) for data, _, rows in blocks]
        kinds = torch.empty(sum(map(len, every)), dtype=torch.uint8, device="cpu")
        for of_block, place in zip(every, places, strict=True):
            kinds[place] = of_block
        split = [
            _groups(data, parameters, of_block, dim)
            for (data, parameters, _), of_block in zip(blocks, every, strict=True)
        ]
        parts, joined = [_pack_kinds(kinds)], []
        for kind in range(len(ROW_WIDTHS)):
            members = (kinds == kind).nonzero().view(-1)
            inside = [
                torch.searchsorted(members, place[of_block == kind])
                for of_block, place in zip(every, places, strict=True)
            ]
            rows = [(groups[kind][2], groups[kind][1]) for groups in split]
            some = [number for number, (_, count) in enumerate(rows) if count]
            if some:
                parts.append(join_rows([rows[i] for i in some], [inside[i] for i in some]))
            joined.append({**split[0][kind][0], "rows": len(members)})
        return torch.cat(parts), {"groups": joined}

    def spec(self) -> CodecSpec:
        spec: CodecSpec = {"name": self.name, "version": self.version}
        given = {"mean_bits": self.mean_bits, "offset": self.offset, "constant": self.constant}
        return spec | {name: value for name, value in given.items() if value is not None}

    def survey(self, sample: Sample) -> ImportanceSurvey | None:
        rows = sample(SAMPLE_ROWS)
        accumulator = _accumulator(rows.optimizer)
        if accumulator is None or not rows.count:
            return None
        found = ImportanceSurvey()
        found.add(rows.weight, accumulator, rows.count / len(rows.weight))
        return found

    def settle(self, survey: Survey) -> ImportanceWeighted:
        assert isinstance(survey, ImportanceSurvey)
        if self.mean_bits is not None:
            constant = survey.constant_for_budget(self.mean_bits)
        else:
            assert self.offset is not None
            constant = survey.constant_for_offset(self.offset)
        return ImportanceWeighted(self.offset, self.mean_bits, constant)

    def _widths(
        self, rows: torch.Tensor, ids: torch.Tensor, optimizer: Mapping[str, torch.Tensor]
    ) -> torch.Tensor:
        """Choose the bits of each row, ``(n,)`` int64 on the CPU."""
        accumulator = _accumulator(optimizer)
        if accumulator is None:
            _warn_fixed_width(self.value_bits)
            return torch.full((len(ids),), self.value_bits, device="cpu")
        score = importance(rows, ids, accumulator)
        score += _stay(rows, ids, score + self._constant_for(score, accumulator))
        bits = score + self._constant_for(score, accumulator)
        return torch.tensor(ROW_WIDTHS, device="cpu")[
            torch.bucketize(bits, torch.tensor(BORDERS, device="cpu"))
        ]

    def _constant_for(self, score: torch.Tensor, accumulator: torch.Tensor) -> float:
        if self.constant is not None:
            return self.constant
        if self.mean_bits is not None:
            return _fitting_offset(score, self.mean_bits)
        assert self.offset is not None
        trained = accumulator.detach().to(torch.float32).cpu()
        positive = trained[(trained > 0) & trained.isfinite()]
        return self.offset - (0.5 * float(positive.median().log2()) if len(positive) else 0.0)


def _accumulator(optimizer: Mapping[str, torch.Tensor]) -> torch.Tensor | None:
    """Return row-wise Adagrad's sums, one per row; None under another optimizer."""
    state = optimizer.get("momentum1")
    return None if state is None or state.dim() != 1 else state


def _groups(
    data: torch.Tensor, parameters: Parameters, kinds: torch.Tensor, dim: int
) -> list[tuple[Parameters, int, torch.Tensor]]:
    """Split a block by width: parameters, number of rows and bytes of each group."""
    groups, rows = parameters.get("groups"), len(kinds)
    if not isinstance(groups, list) or len(groups) != len(ROW_WIDTHS):
        raise ValueError(f"groups {groups!r}")
    found, at = [], -(-rows // 4)
    for kind, (bits, group) in enumerate(zip(ROW_WIDTHS, groups, strict=True)):
        count = int((kinds == kind).sum())
        if not isinstance(group, dict) or group.get("rows") != count:
            raise ValueError(f"group {group!r} of {count} rows of {bits} bits")
        size = count * Rowwise(bits).row_bytes(dim)
        found.append((group, count, data[at : at + size]))
        at += size
    if at != data.numel():
        raise ValueError(f"{rows} rows of mixed width take {at} bytes, not {data.numel()}")
    return found


def _stay(rows: torch.Tensor, ids: torch.Tensor, bits: torch.Tensor) -> torch.Tensor:
    """Compute a bonus, ``(n,)`` float32, that keeps rows at the width they were restored from.

    Quantizing changes a row's norm a little. Where that moves the score below a border, the row's
    bits would be halved for no reason that the loss knows of, and every restore would add such
    rows.
    """
    bonus = torch.zeros(len(bits), device="cpu")
    for border, width in zip(BORDERS, ROW_WIDTHS[1:], strict=True):
        near = ((bits - border).abs() <= _BAND).nonzero().view(-1)
        if not len(near):
            continue
        chosen = rows.index_select(0, ids[near.to(ids.device)])
        was_wide = _relative_error(chosen, width) <= _NO_ERROR
        bonus[near[was_wide & (_relative_error(chosen, width // 2) > _AN_ERROR)]] = _BAND
    return bonus


def _relative_error(rows: torch.Tensor, bits: int) -> torch.Tensor:
    codec, restored = Rowwise(bits), torch.empty(rows.shape, dtype=rows.dtype, device="cpu")
    encoded = codec.encode(rows)
    codec.decode(encoded.data.view(-1), encoded.parameters, len(rows), 0, restored)
    values = rows.to(torch.float32).cpu()
    return (restored.to(torch.float32) - values).norm(dim=1) / values.norm(dim=1)


def _fitting_offset(score: torch.Tensor, mean_bits: float) -> float:
    """Find the highest offset at which the rows' mean width is within the budget."""
    low, high = -64.0, 64.0
    widths = torch.tensor(ROW_WIDTHS, dtype=torch.float64, device="cpu")
    if not len(score):
        return low
    for _ in range(30):
        middle = (low + high) / 2
        mean = float(
            widths[torch.bucketize(score + middle, torch.tensor(BORDERS, device="cpu"))].mean()
        )
        low, high = (middle, high) if mean <= mean_bits else (low, middle)
    return low


def _pack_kinds(kinds: torch.Tensor) -> torch.Tensor:
    padded = torch.zeros(-(-len(kinds) // 4) * 4, dtype=torch.uint8, device="cpu")
    padded[: len(kinds)] = kinds
    four = padded.view(-1, 4)
    return four[:, 0] | four[:, 1] << 2 | four[:, 2] << 4 | four[:, 3] << 6


def _unpack_kinds(data: torch.Tensor, rows: int) -> torch.Tensor:
    packed = data[: -(-rows // 4)]
    four = torch.stack([packed >> shift & 3 for shift in (0, 2, 4, 6)], dim=1)
    kinds = four.view(-1)[:rows]
    if len(kinds) != rows or bool((kinds >= len(ROW_WIDTHS)).any()):
        raise ValueError(f"{data.numel()} bytes don't name the group of each of {rows} rows")
    return kinds


@functools.cache
def _warn_fixed_width(bits: int) -> None:
    logger.warning(
        "importance-weighted widths need row-wise Adagrad's state (momentum1, one value per row): "
        "tables with another optimizer are stored with %d bits",
        bits,
    )
