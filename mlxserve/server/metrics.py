"""Numbers for Prometheus: what callers waited for, what the engines hold.

Knows: metric names and where each number comes from. Does not know what is done with them.
Times are in seconds, memory in bytes, as Prometheus's naming guide asks.
"""

from __future__ import annotations

from collections.abc import Iterator

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from mlxserve.server.models import ModelRegistry

_FIRST = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120)
_GAP = (0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 10)
_WHOLE = (0.1, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300, 600)


class Metrics:
    """One registry a server. `render` is what `/metrics` answers."""

    def __init__(self, models: ModelRegistry) -> None:
        self.registry = CollectorRegistry()
        self._requests = Counter(
            "mlxserve_requests",
            "HTTP requests by route and status.",
            ["route", "status"],
            registry=self.registry,
        )
        self._seconds = Histogram(
            "mlxserve_request_seconds", "Whole requests.", ["route"], buckets=_WHOLE, registry=self.registry
        )
        self._errors = Counter(
            "mlxserve_errors", "Errors shown to callers.", ["code"], registry=self.registry
        )
        self._first = Histogram(
            "mlxserve_time_to_first_token_seconds",
            "From the request to its first token.",
            ["model"],
            buckets=_FIRST,
            registry=self.registry,
        )
        self._gap = Histogram(
            "mlxserve_time_between_tokens_seconds",
            "Between two tokens of an answer.",
            ["model"],
            buckets=_GAP,
            registry=self.registry,
        )
        self._tokens = Counter(
            "mlxserve_tokens", "Tokens by kind.", ["model", "kind"], registry=self.registry
        )
        self.registry.register(_Engines(models))

    def request(self, route: str, status: int, seconds: float) -> None:
        self._requests.labels(route, str(status)).inc()
        self._seconds.labels(route).observe(seconds)

    def error(self, code: str) -> None:
        self._errors.labels(code).inc()

    def observer(self, model: str) -> ModelObserver:
        return ModelObserver(self._first.labels(model), self._gap.labels(model), self._tokens, model)

    def render(self) -> bytes:
        """The text exposition format."""
        return generate_latest(self.registry)


class ModelObserver:
    """Takes one model's times and tokens (generation.Observer)."""

    def __init__(self, first: Histogram, gap: Histogram, tokens: Counter, model: str) -> None:
        self._first, self._gap, self._tokens, self._model = first, gap, tokens, model

    def first_token(self, seconds: float) -> None:
        self._first.observe(seconds)

    def gap(self, seconds: float) -> None:
        self._gap.observe(seconds)

    def tokens(self, prompt: int, cached: int, completion: int) -> None:
        for kind, count in (("prompt", prompt), ("cached", cached), ("completion", completion)):
            self._tokens.labels(self._model, kind).inc(count)


class _Engines(Collector):
    """Reads every loaded engine's own numbers at the moment of the scrape."""

    def __init__(self, models: ModelRegistry) -> None:
        self._models = models

    def collect(self) -> Iterator[Metric]:
        families: dict[str, GaugeMetricFamily] = {}
        for entry in self._models.loaded:
            for name, value in entry.engine.stats().items():
                if not isinstance(value, int | float):
                    continue  # words, for people
                family = families.setdefault(
                    name,
                    GaugeMetricFamily(f"mlxserve_engine_{name}", f"The engine's {name}.", labels=["model"]),
                )
                family.add_metric([entry.card.name], float(value))
        yield from families.values()
        loaded = GaugeMetricFamily(
            "mlxserve_loaded_models", "Models in memory.", value=len(self._models.loaded)
        )
        used = GaugeMetricFamily(
            "mlxserve_models_bytes", "Memory of loaded models.", value=self._models.used_bytes
        )
        budget = GaugeMetricFamily(
            "mlxserve_models_budget_bytes", "Memory that models may take.", value=self._models.budget_bytes
        )
        yield from (loaded, used, budget)
