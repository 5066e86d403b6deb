"""The Neuron SDK's surface on a CPU: ``nki`` (language and hardware rules), graphs, runtime and timing."""

if "." not in __name__:
    from neuronmm_checkout import stand_back

    stand_back(__name__)
