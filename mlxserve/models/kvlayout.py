"""What one token costs in the K/V cache, read from a configuration alone.

Knows: per layer how many numbers are stored for a token and for how many tokens, as mlx-lm's
definitions store them. Where a configuration describes its layers in a way not known here, every layer
counts as full attention: an upper bound, never too little.
Does not know: bytes (`memory`), MLX, or how the cache lays the numbers out (`cache.store`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from mlxserve.errors import ModelInvalid
from mlxserve.models.definitions import module_name

Config = Mapping[str, Any]

# Definitions that drop what slides out of a window; the others keep every token, whatever the
# configuration says of windows. tests/models/test_memory.py compares this with mlx-lm.
# fmt: off
WINDOWED = frozenset({
    "afmoe", "baichuan_m1", "cohere2", "exaone4", "exaone_moe", "gear", "gemma3_text", "gemma3n",
    "gemma4_text", "gpt_oss", "iquestloopcoder", "laguna", "llama", "llama4", "mellum", "mimo_v2_flash",
    "ministral3", "muse_glimmer", "muse_spark", "olmo3", "plamo3", "recurrent_gemma", "spark2_5", "step3p5",
})
# Definitions that store the compressed latent of multi-head latent attention (DeepSeek-V2, 2024)
# instead of expanded keys and values.
LATENT = frozenset({
    "bailing_hybrid", "bailing_moe_v3", "deepseek_v3", "deepseek_v32", "glm4_moe_lite", "kimi_k3",
    "kimi_linear", "longcat_flash", "longcat_flash_ngram", "mistral4",
})
# fmt: on
# Outer definitions of image models, which keep their text part's configuration inside.
WRAPPERS = {
    "gemma3": "gemma3_text",
    "gemma4": "gemma4_text",
    "kimi_vl": "deepseek_v3",
    "glm_moe_dsa": "deepseek_v32",
}
TEXT_PARTS = ("text_config", "llm_config", "language_config")
# Words for layers that keep a state of fixed size instead of keys and values.
STATEFUL = {"linear_attention", "mamba", "mamba2", "conv", "recurrent", "moe", "mlp", "M", "-", "E"}


@dataclass(frozen=True, slots=True)
class KvLayer:
    """One layer: numbers stored for a token (keys and values together), and the window if it slides."""

    values: int
    window: int | None = None

    def tokens(self, context: int) -> int:
        """How many of `context` tokens the layer keeps."""
        return context if self.window is None else min(context, self.window)


def text_config(config: Config) -> dict[str, Any]:
    """The configuration of the text model: an image model's inner one, completed from the outer."""
    inner = next((config[part] for part in TEXT_PARTS if isinstance(config.get(part), Mapping)), None)
    if inner is None:
        return dict(config)
    outer = {key: value for key, value in config.items() if not isinstance(value, Mapping)}
    return {**outer, **inner, "model_type": inner.get("model_type") or config.get("model_type")}


def kv_layers(config: Config) -> list[KvLayer]:
    """Every layer that stores keys and values, in order. Raises ModelInvalid, naming a missing field."""
    return [layer for layer in kv_by_layer(config) if layer is not None]


def kv_by_layer(config: Config) -> list[KvLayer | None]:
    """An entry for each layer of the model, None where it stores no keys and values. Raises as `kv_layers`."""
    text = text_config(config)
    name = _definition(text)
    kinds = _layer_kinds(text)
    sharing = int(text.get("num_kv_shared_layers") or 0)
    window = _window(text) if name in WINDOWED else None
    layers: list[KvLayer | None] = []
    for number, kind in enumerate(kinds):
        if kind in STATEFUL or number >= _count(text, *LAYERS) - sharing:
            layers.append(None)
            continue
        sliding = window is not None and "full" not in kind and kind not in ("attention", "*")
        layers.append(KvLayer(_values(text, name, sliding), window if sliding else None))
    return layers


def is_latent(config: Config) -> bool:
    """True where the cache holds one compressed latent for all heads, which no rank can hold a part of."""
    return _definition(text_config(config)) in LATENT


LAYERS = ("num_hidden_layers", "n_layer", "n_layers", "num_layers")
HEADS = ("num_attention_heads", "n_head", "n_heads")
WIDTH = ("hidden_size", "n_embd", "d_model")


def _definition(text: Config) -> str:
    name = module_name(text)
    return WRAPPERS.get(name, name)


def _layer_kinds(text: Config) -> list[str]:
    """A word for each layer, of those that configurations use."""
    count = _count(text, *LAYERS)
    named = _named_kinds(text)
    if named:
        return named
    numbers = range(count)
    if every := text.get("full_attention_interval"):
        return ["full_attention" if (n + 1) % every == 0 else "linear_attention" for n in numbers]
    if period := text.get("attn_layer_period"):
        offset = text.get("attn_layer_offset", 0)
        return ["attention" if n % period == offset else "mamba" for n in numbers]
    for key, first in (("full_attn_idxs", 0), ("full_attn_layers", 1)):
        chosen = text.get(key) or (text.get("linear_attn_config") or {}).get(key)
        if chosen:
            return ["full_attention" if n + first in chosen else "conv" for n in numbers]
    return [_by_pattern(text, n) for n in numbers]


def _named_kinds(text: Config) -> list[str]:
    """Kinds where the configuration lists them one by one."""
    for key in ("layer_types", "layers_block_type", "hybrid_override_pattern"):
        if text.get(key):
            return [str(kind) for kind in text[key]]
    if blocks := text.get("block_types") or text.get("_block_types"):
        return [blocks[n % len(blocks)] for n in range(_count(text, *LAYERS))]
    return []


def _by_pattern(text: Config, number: int) -> str:
    """Layer `number` of a model in which windows and full attention take turns, or which has no windows."""
    name = _definition(text)
    pattern = text.get("sliding_window_pattern")
    if isinstance(pattern, str):  # exaone4: "LLLG"
        return "sliding_attention" if pattern[number % len(pattern)] == "L" else "full_attention"
    defaults = {"gemma3_text": 6, "cohere2": 4, "olmo3": 4, "gpt_oss": 2, "llama4": 4}
    every = pattern or defaults.get(name)
    if name in ("mamba", "mamba2", "rwkv7"):
        return "mamba"
    if not every:
        return "full_attention"
    return "full_attention" if (number + 1) % every == 0 else "sliding_attention"


def _window(text: Config) -> int | None:
    keys = (
        "sliding_window",
        "sliding_window_size",
        "attention_window_size",
        "window_size",
        "attention_chunk_size",
    )
    defaults = {"gemma3_text": 512, "gpt_oss": 128, "cohere2": 4096}
    return _first(text, *keys) or defaults.get(_definition(text))


def _values(text: Config, name: str, sliding: bool) -> int:
    """Numbers a layer stores for one token: latents, or heads x (key width + value width)."""
    if name in LATENT:
        latents = _count(text, "kv_lora_rank") + _count(text, "qk_rope_head_dim")
        indexer = 2 * (_first(text, "index_head_dim") or 0) if name == "deepseek_v32" else 0
        return (latents + indexer) * (2 if name.startswith("longcat") else 1)  # two attentions a layer
    heads = _first(text, "num_key_value_heads", "num_kv_heads", "n_head_kv")
    if heads is None:
        heads = 1 if text.get("multi_query") else _count(text, *HEADS)
    width = _first(text, "head_dim", "attention_head_dim") or _count(text, *WIDTH) // _count(text, *HEADS)
    if nope := _first(text, "qk_nope_head_dim"):  # expanded latent attention
        key_width = nope + _count(text, "qk_rope_head_dim")
        return _count(text, *HEADS) * (key_width + _count(text, "v_head_dim"))
    if not sliding and (wide := text.get("global_head_dim")):
        width = wide
        heads = (text.get("attention_k_eq_v") and text.get("num_global_key_value_heads")) or heads
    return heads * (width + (_first(text, "v_head_dim") or width))


def _first(text: Config, *keys: str) -> int | None:
    """The first of several names for one number."""
    for key in keys:
        value = text.get(key)
        if isinstance(value, int) and not isinstance(value, bool) and value > 0:
            return value
    return None


def _count(text: Config, *keys: str) -> int:
    value = _first(text, *keys)
    if value is None:
        raise ModelInvalid(f"The configuration has no usable {keys[0]}.", param=keys[0])
    return value
