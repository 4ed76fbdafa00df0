"""The tokenizer of the tiny policies: byte-level BPE with Qwen's control tokens, and a short chat template."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

VOCABULARY = 1280
SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]  # their ids are their places
MARKUP = ["<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>"]

# Qwen's control tokens and tool-call JSON; tools as one line each: name parameter optional?
CHAT_TEMPLATE = """\
{%- if tools %}<|im_start|>system
{% for tool in tools %}{% set f = tool.function or tool %}{{ f.name }}\
{% for p in f.parameters.properties %} {{ p }}{{ '' if p in (f.parameters.required or []) else '?' }}{% endfor %}

{% endfor %}<|im_end|>
{% endif %}\
{%- for message in messages %}\
{%- if message.role == 'tool' %}<tool_response>{{ message.content }}</tool_response>
{% else %}<|im_start|>{{ message.role }}
{{ message.content }}<|im_end|>
{% endif %}\
{%- endfor %}\
{%- if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""

# What counts as one piece of text. The scaffolding of a call is one piece, so
# that a call is short to write; a value is cut alike in a query and in JSON, so that it can be copied.
PIECES = "|".join(
    (
        r'\n\{"name": "',
        r'", "arguments": \{\}\}\n',
        r'", "arguments": \{"',
        r'"?\}\}\n',
        r'": "',
        r'": \["',
        r'": \[',
        r'": \{"',
        r'": \{',
        r'": ',
        r'", "',
        r'\], "',
        r'\}, "',
        r', "',
        r'\{"',
        r'"\}',
        r'"\]\}?',
        r'\["',
        r"assistant\n",
        r"user\n",
        r"system\n",
        r"\?",
        r" \(",
        r"\), ",
        r" '",
        r"', ",
        r"'\)",
        r" ?[A-Za-z_]+",
        r"[0-9]",
        r"\s",
        r"[^A-Za-z0-9_\s]",
    )
)


def make_tokenizer(texts: Sequence[str]) -> PreTrainedTokenizerFast:
    """A byte-level BPE tokenizer with Qwen's control tokens, trained on texts."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(PIECES), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY - len(MARKUP),
        special_tokens=SPECIAL,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
        clean_up_tokenization_spaces=False,
    )
    fast.add_tokens(MARKUP)
    fast.chat_template = CHAT_TEMPLATE
    return fast


def carried_over(
    embedding: np.ndarray, old: PreTrainedTokenizerFast, new: PreTrainedTokenizerFast
) -> np.ndarray:
    """An embedding [vocabulary, width] for another tokenizer: a token that both have keeps its row, another has the mean
    of the rows of the tokens that spelt it (fast vocabulary transfer, Gee et al. 2022)."""
    known, rows = old.get_vocab(), np.array(embedding)
    for token, id in new.get_vocab().items():
        spelt = [known[token]] if token in known else old.encode(new.decode([id]), add_special_tokens=False)
        rows[id] = np.mean(np.asarray(embedding)[spelt], axis=0)
    return rows
