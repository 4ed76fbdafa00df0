"""Starts sglang-jax's HTTP server with weight updates: its own options, and two of ours.

    python -m tpu_scripts.sglang_jax_server --model-path=FOLDER --host=0.0.0.0 --port=30000 --tp-size=4

Run it in sglang-jax's own environment (Python 3.12) from the root of this repository. The engine always runs
in this process and without a tokenizer. No other file touches sglang-jax. A version that is built differently
gives an error with the name that is missing.

This file has not run against sglang-jax itself. docs/notes/tpu.md names the source that it was written
against.
"""

from __future__ import annotations

import argparse
import importlib
import os
import sys
from typing import Any

from tpu_scripts.served_weights import ServedWeights
from tpu_scripts.shim import Shim

ALWAYS = ("enable_single_process", "skip_tokenizer_init")  # keep the scheduler in reach; raw output_ids

PLAIN = (str, int, float, bool, type(None))


class SglangJax:
    """sglang-jax's model runner, reached through the scheduler; the `Runner` of served_weights.py."""

    def __init__(self, scheduler_info: dict[str, Any]):
        """scheduler_info: the result of sglang-jax's launcher. Raises RuntimeError with the name that is
        missing."""
        if not isinstance(scheduler_info, dict) or "scheduler" not in scheduler_info:
            raise RuntimeError(
                "sglang-jax's launcher gave no scheduler_info['scheduler']: its engine is not "
                "in this process; serve on one host, with --nnodes=1 and --dp-size=1."
            )
        worker = _attribute(scheduler_info["scheduler"], "tp_worker")
        worker = getattr(worker, "worker", worker)  # the overlapping worker wraps the plain one
        self._runner = _attribute(worker, "model_runner")
        leaves, paths = self.leaves, self.paths()
        if len(leaves) != len(paths):
            raise RuntimeError(f"sglang-jax serves {len(leaves)} leaves of a model that has {len(paths)}.")

    @property
    def leaves(self) -> list[Any]:
        return _attribute(self._runner, "model_state_leaves")

    @leaves.setter
    def leaves(self, leaves: list[Any]) -> None:
        self._runner.model_state_leaves = leaves

    def paths(self) -> list[str]:
        """The paths in the order of the leaves, which is that of the model's state as nnx splits it."""
        import jax
        from flax import nnx

        state = nnx.split(_attribute(self._runner, "model"))[1]
        names = (
            jax.tree_util.keystr(path, simple=True, separator=".")
            for path, _ in jax.tree_util.tree_leaves_with_path(state)
        )
        return [name.removesuffix(".value") for name in names]


def install(http_server: Any, version: str, drain: float) -> None:
    """Wraps the app of sglang-jax's http_server module in the shim and takes hold of the scheduler.

    The module drops the scheduler after the launch, so its launcher is wrapped too. Raises RuntimeError with
    the name that is missing.
    """
    launch, app = _attribute(http_server, "_launch_subprocesses_or_threads"), _attribute(http_server, "app")
    weights, options = [], {}

    def launch_and_keep(*args, **kwargs):
        result = launch(*args, **kwargs)
        server_args = kwargs["server_args"] if "server_args" in kwargs else args[0]
        options.update((k, v) for k, v in vars(server_args).items() if isinstance(v, PLAIN))
        weights.append(ServedWeights(SglangJax(result[2]), _attribute(server_args, "model_path"), version))
        return result

    http_server._launch_subprocesses_or_threads = launch_and_keep
    _attribute(app, "add_middleware")(Shim, weights=lambda: weights[0], options=lambda: options, drain=drain)


def main(argv: list[str]) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__.splitlines()[0],
        allow_abbrev=False,
        epilog="Every other option goes to sglang-jax: python -m sgl_jax.launch_server --help lists them.",
    )
    parser.add_argument("--weight-version", default="default", help="of the weights that it starts with")
    parser.add_argument(
        "--drain-seconds", type=float, default=500, help="that an update waits for running requests"
    )
    ours, theirs = parser.parse_known_args(argv)
    try:
        server_args = parse_server_args(_module("sgl_jax.srt.server_args"), theirs)
        http_server = _module("sgl_jax.srt.entrypoints.http_server")
        install(http_server, ours.weight_version, ours.drain_seconds)
        _attribute(http_server, "launch")(server_args)
    except (RuntimeError, ValueError) as error:
        sys.exit(f"Error: {error}")
    finally:
        stop = getattr(sys.modules.get("sgl_jax.srt.utils"), "kill_process_tree", None)
        if stop:  # as its own launcher does; else its threads keep the process alive
            stop(os.getpid(), include_parent=False)


def parse_server_args(module: Any, argv: list[str]) -> Any:
    """Parses sglang-jax's options with its own parser, and sets the two that are always set."""
    kind = _attribute(module, "ServerArgs")
    if hasattr(kind, "from_cli"):  # reads sys.argv
        sys.argv = [sys.argv[0], *argv]
        server_args = kind.from_cli()
    else:  # before the middle of 2026
        server_args = _attribute(module, "prepare_server_args")(argv)
    for name in ALWAYS:
        _attribute(server_args, name)  # fails if absent; assignment would add a name that nobody reads
        setattr(server_args, name, True)
    return server_args


def _module(name: str) -> Any:
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise RuntimeError(
            f"{name} cannot be imported ({error}); run this in the environment that "
            "`tpu_scripts/vm.sh setup-server` makes."
        ) from error


def _attribute(owner: Any, name: str) -> Any:
    try:
        return getattr(owner, name)
    except AttributeError:
        kind = getattr(owner, "__name__", type(owner).__name__)
        raise RuntimeError(
            f"This version of sglang-jax has no {kind}.{name}, which weight updates need; use "
            "the commits named in docs/notes/tpu.md or adapt tpu_scripts/sglang_jax_server.py."
        ) from None


if __name__ == "__main__":
    main(sys.argv[1:])
