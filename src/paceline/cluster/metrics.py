"""The ingress's metrics by replica, read when they are asked for."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.registry import Collector

from paceline.cluster.worker import Replicas


class ReplicaMetrics(Collector):
    def __init__(self, replicas: Replicas) -> None:
        self._replicas = replicas

    def collect(self) -> Iterator[Any]:
        seen = self._replicas
        requests = CounterMetricFamily(
            "paceline_replica_requests",
            "Requests by replica and why it was chosen",
            labels=["replica", "chosen"],
        )
        for (replica, chosen), count in list(seen.requests.items()):
            requests.add_metric([replica, chosen], count)
        yield requests
        tokens = CounterMetricFamily("paceline_replica_tokens", "Tokens passed on", labels=["replica"])
        running = GaugeMetricFamily("paceline_replica_open_requests", "Requests it is at", labels=["replica"])
        for replica, count in list(seen.open.items()):
            tokens.add_metric([replica], seen.tokens[replica])
            running.add_metric([replica], count)
        yield from (tokens, running)
        family = GaugeMetricFamily(
            "paceline_replica",
            "What a replica said of itself with its last request",
            labels=["replica", "value"],
        )
        for replica, gauges in list(seen.gauges.items()):
            for name, value in gauges.items():
                family.add_metric([replica, name], value)
        yield family
        yield GaugeMetricFamily(
            "paceline_replica_kinds", "Kinds of replicas seen: texts move within one", value=len(seen.kinds)
        )
        yield CounterMetricFamily("paceline_replica_lost", "Replicas lost under a request", value=seen.lost)
        yield CounterMetricFamily("paceline_moved", "Texts that went on elsewhere", value=seen.moved)
