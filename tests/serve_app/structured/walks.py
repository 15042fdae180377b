"""Random answers that follow a grammar."""

import random
from typing import Any

import numpy as np
from jsonschema import Draft202012Validator
from jsonschema.validators import validator_for
from numpy.typing import NDArray

from serve_app.structured.matcher import AnswerMatcher
from serve_app.tokenization.tokenizer import PromptTokenizer

ENDS = (0, 2)
"""The demo model's end tokens."""


class Walker:
    """Writes random answers with the demo model's tokens. It prefers to end strings, lists and objects."""

    def __init__(self, tokenizer: PromptTokenizer) -> None:
        self._tokenizer = tokenizer
        vocab = tokenizer.pretrained.get_vocab()
        self._closing = np.zeros(4096 + 64, dtype=bool)
        self._closing[[number for text, number in vocab.items() if set(text) & set('"}]')]] = True

    def answer(self, matcher: AnswerMatcher, seed: int, tokens: int) -> tuple[str, bool]:
        """Return an answer's text, and whether it ended within its number of tokens. Raises GrammarError."""
        rng, ids = random.Random(seed), np.empty(0, dtype=np.int32)
        for step in range(tokens):
            mask = matcher.allowed(ids)
            assert mask is not None, "allowed tokens match"
            allowed = np.flatnonzero(np.unpackbits(mask, bitorder="little"))
            assert len(allowed), "some token follows"
            others = np.setdiff1d(allowed, ENDS)
            if len(others) < len(allowed) and (not len(others) or rng.random() < 0.7):
                return self._tokenizer.decode(ids.tolist()), True
            closing = others[self._closing[others]]
            among: NDArray[np.int64] = closing if step > tokens // 4 and len(closing) and rng.random() < 0.8 else others
            ids = np.append(ids, np.int32(rng.choice(among)))
        return self._tokenizer.decode(ids.tolist()), False


def fits(schema: dict[str, Any], value: Any) -> bool:
    """Return whether a value fits a schema, by another implementation; True for schemas that it cannot read."""
    named = {name: part for name, part in schema.items() if name != "$schema" or "json-schema.org" in str(part)}
    validator = validator_for(named, default=Draft202012Validator)
    try:
        validator.check_schema(named)
        return bool(validator(named).is_valid(value))
    except KeyboardInterrupt:
        raise
    except BaseException:  # endless references, patterns of other languages, references to elsewhere
        return True
