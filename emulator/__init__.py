"""The Neuron SDK emulated on a CPU: the NKI language, HLO graphs, the runtime below a host, and a timing model."""

if "." not in __name__:
    from neuronmm_checkout import stand_back

    stand_back(__name__)
