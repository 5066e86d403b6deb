"""Serving: the vLLM plugin and the OpenAI-compatible server."""
