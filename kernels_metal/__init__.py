"""Our own Metal kernels, each with a reference in plain MLX operations that runs everywhere.

Knows: shapes, dtypes and launches. Knows nothing of requests, schedulers or files.
"""
