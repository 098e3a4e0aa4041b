"""Tokenizers for these tests: SmolLM2's from its GGUF metadata, the byte tokenizer with any template."""

from __future__ import annotations

import json
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from mlxserve.text.tokenizer import Tokenizer, load_tokenizer
from tests import tiny

_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}


def _gguf_metadata(path: Path) -> dict[str, Any]:
    """The key-value part of a GGUF file; the gguf package's reader takes seconds for it."""
    with path.open("rb") as file:

        def scalar(code: str) -> Any:
            return struct.unpack("<" + code, file.read(struct.calcsize("<" + code)))[0]

        def text() -> str:
            return file.read(scalar("Q")).decode()

        def value(kind: int) -> Any:
            if kind == 9:
                inner = scalar("I")
                return [value(inner) for _ in range(scalar("Q"))]
            return text() if kind == 8 else scalar(_SCALARS[kind])

        assert file.read(4) == b"GGUF" and scalar("I") == 3
        _, count = scalar("Q"), scalar("Q")
        return {text(): value(scalar("I")) for _ in range(count)}


@pytest.fixture(scope="session")
def smollm2_folder(smollm2: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """SmolLM2's tokenizer as Hugging Face files, made of the metadata of its GGUF file."""
    from tokenizers import AddedToken, decoders, models, pre_tokenizers
    from tokenizers import Tokenizer as Backend

    metadata = _gguf_metadata(smollm2)
    tokens: list[str] = metadata["tokenizer.ggml.tokens"]
    merges = [tuple(merge.split(" ", 1)) for merge in metadata["tokenizer.ggml.merges"]]
    types = metadata["tokenizer.ggml.token_type"]
    backend = Backend(models.BPE(vocab={token: i for i, token in enumerate(tokens)}, merges=merges))
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    backend.decoder = decoders.ByteLevel()
    control = [token for token, kind in zip(tokens, types) if kind == 3]
    backend.add_special_tokens([AddedToken(token, normalized=False) for token in control])
    folder = tmp_path_factory.mktemp("smollm2")
    backend.save(str(folder / "tokenizer.json"))
    config = {
        "bos_token": "<|im_start|>",
        "eos_token": "<|im_end|>",
        "chat_template": metadata["tokenizer.chat_template"],
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return folder


@pytest.fixture(scope="session")
def smol(smollm2_folder: Path) -> Tokenizer:
    return load_tokenizer(smollm2_folder)


MakeTokenizer = Callable[..., Tokenizer]


@pytest.fixture
def make(tmp_path: Path) -> MakeTokenizer:
    """A byte tokenizer (token i is byte i) with a template, further added tokens and configuration."""
    made = 0

    def build(template: Any = tiny.CHATML, added: tuple[str, ...] = (), **settings: Any) -> Tokenizer:
        nonlocal made
        made += 1
        folder = tiny.write_tokenizer(tmp_path / str(made), template, **settings)
        content = json.loads((folder / "tokenizer.json").read_text())
        for text in added:
            entry = {**content["added_tokens"][0], "id": 256 + len(content["added_tokens"]), "content": text}
            content["added_tokens"].append(entry)
        (folder / "tokenizer.json").write_text(json.dumps(content))
        return load_tokenizer(folder)

    return build
