"""One file a backend: where a model runs."""
