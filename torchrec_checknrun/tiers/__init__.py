"""Keep what brings a rank back in other places than its image and the storage.

``peers.py`` keeps copies of rank files in other ranks' memory, and brings them back: read it first.
``peer_tier.py`` holds the copies of one rank's files; ``placement.py`` says on which rank,
``exchange.py`` moves the bytes. ``priority_rows.py`` saves some rows more often than others.
"""
