"""The table of architectures: one row for each kind of GGUF file that can be run.

A row says which mlx-lm definition runs it, what its tensors are called there, how they were rearranged for
the file, and which configuration fields its metadata becomes. Adding an architecture is adding a row.

Knows: names and conventions of the files that llama.cpp's converters write. Knows nothing of bytes or MLX.
Sources: the `gguf` package's MODEL_TENSORS and Keys; https://github.com/ggml-org/llama.cpp (conversion/).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from mlxserve.errors import ModelInvalid, ModelUnsupported
from mlxserve.models.gguf import settings
from mlxserve.models.gguf.settings import Settings


@dataclass(frozen=True, slots=True)
class Architecture:
    """One row. Tensor names are the file's without `.weight` or `.bias`, and within a block without `blk.N.`.

    name, when: `general.architecture`, and a key that must be set (not zero) for the row to apply.
    ends, block: tensor name -> the definition's module path, outside and inside a block ("{i}": its number).
    biases: tensors that may carry a bias -> the configuration flag that says so, "" where the definition
    always has one. optional: tensors that may be absent. bare: tensors that are a parameter, not a module.
    own_fields: configuration fields beyond the common ones, from (keys, common fields, tensor names).
    eps: metadata key and configuration field of the norm's epsilon.
    interleaved: rows of Q and K are interleaved in each head, as the files of a few families have them.
    norm_offset: added to norm weights in the file. head: whether `output.weight` may be absent or present.
    scalings: kinds of RoPE scaling that the definition carries out. own_head_dim: it takes `head_dim`, else
    heads are hidden_size / heads wide. partial_rotary: it takes `partial_rotary_factor`.
    """

    name: str
    model_type: str
    ends: Mapping[str, str]
    block: Mapping[str, str]
    when: str | None = None
    own_fields: Settings = settings.nothing
    biases: Mapping[str, str] = field(default_factory=dict)
    optional: frozenset[str] = frozenset()
    bare: frozenset[str] = frozenset()
    eps: tuple[str, str] = ("attention.layer_norm_rms_epsilon", "rms_norm_eps")
    interleaved: bool = False
    norm_offset: float = 0.0
    head: Literal["free", "tied", "own"] = "free"
    scalings: frozenset[str] = frozenset({"linear", "yarn", "llama3", "longrope"})
    own_head_dim: bool = True
    partial_rotary: bool = False

    def path(self, base: str) -> str:
        """Module path of a tensor such as `token_embd` or `blk.3.attn_q`; KeyError if the row has none."""
        if not base.startswith("blk."):
            return self.ends[base]
        _, number, inner = base.split(".", 2)
        return self.block[inner].format(i=int(number))


# --- names ---------------------------------------------------------------------------------------------

_LAYER = "model.layers.{i}."


def _in_layer(names: Mapping[str, str], layer: str = _LAYER) -> dict[str, str]:
    return {tensor: layer + path for tensor, path in names.items()}


_ENDS = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
_ATTENTION = {
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
}
_QK_NORMS = {"attn_q_norm": "self_attn.q_norm", "attn_k_norm": "self_attn.k_norm"}
_GATED_MLP = {"ffn_gate": "mlp.gate_proj", "ffn_up": "mlp.up_proj", "ffn_down": "mlp.down_proj"}
_PRE_NORMS = {"attn_norm": "input_layernorm", "ffn_norm": "post_attention_layernorm"}
_POST_NORMS = {
    "post_attention_norm": "post_attention_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}
_FOUR_NORMS = {"attn_norm": "input_layernorm", "ffn_norm": "pre_feedforward_layernorm", **_POST_NORMS}
_LLAMA = _in_layer({**_ATTENTION, **_GATED_MLP, **_PRE_NORMS})
_LLAMA_BIASES = {**dict.fromkeys(_ATTENTION, "attention_bias"), **dict.fromkeys(_GATED_MLP, "mlp_bias")}
_ATTENTION_BIASES = dict.fromkeys(_ATTENTION, "attention_bias")


def _experts(router: str, stack: str) -> dict[str, str]:
    """A router and the three stacks (experts, out, in), which mlx-lm's switch layers hold the same way."""
    return {
        "ffn_gate_inp": router,
        "ffn_gate_exps": f"{stack}.gate_proj",
        "ffn_up_exps": f"{stack}.up_proj",
        "ffn_down_exps": f"{stack}.down_proj",
    }


# --- the table -----------------------------------------------------------------------------------------
# Rows of one name are tried in order.

TABLE: tuple[Architecture, ...] = (
    Architecture(
        "llama",
        "mixtral",
        _ENDS,
        _in_layer(
            {
                **_ATTENTION,
                **_PRE_NORMS,
                **_experts("block_sparse_moe.gate", "block_sparse_moe.switch_mlp"),
            }
        ),
        when="expert_count",
        own_fields=settings.mixtral,
        interleaved=True,
        scalings=frozenset(),
        own_head_dim=False,
    ),
    # Also Mistral, Mistral Nemo, Mistral Small, SmolLM2, TinyLlama, Yi and others of the same shape.
    Architecture("llama", "llama", _ENDS, _LLAMA, biases=_LLAMA_BIASES, interleaved=True),
    Architecture("mistral", "mistral", _ENDS, _LLAMA, biases=_LLAMA_BIASES, interleaved=True),
    Architecture(
        "mistral3",
        "ministral3",
        _ENDS,
        _LLAMA,
        when="attention.temperature_scale",
        own_fields=settings.ministral3,
        interleaved=True,
    ),
    Architecture("mistral3", "mistral", _ENDS, _LLAMA, biases=_LLAMA_BIASES, interleaved=True),
    Architecture(
        "qwen2",
        "qwen2",
        _ENDS,
        _LLAMA,
        biases={"attn_q": "", "attn_k": "", "attn_v": ""},
        own_head_dim=False,
    ),
    Architecture("qwen3", "qwen3", _ENDS, {**_LLAMA, **_in_layer(_QK_NORMS)}),
    Architecture(
        "qwen3moe",
        "qwen3_moe",
        _ENDS,
        _in_layer({**_ATTENTION, **_QK_NORMS, **_PRE_NORMS, **_experts("mlp.gate", "mlp.switch_mlp")}),
        own_fields=settings.qwen3_moe,
        scalings=frozenset(),
    ),
    Architecture(
        "gpt-oss",
        "gpt_oss",
        _ENDS,
        _in_layer(
            {
                **_ATTENTION,
                **_experts("mlp.router", "mlp.experts"),
                "attn_norm": "input_layernorm",
                "post_attention_norm": "post_attention_layernorm",
                "attn_sinks": "self_attn.sinks",
            }
        ),
        biases=dict.fromkeys((*_ATTENTION, *_experts("", "")), ""),
        bare=frozenset({"attn_sinks"}),
        own_fields=settings.gpt_oss,
        head="own",
    ),
    Architecture(
        "gemma",
        "gemma",
        _ENDS,
        _LLAMA,
        norm_offset=1.0,
        head="tied",
        scalings=frozenset(),
    ),
    Architecture(
        "gemma2",
        "gemma2",
        _ENDS,
        _in_layer({**_ATTENTION, **_GATED_MLP, **_FOUR_NORMS}),
        own_fields=settings.gemma2,
        norm_offset=1.0,
        head="tied",
        scalings=frozenset(),
    ),
    Architecture(
        "gemma3",
        "gemma3_text",
        _ENDS,
        _in_layer({**_ATTENTION, **_QK_NORMS, **_GATED_MLP, **_FOUR_NORMS}),
        own_fields=settings.gemma3,
        norm_offset=1.0,
    ),
    Architecture(
        "phi3",
        "phi3",
        _ENDS,
        # Q, K and V are one tensor in the file and in the definition, gate and up likewise.
        _in_layer(
            {
                "attn_qkv": "self_attn.qkv_proj",
                "attn_output": "self_attn.o_proj",
                "ffn_up": "mlp.gate_up_proj",
                "ffn_down": "mlp.down_proj",
                **_PRE_NORMS,
            }
        ),
        own_fields=settings.phi3,
        scalings=frozenset({"longrope"}),
        own_head_dim=False,
        partial_rotary=True,
    ),
    Architecture(
        "granite",
        "granite",
        _ENDS,
        _LLAMA,
        biases=_LLAMA_BIASES,
        own_fields=settings.granite,
        interleaved=True,
        own_head_dim=False,
    ),
    Architecture(
        "olmo2",
        "olmo3",
        _ENDS,
        _in_layer({**_ATTENTION, **_QK_NORMS, **_GATED_MLP, **_POST_NORMS}),
        when="attention.sliding_window",
        own_fields=settings.olmo3,
        biases=_ATTENTION_BIASES,
    ),
    Architecture(
        "olmo2",
        "olmo2",
        _ENDS,
        _in_layer({**_ATTENTION, **_QK_NORMS, **_GATED_MLP, **_POST_NORMS}),
        biases=_LLAMA_BIASES,
    ),
    Architecture(
        "seed_oss",
        "seed_oss",
        _ENDS,
        _in_layer(
            {
                **_ATTENTION,
                **_GATED_MLP,
                "attn_norm": "input_layernorm",
                "post_attention_norm": "post_attention_layernorm",
            }
        ),
        biases={**_ATTENTION_BIASES, "attn_output": "attention_out_bias"},
    ),
    Architecture(
        "smollm3",
        "smollm3",
        _ENDS,
        _LLAMA,
        biases=_LLAMA_BIASES,
        own_fields=settings.smollm3,
        interleaved=True,
    ),
    Architecture(
        "starcoder2",
        "starcoder2",
        _ENDS,
        _in_layer({**_ATTENTION, **_PRE_NORMS, "ffn_up": "mlp.c_fc", "ffn_down": "mlp.c_proj"}),
        biases=dict.fromkeys((*_ATTENTION, *_PRE_NORMS, "ffn_up", "ffn_down", "output_norm"), ""),
        eps=("attention.layer_norm_epsilon", "norm_epsilon"),
        scalings=frozenset(),
        own_head_dim=False,
    ),
    Architecture(
        "exaone",
        "exaone",
        {"token_embd": "transformer.wte", "output_norm": "transformer.ln_f", "output": "lm_head"},
        _in_layer(
            {
                "attn_q": "attn.attention.q_proj",
                "attn_k": "attn.attention.k_proj",
                "attn_v": "attn.attention.v_proj",
                "attn_output": "attn.attention.out_proj",
                "ffn_gate": "mlp.c_fc_0",
                "ffn_up": "mlp.c_fc_1",
                "ffn_down": "mlp.c_proj",
                "attn_norm": "ln_1",
                "ffn_norm": "ln_2",
            },
            "transformer.h.{i}.",
        ),
        biases=_LLAMA_BIASES,
        own_fields=settings.exaone,
        eps=("attention.layer_norm_rms_epsilon", "layer_norm_epsilon"),
    ),
    Architecture(
        "command-r",
        "cohere",
        _ENDS,
        _in_layer({**_ATTENTION, **_QK_NORMS, **_GATED_MLP, "attn_norm": "input_layernorm"}),
        biases=_ATTENTION_BIASES,
        optional=frozenset(_QK_NORMS),
        own_fields=settings.cohere,
        eps=("attention.layer_norm_epsilon", "layer_norm_eps"),
        head="tied",
        scalings=frozenset(),
        own_head_dim=False,
    ),
    Architecture(
        "cohere2",
        "cohere2",
        _ENDS,
        _in_layer({**_ATTENTION, **_GATED_MLP, "attn_norm": "input_layernorm"}),
        biases=_ATTENTION_BIASES,
        own_fields=settings.cohere2,
        eps=("attention.layer_norm_epsilon", "layer_norm_eps"),
        head="tied",
        scalings=frozenset(),
    ),
)


def supported() -> list[str]:
    """Every `general.architecture` that has a row."""
    return sorted({row.name for row in TABLE})


def find_architecture(metadata: Mapping[str, Any]) -> Architecture:
    """The row for a file. Raises ModelUnsupported, naming what there is, for a file without one."""
    name = metadata.get("general.architecture")
    if not isinstance(name, str):
        raise ModelInvalid("The file's metadata has no general.architecture.")
    kind = metadata.get("general.type", "model")
    if kind != "model" or name == "clip":
        what = "an image projector" if name == "clip" else f"of type {kind!r}"
        raise ModelUnsupported(f"The GGUF file is {what}, not a language model.")
    for row in TABLE:
        if row.name == name and (row.when is None or metadata.get(f"{name}.{row.when}")):
            return row
    raise ModelUnsupported(
        f"The architecture {name!r} of this GGUF file is not supported; supported are "
        f"{', '.join(supported())}. The same model as safetensors may run: give its Hub name or folder."
    )
