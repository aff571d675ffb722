"""Compare the page of configuration keys with the config: names, defaults and choices."""

from __future__ import annotations

import re
from collections.abc import Iterator
from enum import Enum
from pathlib import Path

import pytest
from omegaconf import OmegaConf

from torchrec_checknrun.hydra_config import config
from torchrec_checknrun.hydra_config.config import CheckNRunConfig

PAGE = Path(__file__).parents[2] / "docs" / "reference" / "configuration.md"
CHOICES: dict[str, type[Enum]] = {
    "policy": config.PolicyName,
    "bits": config.Bits,
    "background": config.Background,
    "staging": config.Staging,
    "when_busy": config.WhenBusy,
    "resume": config.Resume,
    "publish_bits": config.PublishBits,
}


def rows() -> Iterator[tuple[list[str], str, str]]:
    """Yield the keys, the defaults and the meaning of each row of ``check_n_run``'s table."""
    text = PAGE.read_text().split("\n## Environment\n")[0]
    for line in text.splitlines():
        if line.startswith("| `"):
            names, defaults, meaning = line.removeprefix("|").split(" | ", 2)
            yield re.findall(r"`(\w+)`", names), defaults, meaning


def shown(value: object) -> str:
    """Return a default as the page has it."""
    if isinstance(value, Enum):
        return value.name
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    return f"{value:g}" if isinstance(value, float) else str(value)


def test_defaults_are_those_of_the_page() -> None:
    found: dict[str, str] = {}
    for keys, text, _ in rows():
        of_some = dict(re.findall(r"`(\w+)`: (\w+)", text))
        defaults = re.sub(r" \(.*\)", "", text).split(", ")
        of_all = defaults if len(defaults) > 1 else defaults * len(keys)
        found |= dict(zip(keys, of_all, strict=True)) | of_some
    own = OmegaConf.to_container(OmegaConf.structured(CheckNRunConfig(root="required")))
    assert isinstance(own, dict)
    assert found == {str(k): shown(v) for k, v in own.items() if not str(k).startswith("_")}


@pytest.mark.parametrize("key", CHOICES)
def test_choices_are_those_of_the_page(key: str) -> None:
    (text,) = [meaning for keys, _, meaning in rows() if key in keys]
    assert set(CHOICES[key].__members__) <= set(re.findall(r"\w+", text))
