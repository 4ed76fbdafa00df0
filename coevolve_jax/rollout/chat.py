"""Text <-> ids for one tokenizer: prompts, continuations and calls.

A conversation is append-only. The chat template renders the first prompt
whole; everything later is only ever rendered as the continuation that the
template puts after an assistant message, and is tokenised once. What the
policy sampled is never rendered again.
"""

from __future__ import annotations

import copy
import json
import os
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from coevolve_jax.rollout.tool_call_format import END, HOW, OUTPUT, WRITINGS, ParsedCall
from coevolve_jax.types import Call

_LONGEST_CHARACTER = 4  # bytes in UTF-8, and thus tokens


def load_tokenizer(folder: str | os.PathLike) -> Any:
    """That of a Hugging Face model folder, which need not hold weights. ValueError where there is none."""
    # Imported here: it takes seconds, and most who import this file load none.
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(folder, local_files_only=True)
    except (OSError, ValueError) as error:
        why = " ".join(str(error).split()) if os.path.isdir(folder) else "there is no such folder"
        raise ValueError(
            f"{folder} holds no tokenizer that transformers can load ({why}): copy it there."
        ) from None


def tool_name(document: Mapping) -> str:
    """The name of a tool that is documented as chat templates have it, or bare, as BFCL does."""
    return document.get("function", document)["name"]


class Chat:
    """The chat format of a Hugging Face tokenizer with Qwen's turn and tool-call tokens.

    Raises:
      ValueError: the tokenizer has no chat template or no <|im_end|>, or its template rewrites what
        precedes a continuation, so that append-only trajectories cannot be built from it.
    """

    def __init__(self, tokenizer):
        if not tokenizer.chat_template:
            raise ValueError(
                f"The tokenizer in {tokenizer.name_or_path} has no chat template: use an instruct model."
            )
        stop = tokenizer.convert_tokens_to_ids(END)
        if stop is None or stop == tokenizer.unk_token_id:
            raise ValueError(
                f"The tokenizer in {tokenizer.name_or_path} has no {END}: it is not a Qwen chat model."
            )
        self._tokenizer = tokenizer
        self.stop_ids = (stop,)
        self._special = re.compile(
            "|".join(re.escape(t) for t in sorted(tokenizer.get_added_vocab(), key=len)[::-1])
        )
        self._user = self._continuation([{"role": "user", "content": "\x00"}])
        self._question: list[str] | None = None
        self._tools: dict[int, list[str]] = {}
        self._prompts: dict[str, list[str]] = {}
        self._writing = WRITINGS["json"]

    def writing(self, calls: str) -> Chat:
        """The same chat with calls written in one of WRITINGS."""
        other = copy.copy(self)
        other._writing, other._prompts = WRITINGS[calls], {}
        return other

    def _render(self, messages: Sequence[Mapping], tools=None, open_turn: bool = True) -> str:
        return self._tokenizer.apply_chat_template(
            list(messages), tools=tools, tokenize=False, add_generation_prompt=open_turn
        )

    def _continuation(self, messages: Sequence[Mapping]) -> list[str]:
        """What the template puts after an assistant's <|im_end|>, split at the contents."""
        before = [{"role": "user", "content": "\x01"}, {"role": "assistant", "content": "\x02"}]
        head, found, _ = self._render(before, open_turn=False).partition("\x02" + END)
        whole = self._render([*before, *messages])
        if not found or not whole.startswith(head + found):
            raise ValueError(
                f"The chat template of {self._tokenizer.name_or_path} rewrites earlier messages when a new one "
                "comes: append-only trajectories need a template that does not (for Qwen3 an Instruct one)."
            )
        return whole[len(head + found) :].split("\x00")

    def _fill(self, pieces: Sequence[str], contents: Sequence[str]) -> list[int]:
        """Tokenises pieces and contents as one text; a control token's text in a content is broken up."""
        safe = (self._special.sub(lambda m: f"{m[0][0]} {m[0][1:]}", whole(c)) for c in contents)
        text = pieces[0] + "".join(c + p for c, p in zip(safe, pieces[1:], strict=True))
        return self._tokenizer.encode(text, add_special_tokens=False)

    def prompt(self, tools: Sequence[Mapping], query: str) -> list[int]:
        """Ids of the first prompt: tools, the user's query, and the opening of the assistant's turn."""
        if not self._writing.templated:
            query = HOW.format(description="\n".join(t["function"]["description"] for t in tools)) + query
            tools = ()
        key = json.dumps(tools)
        if key not in self._prompts:
            self._prompts[key] = self._render(
                [{"role": "user", "content": "\x00"}], tools=list(tools) or None
            ).split("\x00")
        return self._fill(self._prompts[key], [query])

    def question(self, system: str, user: str) -> list[int]:
        """Ids of a conversation of its own, without tools, up to the opening of the assistant's turn."""
        if self._question is None:
            roles = [{"role": role, "content": "\x00"} for role in ("system", "user")]
            self._question = self._render(roles).split("\x00")
        return self._fill(self._question, [system, user])

    def user(self, query: str) -> list[int]:
        """Ids that follow a finished assistant turn when the user speaks again."""
        return self._fill(self._user, [query])

    def observations(self, texts: Sequence[str]) -> list[int]:
        """Ids that follow an assistant message with len(texts) tool calls: their results, in order."""
        if not self._writing.templated:
            return self.user("\n".join(OUTPUT.format(text=text) for text in texts))
        n = len(texts)
        if n not in self._tools:
            self._tools[n] = self._continuation([{"role": "tool", "content": "\x00"}] * n)
        return self._fill(self._tools[n], texts)

    def message(self, calls: Sequence[Call]) -> list[int]:
        """Ids of an assistant message that makes these calls and ends, as a policy writes it; none ends the turn."""
        text = "\n".join(self._writing.render(call) for call in calls)
        return [*self._tokenizer.encode(text, add_special_tokens=False), *self.stop_ids]

    def decode(self, ids: Sequence[int] | np.ndarray) -> str:
        """The text of ids, control tokens included."""
        return self._tokenizer.decode(ids, skip_special_tokens=False)

    def parse(self, ids: Sequence[int] | np.ndarray) -> list[ParsedCall]:
        """The calls of one sampled assistant message; none means that it ends its turn."""
        return self._writing.parse(self.decode(ids))


def whole(text: str) -> str:
    """Pairs of surrogates put together, and halves of them, which no tokenizer takes, as U+FFFD."""
    return text if text.isascii() else text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")


def pieces(decode: Callable[[Sequence[int] | np.ndarray], str], ids: Sequence[int] | np.ndarray) -> list[str]:
    """The text of each token. A character that several tokens make stands with the last of them, after "".

    decode: `Chat.decode`. All pieces joined are the decoded ids, where these are whole characters.
    """
    found, start = [], 0
    for end in range(1, len(ids) + 1):
        text = decode(ids[start:end])
        whole = not text.endswith("\ufffd") or end == len(ids) or end - start == _LONGEST_CHARACTER
        found.append(text if whole else "")
        start = end if whole else start
    return found
