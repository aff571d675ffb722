"""Keep what brings a rank back in several places: its image, a peer's memory, the storage.

``tier.py`` says what a place is; ``image_tier.py``, ``peer_tier.py`` and ``storage_tier.py`` are
the three, nearest first. ``peers.py`` keeps copies of rank files in other ranks' memory, and brings
them back; ``placement.py`` says on which rank, ``exchange.py`` moves the bytes.
"""
