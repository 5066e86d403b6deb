"""Offline SVD compression of a checkpoint."""
