"""Turn rows, state and control records into bytes, and check every byte that is read.

A checkpoint is a manifest and one file per rank; a rank file is chunks, an index and a footer. This
room alone implements docs/reference/format.md. A file may come from an untrusted source: every
field is checked before use. Read ``rank_file.py`` first, then ``row_chunk.py``.
"""
