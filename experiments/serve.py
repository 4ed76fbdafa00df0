"""Serves a model folder with SGLang on this machine until Ctrl-C.

    python experiments/serve.py --model=models/tiny_qwen3
    python experiments/serve.py --model=PATH_TO/Qwen3-4B --dtype=bfloat16 -- --tp-size=2

Arguments after -- go to sglang.launch_server unchanged.

With a GPU, `pip install sglang` here, or name another interpreter by --python. Without a GPU, in a checkout
`make sglang-cpu` builds the environment and runs the first of these commands.
"""

import sys

from absl import app, flags

from coevolve_jax import shipped
from coevolve_jax.config import parse_flags

_MODEL = flags.DEFINE_string("model", "models/tiny_qwen3", "Hugging Face model folder.")
_PYTHON = flags.DEFINE_string(
    "python", None, "Interpreter with sglang; by default this one, or .sglang/bin/python."
)
_DEVICE = flags.DEFINE_enum(
    "device", None, ("cpu", "auto"), "Default: cpu with .sglang/bin/python, else auto."
)
_DTYPE = flags.DEFINE_enum(
    "dtype", "float32", ("float32", "bfloat16", "float16", "auto"), "Type of weights and KV cache."
)
_LENGTH = flags.DEFINE_integer("context_length", 2048, "Tokens of prompt and answer.", lower_bound=2)
_RUNNING = flags.DEFINE_integer("max_running_requests", 64, "Requests at once.", lower_bound=1)
_VERSION = flags.DEFINE_string("weight_version", "launched", "The server's name for these weights.")
_SEED = flags.DEFINE_integer("seed", 0, "Seed of the sampling.", lower_bound=0)
_HOST = flags.DEFINE_string(
    "host", "127.0.0.1", "0.0.0.0 admits all machines; they may also change the weights."
)
_PORT = flags.DEFINE_integer("port", 0, "0 takes a free one.", lower_bound=0, upper_bound=65535)
_WORDS = flags.DEFINE_bool(
    "words", False, "Also serve the OpenAI protocol, which explorer=llm needs; rollouts do not need it."
)
_LOG = flags.DEFINE_string("log", None, "File for the server's output, appended.")
_DEADLINE = flags.DEFINE_float(
    "deadline", 600.0, "Seconds within which the server must start.", lower_bound=1.0
)


def main(argv) -> None:
    from coevolve_jax.rollout.sglang.server import Server  # here, so that --help does not wait for it

    server = None
    try:
        server = Server(
            _MODEL.value,
            version=_VERSION.value,
            python=_PYTHON.value,
            device=_DEVICE.value,
            dtype=_DTYPE.value,
            context_length=_LENGTH.value,
            max_running_requests=_RUNNING.value,
            seed=_SEED.value,
            host=_HOST.value,
            port=_PORT.value,
            words=_WORDS.value,
            log_path=_LOG.value,
            arguments=argv[1:],
            deadline=_DEADLINE.value,
        )
        print(f"SGLang loads {_MODEL.value} (log: {server.log_path}) ...", flush=True)
        server.wait_until_ready()
        print(
            f"{server.url} serves {_MODEL.value}. Ctrl-C stops it. Train on it from another shell:\n"
            f"    {shipped.command('train')} --config=configs/bfcl_tiny.py:engine=sglang --workdir=DIR "
            f"--config.engine.url={server.url}",
            flush=True,
        )
        server.wait()
        sys.exit(f"Error: {server.failure('ended')}")
    except KeyboardInterrupt:
        print("\nStopped.")
    except OSError as error:
        sys.exit(f"Error: {error.filename} cannot be written ({error.strerror}): choose another --log.")
    except (ValueError, RuntimeError) as error:
        sys.exit(f"Error: {error}")
    finally:
        if server is not None:
            server.stop()


if __name__ == "__main__":
    app.run(main, flags_parser=parse_flags)
