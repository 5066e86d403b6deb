"""Generation: the engine, its decoders and its backends."""

if "." not in __name__:
    from neuronmm_checkout import stand_back

    stand_back(__name__)
