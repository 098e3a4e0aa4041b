"""Text on both sides of the model: chat templates and tokens in, readable text, reasoning and tool calls out.

Knows: tokenizer files, templates, characters. Knows nothing of MLX, weights, HTTP or scheduling.
"""
