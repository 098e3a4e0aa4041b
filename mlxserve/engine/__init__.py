"""The engine: many requests in, one batch a step, tokens out.

Knows: scheduling, batches, sampling, the loop and the one thread that owns MLX. Knows nothing of HTTP or
the command line.
"""
