"""Runs in object storage: their addresses, the lease, the mirror in the background, and copies for reading."""
