"""Calls of Ray Serve with handles that are scripted: Ray is imported, no cluster is started."""

import asyncio
from types import SimpleNamespace

import pytest

from onchip.server.replicas.balancer import PrefixBalancer
from onchip.server.replicas.gateway import ReplicaDied, ReplicasBusy
from onchip.server.replicas.request import ReplicaRequest
from tests.cli.parsing import parse

# This module first: it decides how Ray authenticates, before Ray is imported.
ray_cluster = pytest.importorskip("onchip.server.replicas.cluster", reason="Ray is not installed")
exceptions = ray_cluster.ray.exceptions
DeploymentUnavailableError = pytest.importorskip("ray.serve.exceptions").DeploymentUnavailableError
PrefixRouter = pytest.importorskip("onchip.server.replicas.router").PrefixRouter

BUSY = ray_cluster.BackPressureError(64, 64)
REQUEST = ReplicaRequest({}, b"{}", [b"key"])


class ScriptedCall:
    """A response of Ray Serve: one message, then an error, which `cancel` raises again if the
    request was not assigned to a replica.
    """

    def __init__(self, error, is_assigned=False):
        self.error, self.is_assigned, self.is_cancelled = error, is_assigned, False

    async def __aiter__(self):
        if self.is_assigned:
            yield {"type": "http.response.start"}
        raise self.error

    def cancel(self):
        self.is_cancelled = True
        if not self.is_assigned:
            raise self.error


def call_replicas(call):
    handle = SimpleNamespace(remote=lambda request: call)
    return ray_cluster.RayReplicas(SimpleNamespace(options=lambda **options: handle))


async def collect(call):
    return [message async for message in call_replicas(call).respond(REQUEST)]


class TestResponses:
    @pytest.mark.parametrize(
        ("error", "kind"),
        [(BUSY, ReplicasBusy), (DeploymentUnavailableError("Replica"), ReplicaDied)],
    )
    def test_a_request_that_no_replica_takes_keeps_its_error(self, error, kind):
        call = ScriptedCall(error)
        with pytest.raises(kind):
            asyncio.run(collect(call))
        assert call.is_cancelled

    @pytest.mark.parametrize(
        "error",
        [
            exceptions.RayActorError(),
            exceptions.ObjectLostError("00", None, ""),
            exceptions.RayTaskError("respond", "traceback", ValueError("a bug")),
            asyncio.CancelledError(),  # Ray Serve's form of TaskCancelledError
        ],
    )
    def test_every_failure_of_a_replica_is_one_that_clients_may_retry(self, error):
        with pytest.raises(ReplicaDied):
            asyncio.run(collect(ScriptedCall(error, is_assigned=True)))

    def test_a_cancelled_task_stays_cancelled(self):
        class Waiting(ScriptedCall):
            async def __aiter__(self):
                await asyncio.Event().wait()
                yield

        async def cancel():
            task = asyncio.ensure_future(collect(call))
            await asyncio.sleep(0)
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
            return task.cancelled()

        call = Waiting(None, is_assigned=True)
        assert asyncio.run(cancel()) and call.is_cancelled


class TestBroadcasts:
    def test_a_late_replica_costs_its_own_answer_alone(self):
        async def answer(value, delay_s=0.0):
            await asyncio.sleep(delay_s)
            if value is None:
                raise exceptions.RayActorError()
            return value

        async def results():
            delays = {("a", 1): 0.0, ("b", 2): 60.0, None: 0.0}
            return [
                SimpleNamespace(get_async=lambda value=value, s=s: answer(value, s))
                for value, s in delays.items()
            ]

        assert self.broadcast(results) == {"a": 1}

    def test_no_replica_is_no_answer(self):
        async def results():
            raise DeploymentUnavailableError("Replica")

        assert self.broadcast(results) == {}

    def broadcast(self, results):
        replicas = call_replicas(None)
        call = SimpleNamespace(_fetch_replica_results_async=results)
        replicas.handle.broadcast = lambda *names: call
        return asyncio.run(replicas.broadcast("is_ready", 0.1))


class TestCluster:
    def make(self, *options):
        return ray_cluster.Cluster(vars(parse(["serve", "--replicas", "3", *options])))

    def test_commands_on_one_cluster_have_names_of_their_own(self):
        assert self.make("--port", "8000").name != self.make("--port", "8001").name

    def test_the_store_has_room_for_the_bodies_of_all_open_requests(self):
        assert self.make("--max-bodies-mib", "100")._store_bytes() > 3 * 100 * 2**20

    def test_options_of_the_deployment(self, monkeypatch):
        cluster = self.make("--no-prefix-caching")
        cluster._is_own = True
        monkeypatch.setattr(cluster, "_gpus_each", lambda: 0)
        config = cluster._deployment(3)._deployment_config
        assert config.health_check_period_s == ray_cluster.HEALTH_CHECK_S
        assert config.request_router_config.request_router_kwargs == {"max_entries": 0}


class TestRouter:
    @pytest.fixture
    def router(self):
        router = object.__new__(PrefixRouter)
        router._balancer = PrefixBalancer()
        return router

    def choose(self, router, request):
        context = SimpleNamespace(should_backoff=False)
        pending = SimpleNamespace(args=[request], routing_context=context)
        replicas = [SimpleNamespace(replica_id=SimpleNamespace(unique_id=i)) for i in "cab"]
        ranks = asyncio.run(router.choose_replicas(replicas, pending))
        return [rank[0].replica_id.unique_id for rank in ranks]

    def test_requests_without_a_body_go_to_the_same_replica(self, router):
        for _ in range(3):
            router._balancer.count_sent("a")
            assert self.choose(router, ReplicaRequest({}, b"")) == ["a", "b", "c"]
        assert self.choose(router, ReplicaRequest({}, b"{}"))[-1] == "a"

    def test_the_replica_that_accepted_a_prompt_is_recorded(self, router):
        pending = SimpleNamespace(args=[REQUEST])
        router.on_request_routed(pending, SimpleNamespace(unique_id="b"), None)
        assert self.choose(router, REQUEST)[0] == "b"
