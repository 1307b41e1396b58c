"""A request router that ignores prompts: what prefix-aware routing is compared with."""

from itertools import count

from ray.serve.request_router import RequestRouter


class RoundRobinRouter(RequestRouter):
    def initialize_state(self):
        self._turns = count()

    async def choose_replicas(self, candidate_replicas, pending_request=None):
        if pending_request is not None:
            pending_request.routing_context.should_backoff = True
        turn = next(self._turns) % len(candidate_replicas)
        return [[candidate_replicas[turn]]]
