"""Where an order goes: to the replica that knows most of its prompt, unless that one is hot, else where least is to do.

It runs in the process that asks, beside the handle. See Ray's `ray.serve.request_router`.
"""

from __future__ import annotations

from collections import defaultdict
from typing import Any

from ray.serve.request_router import PendingRequest, ReplicaID, RequestRouter, RunningReplica

from paceline.cluster.prefixes import Prefixes
from paceline.cluster.wire import Order

HOT = 4  # requests that a replica may have more than the least busy one, before it is left
ASKED = 8  # replicas that are compared by what they have to do


class PrefixRouter(RequestRouter):  # type: ignore[misc]  # Ray has no types for us
    def initialize_state(self, hot: int = HOT) -> None:
        """Called by Ray, with the `request_router_kwargs` of the deployment."""
        self._hot = hot
        self._known = Prefixes()
        self._open: defaultdict[str, set[str]] = defaultdict(set)  # replica -> requests of this process

    async def choose_replicas(
        self, candidate_replicas: list[RunningReplica], pending_request: PendingRequest | None = None
    ) -> list[list[RunningReplica]]:
        """Ranks of replicas; Ray takes the first that has room, and asks again after a while if none has."""
        order = _order(pending_request)
        if pending_request is None or order is None:
            return [candidate_replicas]
        pending_request.routing_context.should_backoff = True
        replicas = {_name(r.replica_id): r for r in candidate_replicas}
        names = [name for name in replicas if name not in order.avoid] or list(replicas)
        load = {name: len(self._open[name]) for name in names}
        names.sort(key=load.__getitem__)
        order.known = self._known.find(order.salt, order.prompt, names)
        order.chosen = "load" if order.known is None else "prefix"
        if order.known is not None and load[order.known] - load[names[0]] > self._hot:
            order.chosen, order.known = "hot", None
        first = [] if order.known is None else [replicas[order.known]]
        rest = [replicas[name] for name in names]
        return [first, rest[:ASKED], rest]

    def on_request_routed(self, pending_request: PendingRequest, replica_id: ReplicaID, result: Any) -> None:
        name, order = _name(replica_id), _order(pending_request)
        self._open[name].add(pending_request.metadata.internal_request_id)
        if order is not None:
            order.chosen = "full" if order.known not in (None, name) else order.chosen
            self._known.add(order.salt, order.prompt, name)

    def on_request_completed(self, replica_id: ReplicaID, internal_request_id: str) -> None:
        self._open[_name(replica_id)].discard(internal_request_id)  # of one that was refused, too

    def update_replicas(self, replicas: list[RunningReplica]) -> None:
        super().update_replicas(replicas)
        alive = {_name(replica.replica_id) for replica in replicas}
        for name in set(self._open) - alive:
            del self._open[name]


def _name(replica: ReplicaID) -> str:
    return str(replica.unique_id)


def _order(pending: PendingRequest | None) -> Order | None:
    first = pending.args[0] if pending is not None and pending.args else None
    return first if isinstance(first, Order) else None
