"""Copy rows' bytes as NumPy's plain indexing does, compiled and not."""

import copy
import logging
import sys
from pathlib import Path
from unittest.mock import patch

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import torchrec_checknrun
from tests.examples import examples
from torchrec_checknrun import native as module
from torchrec_checknrun.native import (
    Chosen,
    TensorPlaces,
    can_copy,
    copy_rows,
    has_extension,
)
from torchrec_checknrun.version import __version__, sources_digest

COMPILED = [False, True] if has_extension() else [False]


@st.composite
def some(draw: st.DrawFn, rows: int, n: int) -> Chosen:
    if draw(st.booleans()):
        start = draw(st.integers(0, rows - n))
        return slice(start, start + n)
    chosen = draw(st.lists(st.integers(0, rows - 1), min_size=n, max_size=n, unique=True))
    return np.array(sorted(chosen), dtype=np.int64)


@settings(max_examples=examples(200), deadline=None)
@given(
    st.sampled_from([torch.float32, torch.float16, torch.float64, torch.uint8]),
    st.sampled_from([None, 1, 3, 64]),
    st.sampled_from([1, 9, 400]),
    st.sampled_from([5, 1 << 19]),
    st.sampled_from(COMPILED),
    st.data(),
)
def test_rows_come_to_their_places(
    dtype: torch.dtype,
    cols: int | None,
    rows: int,
    block: int,
    compiled: bool,
    data: st.DataObject,
) -> None:
    more = rows + data.draw(st.integers(0, 5))
    n = data.draw(st.integers(0, rows))
    chosen, where = data.draw(some(rows, n)), data.draw(some(more, n))
    shape = () if cols is None else (cols,)
    source = torch.randint(0, 250, (rows, *shape)).to(dtype)
    target = torch.randint(0, 250, (more, *shape)).to(dtype)
    wanted = target.numpy().copy()
    wanted[where] = source.numpy()[chosen]
    with (
        patch.object(module, "has_extension", lambda: compiled),
        patch.object(module, "BLOCK_BYTES", block),
    ):
        assert can_copy(source, target)
        # Try every view of the source's bytes, from every beginning.
        odd = torch.cat([torch.zeros(1, dtype=torch.uint8), source.reshape(-1).view(torch.uint8)])
        copy_rows(odd[1:], rows, chosen, target, where)
    assert np.array_equal(target.numpy(), wanted)


@pytest.mark.parametrize("compiled", COMPILED)
@pytest.mark.parametrize(
    ("rows", "chosen", "where"),
    [
        (6, slice(0, 7), slice(0, 7)),
        (6, np.array([0, 6]), slice(0, 2)),
        (6, slice(0, 2), np.array([0, 9])),
        (6, np.array([0, 1]), slice(8, 10)),
        (5, slice(0, 2), slice(0, 2)),
        (12, slice(0, 2), slice(0, 2)),
    ],
)
def test_rows_that_are_not_there_are_refused(
    compiled: bool, rows: int, chosen: Chosen, where: Chosen
) -> None:
    source, target = torch.ones(6, 4), torch.zeros(9, 4)
    with (
        patch.object(module, "has_extension", lambda: compiled),
        pytest.raises((IndexError, ValueError, TypeError)),
    ):
        copy_rows(source, rows, chosen, target, where)
    assert not target.any()


@pytest.mark.skipif(not has_extension(), reason="the compiled kernel was not built")
@pytest.mark.parametrize(
    "place", [torch.tensor([-1]), torch.tensor([9]), torch.tensor([0], dtype=torch.int32)]
)
def test_the_kernel_leaves_other_memory_alone(place: torch.Tensor) -> None:
    rows = torch.zeros(9, 4)
    for places in ((place, torch.tensor([0])), (torch.tensor([0]), place)):
        with pytest.raises((IndexError, ValueError)):
            torch.ops.checknrun.copy_rows(rows, 9, 0, places[0], rows.clone(), 0, places[1], 1)
    for first, n in ((-1, 1), (0, 10), (9, 1), (1, -1), (2**63 - 1, 1)):
        with pytest.raises((IndexError, ValueError)):
            torch.ops.checknrun.copy_rows(rows, 9, first, None, rows.clone(), 0, None, n)


def test_memory_in_pieces_is_for_torch() -> None:
    rows = torch.zeros(4, 6)
    assert can_copy(rows, rows)
    assert not can_copy(rows[:, :3], rows)
    assert not can_copy(rows, rows[::2])
    assert not can_copy(rows[:0], rows)


class TestLibrary:
    """Use a library that fits; otherwise warn once of the reason and the command to build one."""

    @pytest.fixture
    def package(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
    ) -> Path:
        """Make a folder in which the package looks for libraries."""
        folder = tmp_path / "torchrec_checknrun"
        folder.mkdir()
        monkeypatch.setattr(module, "__file__", str(folder / "native.py"))
        caplog.set_level(logging.WARNING)
        return folder

    def used(self) -> bool:
        return module.has_extension.__wrapped__()

    def warned(self, caplog: pytest.LogCaptureFixture) -> str:
        (record,) = caplog.records
        return record.getMessage()

    def test_a_missing_library_names_the_command(
        self, package: Path, caplog: pytest.LogCaptureFixture
    ) -> None:
        assert not self.used()
        text = self.warned(caplog)
        assert "the compiled kernel is missing: NumPy" in text
        assert "-m pip install --no-build-isolation" in text
        assert f"torchrec_checknrun-{__version__}.tar.gz" in text

    def test_sources_name_the_build_command(
        self, package: Path, caplog: pytest.LogCaptureFixture
    ) -> None:
        (package.parent / "setup.py").touch()
        assert not self.used()
        assert self.warned(caplog).endswith(
            f"cd {package.parent} && {sys.executable} setup.py build_ext --inplace"
        )

    @pytest.mark.parametrize("version", ["2.1.0", "99.0.1+cu130", "2.999.0a0+git1"])
    def test_of_another_torch(
        self, package: Path, caplog: pytest.LogCaptureFixture, version: str
    ) -> None:
        note = f"checknrun: built for torch {version};".encode()
        (package / "_C.abi3.so").write_bytes(b"\x7fELF\0" + note + b"\0")
        with patch.object(torch.ops, "load_library", side_effect=AssertionError):
            assert not self.used()
        assert f"was built for torch {version} and is not used with torch" in self.warned(caplog)

    def test_of_another_patch_release(self, package: Path) -> None:
        major, minor = torch.__version__.split(".")[:2]
        note = f"checknrun: built for torch {major}.{minor}.77+other;".encode()
        (package / "_C.abi3.so").write_bytes(note)
        with patch.object(torch.ops, "load_library") as load:
            module._load(package / "_C.abi3.so")
        load.assert_called_once()

    @pytest.mark.parametrize("built_of", [b"", b" checknrun: built of sources 00ff;"])
    def test_of_an_earlier_checkout(
        self, package: Path, built_of: bytes, caplog: pytest.LogCaptureFixture
    ) -> None:
        """Use no library that the sources beside it have outlived, as after a pull."""
        (package / "csrc").mkdir()
        (package / "csrc" / "copy_on_write.h").write_text("class KernelRows;")
        note = f"checknrun: built for torch {torch.__version__};".encode()
        (package / "_C.abi3.so").write_bytes(b"\x7fELF\0" + note + built_of + b"\0")
        with patch.object(torch.ops, "load_library", side_effect=AssertionError):
            assert not self.used()
        assert "was built of other sources than those beside it" in self.warned(caplog)

    def test_of_these_sources(self, package: Path) -> None:
        (package / "csrc").mkdir()
        (package / "csrc" / "copy_on_write.h").write_text("class KernelRows;")
        note = f"checknrun: built for torch {torch.__version__};"
        note += f" checknrun: built of sources {sources_digest(package / 'csrc')};"
        (package / "_C.abi3.so").write_text(note)
        with patch.object(torch.ops, "load_library") as load:
            assert self.used()
        load.assert_called_once()

    def test_any_change_makes_other_sources(self, tmp_path: Path) -> None:
        found = set()
        for name, text in [("a.h", "x"), ("a.h", "xy"), ("b.h", "xy"), ("a.cpp", "")]:
            (tmp_path / name).write_text(text)
            found.add(sources_digest(tmp_path))
        assert len(found) == 4

    def test_without_a_note(self, package: Path, caplog: pytest.LogCaptureFixture) -> None:
        (package / "_C.abi3.so").write_bytes(b"\x7fELF of an earlier version of this package")
        with patch.object(torch.ops, "load_library", side_effect=AssertionError):
            assert not self.used()
        assert "was built for torch of an unknown version and is not" in self.warned(caplog)

    def test_a_torn_library_is_not_loaded(
        self, package: Path, caplog: pytest.LogCaptureFixture
    ) -> None:
        note = f"checknrun: built for torch {torch.__version__};".encode()
        (package / "_C.abi3.so").write_bytes(note + b" no library")
        assert not self.used()
        assert "can't be loaded" in self.warned(caplog)

    def test_an_unreadable_library_is_reported(
        self, package: Path, caplog: pytest.LogCaptureFixture
    ) -> None:
        (package / "_C.abi3.so").symlink_to(package / "a library that is gone")
        assert not self.used()
        assert "can't be read" in self.warned(caplog)

    @pytest.mark.skipif(not has_extension(), reason="the compiled kernel was not built")
    def test_the_one_in_use_says_which_torch_it_was_built_for(self) -> None:
        (library,) = Path(torchrec_checknrun.__path__[0]).glob("_C*.so")
        assert f"built for torch {torch.__version__};".encode() in library.read_bytes()

    @pytest.mark.skipif(not has_extension(), reason="the compiled kernel was not built")
    def test_the_one_in_use_says_of_which_sources_it_was_built(self) -> None:
        (library,) = Path(torchrec_checknrun.__path__[0]).glob("_C*.so")
        digest = sources_digest(library.parent / "csrc")
        assert f"built of sources {digest};".encode() in library.read_bytes()


CHANGES = {
    "nothing": lambda p: None,
    "its values": lambda p: p.data.add_(1),
    "its memory": lambda p: setattr(p, "data", p.data.clone()),
    "its shape": lambda p: setattr(p, "data", p.data.view(2, 6)),
    "its strides": lambda p: setattr(p, "data", p.data.as_strided((3, 4), (1, 3))),
    "its dtype": lambda p: setattr(p, "data", p.data.view(torch.int32)),
    "the tensor itself": lambda p: torch.utils.swap_tensors(p, torch.nn.Parameter(p.data.clone())),
}


@pytest.mark.parametrize("compiled", COMPILED)
@pytest.mark.parametrize("change", CHANGES)
def test_tensors_lie_where_they_did(
    change: str, compiled: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "has_extension", lambda: compiled)
    monkeypatch.setattr(module, "_FEW_TENSORS", 2)
    tensors = [torch.nn.Parameter(torch.rand(3, 4), requires_grad=False) for _ in range(3)]
    places = TensorPlaces(tensors)
    assert places.same()
    CHANGES[change](tensors[1])
    assert places.same() == (change in ("nothing", "its values"))
    assert copy.deepcopy(places).same()
