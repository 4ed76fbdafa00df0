"""A proxy on loopback before a real server, which adds the faults of networks and servers."""

import asyncio
import json

import aiohttp
from aiohttp import web

from coevolve_jax import event_loop


class Proxy:
    """Forwards everything to `target`, with faults. A context manager; `url` is where it listens.

    faults: what it does to the next /generate requests: "reset", "500", "truncate", "hang", "abort",
    "garbage" or "pass". always: what it does to every request of any kind, "" for nothing. always_at: the
    same for a path. seen: bodies of the /generate requests. aborted: ids that it was told to abort. posted:
    paths of all POSTs. pretended: by path, what answers say instead of the target's word.
    """

    def __init__(self, target: str):
        self._target = target
        self.faults: list[str] = []
        self.always = ""
        self.always_at: dict[str, str] = {}
        self.seen: list[dict] = []
        self.aborted: list[str] = []
        self.posted: list[str] = []
        self.pretended: dict[str, dict] = {}

    def __enter__(self):
        event_loop.run(self._start())
        return self

    def __exit__(self, *exc):
        event_loop.run(self._stop())

    async def _start(self):
        self._http = aiohttp.ClientSession()
        app = web.Application(client_max_size=2**26)
        app.router.add_route("*", "/{path:.*}", self._handle)
        self._runner = web.AppRunner(app, access_log=None, shutdown_timeout=0.1)
        await self._runner.setup()
        site = web.TCPSite(self._runner, "127.0.0.1", 0)
        await site.start()
        self.url = f"http://127.0.0.1:{self._runner.addresses[0][1]}"

    async def _stop(self):
        await self._http.close()
        await self._runner.cleanup()

    async def _handle(self, request):
        body = await request.read()
        fault = self.always or self.always_at.get(request.path, "")
        self.posted += [request.path] if request.method == "POST" else []
        if request.path == "/abort_request":
            self.aborted.append(json.loads(body).get("rid"))
        if request.path == "/generate":
            self.seen.append(json.loads(body))
            fault = fault or (self.faults.pop(0) if self.faults else "")
        if fault == "reset":
            request.transport.abort()
            return web.Response()
        if fault == "500":
            return web.json_response({"error": {"message": "CUDA out of memory"}}, status=500)
        if fault == "hang":
            await asyncio.sleep(3600)
        headers = {"Content-Type": "application/json"}
        url = self._target + request.path_qs
        async with self._http.request(request.method, url, data=body, headers=headers) as answer:
            content, status = await answer.read(), answer.status
        if request.path in self.pretended:
            content = json.dumps(json.loads(content) | self.pretended[request.path]).encode()
        if fault == "garbage":
            return web.json_response({"output_ids": ["a"], "meta_info": {}})
        if fault == "abort":
            return web.json_response(aborted(json.loads(content)))
        if fault == "truncate":
            cut = web.StreamResponse(headers={"Content-Length": str(len(content))})
            await cut.prepare(request)
            await cut.write(content[: len(content) // 2])
            request.transport.abort()
            return cut
        return web.Response(body=content, status=status, content_type="application/json")


def aborted(answer: dict) -> dict:
    """The same answer, aborted after its first half, like a server that runs out of memory."""
    half = len(answer["output_ids"]) // 2
    meta = answer["meta_info"]
    meta["output_token_logprobs"] = meta["output_token_logprobs"][:half]
    meta["weight_versions"] = [{**meta["weight_versions"][0], "end": half}]
    meta["finish_reason"] = {"type": "abort", "message": "out of memory"}
    return {**answer, "output_ids": answer["output_ids"][:half]}
