"""Train a DLRM on Criteo data with checkpoints: the main job."""
