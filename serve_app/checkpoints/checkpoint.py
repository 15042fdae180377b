"""The facts of a checkpoint directory, read without loading the weights in full."""

import struct
from collections.abc import Iterator
from hashlib import sha256
from itertools import chain
from pathlib import Path
from typing import Any, BinaryIO

import msgspec

from serve_app.engine.protocol import CheckpointInfo as CheckpointInfo
from serve_app.errors import unread

SAMPLE_BYTES = 256
"""The bytes from each tensor's middle for the fingerprint."""

_LENGTH_KEYS = ("max_position_embeddings", "n_positions", "max_seq_len", "seq_length")
_TOKENIZER_FILES = (("tokenizer.json",), ("tokenizer.model",), ("vocab.json", "merges.txt"))


class CheckpointError(ValueError):
    """A checkpoint cannot be served. The message contains the remedy."""


class _AddedToken(msgspec.Struct):
    id: int
    content: str


class _TokenizerFile(msgspec.Struct):
    added_tokens: list[_AddedToken] = []


class _TensorHeader(msgspec.Struct):
    data_offsets: tuple[int, int]
    dtype: str = ""


def load_checkpoint_info(path: Path, *, weights: bool = True) -> CheckpointInfo:
    """Read the facts of the checkpoint in directory ``path``.

    The fingerprint is a SHA-256, truncated to 128 bits, over config.json, the weights' index, and each safetensors
    file's name, size, header and ``SAMPLE_BYTES`` from the middle of each tensor. Changes outside the samples are not
    detected. ``weights`` False: they are elsewhere, and the fingerprint is over config.json alone. Raises
    CheckpointError with a remedy when a file is missing or broken.
    """
    if not path.is_dir():
        raise CheckpointError(f"no directory {path}; give the path of a checkpoint directory that exists")
    config = read_json(path / "config.json", "the directory must hold a Hugging Face checkpoint")
    if not any(all((path / name).is_file() for name in names) for names in _TOKENIZER_FILES):
        raise CheckpointError(f"{path} holds no tokenizer.json; save the model's tokenizer into the same directory")
    nested = config.get("text_config")
    text_config: dict[str, Any] = nested if isinstance(nested, dict) else config
    vocab_size = _first_size(text_config, ("vocab_size",))
    max_model_len = _first_size(text_config, _LENGTH_KEYS)
    architectures = config.get("architectures")
    if vocab_size is None or max_model_len is None or not (isinstance(architectures, list) and architectures):
        raise CheckpointError(
            f"{path / 'config.json'} must name architectures, vocab_size and max_position_embeddings; "
            "is it the config of a language model?"
        )
    eos_token_ids = _eos_token_ids(path, config, text_config)
    return CheckpointInfo(
        path=path,
        fingerprint=weights_fingerprint(path)
        if weights
        else sha256((path / "config.json").read_bytes()).hexdigest()[:32],
        vocab_size=vocab_size,
        max_model_len=max_model_len,
        eos_token_ids=eos_token_ids,
        tokenizer=_tokenizer_fingerprint(path, vocab_size, eos_token_ids),
    )


def _tokenizer_fingerprint(path: Path, *facts: object) -> str:
    """Return what tells tokenizers apart: a digest of the files, and of other facts."""
    digest = sha256(repr(facts).encode())
    for name in chain.from_iterable(_TOKENIZER_FILES):
        if (path / name).is_file():
            digest.update(name.encode() + sha256((path / name).read_bytes()).digest())
    return digest.hexdigest()[:16]


def _first_size(config: dict[str, Any], keys: tuple[str, ...]) -> int | None:
    """Return the first positive integer under one of ``keys``."""
    values = (config.get(key) for key in keys)
    return next((value for value in values if type(value) is int and value > 0), None)


def read_json(path: Path, remedy: str) -> dict[str, Any]:
    """Return a file's object. Raises CheckpointError, with the ``remedy`` if there is no such file."""
    if not path.is_file():
        raise CheckpointError(f"{path} does not exist; {remedy}")
    try:
        return msgspec.json.decode(path.read_bytes(), type=dict[str, Any])
    except (OSError, ValueError, RecursionError) as error:
        raise CheckpointError(f"{path} is not valid JSON ({unread(error)}); copy the checkpoint again") from error


def _eos_token_ids(path: Path, *configs: dict[str, Any]) -> tuple[int, ...]:
    """Return every id that ends a generation: from generation_config, then the tokenizer, then the config."""
    named: list[Any] = []
    generation = path / "generation_config.json"
    if generation.is_file():
        named.append(read_json(generation, "").get("eos_token_id"))
    tokenizer_config = path / "tokenizer_config.json"
    if tokenizer_config.is_file():
        token = read_json(tokenizer_config, "").get("eos_token")
        content = token.get("content") if isinstance(token, dict) else token
        if isinstance(content, str):
            named.append(_added_token_id(path / "tokenizer.json", content))
    named.extend(config.get("eos_token_id") for config in configs)
    flat = (item for value in named for item in (value if isinstance(value, list) else [value]))
    return tuple(dict.fromkeys(item for item in flat if type(item) is int))


def _added_token_id(tokenizer_file: Path, content: str) -> int | None:
    if not tokenizer_file.is_file():
        return None
    try:
        tokenizer = msgspec.json.decode(tokenizer_file.read_bytes(), type=_TokenizerFile)
    except msgspec.DecodeError as error:
        raise CheckpointError(f"{tokenizer_file} is not a tokenizer ({error}); copy the checkpoint again") from error
    return next((token.id for token in tokenizer.added_tokens if token.content == content), None)


def weights_fingerprint(path: Path) -> str:
    """Return the fingerprint of ``load_checkpoint_info``. Raises CheckpointError without whole safetensors files."""
    weights = sorted(path.glob("*.safetensors"))
    if not weights:
        raise CheckpointError(f"{path} holds no *.safetensors weights; convert the checkpoint to safetensors")
    digest = sha256()
    for part in ((path / "config.json").read_bytes(), *_index_bytes(path)):
        digest.update(len(part).to_bytes(8, "little") + part)
    for file in weights:
        for part in _weights_sample(file):
            digest.update(len(part).to_bytes(8, "little") + part)
    return digest.hexdigest()[:32]


def stored_bytes(path: Path, number_bytes: int = 4) -> int:
    """Return the bytes of a checkpoint's weights; numbers of four bytes become ``number_bytes`` when they are loaded.

    Raises CheckpointError for a broken file.
    """
    index = path / "model.safetensors.index.json"
    named = set((read_json(index, "").get("weight_map") or {}).values()) if index.is_file() else set()
    files = [path / str(name) for name in named]  # beside them may be the same weights in another form
    total = 0
    for file in files or [file for file in path.glob("*.safetensors") if not file.name.startswith("consolidated")]:
        with file.open("rb") as weights:
            _, tensors = _header(file, weights)
        for tensor in tensors.values():
            size = tensor.data_offsets[1] - tensor.data_offsets[0]
            total += size * number_bytes // 4 if tensor.dtype == "F32" else size
    return total


def _index_bytes(path: Path) -> Iterator[bytes]:
    index = path / "model.safetensors.index.json"
    if not index.is_file():
        return
    names = read_json(index, "").get("weight_map")
    missing = sorted({str(name) for name in names.values() if not (path / str(name)).is_file()}) if names else []
    if missing:
        raise CheckpointError(f"{path} lacks weights listed in its index: {', '.join(missing)}; copy them too")
    yield index.read_bytes()


def _weights_sample(file: Path) -> Iterator[bytes]:
    """Yield a safetensors file's name, size, header and one slice of each tensor.

    Source: the format's layout, 8 bytes of little-endian header length, a JSON header, then the tensors' data.
    """
    yield file.name.encode()
    yield file.stat().st_size.to_bytes(8, "little")
    with file.open("rb") as weights:
        header, tensors = _header(file, weights)
        yield header
        for _, tensor in sorted(tensors.items()):
            start, end = tensor.data_offsets
            middle = start + max(0, (end - start - SAMPLE_BYTES) // 2)
            weights.seek(8 + len(header) + middle)
            yield weights.read(min(SAMPLE_BYTES, end - middle))


def _header(file: Path, weights: BinaryIO) -> tuple[bytes, dict[str, _TensorHeader]]:
    """Return an open safetensors file's header, raw and by tensor."""
    size = file.stat().st_size
    try:
        (header_bytes,) = struct.unpack("<Q", weights.read(8))
        if header_bytes > size - 8:
            raise ValueError("the header is longer than the file")
        header = weights.read(header_bytes)
        entries = msgspec.json.decode(header, type=dict[str, msgspec.Raw])
        entries.pop("__metadata__", None)
        tensors = {name: msgspec.json.decode(raw, type=_TensorHeader) for name, raw in entries.items()}
        if any(tensor.data_offsets[1] > size - 8 - header_bytes for tensor in tensors.values()):
            raise ValueError("the file is cut short")
    except (struct.error, ValueError) as error:
        raise CheckpointError(f"{file} is not a whole safetensors file ({error}); copy it again") from error
    return header, tensors
