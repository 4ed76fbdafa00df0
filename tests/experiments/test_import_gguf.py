"""The programs that write a GGUF file as a model folder and that ask a model."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from coevolve_jax.llm.prompting import visible
from coevolve_jax.models import hf_io
from coevolve_jax.models.decoder import Decoder
from coevolve_jax.rollout.chat import Chat, load_tokenizer
from tests.support import forked
from tests.support.gguf_files import config_of, random_tensors, write
from tests.support.paths import ROOT

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def file(tmp_path_factory):
    config = config_of("llama")
    return write(tmp_path_factory.mktemp("gguf") / "a.gguf", config, random_tensors(config), "Q8_0")


def start(program, environ, *arguments):
    return forked.run([ROOT / "experiments" / f"{program}.py", *map(str, arguments)], environ)


def test_a_file_is_converted_and_the_model_answers_as_greedy_decoding_does(file, environ, tmp_path):
    done = start("import_gguf", environ, file, tmp_path / "model")
    assert done.returncode == 0, done.stderr[-3000:]
    told = done.stdout.splitlines()
    assert told[0] == f"{tmp_path / 'model'}: llama, 2 layers, {count(tmp_path / 'model'):,} parameters"
    assert told[1] == f"tensors in {file}: 16 Q8_0, 5 F32"
    assert re.fullmatch(r"\d MB of float32 in \d+ s", told[2])

    questions = ("Does it rain?", "How many times?")
    done = start("ask", environ, f"--model={tmp_path / 'model'}", "--max_new_tokens=6", *questions)
    assert done.returncode == 0, done.stderr[-3000:]
    parts = re.findall(
        r"\n> (.*)\n((?:.|\n)*?)\n\[(\d+) tokens in \d+\.\d s, \d+ a second(.*)\]\n", done.stdout
    )
    assert [question for question, *_ in parts] == list(questions)
    for question, answer, number, cut in parts:
        text, ids, stopped = greedy(tmp_path / "model", question, 6)
        assert int(number) == ids  # a terminal gets what it can print
        assert answer == visible(text).expandtabs()
        assert cut == ("" if stopped else "; cut, see --max_new_tokens")


def count(folder) -> int:
    return sum(leaf.size for leaf in jax.tree.leaves(hf_io.load(folder)[1]))


def greedy(folder, question: str, most: int) -> tuple[str, int, bool]:
    """Returns the text, the number of tokens, and whether the answer ended, without any cache."""
    config, params = hf_io.load(folder)
    chat, apply = Chat(load_tokenizer(folder)), jax.jit(Decoder(config).apply)
    ids = chat.prompt((), question)
    begins = len(ids)
    while len(ids) < begins + most and (len(ids) == begins or ids[-1] not in chat.stop_ids):
        row = np.zeros((1, 128), np.int32)
        row[0, : len(ids)] = ids
        ids.append(int(jnp.argmax(apply({"params": params}, row)[0, len(ids) - 1])))
    stopped = ids[-1] in chat.stop_ids
    return chat.decode(ids[begins : -1 if stopped else None]), len(ids) - begins, stopped


def test_what_is_wrong_is_told_in_one_sentence(file, environ, tmp_path):
    (tmp_path / "bad.gguf").write_bytes(file.read_bytes()[:999])
    for program, arguments, why in (
        ("import_gguf", [file], "name a GGUF file and a new folder"),
        ("import_gguf", [file, tmp_path], "is already there: name a new folder"),
        ("import_gguf", [tmp_path / "bad.gguf", tmp_path / "new"], "bad.gguf is no whole GGUF file"),
        ("ask", [f"--model={tmp_path}"], "name at least one question"),
        ("ask", [f"--model={tmp_path}", "Hello?"], "is not a Hugging Face model folder"),
        ("ask", ["--model=models/tiny_qwen3", "--max_new_tokens=99999", "Hello?"], "lower --max_new_tokens"),
    ):
        done = start(program, environ, *arguments)
        assert done.returncode == 1 and done.stderr.startswith("Error: "), done.stderr[-2000:]
        assert why in done.stderr and done.stderr.count("\n") == 1
