"""vLLM's part of pulls: what leaves is described, and what comes is verified before vLLM sees it.

Each copy is a request of one token, which vLLM places as any other; its connector moves the blocks. Called from any
thread but the engine's loop. Imports no vllm.
"""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Protocol

import msgspec
import numpy as np

from router.protocol.block_hash import HASH_BYTES, TokenArray, hash_at, hash_blocks
from serve_app.cache.kv_chain import KvChain, KvFormat, KvPart, TransferError, WrongChain, make_header, verify_part
from serve_app.cache.prefix.hot_prefixes import HashedTokens
from serve_app.engine.vllm.transfer.job import LAYOUT_FILE, Job, Layout


class RunJob(Protocol):
    """Has vLLM run a job as a request of one token; returns how many of the prompt's tokens were not computed."""

    def __call__(self, job: Job, token_ids: Sequence[int], root: bytes, lora: str) -> int:
        """Wait for its end. Raises EngineError, or LookupError for an adapter that is not loaded."""


def format_of(directory: Path, model: str, block_size: int) -> KvFormat:
    """Return what KV has to be like to be loaded, from what the worker wrote of its layers."""
    layout = msgspec.json.decode((directory / LAYOUT_FILE).read_bytes(), type=Layout)
    made = hashlib.blake2b(msgspec.json.encode((layout.vllm, layout.cpu, layout.layers)), digest_size=8).hexdigest()
    part = KvPart(layout.dtype, (len(layout.layers), *layout.shape), axes=f"vllm {layout.vllm}: layers, block")
    return KvFormat(f"{model}/vllm-{made}", block_size, (part,))


class VllmTransfer:
    """One engine's way in and out for KV. ``root_of``: the root of a chain that is held by its first hash, else b""."""

    def __init__(
        self,
        kv_format: KvFormat,
        directory: Path,
        max_model_len: int,
        run_job: RunJob,
        known_blocks: Callable[[bytes, int], int],
        root_of: Callable[[bytes], bytes],
    ) -> None:
        self._format = kv_format
        self._directory = directory
        self._most_blocks = (max_model_len - 2) // kv_format.block_size  # a job has a token more, and answers with one
        self._run_job = run_job
        self._known_blocks = known_blocks
        self._root_of = root_of
        self._numbers = itertools.count()

    def export_prefix(self, prefix: HashedTokens, first: int, most_blocks: int | None) -> KvChain | None:
        """Return the blocks from ``first`` on that vLLM holds of a prefix, ``most_blocks`` at most; None for none."""
        size = self._format.block_size
        most = self._most_blocks if most_blocks is None else min(first + most_blocks, self._most_blocks)
        scope, ids = prefix.scope, np.ascontiguousarray(prefix.token_ids, dtype=np.int32)
        end = self._known_blocks(prefix.chain, min(most, len(ids) // size))
        chain = prefix.chain[: end * HASH_BYTES]
        root = self._root(chain, ids) if end > first and not scope.public_blocks else b""
        if not root:
            return None
        file = self._file()
        try:
            self._run_job(Job("export", str(file), first, end), [*ids[: end * size].tolist(), 0], root, scope.lora)
            payload = np.fromfile(file, np.uint8).reshape(-1, self._format.block_bytes)
        except (FileNotFoundError, LookupError):
            return None
        finally:
            file.unlink(missing_ok=True)
        end = first + len(payload)
        held_ids, hashes = ids[: end * size], prefix.chain[: end * HASH_BYTES]
        header = make_header(self._format, scope, held_ids, hashes, payload, first)
        return KvChain(msgspec.structs.replace(header, root=root), payload)

    def import_part(self, part: KvChain, prefix: HashedTokens, first: int) -> int:
        """Load the blocks from ``first`` on of the chain that is wanted; return how many leading ones are held then.

        Where blocks before ``first`` were evicted meanwhile vLLM computes the prefix, and fewer than ``first`` is said.
        Raises a TransferError, taking nothing, for what is not that.
        """
        scope, token_ids = prefix.scope, prefix.token_ids
        verify_part(part, self._format, scope, token_ids, prefix.chain, first)
        end, size = first + part.header.blocks, self._format.block_size
        root = part.header.root
        if scope.public_blocks or end > self._most_blocks:
            raise TransferError("vLLM cannot hold it")
        if not root or hash_blocks(root, token_ids[: end * size], size) != prefix.chain[: end * HASH_BYTES]:
            raise WrongChain("its root is not that of the tokens that were asked for")
        file = self._file()
        try:
            np.ascontiguousarray(part.payload).tofile(file)
            job = Job("import", str(file), first, end)
            cached = self._run_job(job, [*token_ids[: end * size].tolist(), 0], root, scope.lora)
        except LookupError as error:
            raise TransferError(f"adapter {scope.lora} is not loaded") from error
        finally:
            file.unlink(missing_ok=True)
        return cached // size

    def _root(self, chain: bytes, token_ids: TokenArray) -> bytes:
        """Return the root under which these tokens have this chain, b"" where none is known."""
        root, size = self._root_of(hash_at(chain, 0)), self._format.block_size
        whole = len(chain) // HASH_BYTES * size
        return root if root and hash_blocks(root, token_ids[:whole], size) == chain else b""

    def _file(self) -> Path:
        return self._directory / f"kv-{next(self._numbers)}"
