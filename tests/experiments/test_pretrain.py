"""The script that makes the tiny policies, shrunk: real demonstrations, a few steps, a folder."""

import json
import subprocess
import sys

import jax
import numpy as np
import pytest
from transformers import AutoTokenizer

from tests.support.paths import ROOT

sys.path.insert(0, str(ROOT / "experiments" / "pretraining"))

from tiny_tokenizer import MARKUP, carried_over, make_tokenizer

from coevolve_jax.models import hf_io

pytestmark = pytest.mark.slow


@pytest.mark.nightly
def test_it_goes_on_from_a_folder_and_writes_one(tmp_path, quick):
    start, output = ROOT / "models" / "tiny_qwen3", tmp_path / "made"
    flags = [f"--output={output}", f"--start={start}", "--steps=3", "--tasks=16", "--tokens=2048"]
    flags.append("--hints=0.5")
    flags.append("--weak_tools=cp:sibling_tool:0.5 sort:skip:0.25")
    done = subprocess.run(
        [sys.executable, "experiments/pretraining/pretrain_tiny.py", *flags],
        cwd=ROOT,
        env=quick,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert json.loads((output / "weak_tools.json").read_text()) == {
        "cp": {"error": "sibling_tool", "rate": 0.5},
        "sort": {"error": "skip", "rate": 0.25},
    }
    config, params = hf_io.load(output)
    before_config, before = hf_io.load(start)
    assert (
        config == before_config
        and (output / "tokenizer.json").read_bytes() == (start / "tokenizer.json").read_bytes()
    )
    moved = jax.tree.leaves(jax.tree.map(lambda a, b: float(np.abs(a - b).max()), params, before))
    assert (
        np.isfinite(moved).all() and max(moved) > 0
    )  # not all: the rate rises slowly, and files hold half precision


def test_another_tokenizer_takes_over_what_the_first_one_knew():
    text = "toggle_airplane_mode\ncheck_wifi_status\nTake my SIM card out \u2708, then check my Wi-Fi."
    old, new = AutoTokenizer.from_pretrained(ROOT / "models" / "tiny_qwen3"), make_tokenizer([text] * 3)
    table = np.random.default_rng(0).normal(size=(len(old), 8)).astype(np.float32)
    rows = carried_over(table, old, new)
    assert rows.shape == table.shape and np.array_equal(carried_over(table, old, old), table)
    row = lambda tokenizer, token: tokenizer.convert_tokens_to_ids(token)
    for token in (*MARKUP, "<|im_end|>", "a", "."):
        assert np.array_equal(rows[row(new, token)], table[row(old, token)])
    name = "toggle_airplane_mode"  # one token now, several before
    spelt = old.encode(name, add_special_tokens=False)
    assert new.encode(name, add_special_tokens=False) == [row(new, name)] and len(spelt) > 1
    assert np.allclose(rows[row(new, name)], table[spelt].mean(axis=0))
