"""Compare a saved state with the live object before merging."""

from typing import Any

import numpy as np
import pytest
import torch

from torchrec_checknrun.errors import IncompatibleCheckpoint
from torchrec_checknrun.restore.state_fit import check_state, merge_state
from torchrec_checknrun.values.state import encode_state


def nothing(_: object) -> bool:
    return False


class TestCheckState:
    def check(self, current: object, saved: object) -> None:
        tree, _ = encode_state(saved, "model")
        check_state(current, tree, "model", nothing)

    def test_matching_states_are_accepted(self) -> None:
        live = {"a": torch.zeros(2, 3), "b": {"c": 1}, 3: torch.zeros(())}
        self.check(live, {"a": torch.ones(2, 3), "b": {"c": 2}, 3: torch.ones(()), "late": 1})

    def test_what_an_object_creates_late_is_no_problem(self) -> None:
        self.check({"state": {}}, {"state": {0: {"step": torch.ones(())}}})

    def test_lists_may_have_another_length(self) -> None:
        self.check({"l": [torch.zeros(2)]}, {"l": [torch.zeros(3), torch.zeros(4)]})
        self.check({"l": [], "t": (1, 2)}, {"l": [torch.zeros(3)], "t": ()})

    @pytest.mark.parametrize(
        ("live", "saved", "message"),
        [
            ({"a": 1}, {"b": 1}, r"^model\.a is not in the checkpoint, which has b: "),
            ({"a": {"x": 1}}, {"a": {}}, r"^model\.a\.x is not in the checkpoint, .*nothing there"),
            (
                {"w": torch.zeros(2)},
                {"w": torch.zeros(3)},
                r"^model\.w: the checkpoint has float32 \[3\], the model wants float32 \[2\]",
            ),
            (
                {"w": torch.zeros(2)},
                {"w": torch.zeros(2).int()},
                r"^model\.w: the checkpoint has int32 \[2\]",
            ),
            ({"w": torch.zeros(2)}, {"w": 5}, r"^model\.w: the checkpoint has no tensor"),
            ({"w": torch.zeros(2)}, {"w": np.zeros(2)}, r"^model\.w: the checkpoint has no tensor"),
            ({"w": torch.zeros(())}, {"w": torch.zeros(1)}, r"float32 \[1\].*float32 \[\]"),
            ({1: 5}, {"1": 5}, r"^model\.1 is not in the checkpoint"),
            (
                {"l": [torch.zeros(2), torch.zeros(2)]},
                {"l": [torch.zeros(2), torch.zeros(3)]},
                r"^model\.l\[1\]: the checkpoint has float32 \[3\]",
            ),
            ({"l": ({"x": torch.zeros(2)},)}, {"l": ({},)}, r"^model\.l\[0\]\.x is not in"),
        ],
    )
    def test_does_not_fit(self, live: object, saved: object, message: str) -> None:
        with pytest.raises(IncompatibleCheckpoint, match=message):
            self.check(live, saved)

    def test_table_leaves_are_restored_elsewhere(self) -> None:
        table = torch.zeros(9, 9)
        tree, _ = encode_state({"dense": 1}, "model")
        live = {"dense": 1, "table": table, "tables": {"t": table}}
        check_state(live, tree, "model", lambda value: value is table)
        with pytest.raises(IncompatibleCheckpoint, match=r"model\.table "):
            check_state(live, tree, "model", nothing)

    def test_many_keys_are_shortened(self) -> None:
        with pytest.raises(IncompatibleCheckpoint, match=r"k0, .*k7, …: "):
            self.check({"other": 1}, {f"k{i}": i for i in range(50)})


class TestMergeState:
    def test_tensors_keep_their_identity(self) -> None:
        parameter = torch.nn.Parameter(torch.zeros(2))
        buffer = torch.zeros(3)
        live: dict[str, Any] = {"p": parameter, "inner": {0: buffer}, "n": 1}
        inner = live["inner"]
        saved = {"p": torch.ones(2), "inner": {0: torch.full((3,), 2.0)}, "n": 7, "late": [1]}
        merged = merge_state(live, saved)
        assert merged is live
        assert merged["p"] is parameter
        assert merged["inner"] is inner
        assert merged["inner"][0] is buffer
        assert parameter.tolist() == [1, 1]
        assert parameter.requires_grad
        assert buffer.tolist() == [2, 2, 2]
        assert (merged["n"], merged["late"]) == (7, [1])

    def test_what_the_checkpoint_has_not_stays(self) -> None:
        table = torch.ones(2)
        assert merge_state({"table": table, "n": 1}, {"n": 2}) == {"table": table, "n": 2}

    def test_views_are_written_through(self) -> None:
        base = torch.zeros(2, 3)
        merge_state({"column": base[:, 1]}, {"column": torch.ones(2)})
        assert base.tolist() == [[0, 1, 0], [0, 1, 0]]

    @pytest.mark.parametrize(
        ("live", "saved"), [(None, {"a": 1}), ([1, 2], [3]), (1.5, None), ((1,), (2, 3))]
    )
    def test_other_values_are_replaced(self, live: object, saved: object) -> None:
        assert merge_state(live, saved) == saved
