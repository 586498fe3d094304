"""Controls one engine over SGLang's HTTP endpoints, which the embedded engine serves as well.

These calls (pause, weights, checksum) are synchronous: the trainer issues them from threads.
Generation is in `generation`. `Pulse` checks in the background that an engine still answers.
"""

import base64
import hashlib
import json
import pickle
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from http import HTTPStatus
from typing import Any

from relax_hpc.errors import EngineError, EngineLostError
from relax_hpc.inference.http import Closing, Http, cut, parse_version
from relax_hpc.runtime.comm.orders import LOADER, Order

_TARGET_ONLY = {"selector": "target", "disable_draft_model": True}
"""Leaves a draft model unchanged: its weights are not the policy's. SGLang 0.5.23 reads the first
key, 0.5.17 the second; each ignores the other."""
_LOAD_S = 5.0
"""Time for an engine to report its number of requests."""


class EngineClient(Closing):
    """Calls one engine. Every failure is an EngineError that names URL and endpoint."""

    def __init__(
        self,
        url: str,
        token: str,
        *,
        timeout_s: float = 300,
        recompute: bool = False,
        has_prefix_cache: bool = True,
    ) -> None:
        """Connects lazily.

        Args:
            url: "http://host:port".
            timeout_s: of every call; joining a weight group waits for its peers.
            recompute: whether a pause drops the caches of requests.
            has_prefix_cache: whether it then drops a prefix cache, too.
        """
        self.url = url
        self._http = Http(url, token, timeout_s=timeout_s)
        self._load_s = min(timeout_s, _LOAD_S)
        self._session_open, self._has_sessions = False, True
        self._recompute, self._has_prefix_cache = recompute, has_prefix_cache

    def close(self) -> None:
        self._http.close()

    # State.

    def health(self, timeout_s: float) -> bool:
        """Whether the server answers within `timeout_s`. Never raises."""
        try:
            return self._http.status("GET", "/health", timeout_s=timeout_s) == HTTPStatus.OK
        except EngineLostError:
            return False

    def version(self) -> int:
        """Returns the policy version of the weights; 0 until the first update."""
        return parse_version(self._http.ask("GET", "/model_info"))

    def num_requests(self) -> int:
        path = "/v1/loads?include=core"
        reply = self._http.ask("GET", path, optional=True, timeout_s=self._load_s)
        if reply is None:  # SGLang before 0.5.1x
            path = "/server_info"
            reply = {"loads": [self._http.ask("GET", path, timeout_s=self._load_s)]}
        try:
            return sum(
                int(rank["num_running_reqs"]) + int(rank["num_waiting_reqs"])
                for rank in reply["loads"]
            )
        except (TypeError, KeyError, ValueError) as error:
            raise EngineError(
                f"{self.url}{path}: does not say how many requests there are: {cut(reply)}"
            ) from error

    def checksum(self) -> str:
        """Returns a digest of the weights.

        The embedded engine digests by Hugging Face names, as `comm.bucket.digest` does. SGLang
        digests its fused and sharded weights, so its digests compare with each other only.
        """
        reply = self._post("/weights_checker", {"action": "checksum"})
        if digest := reply.get("per_engine_checksum"):
            return str(digest)
        ranks = json.dumps(reply.get("ranks"), sort_keys=True)  # older SGLang has no overall one
        return hashlib.sha256(ranks.encode()).hexdigest()

    # Control.

    def pause(self) -> None:
        if not self._recompute:
            self._post("/pause_generation", {"mode": "in_place"})
            return
        self._post("/pause_generation", {"mode": "retract"})
        if self._has_prefix_cache:  # else they would find their own beginnings there
            self.flush_cache()

    def freeze_heap(self, timeout_s: float) -> None:
        """Lets the server's garbage collector pass over what exists by now: modules and buffers
        that live as long as it. With 1,000 requests it spends up to 40 % of its time there."""
        with suppress(EngineLostError):
            self._http.status("POST", "/freeze_gc", timeout_s=timeout_s)

    def shut(self) -> None:
        """Ends all requests, and keeps new ones until it is resumed; SGLang outside of its
        scheduler, so that it stays idle."""
        self._post("/pause_generation", {"mode": "abort"})

    def resume(self) -> None:
        self._post("/continue_generation", {})

    def abort_all(self) -> None:
        """Ends all requests; their callers get the tokens so far, finished by ABORT."""
        self._post("/abort_request", {"abort_all": True})

    def flush_cache(self) -> None:
        """Drops cached prefixes; refused while requests are running."""
        self._post("/flush_cache", {})

    def release_memory(self, tags: Sequence[str]) -> None:
        """Releases GPU memory; its contents are lost. The engine must be idle, or it may crash."""
        self._post("/release_memory_occupation", {"tags": list(tags)})

    def resume_memory(self, tags: Sequence[str]) -> None:
        """Takes released memory again; weights are garbage until updated."""
        self._post("/resume_memory_occupation", {"tags": list(tags)})

    # Weights.

    def init_weights_group(
        self, host: str, port: int, rank_offset: int, world_size: int, name: str, backend: str
    ) -> None:
        """Makes the engine join a broadcast group. Blocks until all its ranks are there."""
        self._post(
            "/init_weights_update_group",
            {
                "master_address": host,
                "master_port": port,
                "rank_offset": rank_offset,
                "world_size": world_size,
                "group_name": name,
                "backend": backend,
            },
        )

    def destroy_weights_group(self, name: str) -> None:
        self._post("/destroy_weights_update_group", {"group_name": name})

    def update_weights(
        self,
        names: Sequence[str],
        dtypes: Sequence[str],
        shapes: Sequence[Sequence[int]],
        *,
        group: str,
        version: int,
        last: bool,
    ) -> None:
        """Makes a paused engine receive one flat bucket; the sender broadcasts meanwhile.

        After an error the engine holds undefined weights until a whole update has succeeded.

        Args:
            names: Hugging Face names, in the order of their bytes.
            dtypes: "bfloat16", ...
            shapes: unsharded.
            last: whether this bucket completes the version.
        """
        body: dict[str, Any] = {
            "names": list(names),
            "dtypes": list(dtypes),
            "shapes": [list(shape) for shape in shapes],
            "group_name": group,
            "load_format": "flattened_bucket",
            # Requests keep their caches over an in-place pause; see `generation` for the others.
            "flush_cache": False,
            **_TARGET_ONLY,
        }
        if last:
            body["weight_version"] = str(version)
        self._in_session("/update_weights_from_distributed", body, last=last)

    def receive_weights(self, orders: Sequence[Order], *, version: int) -> None:
        """Makes a paused engine carry out an order; see `sglang.receive`.

        An answer does not mean success: the receipts tell.

        Args:
            orders: one per tensor-parallel rank of the engine; same task and serial.
            version: policy version of the weights; noted if the orders change them.
        """
        body: dict[str, Any] = {
            "serialized_named_tensors": [_as_tensors(order) for order in orders],
            "load_format": LOADER,
            "flush_cache": False,
            **_TARGET_ONLY,
        }
        if orders[0].task in ("receive", "check"):
            body["weight_version"] = str(version)
        self._in_session("/update_weights_from_tensor", body, last=not orders[0].begins)

    def update_weights_from_disk(self, path: str, version: int) -> None:
        """Makes a paused engine load a Hugging Face folder that it can read."""
        self._post(
            "/update_weights_from_disk",
            {
                "model_path": path,
                "weight_version": str(version),
                "flush_cache": False,
                # Not what the engine was started with, which may be a format without files.
                "load_format": "auto",
            },
        )

    def _in_session(self, endpoint: str, body: dict[str, Any], *, last: bool) -> None:
        """Posts within an update session, opened before and, with `last`, closed after."""
        if self._has_sessions and not self._session_open:
            self._session_open = self._has_sessions = self._begin_session()
        try:
            self._post(endpoint, body)
        except EngineError:
            self._session_open = False
            raise
        if last and self._session_open:
            self._session_open = False
            self._post("/end_weight_update", {})

    def _begin_session(self) -> bool:
        """Opens an update session; returns whether the server has them. Old versions do not."""
        ask = "/begin_weight_update"
        try:
            return self._http.ask("POST", ask, _TARGET_ONLY, optional=True) is not None
        except EngineError:  # a sender that died has left its session open
            self._post("/end_weight_update", {})
            self._post(ask, _TARGET_ONLY)
            return True

    def _post(self, endpoint: str, body: dict[str, Any]) -> dict[str, Any]:
        reply = self._http.ask("POST", endpoint, body)
        return reply if isinstance(reply, dict) else {}


def _as_tensors(order: Order) -> str:
    """Packs an order as SGLang packs tensors: as the name of a dummy tensor."""
    return base64.b64encode(pickle.dumps([(order.to_json(), _Blank())])).decode()


class _Blank:
    """Unpickles as a tensor."""

    def __reduce__(self) -> tuple[type, tuple[list[int]]]:
        from torch import ByteTensor

        return ByteTensor, ([0],)


class Pulse(Closing):
    """Polls the engine's scheduler: its HTTP server may live on while the scheduler hangs. Sends
    one request at a time, so that a slow engine is not flooded."""

    def __init__(self, url: str, token: str, *, every_s: float, timeout_s: float) -> None:
        """Starts polling.

        Args:
            url: "http://host:port".
            timeout_s: of one request; after it a new connection is tried.
        """
        self._http = Http(url, token, timeout_s=timeout_s)
        self._every_s, self._answered = every_s, time.monotonic()
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._ask, name=f"pulse of {url}", daemon=True)
        self._thread.start()

    @property
    def silent_s(self) -> float:
        """Returns seconds since the last answer, or since it was excused."""
        return time.monotonic() - self._answered

    def excuse(self) -> None:
        """Restarts the count of silence, if the reason for it is known."""
        self._answered = time.monotonic()

    def close(self) -> None:
        """Does not wait for a pending answer."""
        self._over.set()

    def _ask(self) -> None:
        with self._http:
            while not self._over.wait(self._every_s):
                try:
                    self._http.status("GET", "/server_info")
                except EngineLostError:
                    continue
                self._answered = time.monotonic()
