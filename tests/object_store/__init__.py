"""Keep checkpoints in a real S3 server, on loopback, also when it fails."""
