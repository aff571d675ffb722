"""Take a snapshot at a cut and write it behind training: staging, rank files, commit.

The training thread pays for a copy of the modified rows; encoding and writing happen behind it, in
a thread or a process. A checkpoint counts from the moment its manifest exists. Read
``snapshot.py`` first, then ``background.py``.
"""
