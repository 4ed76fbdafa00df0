"""Writes a GGUF file, llama.cpp's format, as a Hugging Face folder that can be trained and served.

    python experiments/import_gguf.py SmolLM2-135M-Instruct.Q4_1.gguf models/smollm2-135m-instruct

The architectures llama, qwen2 and qwen3 are read, with any quantisation that the package gguf knows. The
folder holds weights, config, tokenizer and chat template. Quantised weights are only near the original ones:
take the original checkpoint where you can.
"""

import os
import sys
import time

os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
os.environ.setdefault("JAX_PLATFORMS", "cpu")  # nothing here needs an accelerator

from absl import app, flags
from tqdm import tqdm

from coevolve_jax import shipped
from coevolve_jax.config import command_line

_DTYPE = flags.DEFINE_enum(
    "dtype",
    "float32",
    ["float32", "bfloat16"],
    "Type of the weights in the folder: float32 holds the file's values exactly, bfloat16 rounds them and "
    "takes half the space.",
)


def main(argv) -> None:
    if len(argv) != 3:
        start = shipped.command("import-gguf")
        sys.exit(f"Error: name a GGUF file and a new folder: {start} FILE.gguf FOLDER; see --help.")
    with command_line.exits(OSError):
        run(*argv[1:])


def run(file: str, folder: str) -> None:
    from coevolve_jax.models import gguf_io, hf_io

    start = time.monotonic()
    bar = lambda names: tqdm(names, unit="tensor", disable=None)
    done = gguf_io.convert(file, folder, _DTYPE.value, bar)
    config = done.config
    entries = hf_io.entries_of(config, hf_io.abstract_params(config))
    parameters = sum(entry.leaf.size for entry in entries)
    kinds = ", ".join(f"{count} {kind}" for kind, count in done.types.most_common())
    print(f"{folder}: {config.model_type}, {config.num_hidden_layers} layers, {parameters:,} parameters")
    print(f"tensors in {file}: {kinds}")
    print(f"{done.bytes / 1e6:,.0f} MB of {_DTYPE.value} in {time.monotonic() - start:.0f} s")


if __name__ == "__main__":
    app.run(main, flags_parser=command_line.parse_flags)
