"""The balancer as a request router of Ray Serve. Ray pickles this class by value, together with the
names of its module.
"""

# pyright: reportMissingImports=false

from typing import Any

from ray.serve.request_router import PendingRequest, ReplicaID, RequestRouter, RunningReplica

from onchip.server.replicas.balancer import PrefixBalancer
from onchip.server.replicas.request import ReplicaRequest


class PrefixRouter(RequestRouter):
    """Runs in the process of the gateway, on a thread of Ray Serve. A replica that rejects a
    request, because it has too many, is followed by the next of the balancer's order.
    """

    # The default of 0.1 s is too short for a replica that shares its cores with steps of a model:
    # a late answer would send the request to a replica without its prefix.
    queue_len_response_deadline_s = 1.0

    def initialize_state(self, **options: Any) -> None:
        """options: of PrefixBalancer."""
        self._balancer = PrefixBalancer(**options)

    async def choose_replicas(
        self,
        candidate_replicas: list[RunningReplica],
        pending_request: PendingRequest | None = None,
    ) -> list[list[RunningReplica]]:
        if pending_request is not None:
            # Otherwise Ray would ask again at once, without end, while all replicas are full.
            pending_request.routing_context.should_backoff = True
        request = _find_request(pending_request)
        by_id = {replica.replica_id.unique_id: replica for replica in candidate_replicas}
        if request is not None and not request.body:
            order = sorted(by_id)  # the live page shows the same replica at every poll
        else:
            order = self._balancer.choose(request.keys if request else (), list(by_id))
        return [[by_id[name]] for name in order]

    def update_replicas(self, replicas: list[RunningReplica]) -> None:
        self._balancer.update(replica.replica_id.unique_id for replica in replicas)
        super().update_replicas(replicas)

    def on_replica_actor_died(self, replica_id: ReplicaID) -> None:
        super().on_replica_actor_died(replica_id)
        self._balancer.update(left.unique_id for left in self.curr_replicas)

    def on_request_routed(
        self, pending_request: PendingRequest, replica_id: ReplicaID, result: Any
    ) -> None:
        """Another replica than the first of the order may have accepted the request."""
        if request := _find_request(pending_request):
            self._balancer.record(request.keys, replica_id.unique_id)

    def on_send_request(self, replica_id: ReplicaID) -> None:
        super().on_send_request(replica_id)
        self._balancer.count_sent(replica_id.unique_id)

    def on_request_completed(self, replica_id: ReplicaID, internal_request_id: str) -> None:
        self._balancer.count_completed(replica_id.unique_id)


def _find_request(pending: PendingRequest | None) -> ReplicaRequest | None:
    args = () if pending is None else pending.args
    return next((arg for arg in args if isinstance(arg, ReplicaRequest)), None)
