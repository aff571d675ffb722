"""Configure checkpoints with Hydra: the config group ``checkpoint`` and its baselines.

Read ``config.py`` first; ``baselines.py`` holds stock DCP and "off", which the same switch offers.
"""
