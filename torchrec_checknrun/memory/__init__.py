"""Keep a rank's state in memory that outlives its process, so that a killed process loses nothing.

An image is a file in shared memory that holds a rank's shards, the marks of their modified rows, an
undo journal of the step in progress, and everything else as of the last two steps. After a restart
all ranks go back to the newest step that each of them can reach. Read ``image.py`` first, then
``step_journal.py`` and ``agreement.py``; ``file.py`` knows files, ``header.py`` their first pages.
"""
