"""Keep files in a folder or an object store, and survive the faults of storage.

Every byte of a checkpoint goes through ``Folder``: local disks, object stores through fsspec, with
bounded waits, retries of transient errors and writes that are complete or absent. Nothing here
knows checkpoints. Read ``folder.py`` first.
"""
