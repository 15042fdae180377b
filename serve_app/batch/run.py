"""Runs a batch file: ``batch_size`` requests at once, each prepared and answered as the server does it."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any

from serve_app.api.request import ChatRequest
from serve_app.batch.input_file import DEFAULT_MAX_GENERATE_LENGTH, BatchFile, in_the_files_words
from serve_app.batch.local_engine import LocalEngine
from serve_app.batch.profile import profile
from serve_app.checkpoints.checkpoint import CheckpointInfo
from serve_app.checkpoints.limits import max_model_len
from serve_app.config.app import AppConfig
from serve_app.errors import InvalidRequest, WarmpathError
from serve_app.fairness.shares import Budget, Shares
from serve_app.fairness.waiting_line import WaitingLine
from serve_app.fairness.workers import FairWorkers
from serve_app.generation.answer import answer_pieces
from serve_app.generation.prepare import Limits, Preparer
from serve_app.generation.saves import save_warning
from serve_app.prompts.registry import Prompts
from serve_app.tenants.secret import load_secret
from serve_app.tenants.tenants import Tenants
from serve_app.tokenization.tokenizer import PromptTokenizer

logger = logging.getLogger(__name__)

_SAVES = {"saved": "is saved", "present": "was saved already"}


@dataclass(frozen=True, slots=True)
class BatchResult:
    """``responses`` and ``profile`` as their files have them; ``errors``: a sentence for each request that failed."""

    responses: list[dict[str, Any]]
    profile: dict[str, Any]
    errors: list[str]


async def run_batch(
    config: AppConfig,
    info: CheckpointInfo,
    file: BatchFile,
    on_start: Callable[[], None],
    on_done: Callable[[], None],
) -> BatchResult:
    """Answer every request of a file. A request that fails is an error of its own, and the others go on.

    ``on_start``: called once the model is loaded, ``on_done`` after each request. Raises ValueError for settings,
    adapters or a model that cannot be run.
    """
    tokenizer = await asyncio.to_thread(
        PromptTokenizer, info.path, cache_bytes=config.tokenizer_cache_bytes, block_size=config.block_size
    )
    async with LocalEngine.running(config, info) as source:
        batch = _Batch(config, info, file, tokenizer, source)
        on_start()
        left = iter(range(len(file.requests)))

        async def work() -> None:
            for index in left:
                await batch.answer(index)
                on_done()

        async with asyncio.TaskGroup() as workers:
            for _ in range(min(file.batch_size, len(file.requests))):
                workers.create_task(work())
    taken = {int(request_id.partition(".")[0]): one for request_id, one in source.work.items()}
    errors = [batch.errors[index] for index in sorted(batch.errors)]
    return BatchResult([batch.responses[index] for index in range(len(file.requests))], profile(taken), errors)


class _Batch:
    """One run; ``responses`` and ``errors`` by index."""

    def __init__(
        self, config: AppConfig, info: CheckpointInfo, file: BatchFile, tokenizer: PromptTokenizer, source: LocalEngine
    ) -> None:
        self.responses: dict[int, dict[str, Any]] = {}
        self.errors: dict[int, str] = {}
        self._model = config.model_name
        self._file = file
        self._tokenizer = tokenizer
        self._source = source
        secret = load_secret(secret_file=config.secret_file)
        tenants = Tenants((), secret)
        self._tenant = tenants.authenticate(None)
        shares = Shares({})
        self._places = WaitingLine(Budget(shares, lambda: file.batch_size))
        prompts = Prompts.of(config.public_prompts, config.prompts_dir)
        prompts.install(tokenizer)
        self._preparer = Preparer(
            info,
            tokenizer,
            tenants,
            secret,
            source.adapters.registry,
            Limits(max_model_len(config, info), DEFAULT_MAX_GENERATE_LENGTH, config.save_ttl_s),
            prompts,
            workers=FairWorkers(shares),
            simulated=config.engine_traits.simulated,
        )

    async def answer(self, index: int) -> None:
        """Answer one request, or note why it cannot be."""
        response: dict[str, Any] = {
            "output_text": "",
            "request_idx": index,
            "batch_idx": index % self._file.batch_size,
            "finish_reason": "error",
            "messages": _messages(self._file.requests[index]),
            "formatted_system_prompt": "",
            "formatted_complete_request": "",
        }
        self.responses[index] = response
        try:
            try:
                await self._generate(index, self._file.request(index, self._model), response)
            except InvalidRequest as error:
                raise in_the_files_words(error) from error
        except WarmpathError as error:
            # Nothing half done: what a failed request has for a text says why.
            named = f"{error.param}: " if error.param else ""
            self.errors[index] = f"requests[{index}]: {named}{error.message}"
            response |= {"output_text": self.errors[index], "finish_reason": "error"}

    async def _generate(self, index: int, request: ChatRequest, response: dict[str, Any]) -> None:
        formatted = await self._preparer.formatted(request, self._tenant.name)
        response["formatted_system_prompt"] = formatted.system_text
        response["formatted_complete_request"] = formatted.text
        generations = await self._preparer.prepare(request, self._tenant, str(index))
        place = await self._places.enter(self._tenant.name)
        pieces = answer_pieces(generations, self._source, self._tokenizer.decoder, request.stop, place)
        text, reason = "", "error"
        async with aclosing(pieces):
            async for piece in pieces:
                text += piece.text
                reason = piece.finish_reason or reason
                if piece.save is not None:
                    self._tell_save(index, save_warning(piece.save), piece.save.outcome)
                if piece.cached_tokens is not None:
                    prompt_tokens = len(generations[0].token_ids)
                    logger.debug(
                        "requests[%d]: %d of %d prompt tokens reused", index, piece.cached_tokens, prompt_tokens
                    )
        response |= {"output_text": text, "finish_reason": reason}

    def _tell_save(self, index: int, warning: str, outcome: str) -> None:
        if warning:
            logger.warning("requests[%d]: %s", index, warning)
        else:
            logger.debug("requests[%d]: the KV of its system prompt %s", index, _SAVES[outcome])


def _messages(request: Any) -> list[Any]:
    """Return the messages as Edge-LLM repeats them: contents as lists of parts."""
    messages = request.get("messages") if isinstance(request, dict) else None
    return [
        {**message, "content": [{"type": "text", "text": message["content"]}]}
        if isinstance(message, dict) and isinstance(message.get("content"), str)
        else message
        for message in (messages if isinstance(messages, list) else [])
    ]
