"""Recipes, one YAML a model."""

if "." not in __name__:
    from neuronmm_checkout import stand_back

    stand_back(__name__)
