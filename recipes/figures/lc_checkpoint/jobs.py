"""Train the small models of LC-Checkpoint's paper by plain SGD, as one vector of parameters.

Every batch is a function of the iteration alone, so that a job that goes on from an older vector
trains the same batches as the one that never failed.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn

from recipes.figures.movielens import ratings

_FACTORS = 32  # of a user and an item
_MEAN_STARS = 3.53


class Factors(nn.Module):
    """Matrix factorisation without biases."""

    def __init__(self, users: int, items: int) -> None:
        super().__init__()
        self.users = nn.Parameter(0.2 * torch.randn(users, _FACTORS))
        self.items = nn.Parameter(0.2 * torch.randn(items, _FACTORS))

    def forward(self, pairs: torch.Tensor) -> torch.Tensor:
        """Predict stars, less their mean."""
        return (self.users[pairs[:, 0]] * self.items[pairs[:, 1]]).sum(1)


@dataclass(frozen=True)
class Settings:
    """The parts that a job is trained with."""

    rate: float
    batch: int
    iterations: int
    evaluated: int
    """Samples whose loss decides when a job has caught up."""


class VectorJob:
    """A model in training.

    Args:
        inputs, targets: of all samples.
        loss: of predictions and targets, a mean.
    """

    def __init__(
        self,
        model: nn.Module,
        inputs: torch.Tensor,
        targets: torch.Tensor,
        loss: Callable[[torch.Tensor, torch.Tensor], torch.Tensor],
        settings: Settings,
    ) -> None:
        self.settings = settings
        self._model, self._inputs, self._targets, self._loss = model, inputs, targets, loss
        self._parameters = list(model.parameters())

    @property
    def shapes(self) -> list[torch.Size]:
        """Return the parameters' shapes, in the vector's order."""
        return [parameter.shape for parameter in self._parameters]

    @torch.no_grad()
    def vector(self) -> np.ndarray:
        """Copy all parameters."""
        return torch.cat([p.reshape(-1) for p in self._parameters]).numpy()

    @torch.no_grad()
    def put(self, vector: np.ndarray) -> None:
        """Continue from other parameters."""
        parts = torch.from_numpy(vector).split([p.numel() for p in self._parameters])
        for parameter, part in zip(self._parameters, parts, strict=True):
            parameter.copy_(part.view(parameter.shape))

    def train(self, iteration: int) -> None:
        """Train the batch of an iteration."""
        generator = torch.Generator().manual_seed(iteration)
        chosen = torch.randint(len(self._inputs), (self.settings.batch,), generator=generator)
        loss = self._loss(self._model(self._inputs[chosen]), self._targets[chosen])
        gradients = torch.autograd.grad(loss, self._parameters)
        with torch.no_grad():
            for parameter, gradient in zip(self._parameters, gradients, strict=True):
                parameter.sub_(gradient, alpha=self.settings.rate)

    @torch.no_grad()
    def evaluate(self) -> float:
        """Return the loss on the first samples."""
        few = slice(self.settings.evaluated)
        return self._loss(self._model(self._inputs[few]), self._targets[few]).item()


def digits() -> tuple[np.ndarray, np.ndarray]:
    """Load scikit-learn's digits: ``(n, 8, 8)`` from 0 to 1, and their classes."""
    try:
        from sklearn.datasets import load_digits
    except ImportError:
        sys.exit("digits come with scikit-learn: pip install 'torchrec_checknrun[digits]'")
    found = load_digits()
    return found.images.astype(np.float32) / 16, found.target.astype(np.int64)


def large_digits(images: np.ndarray, classes: np.ndarray) -> tuple[torch.Tensor, torch.Tensor]:
    """Enlarge digits to MNIST's geometry: 20 x 20 in 28 x 28; each thrice, moved a little."""
    random = np.random.default_rng(0)
    glyphs = torch.from_numpy(images)[:, None]
    glyphs = F.pad(F.interpolate(glyphs, size=(20, 20), mode="bilinear"), (4, 4, 4, 4))
    glyphs = glyphs * (glyphs > 0.05)  # most pixels are zero, as MNIST's
    moved = [glyphs]
    for _ in range(2):
        shifts = random.integers(-2, 3, (len(glyphs), 2)).tolist()
        moved.append(
            torch.stack([g.roll((a, b), (1, 2)) for g, (a, b) in zip(glyphs, shifts, strict=True)])
        )
    order = torch.from_numpy(random.permutation(3 * len(glyphs)))
    return torch.cat(moved)[order], torch.from_numpy(classes).repeat(3)[order]


def logistic_regression(_: Path | None) -> VectorJob:
    """Make multinomial logistic regression on digits: 7,850 parameters."""
    model = nn.Sequential(nn.Flatten(), nn.Linear(784, 10))
    settings = Settings(rate=0.1, batch=64, iterations=300, evaluated=6000)
    return VectorJob(model, *large_digits(*digits()), F.cross_entropy, settings)


def lenet(_: Path | None) -> VectorJob:
    """Make LeNet-5 on digits: 61,706 parameters."""
    model = nn.Sequential(
        nn.Conv2d(1, 6, 5, padding=2),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(6, 16, 5),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        *(nn.Linear(400, 120), nn.ReLU(), nn.Linear(120, 84), nn.ReLU(), nn.Linear(84, 10)),
    )
    settings = Settings(rate=0.05, batch=64, iterations=300, evaluated=800)
    return VectorJob(model, *large_digits(*digits()), F.cross_entropy, settings)


def matrix_factorisation(folder: Path | None) -> VectorJob:
    """Make matrix factorisation of ratings: 84,000 parameters."""
    given = ratings(folder)
    order = np.random.default_rng(0).permutation(len(given.stars))
    pairs = torch.from_numpy(given.ids[order, :2])
    stars = torch.from_numpy(given.stars[order] - np.float32(_MEAN_STARS))
    settings = Settings(rate=20.0, batch=1000, iterations=400, evaluated=20_000)
    return VectorJob(Factors(*given.sizes[:2]), pairs, stars, F.mse_loss, settings)


JOBS: dict[str, Callable[[Path | None], VectorJob]] = {
    "logistic regression": logistic_regression,
    "LeNet": lenet,
    "matrix factorisation": matrix_factorisation,
}
"""By name; each takes the folder with ratings, or None."""


@contextmanager
def job(name: str, folder: Path | None) -> Iterator[VectorJob]:
    """Make a job whose bits depend on nothing but its name and the ratings."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        torch.manual_seed(0)
        yield JOBS[name](folder)
    finally:
        torch.set_num_threads(threads)
