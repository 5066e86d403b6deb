"""Serving: an OpenAI-compatible server on the engine's continuous batch."""

if "." not in __name__:
    from neuronmm_checkout import stand_back

    stand_back(__name__)
