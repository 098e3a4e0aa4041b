"""The sharder: one model over several machines, by tensor or by pipeline.

Knows: MLX's distributed backends, who holds which part of a model, how ranks are started, watched and
restarted. Does not know HTTP or text beyond what the engine already does with them.
"""
