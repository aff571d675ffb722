"""Let the reader go on one batch too late after a restart."""

from __future__ import annotations

from typing import Any

from recipes.dlrm_criteo.reader import Reader
from tests.crash.sabotage import replace, report, train


def sabotage() -> None:
    load_state_dict = Reader.load_state_dict

    def load_and_skip(reader: Reader, state: dict[str, Any]) -> None:
        load_state_dict(reader, state)
        reader.position += reader.global_batch
        report(f"the reader goes on at sample {reader.position}")

    replace(Reader, "load_state_dict", load_and_skip)


if __name__ == "__main__":
    sabotage()
    train()
