"""Computes, with llguidance, the tokens that may come next in an answer with a JSON schema."""

from __future__ import annotations

import functools
from typing import Any

import numpy as np

try:
    import llguidance
    import llguidance.hf
    import llguidance.numpy
except ModuleNotFoundError:
    raise ValueError(
        "The in-process engine constrains answers to a schema with llguidance, which is not installed: "
        "pip install 'coevolve_jax[llm]', or set config.explorer.json_schema to False."
    ) from None

KEPT = 64  # schemas that stay compiled


class Answer:
    """One answer, which is written token by token."""

    def __init__(self, matcher: llguidance.LLMatcher):
        self._matcher = matcher

    def allow(self, words: np.ndarray) -> None:
        """Sets the bits of the tokens that may come next. words: uint32 [ceil(V / 32)].

        Stop ids are among them where the answer is complete.
        """
        llguidance.numpy.fill_next_token_bitmask(self._matcher, words.view(np.int32)[None])

    def take(self, token: int) -> None:
        """Appends a token, which is no stop id."""
        self._matcher.consume_token(token)

    @property
    def failure(self) -> str:
        """Why the answer cannot go on, "" where it can.

        The schema may take too long to follow, or NaN logits may have given a token that is not allowed.
        """
        return self._matcher.get_error().partition("\n")[0]


class Grammars:
    """Compiles schemas. tokenizer: a fast one of transformers. vocabulary: V, the model's token count."""

    def __init__(self, tokenizer: Any, vocabulary: int):
        self._tokens = functools.lru_cache(
            lambda stop_ids: llguidance.hf.from_tokenizer(tokenizer, vocabulary, list(stop_ids))
        )
        self._start = functools.lru_cache(KEPT)(self._compile)

    def begin(self, schema: str, stop_ids: tuple[int, ...]) -> Answer:
        """Returns an answer without tokens. ValueError for a schema that llguidance does not understand."""
        return Answer(self._start(schema, stop_ids).deep_copy())

    def _compile(self, schema: str, stop_ids: tuple[int, ...]) -> llguidance.LLMatcher:
        # Separators as in json.dumps. With free white space, a weak model writes nothing but white space.
        grammar = llguidance.LLMatcher.grammar_from_json_schema(
            schema, overrides={"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
        )
        matcher = llguidance.LLMatcher(self._tokens(stop_ids), grammar, log_level=0)
        if matcher.is_error():
            why = matcher.get_error().partition("\n")[0]
            raise ValueError(f"The JSON schema {schema[:200]!r} cannot be heeded ({why}): simplify it.")
        return matcher
