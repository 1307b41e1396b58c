"""One page of metrics for all replicas: those of each, with its name as the label `replica`, and
those of the gateway.
"""

from collections.abc import Iterable, Mapping

from prometheus_client import CollectorRegistry, Counter, Gauge, generate_latest
from prometheus_client.core import Metric
from prometheus_client.parser import text_string_to_metric_families


class GatewayMetrics:
    """`render` writes the page; the other methods count."""

    def __init__(self) -> None:
        self._registry = CollectorRegistry()
        self._replicas = self._gauge("replicas", "Replicas that answered this request for metrics")
        self._open = self._gauge("gateway_requests_open", "Requests with a waiting client")
        self._failed = self._counter("gateway_responses_failed", "Errors of the gateway", "status")
        self._lost = self._counter("gateway_requests_lost", "Requests whose replica died")
        self._gone = self._counter("gateway_clients_gone", "Clients that disconnected early")

    def count_failure(self, status: int) -> None:
        self._failed.labels(str(status)).inc()

    def count_disconnect(self) -> None:
        self._gone.inc()

    def count_lost(self) -> None:
        self._lost.inc()

    def render(self, pages: Mapping[str, str], num_open: int) -> bytes:
        """pages: the metrics of each replica, by its name."""
        self._replicas.set(len(pages))
        self._open.set(num_open)
        merged = CollectorRegistry()
        merged.register(_MergedPages(pages))
        return generate_latest(self._registry) + generate_latest(merged)

    def _gauge(self, name: str, description: str) -> Gauge:
        return Gauge(f"onchip_{name}", description, registry=self._registry)

    def _counter(self, name: str, description: str, *labels: str) -> Counter:
        return Counter(f"onchip_{name}", description, labels, registry=self._registry)


class _MergedPages:
    """A collector of prometheus_client."""

    def __init__(self, pages: Mapping[str, str]):
        self._pages = pages

    def collect(self) -> Iterable[Metric]:
        families: dict[str, Metric] = {}
        for replica, page in sorted(self._pages.items()):
            for family in text_string_to_metric_families(page):
                merged = families.setdefault(
                    family.name, Metric(family.name, family.documentation, family.type)
                )
                for sample in family.samples:
                    labels = {**sample.labels, "replica": replica}
                    merged.add_sample(sample.name, labels, sample.value)
        return families.values()
