"""Text <-> ids for one tokenizer: prompts, continuations and calls.

A conversation is append-only. The chat template renders the first prompt whole. Every later message is
rendered as the template's continuation of an assistant message, and tokenised once. Sampled messages are
never rendered again, also where the template would rewrite them.
"""

from __future__ import annotations

import copy
import json
import os
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from jinja2 import TemplateError

from coevolve_jax import shipped
from coevolve_jax.rollout.tool_call_format import (
    HOW,
    OUTPUT,
    WRITINGS,
    ParsedCall,
    Writing,
    render_short,
    spoken,
)
from coevolve_jax.types import Call, Turn

CHATML_TOOLS = Path(__file__).parent / "templates" / "chatml_tools.jinja"

FORMS = 256  # kept by a chat; a strategy's macros give each scenario many sets of tools, of 20 kB each

_LONGEST_CHARACTER = 4  # bytes of UTF-8, and so at most this many tokens
# Some templates print the date. The default of Llama 3's in its place keeps prompts the same every day.
_DATE = "26 Jul 2024"
_CLOCK = f"{{% macro strftime_now(format) %}}{_DATE}{{% endmacro %}}\n"
_PROBE = {"name": "probe", "description": "Probe.", "parameters": {"type": "object", "properties": {}}}
_TOOLS = [{"type": "function", "function": _PROBE}]
# A turn that ended. Its contents are control characters, which no template holds.
_THOUGHT = "<think>\n\x02\n</think>\n\n"
_BEFORE = [{"role": "user", "content": "\x01"}, {"role": "assistant", "content": f"{_THOUGHT}\x03"}]
# Tokens that end a message like the template's own. Llama 3 ends a call with <|eom_id|> where it runs code.
_ALSO_END = {"<|eot_id|>": ("<|eom_id|>",)}
# The format of a template that shows no calls of a message, by a mark in its text.
_MARKS = {"<tool_call>": "json", "<|start_header_id|>": "llama3"}
_CALL = Call("probe", {"a": 1})
_MADE = [{"type": "function", "function": {"name": _CALL.name, "arguments": dict(_CALL.arguments)}}]
_TAGS = ("<think>", "</think>", "<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>")


def _quoted(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)[1:-1]


# Stands for a content while a template is rendered. Trimming takes its margins, which are white space.
_CONTENT = "\x1f\x00\x1f"
# Its forms in a rendering: as it is, trimmed, as JSON, or both. Each with the function that gives the form.
_SLOTS: dict[str, Callable[[str], str]] = {
    _CONTENT: str,
    "\x00": str.strip,
    _quoted(_CONTENT): _quoted,
    _quoted("\x00"): lambda text: _quoted(text.strip()),
}
_SLOT = re.compile(r"(?<!\\)(?:" + "|".join(map(re.escape, _SLOTS)) + ")")
_STANDS_FOR = re.compile(r"[\x00\x1f]|\\u0000")


class _Form(NamedTuple):
    """A rendered template: texts[0], the first content as writes[0] writes it, texts[1], and so on."""

    texts: list[str]
    writes: list[Callable[[str], str]]


def load_tokenizer(folder: str | os.PathLike) -> Any:
    """Loads the tokenizer of a Hugging Face model folder, which need not hold weights.

    ValueError where there is none.
    """
    # Imported here: the import takes seconds, and most users of this file load no tokenizer.
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(shipped.folder(folder), local_files_only=True)
    except (OSError, ValueError) as error:
        why = " ".join(str(error).split()) if os.path.isdir(folder) else "there is no such folder"
        raise ValueError(
            f"{folder} holds no tokenizer that transformers can load ({why}): copy it there."
        ) from None


def tool_name(document: Mapping) -> str:
    """Returns the name of a tool from its function schema, wrapped for chat templates or bare as in BFCL."""
    return document.get("function", document)["name"]


class Chat:
    """The chat format of a Hugging Face tokenizer.

    A ChatML tokenizer whose template ignores tools gets CHATML_TOOLS as its `chat_template` for conversations
    with tools.

    stop_ids: end a message. The first is the template's own. rewrites: the template would change earlier
    messages, such as leave out thoughts. notes: sentences for the user of a run.

    Raises:
      ValueError: the tokenizer has no chat template, or append-only trajectories cannot be built from it.
    """

    def __init__(self, tokenizer):
        self._tokenizer, self._name, self.notes = tokenizer, tokenizer.name_or_path, ()
        self._writing = WRITINGS["json"]  # until the template is known
        vocabulary, ours = tokenizer.get_added_vocab(), CHATML_TOOLS.read_text().strip()
        if self._lacks_tools(vocabulary):
            own = tokenizer.chat_template and tokenizer.get_chat_template().removesuffix("\n")
            tokenizer.chat_template = (
                f"{{% if tools %}}{ours}{{% else %}}\n{own}{{% endif %}}" if own else ours
            )
            self.notes += (
                f"The tokenizer in {self._name} has no chat template with tools: {CHATML_TOOLS.name} of "
                "coevolve_jax shows them, and is saved with the policy.",
            )
        self._template = tokenizer.get_chat_template(tools=_TOOLS)
        self._ours = ours in self._template
        tokens = sorted([*vocabulary, *(tag for tag in _TAGS if tag in self._template)], key=len)[::-1]
        self._special = re.compile("|".join(map(re.escape, tokens)))
        said, _, tail = self._render(_BEFORE, _TOOLS, open_turn=False).rpartition("\x03")
        end = self._special.match(tail)
        if not end or end[0] not in vocabulary:
            raise ValueError(
                f"The chat template of {self._name} ends an assistant's message with no control token: "
                "use an instruct model whose template does."
            )
        self._end = end[0]
        ends = (self._end, *_ALSO_END.get(self._end, ()))
        self.stop_ids = tuple(vocabulary[token] for token in ends if token in vocabulary)
        again = self._render([*_BEFORE, {"role": "user", "content": "\x01"}], _TOOLS)
        self.rewrites = not again.startswith(said) or f"{_THOUGHT}\x03{self._end}" not in again
        if self.rewrites:
            self.notes += (
                f"The chat template of {self._name} rewrites earlier messages, such as leaves out thoughts: "
                "here they stay as they were sampled, thoughts included.",
            )
        if self._tells_the_date():
            self.notes += (
                f"The chat template of {self._name} prints the date: here it is always {_DATE}, so that "
                "prompts stay the same every day.",
            )
        self._forms: dict[str, _Form] = {}
        opening = self._continuation("user", 1).texts[-1]
        self._thinks = "<think>" in opening.rpartition("</think>")[2]  # each message begins as a thought
        self._shown = self._shown_call(opening.partition("<think>")[0])
        self._asked = self._asked_format()
        self._writing = self._written(self._asked or "json")

    def writing(self, calls: str) -> Chat:
        """Returns the same chat with calls written in one of WRITINGS.

        ValueError if the template shows the model no tools, or writes calls in another format.
        """
        other = copy.copy(self)
        other._writing, other._forms = self._written(calls), {}
        if not other._writing.templated:
            return other
        if self._asked not in (None, calls):
            raise ValueError(
                f"config.rollout.tool_call_format is {calls!r}, and the chat template of {self._name} asks "
                f"for calls of the format {self._asked!r}: set it to that."
            )
        if not self._shows_tools():
            raise ValueError(
                f"The chat template of {self._name} shows a model no tools: use a model whose template does."
            )
        if self._shown and not self._asked:
            raise ValueError(
                f"The chat template of {self._name} writes a call as {self._shown!r}, which is no format of "
                "config.rollout.tool_call_format: use a model whose template writes calls as JSON, or set it "
                "to 'python' where the environment runs code."
            )
        other._continuation("tool", 1)  # refuses templates without a role for results
        return other

    def _written(self, calls: str) -> Writing:
        """Returns one of WRITINGS. Where our template shows a call, calls are written as it shows them."""
        short = self._ours and calls == "json"
        return WRITINGS[calls]._replace(render=render_short) if short else WRITINGS[calls]

    def _shown_call(self, opening: str) -> str:
        """Returns the template's own text of _CALL, "" if it shows no calls. opening: of a message."""

        def said(**more) -> str:
            messages = [_BEFORE[0], {"role": "assistant", "content": "", **more}]
            return self._render(messages, _TOOLS, open_turn=False).rpartition("\x01")[2]

        try:
            text, silent = said(tool_calls=_MADE), said()
        except (TypeError, ValueError):  # the template has no place for calls, or not for these
            return ""
        text = "" if text == silent else text.removeprefix(opening)
        ends = map(re.escape, self._tokenizer.convert_ids_to_tokens(self.stop_ids))
        return spoken(re.split("|".join(ends), text)[0]).strip()

    def _asked_format(self) -> str | None:
        """Returns the format in which the template writes calls. None if it is not known, or none of ours."""
        if not self._shown:
            return next((name for mark, name in _MARKS.items() if mark in self._template), None)
        for name, writing in WRITINGS.items():
            if writing.templated and [p.call for p in writing.parse(self._shown)] == [_CALL]:
                return name
        return None

    def _lacks_tools(self, vocabulary: Mapping[str, int]) -> bool:
        """Says whether this is ChatML without tools. ValueError if it is nothing: there is no template."""
        chatml = {"<|im_start|>", "<|im_end|>"} <= vocabulary.keys()
        if self._tokenizer.chat_template:
            return chatml and "<|im_start|>" in self._render(_BEFORE[:1]) and not self._shows_tools()
        if not chatml:
            raise ValueError(f"The tokenizer in {self._name} has no chat template: use an instruct model.")
        return True

    def _shows_tools(self) -> bool:
        """Says whether the template renders tools at all."""
        return self._render(_BEFORE[:1], _TOOLS) != self._render(_BEFORE[:1])

    def _tells_the_date(self) -> bool:
        """Says whether the template, left to itself, prints another date than ours, or cannot do without."""
        conversation: Any = {"conversation": list(_BEFORE), "tools": _TOOLS, "tokenize": False}
        try:
            own = self._tokenizer.apply_chat_template(**conversation)
        except TemplateError:
            return True
        return own != self._render(_BEFORE, _TOOLS, open_turn=False)

    def _render(self, messages: Sequence[Mapping], tools=None, open_turn: bool = True) -> str:
        try:
            return self._tokenizer.apply_chat_template(
                list(messages),
                tools=tools,
                chat_template=_CLOCK + self._tokenizer.get_chat_template(tools=tools),
                tokenize=False,
                add_generation_prompt=open_turn,
                date_string=_DATE,
            )
        except TemplateError as error:
            raise ValueError(
                f"The chat template of {self._name} refuses a conversation of the roles "
                f"{', '.join(m['role'] for m in messages)}: {error}"
            ) from None

    def _form(self, rendered: str, contents: int) -> _Form:
        texts, slots = _SLOT.split(rendered), _SLOT.findall(rendered)
        if len(slots) != contents or "\x1f" in "".join(texts):
            raise ValueError(
                f"The chat template of {self._name} shows a message changed, or not once: append-only "
                "trajectories need a template that shows each as it is."
            )
        return _Form(texts, [_SLOTS[slot] for slot in slots])

    def _continuation(self, role: str, count: int) -> _Form:
        """Returns the template's text from an assistant's end token on, with `count` messages of the role."""

        def build() -> _Form:
            messages = [{"role": role, "content": _CONTENT}] * count
            tools = _TOOLS if self._writing.templated else None
            # After one turn and after two: only what does not depend on them can be appended.
            rendered = [self._render([*_BEFORE * turns, *messages], tools) for turns in (1, 2)]
            (_, one, text), (_, two, other) = [r.rpartition(f"\x03{self._end}") for r in rendered]
            if not one or not two or text != other:
                raise ValueError(
                    f"The chat template of {self._name} rewrites earlier messages when a new one comes, and "
                    "what it adds depends on them: append-only trajectories need a template that appends."
                )
            return self._form(self._end + text, count)

        return self._kept(f"{role} {count}", build)

    def _kept(self, key: str, build: Callable[[], _Form]) -> _Form:
        """Returns the form of a key, built if it is not kept. The FORMS that were used last are kept."""
        form = self._forms.pop(key, None) or build()
        self._forms[key] = form  # the last in order
        if len(self._forms) > FORMS:
            self._forms.pop(next(iter(self._forms)), None)
        return form

    def _fill(self, form: _Form, contents: Sequence[str]) -> list[int]:
        """Tokenises a form and its contents as one text. Text of control tokens in a content is broken up."""
        text = form.texts[0]
        for write, content, after in zip(form.writes, contents, form.texts[1:], strict=True):
            text += self._break_up(write(whole(content))) + after
        return self._tokenizer.encode(text, add_special_tokens=False)

    def _break_up(self, text: str) -> str:
        return self._special.sub(lambda m: f"{m[0][0]} {m[0][1:]}", text)

    def _documents(self, value: Any) -> Any:
        """Copies documents of tools, which a server may have written, with the care that contents get.

        The template writes them in its own way, so they are in its rendering. What stands there for contents
        is left out of them.
        """
        if isinstance(value, str):
            return self._break_up(_STANDS_FOR.sub("", whole(value)))
        if isinstance(value, Mapping):
            return {self._documents(name): self._documents(inner) for name, inner in value.items()}
        return [self._documents(inner) for inner in value] if isinstance(value, list | tuple) else value

    def prompt(
        self, tools: Sequence[Mapping], query: str, system: str = "", examples: Sequence[Turn] = ()
    ) -> list[int]:
        """Returns the ids of the first prompt: tools, query, and the opening of the assistant's turn.

        system: text of a system message. examples: turns before the query, each with the calls that answer.
        """
        queries = [*(turn.query for turn in examples), query]
        ids = self._opening(tools, queries[0], system)
        for turn, following in zip(examples, queries[1:]):
            ids += self.message(turn.calls) + self.user(following)
        return ids

    def _opening(self, tools: Sequence[Mapping], query: str, system: str) -> list[int]:
        if not self._writing.templated:
            query = HOW.format(description="\n".join(t["function"]["description"] for t in tools)) + query
            tools = ()
        contents = {"system": system, "user": query} if system else {"user": query}

        def build() -> _Form:
            messages = [{"role": role, "content": _CONTENT} for role in contents]
            return self._form(self._render(messages, self._documents(tools) or None), len(messages))

        form = self._kept(json.dumps([*contents, *tools]), build)
        return self._fill(form, list(contents.values()))

    def question(self, system: str, user: str) -> list[int]:
        """Returns the ids of a separate conversation without tools, with the assistant's turn opened."""
        roles = [{"role": role, "content": _CONTENT} for role in ("system", "user")]
        form = self._kept("question", lambda: self._form(self._render(roles), 2))
        return self._fill(form, [system, user])

    def user(self, query: str) -> list[int]:
        """Returns the ids of the next user message, which follow a finished assistant turn."""
        return self._fill(self._continuation("user", 1), [query])[1:]  # the end token was sampled

    def observations(self, texts: Sequence[str]) -> list[int]:
        """Returns the ids of the results, in order, of a message with len(texts) tool calls."""
        if not self._writing.templated:
            return self.user("\n".join(OUTPUT.format(text=text) for text in texts))
        return self._fill(self._continuation("tool", len(texts)), texts)[1:]

    def message(self, calls: Sequence[Call]) -> list[int]:
        """Returns the ids of an assistant message that makes these calls. No calls end the turn."""
        return self.said("\n".join(map(self._writing.render, calls)))

    def said(self, text: str) -> list[int]:
        """Returns the ids of an assistant message of this text. A thought that the prompt opens is closed."""
        text = f"\n</think>\n\n{text}" if self._thinks else text
        return [*self._tokenizer.encode(whole(text), add_special_tokens=False), self.stop_ids[0]]

    def decode(self, ids: Sequence[int] | np.ndarray) -> str:
        """Returns the text of ids, control tokens included."""
        return self._tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False)

    def controls(self, text: str) -> bool:
        """Says whether a text holds a control token, or a tag of the template such as <tool_call>."""
        return bool(self._special.search(text))

    def parse(self, ids: Sequence[int] | np.ndarray) -> list[ParsedCall]:
        """Returns the calls of one sampled assistant message. None means that it ends its turn."""
        text = self.decode(ids[:-1] if len(ids) and ids[-1] in self.stop_ids else ids)
        return self._writing.parse(spoken(f"<think>{text}" if self._thinks else text, self._writing.block))


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
