"""A GGUF file's tokenizer: byte-level BPE from its tokens and merges, as transformers reads it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

KEYS = {name: f"tokenizer.ggml.{name}" for name in ("model", "pre", "tokens", "merges", "token_type")}
IDS = {"bos": "bos", "eos": "eos", "unk": "unknown", "pad": "padding"}  # transformers' name -> GGUF's
UNKNOWN, CONTROL, USER_DEFINED, UNUSED = 2, 3, 4, 5  # token types; 1 is a token that BPE makes

# Splits a text into words, of which BPE merges each alone. {digits}: a run of digits in one word.
WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|{digits}"
    r"| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
SPLITS = {"qwen2": WORDS.format(digits=r"\p{N}"), "llama-bpe": WORDS.format(digits=r"\p{N}{1,3}")}
PRE_TOKENIZERS = ("smollm", *SPLITS)


def special_ids(metadata: Mapping[str, Any]) -> dict[str, int]:
    """Returns the ids of bos, eos, unk and pad, of those that the file names."""
    ids = {name: metadata.get(f"tokenizer.ggml.{word}_token_id") for name, word in IDS.items()}
    return {name: id for name, id in ids.items() if id is not None}


def build(metadata: Mapping[str, Any], max_length: int) -> Any:
    """Builds the tokenizer, with the file's chat template where it has one.

    Control tokens are special tokens, user-defined ones are added tokens, and unused ones are left out.

    Args:
      metadata: of the GGUF file.
      max_length: the model's context in tokens.

    Raises:
      ValueError: the file has no byte-level BPE, its pre-tokenizer is not among PRE_TOKENIZERS, or its
        tokens and merges do not fit.
    """
    # Imported here: the import takes seconds.
    from tokenizers import AddedToken, Tokenizer, decoders, models
    from transformers import PreTrainedTokenizerFast

    if missing := [key for key in KEYS.values() if key not in metadata]:
        raise ValueError(
            f"The GGUF file lacks {', '.join(missing)}: take one with a byte-level BPE tokenizer."
        )
    model, pre, tokens, merges, types = (metadata[key] for key in KEYS.values())
    if model != "gpt2":
        raise ValueError(
            f"{KEYS['model']} {model!r} of the GGUF file is not supported; only gpt2, which is byte-level "
            "BPE, is."
        )
    if pre not in PRE_TOKENIZERS:
        raise ValueError(
            f"{KEYS['pre']} {pre!r} of the GGUF file is not supported; only {', '.join(PRE_TOKENIZERS)} are."
        )
    ids = special_ids(metadata)
    if len(types) != len(tokens) or any(id >= len(tokens) for id in ids.values()):
        raise ValueError(
            f"The GGUF file has {len(tokens)} tokens, {len(types)} token types and the special ids {ids}, "
            "which do not fit: restore the file."
        )
    vocabulary = {token: id for id, token in enumerate(tokens) if types[id] != UNUSED}
    try:
        # Llama 3 keeps a word that is a token, whatever the merges make of it.
        bpe = models.BPE(vocabulary, [tuple(m.split(" ")) for m in merges], ignore_merges=pre == "llama-bpe")
    except Exception as error:  # tokenizers raises its own type
        raise ValueError(f"The GGUF file's tokens and merges make no BPE ({error}): restore it.") from None
    tokenizer = Tokenizer(bpe)
    _split_as(tokenizer, pre)
    tokenizer.decoder = decoders.ByteLevel()
    added = lambda *kinds: [token for token, kind in zip(tokens, types) if kind in kinds]
    special = [AddedToken(t, normalized=False) for t in added(UNKNOWN, CONTROL)]
    tokenizer.add_special_tokens(special)
    tokenizer.add_tokens([AddedToken(t, normalized=False) for t in added(USER_DEFINED)])
    if metadata.get("tokenizer.ggml.add_bos_token", pre == "llama-bpe"):
        _begin_with(tokenizer, tokens, ids)
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        clean_up_tokenization_spaces=False,
        model_max_length=max_length,
        **{f"{name}_token": tokens[id] for name, id in ids.items()},
    )
    fast.chat_template = metadata.get("tokenizer.chat_template")
    return fast


def _split_as(tokenizer: Any, pre: str) -> None:
    """Sets the normaliser and the splitting into words that `pre` names. Source: llama.cpp's llama-vocab."""
    from tokenizers import Regex, normalizers, pre_tokenizers

    if pre == "smollm":
        first, rest = pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(False)
    else:
        first = pre_tokenizers.Split(Regex(SPLITS[pre]), "isolated")
        rest = pre_tokenizers.ByteLevel(False, use_regex=False)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([first, rest])
    if pre == "qwen2":
        tokenizer.normalizer = normalizers.NFC()


def _begin_with(tokenizer: Any, tokens: list[str], ids: Mapping[str, int]) -> None:
    """Lets every encoded text begin with bos."""
    from tokenizers import processors

    if "bos" not in ids:
        raise ValueError("The GGUF file asks for a bos token at the beginning and names none: restore it.")
    bos = tokens[ids["bos"]]
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{bos} $A", pair=f"{bos} $A {bos}:1 $B:1", special_tokens=[(bos, ids["bos"])]
    )
