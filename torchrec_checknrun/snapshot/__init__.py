"""Fix the content of a checkpoint at one instant, the cut, and copy it out of the model.

Training waits for what may change at any time; parameters and rows follow behind it, copied by the
background or before training overwrites them. Read ``snapshot.py`` first, then ``staging.py`` and
``cut_rows.py``.
"""
