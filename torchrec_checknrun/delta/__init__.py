"""Store rows as integers on power-of-two grids of their own, and later rows as differences to them.

A row of a *base* stands alone: integers times 2**exponent. A row of a *link* is the integers to add
to what its predecessor restores, so that links add up, and merge, to the bit. Rows that can't build
on a predecessor stand alone in a link, too. Read ``rows.py`` first.
"""
