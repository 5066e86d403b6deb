"""Offline SVD compression of a checkpoint: calibrate, allocate ranks, factorise, write."""
