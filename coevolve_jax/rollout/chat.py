"""Text <-> ids for one tokenizer: prompts, continuations and calls.

A conversation is append-only. The chat template renders the first prompt whole. Every later message is
rendered as the template's continuation of an assistant message, and tokenised once. Sampled messages are
never rendered again.
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

_LONGEST_CHARACTER = 4  # bytes of UTF-8, and so at most this many tokens


def load_tokenizer(folder: str | os.PathLike) -> Any:
    """Loads the tokenizer of a Hugging Face model folder, which need not hold weights.

    ValueError where there is none.
    """
    # Imported here: the import takes seconds, and most users of this file load no tokenizer.
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(folder, local_files_only=True)
    except (OSError, ValueError) as error:
        why = " ".join(str(error).split()) if os.path.isdir(folder) else "there is no such folder"
        raise ValueError(
            f"{folder} holds no tokenizer that transformers can load ({why}): copy it there."
        ) from None


def tool_name(document: Mapping) -> str:
    """Returns the name of a tool from its function schema, wrapped for chat templates or bare as in BFCL."""
    return document.get("function", document)["name"]


class Chat:
    """The chat format of a Hugging Face tokenizer with Qwen's turn and tool-call tokens.

    Raises:
      ValueError: the tokenizer has no chat template or no <|im_end|>, or its template rewrites earlier
        messages. Append-only trajectories cannot be built from such a template.
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
        """Returns the same chat with calls written in one of WRITINGS."""
        other = copy.copy(self)
        other._writing, other._prompts = WRITINGS[calls], {}
        return other

    def _render(self, messages: Sequence[Mapping], tools=None, open_turn: bool = True) -> str:
        return self._tokenizer.apply_chat_template(
            list(messages), tools=tools, tokenize=False, add_generation_prompt=open_turn
        )

    def _continuation(self, messages: Sequence[Mapping]) -> list[str]:
        """Returns the template's text after an assistant's <|im_end|>, split at the contents."""
        before = [{"role": "user", "content": "\x01"}, {"role": "assistant", "content": "\x02"}]
        head, found, _ = self._render(before, open_turn=False).partition("\x02" + END)
        whole = self._render([*before, *messages])
        if not found or not whole.startswith(head + found):
            raise ValueError(
                f"The chat template of {self._tokenizer.name_or_path} rewrites earlier messages "
                "when a new one comes: append-only trajectories need a template that does not "
                "(for Qwen3 an Instruct one)."
            )
        return whole[len(head + found) :].split("\x00")

    def _fill(self, pieces: Sequence[str], contents: Sequence[str]) -> list[int]:
        """Tokenises pieces and contents as one text. Text of control tokens in a content is broken up."""
        safe = (self._special.sub(lambda m: f"{m[0][0]} {m[0][1:]}", whole(c)) for c in contents)
        text = pieces[0] + "".join(c + p for c, p in zip(safe, pieces[1:], strict=True))
        return self._tokenizer.encode(text, add_special_tokens=False)

    def prompt(self, tools: Sequence[Mapping], query: str) -> list[int]:
        """Returns the ids of the first prompt: tools, query, and the opening of the assistant's turn."""
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
        """Returns the ids of a separate conversation without tools, with the assistant's turn opened."""
        if self._question is None:
            roles = [{"role": role, "content": "\x00"} for role in ("system", "user")]
            self._question = self._render(roles).split("\x00")
        return self._fill(self._question, [system, user])

    def user(self, query: str) -> list[int]:
        """Returns the ids of the next user message, which follow a finished assistant turn."""
        return self._fill(self._user, [query])

    def observations(self, texts: Sequence[str]) -> list[int]:
        """Returns the ids of the results, in order, of a message with len(texts) tool calls."""
        if not self._writing.templated:
            return self.user("\n".join(OUTPUT.format(text=text) for text in texts))
        n = len(texts)
        if n not in self._tools:
            self._tools[n] = self._continuation([{"role": "tool", "content": "\x00"}] * n)
        return self._fill(self._tools[n], texts)

    def message(self, calls: Sequence[Call]) -> list[int]:
        """Returns the ids of an assistant message that makes these calls. No calls end the turn."""
        text = "\n".join(self._writing.render(call) for call in calls)
        return [*self._tokenizer.encode(text, add_special_tokens=False), *self.stop_ids]

    def decode(self, ids: Sequence[int] | np.ndarray) -> str:
        """Returns the text of ids, control tokens included."""
        return self._tokenizer.decode(ids, skip_special_tokens=False)

    def parse(self, ids: Sequence[int] | np.ndarray) -> list[ParsedCall]:
        """Returns the calls of one sampled assistant message. None means that it ends its turn."""
        return self._writing.parse(self.decode(ids))


def whole(text: str) -> str:
    """Joins pairs of surrogates. Lone surrogates, which no tokenizer accepts, become U+FFFD."""
    return text if text.isascii() else text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")


def pieces(decode: Callable[[Sequence[int] | np.ndarray], str], ids: Sequence[int] | np.ndarray) -> list[str]:
    """Returns the text of each token. A character of several tokens belongs to the last; the others have "".

    decode: `Chat.decode`. Joined pieces equal the decoded ids, where these are whole characters.
    """
    found, start = [], 0
    for end in range(1, len(ids) + 1):
        text = decode(ids[start:end])
        whole = not text.endswith("\ufffd") or end == len(ids) or end - start == _LONGEST_CHARACTER
        found.append(text if whole else "")
        start = end if whole else start
    return found
