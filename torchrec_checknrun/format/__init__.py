"""Turn rows, state and control records into bytes, and check every byte that is read.

A checkpoint is a manifest and one file a rank; a rank file is chunks, an index and a footer. All of
docs/reference/format.md is implemented here, and nowhere else; a file may come from a stranger, so
that every field is checked before use. Read ``rank_file.py`` first, then ``row_chunk.py``.
"""
