"""Models: names to files, files to weights, weights to an mlx-lm definition that runs on pages.

Knows: file formats, architectures, how a definition takes its cache. Knows nothing of requests,
scheduling, text or HTTP.
"""
