"""Serving: the vLLM plugin and the OpenAI-compatible server."""

if "." not in __name__:
    from neuronmm_checkout import stand_back

    stand_back(__name__)
