"""Read how long and how large the measurement is, from a file in `configs/accuracy`."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf

from recipes.dlrm_criteo.train import CONFIGS

FOLDER = CONFIGS / "accuracy"


@dataclass(frozen=True)
class Scale:
    """The lengths of all parts, in steps, and what is measured.

    Attributes:
        first, every, points: the steps after which the job branches: their first, the steps between
            two, and their number.
        restores: after which of them a branch is evaluated; the last ends it.
        gap: steps between two restores.
        saves: checkpoints in a gap; the last one is restored.
        after: steps without restores, after which a branch is evaluated again.
        eval_samples: held-out samples, at most.
        rated_batch: samples of a step of the models of ratings.
        synthetic_ratings: how many to make where none are given.
        methods: patterns of the methods' names (`methods.py`).
        dlrm: Hydra overrides of the DLRMs, such as their tables' and their batches' size.
    """

    first: int
    every: int
    points: int
    restores: tuple[int, ...]
    gap: int
    saves: int
    after: int
    eval_samples: int
    rated_batch: int
    synthetic_ratings: int
    methods: tuple[str, ...]
    dlrm: tuple[str, ...]

    def __post_init__(self) -> None:
        for name in ("first", "every", "points", "gap", "saves", "eval_samples", "rated_batch"):
            value = getattr(self, name)
            if type(value) is not int or value < 1:
                raise ValueError(f"{name} must be a number of at least 1, not {value!r}")
        if self.saves > self.gap:
            raise ValueError(f"{self.gap} steps (gap) have no room for {self.saves} saves")
        ascending = all(a < b for a, b in zip((0, *self.restores), self.restores, strict=False))
        if not self.restores or not ascending:
            raise ValueError(f"restores must ascend from 1 on, not {list(self.restores)}")

    @property
    def steps(self) -> list[int]:
        """Return the steps after which the job branches."""
        return [self.first + i * self.every for i in range(self.points)]

    @property
    def length(self) -> int:
        """Return the steps of a branch."""
        return (self.restores[-1] - 1) * self.gap + self.after

    @classmethod
    def read(cls, name: str) -> Scale:
        """Read a scale by its name in `configs/accuracy`, or from a YAML file.

        Raises:
            ValueError: there is no such file, or its content is not a scale.
        """
        path = Path(name) if name.endswith((".yaml", ".yml")) else FOLDER / f"{name}.yaml"
        known = sorted(file.stem for file in FOLDER.glob("*.yaml"))
        if not path.is_file():
            raise ValueError(f"there is no scale {name!r}: choose among {known}, or name a file")
        try:
            content: Any = OmegaConf.to_container(OmegaConf.load(path))
            lists = {k: tuple(v) for k, v in content.items() if isinstance(v, list)}
            return cls(**{**content, **lists})
        except Exception as error:  # whatever YAML's parser and a wrong content raise
            raise ValueError(f"{path} is not a scale of this figure: {error}") from error
