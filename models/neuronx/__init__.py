"""The plugin for the Neuron hosts (docs/trainium.md).

The plugin splits a checkpoint over the NeuronCores (:mod:`.checkpoint`, :mod:`.weights`, :mod:`.heads`) and builds its
layers with the host's own graph functions (:mod:`.graph`, :mod:`.kernels`). The host does the rest: compilation,
memory, the generation loop. :mod:`.host_tnx` and :mod:`.host_optimum` adapt the plugin to transformers-neuronx and to
optimum-neuron's HLO backend.

NxD Inference, alone (:mod:`.host_nxd`) or below vLLM, has its own layers: the modules ``nxd_*`` replace their linears.
"""
