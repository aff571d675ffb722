"""Keep files on a folder or an object store, and survive what a storage does.

Every byte of a checkpoint goes through ``Folder``: local disks, object stores through fsspec, with
bounded waits, retries of transient errors and writes that are complete or absent. Nothing here
knows what a checkpoint is. Read ``folder.py`` first.
"""
