"""Checkpoints in a real S3 server, on loopback, also where it fails."""
