"""Measure models: benchmark, evaluation, sweep and prediction, with their tables and pictures."""

if "." not in __name__:
    from neuronmm_checkout import stand_back

    stand_back(__name__)
