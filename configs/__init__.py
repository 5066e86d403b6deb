"""Recipes, one YAML a model."""
