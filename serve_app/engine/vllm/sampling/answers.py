"""Answers in vLLM's core: interrupted ones go on, and grammars are llguidance's, for whichever runner vLLM has.

vLLM's own structured output would begin anew with a resumed answer, and needs a tokenizer of its own.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from vllm.sampling_params import StructuredOutputsParams
from vllm.v1.request import RequestStatus
from vllm.v1.structured_output.backend_types import StructuredOutputBackend, StructuredOutputGrammar
from vllm.v1.structured_output.request import StructuredOutputRequest

from router.protocol.block_hash import TokenArray
from serve_app.engine.runner.token_rules import answer_mask
from serve_app.engine.sampling_params import SamplingParams
from serve_app.engine.step import History, Kept
from serve_app.engine.vllm.sampling.params import ExtraArgs
from serve_app.engine.vllm.scheduling.tenant import tenant_of
from serve_app.engine.vllm.settings import CONFIG_ENDS
from serve_app.structured.compiler import GrammarCompiler
from serve_app.structured.matcher import Matchers


def resume(request: Any) -> bool:
    """Return whether a request goes on with an answer; make its tokens, the prompt's last, output once it starts.

    vLLM then treats it as one that it preempted. It expects its first start to be without output.
    """
    resumed = ExtraArgs.of(request.sampling_params).resumed_tokens
    if resumed and not request.num_output_tokens:
        ids = request.prompt_token_ids
        request.prompt_token_ids = ids[:-resumed]
        request.num_prompt_tokens -= resumed
        request._output_token_ids.extend(ids[-resumed:])
    return resumed > 0


class AnswerGrammar(StructuredOutputGrammar):  # type: ignore[misc]
    """One answer's grammar and excluding rules, or either. ``fail`` is told why no token can follow.

    ``length``: of the answer so far.
    """

    def __init__(
        self, history: History, params: SamplingParams, most_tokens: int, vocab_size: int, fail: Callable[[str], None]
    ) -> None:
        """``most_tokens``: of the whole answer."""
        self._prompt, self._matcher, self._kept = history.prompt, history.matcher, Kept()
        self.length = len(history.answer)
        self._answer: TokenArray = np.empty(max(most_tokens, self.length) + 1, dtype=np.int32)
        self._answer[: self.length] = history.answer
        self._params, self._vocab_size, self._fail = params, vocab_size, fail

    def accept_tokens(self, request_id: str, tokens: list[int]) -> bool:
        """Add tokens to the answer; one that cannot follow is noticed with the next token."""
        if (end := self.length + len(tokens)) > len(self._answer):  # drafts beyond the answer's end
            self._answer = np.concatenate([self._answer, np.empty(end, dtype=np.int32)])
        self._answer[self.length : end] = tokens
        self.length = end
        return True

    def validate_tokens(self, tokens: list[int]) -> list[int]:
        """Return the first tokens that may follow, as far as the grammar's work allows to know."""
        begun, valid = self.length, 0
        try:
            for token in tokens:
                if not self._mask()[token // 8] >> token % 8 & 1:
                    break
                self.accept_tokens("", [token])
                valid += 1
        except ValueError:
            pass
        self.length = begun
        return tokens[:valid]

    def rollback(self, num_tokens: int) -> None:
        """Take tokens back."""
        self.length -= num_tokens

    def fill_bitmask(self, bitmask: torch.Tensor, batch_index: int) -> None:
        """Write the allowed tokens into a row of ``bitmask`` [rows, words], int32; all if the answer has failed."""
        row = bitmask[batch_index].numpy().view(np.uint8)
        try:
            mask = self._mask()
        except ValueError as error:
            self._fail(str(error))
            row[:] = 255
            return
        row[:] = 0
        row[: len(mask)] = mask[: len(row)]  # either is padded to whole words of its own

    def is_terminated(self) -> bool:
        """Return whether the last token ended the answer."""
        return self.length > 0 and int(self._answer[self.length - 1]) in self._params.stop_token_ids

    def reset(self) -> None:
        """Do nothing: vLLM never begins an answer anew."""

    def _mask(self) -> NDArray[np.uint8]:
        history = History(self._prompt, self._answer[: self.length], self._matcher, kept=self._kept)
        return answer_mask(history, self._params, self._vocab_size)


class AnswerGrammars(StructuredOutputBackend):  # type: ignore[misc]
    """vLLM's only backend for structured output here; ``begin`` compiles, in a thread, what a request asks for.

    ``failed``: why the answers that failed did, by request; the scheduler ends them.
    """

    def __init__(self, vllm_config: Any) -> None:
        model, ends = vllm_config.model_config, vllm_config.additional_config[CONFIG_ENDS]
        super().__init__(vllm_config, None, model.get_vocab_size())
        self._matchers = Matchers(GrammarCompiler(Path(model.model), self.vocab_size, ends))
        self._threads = ThreadPoolExecutor(1, "grammars")
        self.failed: dict[str, str] = {}

    def begin(self, request: Any, extra: ExtraArgs) -> None:
        """Let a new request wait for its grammar, or its rules."""
        structured = StructuredOutputRequest(StructuredOutputsParams(grammar=extra.grammar or "rules"))
        structured.grammar = self._threads.submit(self._grammar, request, extra, tenant_of(request))
        request.structured_output_request = structured
        request.status = RequestStatus.WAITING_FOR_STRUCTURED_OUTPUT_GRAMMAR

    def _grammar(self, request: Any, extra: ExtraArgs, tenant: str) -> AnswerGrammar:
        ids = np.array(request.prompt_token_ids, dtype=np.int32)
        prompt, answer = np.split(ids, [len(ids) - extra.answer_tokens])
        history = History(prompt, answer, self._matchers.matcher(extra.grammar, tenant) if extra.grammar else None)
        params = SamplingParams(1, stop_token_ids=tuple(request.sampling_params.stop_token_ids), rules=extra.rules)
        fail = partial(self.failed.__setitem__, request.request_id)
        return AnswerGrammar(history, params, request.max_tokens, self.vocab_size, fail)

    def compile_grammar(self, request_type: Any, grammar_spec: str, stop_token_ids: Any = None) -> Any:
        """Raise TypeError: vLLM asks for a grammar by its text, and one belongs to an answer, which ``begin`` knows."""
        raise TypeError("a grammar is made with its request")

    def allocate_token_bitmask(self, max_num_seqs: int) -> torch.Tensor:
        """Return rows that allow every token."""
        return torch.full((max_num_seqs, -(-self.vocab_size // 32)), -1, dtype=torch.int32)

    def destroy(self) -> None:
        """End the thread."""
        self._threads.shutdown(wait=False, cancel_futures=True)


def awaits_grammar(request: Any) -> bool:
    """Return whether a request's grammar is still being compiled."""
    structured = request.structured_output_request
    return structured is not None and not structured.is_grammar_ready
