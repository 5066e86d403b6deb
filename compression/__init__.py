"""Offline SVD compression of a checkpoint: calibrate, allocate ranks, factorise, write."""

if "." not in __name__:
    from neuronmm_checkout import stand_back

    stand_back(__name__)
