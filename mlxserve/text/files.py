"""Tokenizers from Hugging Face files: what each file says, and which one wins.

Knows: tokenizer.json, tokenizer.model, tokenizer_config.json, special_tokens_map.json, added_tokens.json,
chat_template.jinja and .json, generation_config.json, config.json. Runs no code from a repository.

Source: huggingface.co/docs/transformers, "Tokenizer" and "Chat templates".
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Tokenizer

from mlxserve.errors import ModelInvalid, ModelUnsupported
from mlxserve.text.spm import read_spm_file

# Classes for which add_bos_token in tokenizer_config.json holds, whatever tokenizer.json says.
_BOS_BY_CONFIG = ("Llama", "CodeLlama", "Gemma", "Cohere")


def read_tokenizer_files(folder: Path) -> dict[str, Any]:
    """The keyword arguments of `Tokenizer` for the model in `folder`.

    Raises ModelInvalid for a damaged file, ModelUnsupported where there is no tokenizer that can be read.
    """
    config = _read_json(folder / "tokenizer_config.json")
    special = _special_tokens(folder, config)
    backend = _backend(folder, config)
    _add_missing_tokens(backend, folder, config, special)
    names = {name: text for name, text in special.items() if isinstance(text, str)}
    bos = backend.token_to_id(names["bos_token"]) if "bos_token" in names else None
    return {
        "backend": backend,
        "bos_token_id": bos,
        "eos_token_ids": _eos_ids(folder, backend, names),
        "add_bos": _adds_bos(backend, config, bos),
        "chat_template": _chat_template(folder, config),
        "special_tokens": names,
    }


def _read_json(path: Path) -> dict[str, Any]:
    """A JSON object from a file; empty where there is no such file."""
    if not path.is_file():
        return {}
    try:
        value = json.loads(path.read_bytes())
    except ValueError as error:
        raise ModelInvalid(f"{path.name} is not JSON: {error}") from error
    if not isinstance(value, dict):
        raise ModelInvalid(f"{path.name} must hold a JSON object.")
    return value


def _backend(folder: Path, config: Mapping[str, Any]) -> Tokenizer:
    if (folder / "tokenizer.json").is_file():
        try:
            return Tokenizer.from_buffer((folder / "tokenizer.json").read_bytes())
        except Exception as error:  # the library raises plain Exception
            raise ModelInvalid(f"tokenizer.json cannot be read: {error}") from error
    if (folder / "tokenizer.model").is_file():
        content = (folder / "tokenizer.model").read_bytes()
        if not _looks_like_tiktoken(content):
            return read_spm_file(content)
    return _converted(folder)


def _looks_like_tiktoken(content: bytes) -> bool:
    """tiktoken files are lines of base64, a space and a number."""
    head = content[:200].split(b"\n")[0].split(b" ")
    return len(head) == 2 and head[1].strip().isdigit()


def _converted(folder: Path) -> Tokenizer:
    """A backend through transformers' converters, where that package is there and needs no remote code."""
    known = [path.name for path in folder.glob("*") if "token" in path.name or path.name.startswith("vocab")]
    complaint = f"No tokenizer in {folder} can be read: tokenizer.json or tokenizer.model is needed" + (
        f", there is only {', '.join(sorted(known))}." if known else "."
    )
    if not known:
        raise ModelUnsupported(complaint)
    try:
        from transformers import AutoTokenizer

        made = AutoTokenizer.from_pretrained(folder, trust_remote_code=False, local_files_only=True)
        return made.backend_tokenizer
    except ImportError as error:
        raise ModelUnsupported(f"{complaint} The package transformers may convert it.") from error
    except Exception as error:  # whatever a converter stumbles over
        raise ModelUnsupported(f"{complaint} It could not be converted: {error}") from error


def _special_tokens(folder: Path, config: Mapping[str, Any]) -> dict[str, Any]:
    """`bos_token` and the like as text: tokenizer_config.json over special_tokens_map.json."""
    merged = {**_read_json(folder / "special_tokens_map.json"), **config}
    found: dict[str, Any] = {}
    for name, value in merged.items():
        if name.endswith("_token") and _content(value):
            found[name] = _content(value)
        elif name in ("additional_special_tokens", "extra_special_tokens") and value:
            items = value.values() if isinstance(value, Mapping) else value
            found.setdefault("additional", []).extend(filter(None, map(_content, items)))
    return found


def _content(value: Any) -> str | None:
    """A token given as text or as an object with `content`."""
    text = value.get("content") if isinstance(value, Mapping) else value
    return text if isinstance(text, str) and text else None


def _add_missing_tokens(
    backend: Tokenizer, folder: Path, config: Mapping[str, Any], special: Mapping[str, Any]
) -> None:
    """Tokens that only the other files name, where the library would give them the ids that these say."""
    wanted: dict[int, AddedToken] = {}
    for text, token_id in _read_json(folder / "added_tokens.json").items():
        wanted[int(token_id)] = AddedToken(text, normalized=False)
    for token_id, fields in (config.get("added_tokens_decoder") or {}).items():
        wanted[int(token_id)] = AddedToken(**{k: v for k, v in fields.items() if k in _ADDED_FIELDS})
    present = backend.get_added_tokens_decoder()
    for token_id, token in sorted(wanted.items()):
        coming = backend.token_to_id(token.content)
        if token_id not in present and token_id == (backend.get_vocab_size() if coming is None else coming):
            _add(backend, token)
    have = {token.content for token in backend.get_added_tokens_decoder().values()}
    for text in _texts(special):
        if text not in have and backend.token_to_id(text) is not None:
            backend.add_special_tokens([AddedToken(text, normalized=False)])


_ADDED_FIELDS = ("content", "single_word", "lstrip", "rstrip", "normalized", "special")


def _add(backend: Tokenizer, token: AddedToken) -> None:
    if token.special:
        backend.add_special_tokens([token])
    else:
        backend.add_tokens([token])


def _texts(special: Mapping[str, Any]) -> Iterator[str]:
    for value in special.values():
        yield from [value] if isinstance(value, str) else value


def _eos_ids(folder: Path, backend: Tokenizer, names: Mapping[str, str]) -> set[int]:
    """The union of what the tokenizer, generation_config.json and config.json (also its text part) say."""
    config = _read_json(folder / "config.json")
    places = [_read_json(folder / "generation_config.json"), config, config.get("text_config") or {}]
    found: set[int] = set()
    for place in places:
        value = place.get("eos_token_id")
        found |= {i for i in (value if isinstance(value, list) else [value]) if isinstance(i, int)}
    own = backend.token_to_id(names["eos_token"]) if "eos_token" in names else None
    return found if own is None else found | {own}


def _adds_bos(backend: Tokenizer, config: Mapping[str, Any], bos: int | None) -> bool:
    """Whether raw text gets a BOS.

    tokenizer_config.json's word for the classes that obey it, else what the post-processor does. A
    SentencePiece file alone has none; Llama's classes add a BOS by default.
    """
    if bos is None:
        return False
    by_config = str(config.get("tokenizer_class", "")).startswith(_BOS_BY_CONFIG)
    said = config.get("add_bos_token")
    if isinstance(said, bool) and (by_config or backend.post_processor is None):
        return said
    if backend.post_processor is None:
        return by_config
    return backend.encode("a", add_special_tokens=True).ids[:1] == [bos]


def _chat_template(folder: Path, config: Mapping[str, Any]) -> str | dict[str, str] | None:
    """The template: a file of its own first, then tokenizer_config.json's, one or several under names."""
    named = {
        path.stem: path.read_text(encoding="utf-8")
        for path in sorted((folder / "additional_chat_templates").glob("*.jinja"))
    }
    if (folder / "chat_template.jinja").is_file():
        default = (folder / "chat_template.jinja").read_text(encoding="utf-8")
        return {"default": default, **named} if named else default
    value = _read_json(folder / "chat_template.json").get("chat_template") or config.get("chat_template")
    if isinstance(value, list):
        return {str(item["name"]): str(item["template"]) for item in value if isinstance(item, Mapping)}
    if isinstance(value, Mapping):
        return {str(name): str(source) for name, source in value.items()}
    return value if isinstance(value, str) else None
