"""The low-rank kernels for Trainium in NKI: one body per kernel, written once for two dialects (see docs/nki.md).

Kernels: :mod:`.low_rank_matmul`, :mod:`.low_rank_mlp`, :mod:`.baselines`. Each file ``x.py`` has a sibling
``x_torch.py`` with the torch reference of every kernel in it.
"""
