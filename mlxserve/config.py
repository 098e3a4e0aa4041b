"""Every default, written once. The command line, the server and Python all read them here.

Knows: names, units and limits of settings. Knows nothing of MLX or of how a setting is used.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

DEFAULT_MODEL = "smollm2"
MIB = 1024 * 1024
GIB = 1024 * MIB
# Share of the memory that is free beside the weights (or recommended, on a Mac) which caches may take.
CACHE_SHARE = 0.8
# Between JSON's tokens a model may put white space, but not for ever: models that are lost pad.
WHITE_SPACE = r"[\x20\x0A\x09]{0,32}"


@dataclass(frozen=True, slots=True)
class LoadConfig:
    """How a model's files become weights.

    dtype: "auto" (as stored on an accelerator, float32 on a CPU), "float32", "float16" or "bfloat16".
    quantize_bits: quantise linear layers and embeddings while loading (2, 3, 4, 5, 6 or 8).
    context: tokens a sequence may hold; None takes the model's own.
    rope: overrides of the configuration's RoPE fields (rope_theta, rope_scaling, …).
    """

    dtype: str = "auto"
    quantize_bits: int | None = None
    quantize_group_size: int = 64
    context: int | None = None
    rope: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class EngineConfig:
    """Limits of one engine, which serves one model.

    page_size: tokens a page. max_sequences: rows decoded together. step_tokens: tokens computed in one
    step at most. gap_target_s: how long a running stream may wait for its next token while a prompt is
    read. max_queue: waiting requests before Busy. kv_bits: 16 (as the model computes), 8 or 4.
    cache_bytes: limit of the K/V pool; None asks the machine. cache_dir, cache_dir_bytes: disk tier.
    """

    page_size: int = 16
    max_sequences: int = 256
    step_tokens: int = 512
    min_chunk: int = 16
    gap_target_s: float = 0.25
    max_queue: int = 1024
    kv_bits: int = 16
    kv_group_size: int = 32
    cache_bytes: int | None = None
    cache_dir: Path | None = None
    cache_dir_bytes: int = 8 * GIB
    prefix_cache: bool = True
    overlap: bool = True
    check: bool = False


@dataclass(frozen=True, slots=True)
class SamplingDefaults:
    """What holds where neither the request nor the model's generation_config.json says anything."""

    max_tokens: int = 512
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0  # 0 keeps all
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0


SAMPLING_DEFAULTS = SamplingDefaults()


@dataclass(frozen=True, slots=True)
class ServerConfig:
    """Limits and conduct of the HTTP server.

    allowed_hosts: further Host names accepted while bound to loopback. cors_origins: web pages of other
    origins that may call; none by default. body_timeout_s: a request's body must have arrived by then.
    heartbeat_s: silence on a stream after which a heartbeat is sent. write_timeout_s: a reader that takes
    nothing for so long is given up. drain_s: time running answers get after a stop signal.
    keep_alive_s: idle time after which a model that was loaded on demand is unloaded; None for never.
    load_wait_s: how long a request waits for running models to make room. memory_bytes: budget of all
    loaded models together; None asks the machine. adapter_dirs: where callers may load adapters from; empty
    means anywhere, as long as the server is bound to loopback. data_dir: uploaded files, fine-tuning jobs and
    what they trained; None keeps none of them. max_file_bytes, stored_file_bytes: of one upload, and of all.
    log_prompts: texts in the log, never by default.
    """

    host: str = "127.0.0.1"
    port: int = 8080
    api_keys: tuple[str, ...] = ()
    allowed_hosts: tuple[str, ...] = ()
    cors_origins: tuple[str, ...] = ()
    tls_certificate: Path | None = None
    tls_key: Path | None = None
    max_body_bytes: int = 32 * MIB
    body_timeout_s: float = 30.0
    heartbeat_s: float = 10.0
    write_timeout_s: float = 60.0
    drain_s: float = 15.0
    keep_alive_s: float | None = 300.0
    load_wait_s: float = 60.0
    memory_bytes: int | None = None
    stored_responses: int = 512
    stored_response_bytes: int = 64 * MIB
    adapter_dirs: tuple[Path, ...] = ()
    data_dir: Path | None = None
    max_file_bytes: int = 512 * MIB
    stored_file_bytes: int = 4 * GIB
    upload_timeout_s: float = 600.0
    log_format: str = "text"
    log_prompts: bool = False
