"""The Neuron SDK's surface on a CPU: ``nki`` (language and hardware rules), graphs, runtime and timing."""
