"""The tokenizer of the tiny policies: byte-level BPE with Qwen's control tokens and a short chat template."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

VOCABULARY = 1280
SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]  # ids: their positions here
MARKUP = ["<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>"]

# Qwen's control tokens and tool-call JSON. Each tool is one line: name parameter optional_parameter?
CHAT_TEMPLATE = """\
{%- if tools %}<|im_start|>system
{% for tool in tools %}{% set f = tool.function or tool %}{{ f.name }}\
{% for p in f.parameters.properties %} {{ p }}\
{{ '' if p in (f.parameters.required or []) else '?' }}{% endfor %}

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

# The pieces that BPE may not merge across. The scaffolding of a call is one piece, so a call is short to
# write. A value is split alike in a query and in JSON, so it can be copied.
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
    """Trains a byte-level BPE tokenizer, with Qwen's control tokens, on these texts."""
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
    """Carries an embedding [vocabulary, width] over to another tokenizer.

    A token that both have keeps its row. A new token gets the mean of the old rows of the tokens that spell
    it (fast vocabulary transfer, Gee et al. 2022).
    """
    known, rows = old.get_vocab(), np.array(embedding)
    for token, id in new.get_vocab().items():
        spelt = [known[token]] if token in known else old.encode(new.decode([id]), add_special_tokens=False)
        rows[id] = np.mean(np.asarray(embedding)[spelt], axis=0)
    return rows
