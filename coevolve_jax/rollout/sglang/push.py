"""Pushes new weights to SGLang servers: checks before, verifies after, and keeps the old ones on failure.

A server dies of a tensor of another shape or a truncated file, and reports success when a tensor is missing.
So weights that do not fit the served model are never posted. Afterwards the server's checksum is compared
with that of the weights sent. Running requests are set back to their tokens (`retract`): keys and values of
old weights must not be used again. They continue with the new weights.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import functools
import json
import os
import re
import time
import uuid
from collections.abc import AsyncIterator, Mapping
from pathlib import Path
from typing import Any

import aiohttp
import numpy as np
from absl import logging

from coevolve_jax.models.decoder import ModelConfig
from coevolve_jax.rollout.engine import EngineError
from coevolve_jax.rollout.sglang import checksum as checksums
from coevolve_jax.rollout.sglang import weights as weights_lib
from coevolve_jax.rollout.sglang.weights import FolderWeights, Tensor, Weights

TRANSPORTS = ("disk", "distributed")
CONTROL_TIMEOUT = 60.0  # seconds for an answer to a small question
LABEL = re.compile("(?P<version>[0-9]{1,9})-(?P<mark>[0-9a-f]{8})")
LAYOUT = ("device", "dtype", "quantization", "tp_size", "pp_size", "dp_size", "ep_size", "version")


async def call(
    session: aiohttp.ClientSession,
    url: str,
    method: str,
    path: str,
    body: Mapping | None = None,
    timeout: float | None = None,
) -> dict:
    """Returns the JSON object that the server at `url` answers. timeout: seconds; None is CONTROL_TIMEOUT.

    Raises EngineError, in one sentence, where there is no answer or it is a failure.
    """
    timeout = CONTROL_TIMEOUT if timeout is None else timeout
    try:
        limit = aiohttp.ClientTimeout(total=timeout)
        # Minutes may pass until the next call. On a kept connection it could meet the server's idle close,
        # and fail.
        alone = {"Connection": "close"}
        async with session.request(method, url + path, json=body, timeout=limit, headers=alone) as response:
            text, status = await response.text(), response.status
    except TimeoutError as error:
        raise EngineError(f"The SGLang server at {url} left {path} unanswered for {timeout:g} s.") from error
    except (aiohttp.ClientError, OSError, UnicodeDecodeError) as error:
        raise EngineError(
            f"The SGLang server at {url} cannot be reached for {path} "
            f"({type(error).__name__}: {error}); is it up?"
        ) from error
    try:
        answer = json.loads(text)
    except ValueError:
        answer = None
    if status != 200 or not isinstance(answer, dict) or not answer.get("success", True):
        message = answer.get("message", text) if isinstance(answer, dict) else text
        message = str(message)[:500]
        raise EngineError(f"The SGLang server at {url} answered {path} with status {status}: {message!r}.")
    return answer


async def checksum(session: aiohttp.ClientSession, url: str) -> str:
    """Returns the checksum of the server's weights. It is equal for servers of equal layout and weights."""
    return (await _checker(session, url))[0]


@dataclasses.dataclass(frozen=True)
class Server:
    """The pusher's record of one server.

    tensors: of the served model, in the dtype of the computation. device: "cpu" or "cuda" and the like.
    layout: servers of equal layout store equal weights equally. ranks: processes that share the weights.
    exact: whether its checksums can be computed here.
    folder: the source of its weights, None for a broadcast. version: its label for them. checksum: of them.
    content: identifies the pushed weights, None before a push.
    """

    tensors: Mapping[str, Tensor]
    device: str
    layout: tuple
    ranks: int
    exact: bool
    folder: str | None
    version: str
    checksum: str
    content: str | None = None


class Pusher:
    """Brings one run's weights to its servers.

    config: the policy's architecture.
    model: its Hugging Face folder. It stands for the served model where the server's folder is not readable.
    dtype: of the weights sent; the servers compute in it.
    transport: "disk" writes a folder that the servers load. "distributed" broadcasts, and needs torch.
    root: the folder for versions, which the servers see as well; None is a temporary one on this machine.
    exact: False for servers with a weight layout of their own (packed for AMX, some kernels for experts).
      Their checksums only show that weights change.
    timeout: seconds that a server may take to load the weights.
    ahead: hash the weights before the server pauses, not while it loads them. The pause is shorter, but the
      server has the weights later.
    """

    def __init__(
        self,
        config: ModelConfig,
        model: str | os.PathLike,
        *,
        dtype: str = "float32",
        transport: str = "disk",
        root: str | os.PathLike | None = None,
        exact: bool = True,
        timeout: float = 600.0,
        ahead: bool = False,
    ):
        if transport not in TRANSPORTS:
            raise ValueError(f"Transport {transport!r} of weights is unknown: choose one of {TRANSPORTS}.")
        if transport == "distributed":
            from coevolve_jax.rollout.sglang import broadcast

            self._join = broadcast.Group.join
        self._config, self._model, self._dtype = config, Path(model), dtype
        self._transport, self._exact, self._timeout = transport, exact, timeout
        self._folders, self._ahead = weights_lib.Folders(root), ahead
        self._servers: dict[str, Server] = {}
        self._mark = uuid.uuid4().hex[:8]  # tells its labels from those of other pushers
        self.paused_seconds = 0.0  # sum over servers of the pauses for weights that they took
        self._groups: dict[str, Any] = {}
        self._seen: dict[tuple, str] = {}  # (weights, layout) -> checksum
        self._hashed: Weights | None = None
        self._expected: dict[str, asyncio.Task] = {}  # device of servers -> checksums of `_hashed`

    def write(self, params: Any, version: int) -> Weights:
        """Prepares `params` for a push as `version`.

        With transport "distributed" the result is a view on `params`, valid until they are donated.
        """
        if self._transport == "disk":
            return self._folders.write(self._config, params, version, self._dtype)
        return weights_lib.from_params(self._config, params, version, self._dtype)

    async def push(self, session: aiohttp.ClientSession, url: str, weights: Weights) -> str:
        """Makes the server at `url` serve `weights` under their `label`. Returns its checksum.

        Callers may update several servers at once. Raises ValueError, with nothing sent, where the weights do
        not fit the served model or cannot be read. Raises EngineError where the server did not take them; the
        message says whether it still serves the old weights.
        """
        server = await self._describe(session, url)
        tensors = weights.tensors()
        faults = weights_lib.differences(tensors, server.tensors)
        if faults:
            raise ValueError(
                f"Version {weights.version} is not the model that {url} serves: {'; '.join(faults)}. "
                "Nothing was sent; launch the server with this run's model and engine.dtype."
            )
        expected = self._expect(server, weights, tensors)
        if self._ahead:
            await asyncio.shield(expected)
        del self._servers[url]  # its weights are unknown until they are verified
        start = time.perf_counter()
        async with _paused(session, url):
            try:
                await self._send(session, url, server, weights)
                server = await self._verify(session, url, server, weights, await asyncio.shield(expected))
            except Exception as error:
                await self._leave(session, url)
                kept = await self._restore(session, url, server)
                if not kept:  # its weights are unknown: they must sample nothing
                    with contextlib.suppress(EngineError):
                        await call(session, url, "POST", "/abort_request", {"abort_all": True})
                state = f"still serves version {server.version}" if kept else "lost the old one: restart it"
                raise EngineError(
                    f"{url} did not take version {weights.version} and {state}. {error}"
                ) from error
        self.paused_seconds += time.perf_counter() - start
        self._servers[url] = server
        return server.checksum

    def holds(self, url: str, weights: Weights) -> bool:
        """Says whether this pusher's last verified push to the server at `url` was `weights`."""
        known = self._servers.get(url)
        return known is not None and known.content is not None and known.version == self.label(weights)

    def label(self, weights: Weights) -> str:
        """Returns the servers' label for `weights`: their version and the mark of this pusher."""
        return f"{weights.version}-{self._mark}"

    def version_of(self, url: str, label: str) -> int:
        """Returns the version under a label of this pusher, at the server at `url`.

        Raises EngineError for the label of another pusher. Raises ValueError for any other: a server that was
        started anew has a label of its own.
        """
        found = LABEL.fullmatch(label)
        if found is None:
            raise ValueError(f"no push gave the label {label!r}")
        if found["mark"] != self._mark:
            raise EngineError(
                f"Another program pushed its own weights to the SGLang server at {url}, as {label!r}: give "
                "each run its own servers (config.engine.url)."
            )
        return int(found["version"])

    async def close(self, session: aiohttp.ClientSession) -> None:
        """Leaves the groups and deletes the temporary folder."""
        for url in list(self._groups):
            await self._leave(session, url)
        self._folders.close()

    async def _describe(self, session: aiohttp.ClientSession, url: str) -> Server:
        """Returns a server's record. Asks the server where its label shows a restart or others' weights."""
        info = await call(session, url, "GET", "/model_info")
        known = self._servers.get(url)
        if known is None or known.version != info.get("weight_version"):
            await self._leave(session, url)
            args = await call(session, url, "GET", "/server_info")
            copies = [name for name in ("dp_size", "pp_size") if int(args.get(name) or 1) > 1]
            if self._transport == "distributed" and copies:
                raise ValueError(
                    f"Weights cannot be broadcast to {url}, whose {copies[0]} is {args[copies[0]]}: set "
                    "config.engine.push to 'disk', or start it with tensor parallelism alone."
                )
            try:
                known = self._servers[url] = Server(
                    tensors=_served_tensors(args, self._model),
                    device=args["device"],
                    layout=tuple(str(args.get(key)) for key in LAYOUT),
                    ranks=int(args["tp_size"]),
                    exact=self._exact
                    and args["device"] in ("cpu", "cuda")
                    and args["quantization"] is None
                    and int(args["tp_size"]) == int(args["pp_size"]) == int(args.get("ep_size") or 1) == 1,
                    folder=info["model_path"],
                    version=info["weight_version"],
                    checksum=await checksum(session, url),
                )
            except (KeyError, TypeError) as error:
                raise EngineError(
                    f"{url} is no SGLang server of a known version: {error!r} in what it says of itself; "
                    "launch version 0.5.23."
                ) from error
            if not known.exact:
                logging.warning(
                    "%s holds its weights in a layout of its own: a push is verified only by whether its "
                    "checksum changes, and is the same on servers like it.",
                    url,
                )
        return known

    def _expect(self, server: Server, weights: Weights, tensors: Mapping[str, Tensor]) -> asyncio.Task:
        """Starts the checksums of `weights`, once for all servers of a device.

        They equal the server's own where it is exact. Otherwise they only tell versions apart.
        """
        device = server.device if server.exact else "cpu"
        if self._hashed is not weights:
            self._hashed, self._expected = weights, {}
        task = self._expected.get(device)
        if task is None or (task.done() and task.exception()):
            task = asyncio.create_task(asyncio.to_thread(_checksums, weights, tensors, device))
            self._expected[device] = task
        return task

    async def _send(self, session: aiohttp.ClientSession, url: str, server: Server, weights: Weights) -> None:
        post = functools.partial(call, session, url, "POST", timeout=self._timeout)
        if weights.folder is not None:
            await post("/update_weights_from_disk", _update(weights.folder, self.label(weights)))
            return
        if url not in self._groups:
            self._groups[url] = await self._join(post, url, server.ranks, server.device, CONTROL_TIMEOUT)
        await self._groups[url].send(post, weights, self.label(weights))

    async def _verify(
        self,
        session: aiohttp.ClientSession,
        url: str,
        server: Server,
        weights: Weights,
        expected: Mapping[str, str],
    ) -> Server:
        """Returns the server's record with its new weights. EngineError where they are not those sent."""
        total, ranks = await _checker(session, url)
        content = str(sorted(expected.items()))
        if server.exact:
            names = expected.keys() | {name for rank in ranks for name in rank}  # parameters not sent too
            wrong = [name for name in names if any(rank.get(name) != expected.get(name) for rank in ranks)]
            if wrong:
                raise EngineError(
                    f"{len(wrong)} of {len(names)} parameters are not what was sent, by their checksums: "
                    f"{', '.join(sorted(wrong)[: weights_lib.LISTED])}."
                )
        else:
            same = server.content == content
            if server.content is not None and same != (total == server.checksum):
                what = "changed, the weights did not" if same else "is the same, the weights changed"
                raise EngineError(f"Its checksum {what}.")
            other = self._seen.setdefault((content, server.layout), total)
            if other != total:
                raise EngineError(f"Its checksum is {total}, but {other} on a server like it.")
        folder = None if weights.folder is None else str(weights.folder)
        return dataclasses.replace(
            server, version=self.label(weights), folder=folder, checksum=total, content=content
        )

    async def _restore(self, session: aiohttp.ClientSession, url: str, server: Server) -> bool:
        """Restores the old weights where they are lost. Says whether the server serves them."""
        try:
            info = await call(session, url, "GET", "/model_info")
            kept = info.get("weight_version") == server.version
            kept = kept and await checksum(session, url) == server.checksum
            if not kept and server.folder is not None:
                body = _update(server.folder, server.version)
                await call(session, url, "POST", "/update_weights_from_disk", body, self._timeout)
                kept = await checksum(session, url) == server.checksum
        except EngineError:
            kept = False
        if kept:
            self._servers[url] = server
        return kept

    async def _leave(self, session: aiohttp.ClientSession, url: str) -> None:
        group = self._groups.pop(url, None)
        if group is not None:
            with contextlib.suppress(EngineError):  # a server that is gone has left already
                await group.close(functools.partial(call, session, url, "POST"))


@contextlib.asynccontextmanager
async def _paused(session: aiohttp.ClientSession, url: str) -> AsyncIterator[None]:
    """Pauses a server. Running requests return to its queue with their tokens, and go on in any case."""
    try:
        await call(session, url, "POST", "/pause_generation", {"mode": "retract"})
        yield
    except BaseException:
        with contextlib.suppress(EngineError):
            await call(session, url, "POST", "/continue_generation", {})
        raise
    await call(session, url, "POST", "/continue_generation", {})


def _update(folder: str | os.PathLike, version: str) -> dict:
    # Without the flush, keys and values of the old weights would be used again.
    return {"model_path": str(folder), "weight_version": version, "flush_cache": True}


async def _checker(session: aiohttp.ClientSession, url: str) -> tuple[str, list[dict[str, str]]]:
    """Returns the checksum of all weights, and the checksums of each rank by parameter."""
    answer = await call(session, url, "POST", "/weights_checker", {"action": "checksum"})
    try:
        return str(answer["per_engine_checksum"]), [dict(rank["checksums"]) for rank in answer["ranks"]]
    except (KeyError, TypeError, ValueError) as error:
        raise EngineError(
            f"The SGLang server at {url} answered /weights_checker without checksums "
            f"({error!r}); launch version 0.5.23."
        ) from error


def _checksums(weights: Weights, tensors: Mapping[str, Tensor], device: str) -> dict[str, str]:
    with weights.reader() as read:
        return checksums.checksums(tensors, lambda name: np.asarray(read(name)), device)


def _served_tensors(args: Mapping[str, Any], model: Path) -> dict[str, Tensor]:
    """Returns the tensors of the model that a server was launched with.

    `model` stands for it where its folder is not on this machine.
    """
    folder = Path(args["model_path"])
    folder = folder if (folder / "config.json").is_file() else model
    dtype = {"half": "float16", "float": "float32"}.get(args["dtype"], args["dtype"])
    if dtype == "auto":
        config = json.loads((folder / "config.json").read_text())
        dtype = config.get("dtype") or config.get("torch_dtype") or "float32"
        dtype = "float16" if dtype == "float32" else dtype  # SGLang does so
    floating = weights_lib.DTYPES.values()
    return {
        name: tensor._replace(dtype=dtype) if tensor.dtype in floating else tensor
        for name, tensor in FolderWeights(folder).tensors().items()
    }
