"""The main job: a DLRM trained on Criteo data, with checkpoints."""
