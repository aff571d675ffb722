"""Configure checkpoints with Hydra by the config group ``checkpoint`` and its baselines.

Read ``config.py`` first; ``baselines.py`` holds stock DCP and "off", which the same switch offers.
"""
