"""The plugin for the Neuron hosts, transformers-neuronx and optimum-neuron's HLO backend (docs/trainium.md).

The plugin splits a checkpoint over the NeuronCores (:mod:`.checkpoint`, :mod:`.weights`, :mod:`.heads`) and builds its
layers with the host's own graph functions (:mod:`.graph`, :mod:`.kernels`). The host does the rest: compilation,
memory, the generation loop. :mod:`.host_tnx` and :mod:`.host_optimum` adapt the plugin to each host.
"""
