"""The low-rank kernels for Trainium in NKI: one body per kernel, two dialects beneath (see docs/nki.md)."""
