"""Tokenizers of GGUF files against byte-level BPE in plain Python."""

import json
import unicodedata

import pytest
import regex
from hypothesis import given
from hypothesis import strategies as st
from transformers import AutoTokenizer
from transformers.convert_slow_tokenizer import TikTokenConverter, bytes_to_unicode

from coevolve_jax.models import gguf_io, gguf_tokenizer
from tests.support.gguf_files import MERGES, TEMPLATE, TOKENS, TYPES, config_of, random_tensors, write

# How each tokenizer splits a text into words. Sources: GPT-2's encoder.py, and Qwen2's tokenizer in
# transformers. Llama 3's is the default of transformers' TikTokenConverter; a test below checks it.
GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
QWEN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
LLAMA3 = QWEN.replace(r"|\p{N}|", r"|\p{N}{1,3}|")
BYTES = bytes_to_unicode()
IDS = {token: id for id, token in enumerate(TOKENS)}
RANKS = {tuple(merge.split(" ")): rank for rank, merge in enumerate(MERGES)}

# Old scripts: the tables of Unicode differ in what is new.
TEXTS = st.lists(
    st.sampled_from(
        [
            "the",
            " RAIN",
            "it's",
            "WE'LL",
            " 2024",
            "1234",
            "12",
            "7",
            "½",
            "\n\n",
            "  ",
            "\t",
            "été",
            "e\u0301",
            "雨",
            "{}",
        ]
    )
    | st.text(st.characters(max_codepoint=0x3FFF, categories=("L", "N", "P", "S", "Z", "M")), max_size=6)
    | st.text(st.characters(codec="ascii"), max_size=6),
    max_size=12,
).map("".join)


def words(text: str, pre: str) -> list[str]:
    if pre != "smollm":
        return regex.findall({"qwen2": QWEN, "llama-bpe": LLAMA3}[pre], text)
    parts = regex.split(r"(\p{N})", text)  # every digit alone, and GPT-2's words between them
    return [word for part in parts for word in regex.findall(GPT2, part)]


def bpe(word: str, whole: bool) -> list[int]:
    """Merges the pair of the lowest rank until there is none. whole: a word that is a token stays one."""
    parts = [BYTES[b] for b in word.encode()]
    if whole and "".join(parts) in IDS:
        return [IDS["".join(parts)]]
    while pairs := [RANKS[p] for p in zip(parts, parts[1:]) if p in RANKS]:
        first, second = MERGES[min(pairs)].split(" ")
        merged = []
        for part in parts:
            if merged and (merged[-1], part) == (first, second):
                merged[-1] = first + second
            else:
                merged.append(part)
        parts = merged
    return [IDS[part] for part in parts]


def expected(text: str, pre: str) -> list[int]:
    text = unicodedata.normalize("NFC", text) if pre == "qwen2" else text
    return [id for word in words(text, pre) for id in bpe(word, pre == "llama-bpe")]


@pytest.fixture(scope="module")
def tokenizers(tmp_path_factory):
    """The tokenizers as transformers loads them from the folders, by pre-tokenizer."""
    found, config = {}, config_of("llama")
    for pre in gguf_tokenizer.PRE_TOKENIZERS:
        folder = tmp_path_factory.mktemp(pre)
        file = write(folder / "a.gguf", config, random_tensors(config), pre=pre)
        gguf_io.convert(file, folder / "model")
        found[pre] = AutoTokenizer.from_pretrained(folder / "model")
    return found


@pytest.mark.slow
@pytest.mark.parametrize("pre", gguf_tokenizer.PRE_TOKENIZERS)
def test_ids_are_those_of_plain_bpe_and_decode_to_the_text(tokenizers, pre):
    @given(TEXTS)
    def check(text):
        ids = tokenizers[pre].encode(text, add_special_tokens=False)
        assert ids == expected(text, pre)
        kept = unicodedata.normalize("NFC", text) if pre == "qwen2" else text
        assert tokenizers[pre].decode(ids) == kept

    check()


def test_the_pre_tokenizers_differ():
    """The comparison above would not see one taken for another if they split alike."""
    for text, kinds in (("WE'LL say.\n", 2), ("1234", 2), ("It's 1234 WE'LL\n\nsay.\n", 3)):
        assert len({tuple(expected(text, pre)) for pre in gguf_tokenizer.PRE_TOKENIZERS}) == kinds
    assert [len(expected("1234", pre)) for pre in ("smollm", "qwen2", "llama-bpe")] == [4, 4, 2]
    assert words(text, "smollm")[:5] == ["It", "'s", " ", "1", "2"]
    assert "234" not in words(text, "qwen2") and "123" in words(text, "llama-bpe")


def test_the_published_regular_expressions():
    assert TikTokenConverter().pattern == LLAMA3
    from transformers.models.qwen2 import tokenization_qwen2

    assert tokenization_qwen2.PRETOKENIZE_REGEX == QWEN


@pytest.mark.parametrize("pre", gguf_tokenizer.PRE_TOKENIZERS)
def test_control_tokens_are_special_and_user_defined_ones_are_added(tokenizers, pre):
    tokenizer = tokenizers[pre]
    text = "<|im_start|>user\n<tool_call>rain<repo_name><|im_end|>"
    ids = tokenizer.encode(text, add_special_tokens=False)
    inner = expected("user\n", pre), expected("rain", pre)
    assert ids == [1, *inner[0], IDS["<tool_call>"], *inner[1], IDS["<repo_name>"], 2]
    assert tokenizer.decode(ids) == text
    assert tokenizer.decode(ids, skip_special_tokens=True) == "user\n<tool_call>rain"
    assert (tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.pad_token_id) == (1, 2, 0)
    assert tokenizer.unk_token is None
    assert tokenizer.model_max_length == 16384
    assert "[PAD0]" not in tokenizer.get_vocab() and TYPES[IDS["[PAD0]"]] == gguf_tokenizer.UNUSED
    chat = tokenizer.apply_chat_template([{"role": "user", "content": "rain"}], tokenize=False)
    assert tokenizer.chat_template == TEMPLATE and chat == "<|im_start|>user\nrain<|im_end|>\n"


@pytest.mark.parametrize(
    "pre, more, begins",
    [
        ("smollm", {}, False),
        ("smollm", {"tokenizer.ggml.add_bos_token": True}, True),
        ("llama-bpe", {}, True),
        ("llama-bpe", {"tokenizer.ggml.add_bos_token": False}, False),
        ("qwen2", {}, False),
    ],
)
def test_texts_begin_with_bos_where_the_file_says_so(tmp_path, pre, more, begins):
    config = config_of("llama")
    file = write(tmp_path / "a.gguf", config, random_tensors(config), pre=pre, more=more)
    gguf_io.convert(file, tmp_path / "model")
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "model")
    assert tokenizer.encode("rain") == [1] * begins + expected("rain", pre)
    assert tokenizer.encode("rain", add_special_tokens=False) == expected("rain", pre)


def test_generation_ends_at_the_end_of_a_turn_too(tmp_path):
    config = config_of("llama")
    for name, more, eos in (("a", {}, 2), ("b", {"tokenizer.ggml.eot_token_id": 0}, [2, 0])):
        file = write(tmp_path / f"{name}.gguf", config, random_tensors(config), more=more)
        gguf_io.convert(file, tmp_path / name)
        written = json.loads((tmp_path / name / "generation_config.json").read_text())
        assert written == {"bos_token_id": 1, "eos_token_id": eos, "pad_token_id": 0}


def metadata(**changes) -> dict:
    values = {
        "model": "gpt2",
        "pre": "smollm",
        "tokens": TOKENS,
        "merges": MERGES,
        "token_type": TYPES,
    } | changes
    return {f"tokenizer.ggml.{name}": value for name, value in values.items()}


@pytest.mark.parametrize(
    "changes, why",
    [
        ({"merges": ["a b c d"]}, "tokens and merges make no BPE"),
        ({"merges": [*MERGES, "雨 雨"]}, "tokens and merges make no BPE"),
        ({"token_type": TYPES[1:]}, "do not fit"),
        ({"pre": "llama-bpe"}, "asks for a bos token at the beginning and names none"),
    ],
)
def test_parts_that_do_not_fit_are_told(changes, why):
    with pytest.raises(ValueError, match=why):
        gguf_tokenizer.build(metadata(**changes), 64)


def test_a_token_that_no_merge_makes():
    """Llama 3 keeps such a word whole; the others spell it."""
    tokens, types = [*TOKENS, "zqzq"], [*TYPES, 1]
    build = lambda **changes: gguf_tokenizer.build(metadata(tokens=tokens, token_type=types, **changes), 64)
    assert len(build(pre="smollm").encode("zqzq")) == 4
    assert build(pre="llama-bpe", bos_token_id=1).encode("zqzq") == [1, len(TOKENS)]
