"""The plugin for the Neuron hosts, transformers-neuronx and optimum-neuron's HLO backend (docs/trainium.md).

A checkpoint is cut for the NeuronCores (:mod:`.checkpoint`, :mod:`.weights`, :mod:`.heads`), its layers are drawn in a
host's own graph functions (:mod:`.graph`, :mod:`.kernels`), and the host does the rest: compiling, memory, the
generation loop. What differs between the two hosts is :mod:`.host_tnx` and :mod:`.host_optimum`.
"""
