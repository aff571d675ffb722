"""Draw random ways to cut a tensor into parts."""

from __future__ import annotations

from hypothesis import strategies as st

from torchrec_checknrun.boxes import Box


@st.composite
def tilings(draw: st.DrawFn, whole: Box, most: int = 6) -> list[Box]:
    """Cut a whole into random parts, again and again; some may be empty."""
    parts = [whole]
    for _ in range(draw(st.integers(0, most)) if whole.spans else 0):
        part = parts.pop(draw(st.integers(0, len(parts) - 1)))
        along = draw(st.integers(0, len(part.spans) - 1))
        start, stop = part.spans[along]
        cut = draw(st.integers(start, stop))
        for span in ((start, cut), (cut, stop)):
            parts.append(Box((*part.spans[:along], span, *part.spans[along + 1 :])))
    return parts
