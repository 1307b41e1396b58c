"""Replicas on Ray Serve: started, scaled, called and ended. Ray Serve places them on the nodes of a
cluster, checks their health, replaces dead ones, and drains the ones that scaling removes.

With RAY_ADDRESS the replicas run on that cluster. Without it, a cluster of this machine is started,
on the loopback, without dashboard and usage reports; its processes accept only calls with a token
drawn here, because Ray runs any code that it is sent.
"""

# pyright: reportMissingImports=false

import asyncio
import logging
import os
import secrets
import socket
import sys
from collections.abc import AsyncGenerator, Mapping
from contextlib import suppress
from typing import Any

from starlette.types import Message

# Ray reads these when it is imported, so an import before this one decides by itself.
if not os.environ.get("RAY_ADDRESS") and "ray" not in sys.modules:
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    if "RAY_AUTH_MODE" not in os.environ:
        os.environ["RAY_AUTH_MODE"] = "token"
        os.environ["RAY_AUTH_TOKEN"] = secrets.token_hex(32)

import ray
from ray import serve
from ray.exceptions import RayError
from ray.serve.config import RequestRouterConfig
from ray.serve.exceptions import BackPressureError, RayServeException
from ray.serve.schema import LoggingConfig

from .gateway import ReplicaDied, ReplicasBusy
from .replica import Replica, derive_seed
from .request import ReplicaRequest

ROUTER = "onchip.server.replicas.router.PrefixRouter"
STORE_BYTES = 256 << 20  # of Ray's object store on this machine, besides the bodies of requests
MIN_QUEUED = 64  # requests that wait while others are being routed
HEALTH_CHECK_S = 1.0  # between checks; after three failures Ray Serve replaces a replica
_LOCAL = {
    "include_dashboard": False,
    "logging_level": "warning",
    "_node_ip_address": "127.0.0.1",
}
# Options of the gateway alone: replicas need no keys and no address.
_GATEWAY_ONLY = ("api_key", "api_key_file", "host", "port", "replicas")
_FAILURES = (RayError, RayServeException)


class NamedReplica(Replica):
    async def __init__(self, options: dict[str, Any]):  # pyright: ignore
        seed = derive_seed(options["seed"], self._name)
        await super().__init__({**options, "seed": seed})  # pyright: ignore

    async def report(self, method: str) -> tuple[str, Any]:
        """(name of the replica, result of a method)."""
        return self._name, await getattr(self, method)()

    @property
    def _name(self) -> str:
        return serve.get_replica_context().replica_id.unique_id


class Cluster:
    """A context manager: the replicas run inside of the block, and its value calls them.

    options: of `onchip serve`, by name. router: of Ray Serve, by its import path. name: of
    the application of Ray Serve. The host and the port of a command make it unique on a cluster,
    and a command that starts again replaces the replicas that it left.
    """

    options: Mapping[str, Any]
    router: str
    name: str

    def __init__(self, options: Mapping[str, Any], router: str = ROUTER):
        device = options["device"]
        if device is not None and ":" in device:
            raise ValueError(f"device={device!r} names one device: Ray gives each replica its own")
        self.options, self.router = options, router
        self.name = f"onchip-{socket.gethostname()}-{options['port']}"

    def __enter__(self) -> "RayReplicas":
        address = os.environ.get("RAY_ADDRESS")
        self._is_own = not address and not ray.is_initialized()
        if self._is_own:
            ray.init("local", object_store_memory=self._store_bytes(), **_LOCAL)
        elif not ray.is_initialized():
            ray.init(address, logging_level="warning")
        logging.getLogger("ray.serve").setLevel(logging.WARNING)
        serve.start(proxy_location="Disabled", logging_config=_logging())
        try:
            return RayReplicas(self.scale(self.options["replicas"]))
        except BaseException:
            self.__exit__()
            raise

    def __exit__(self, *exc: object) -> None:
        serve.delete(self.name)
        if self._is_own:
            ray.shutdown()

    def scale(self, num_replicas: int) -> Any:
        """Run this many replicas, and return the handle of Ray Serve. Returns when new ones are
        ready; removed ones finish their requests first, for at most drain_s.
        """
        num_gpus = int(ray.cluster_resources().get("GPU", 0))
        if self._is_own and self._gpus_each() * num_replicas > num_gpus:  # Ray would wait for more
            raise ValueError(
                f"{num_replicas} replicas need a GPU each: this machine has {num_gpus}"
            )
        application = self._deployment(num_replicas).bind(self._replica_options())
        try:
            return serve.run(application, name=self.name, route_prefix=None)
        except RuntimeError as error:
            # Ray Serve has printed the replica's own error.
            raise ValueError(f"the replicas did not start, as the log says: {error}") from None

    def _deployment(self, num_replicas: int) -> Any:
        options = self.options
        return serve.deployment(
            NamedReplica,
            name="Replica",
            num_replicas=num_replicas,
            # More requests than fit a step wait in the engine's queue, which has priorities.
            max_ongoing_requests=options["max_num_seqs"] + options["max_queue"],
            max_queued_requests=max(MIN_QUEUED, options["max_queue"]),
            graceful_shutdown_timeout_s=options["drain_s"],
            graceful_shutdown_wait_loop_s=0.5,
            health_check_period_s=HEALTH_CHECK_S,
            # On one machine, more replicas than cores are allowed.
            ray_actor_options={"num_cpus": 0 if self._is_own else 1, "num_gpus": self._gpus_each()},
            request_router_config=self._router_config(),
            logging_config=_logging(),
            max_constructor_retry_count=1,  # a model that does not load will not load later
        )

    def _router_config(self) -> RequestRouterConfig:
        """Without prefix caching, no prefix is recorded, and requests are routed by load alone."""
        options = {"max_entries": 0} if self.options["no_prefix_caching"] else {}
        return RequestRouterConfig(request_router_class=self.router, request_router_kwargs=options)

    def _store_bytes(self) -> int:
        """The store holds the bodies of all open requests, within the gateway's limit."""
        return STORE_BYTES + self.options["replicas"] * int(self.options["max_bodies_mib"] * 2**20)

    def _gpus_each(self) -> int:
        device = self.options["device"]
        has_gpus = ray.cluster_resources().get("GPU", 0) > 0
        return int(has_gpus if device is None else device == "cuda")

    def _replica_options(self) -> dict[str, Any]:
        return {name: v for name, v in self.options.items() if name not in _GATEWAY_ONLY}


def _logging() -> LoggingConfig:
    return LoggingConfig(log_level="WARNING", enable_access_log=False)


class RayReplicas:
    """The calls that a Gateway needs. handle: of Ray Serve."""

    def __init__(self, handle: Any):
        self.handle = handle
        self._streaming = handle.options(method_name="respond", stream=True)

    async def respond(self, request: ReplicaRequest) -> AsyncGenerator[Message, None]:
        messages = self._streaming.remote(request)
        try:
            async for message in messages:
                yield message
        except BackPressureError as error:
            raise ReplicasBusy(str(error)) from None
        except _FAILURES as error:
            raise ReplicaDied(str(error)) from None
        except asyncio.CancelledError:
            if _is_cancelled():
                raise
            raise ReplicaDied("the call was cancelled by Ray") from None
        finally:
            # Nothing happens if the response is complete. If the request reached no replica, Ray
            # raises the reason again here.
            with suppress(*_FAILURES):
                messages.cancel()

    async def broadcast(self, method: str, timeout_s: float) -> dict[str, Any]:
        call = self.handle.broadcast("report", method)
        try:
            # Ray's public method, results_async, drops all results if one of them is late.
            results = await asyncio.wait_for(call._fetch_replica_results_async(), timeout_s)
        except (TimeoutError, *_FAILURES):  # the latter: there is no replica
            return {}
        tasks = [asyncio.ensure_future(result.get_async()) for result in results]
        done, late = await asyncio.wait(tasks, timeout=timeout_s)
        for task in late:
            task.cancel()
        return dict(t.result() for t in done if not t.cancelled() and not t.exception())


def _is_cancelled() -> bool:
    """This task itself is being cancelled. Ray raises the same exception for its own tasks."""
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0
