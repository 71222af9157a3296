"""A process that computes a share of a target along with others: rank 0 starts it (parallel/team.py), and nobody else.

It has the weights and K/V of its heads, and computes the forwards that it is sent, one after the other, until its line to
rank 0 is closed.
"""

from __future__ import annotations

import contextlib
import os
import queue
import sys
import threading
from dataclasses import replace
from functools import partial
from multiprocessing.connection import Connection

import torch

from paceline.assembly import find_adapters, load_mtp, load_share
from paceline.core import ForwardBatch
from paceline.errors import EngineLost, PacelineError
from paceline.kv.cache import KVCache
from paceline.kv.tail import tensors_of
from paceline.ops.runners import pick_device, pick_runner
from paceline.parallel.group import MemoryGroup, TorchGroup, first_line, join_store
from paceline.parallel.messages import Failed, Forward, Order, Ready
from paceline.parallel.runner import shared
from paceline.parallel.team import facts


class Share:
    """What a rank has loaded, and its part of the caches."""

    def __init__(self, order: Order) -> None:
        config, shard = order.config, (order.rank, order.config.tensor_parallel)
        if (device := pick_device(config.device)).type == "cuda":
            config = replace(config, device=f"cuda:{order.rank}")
            device = torch.device(config.device)
        torch.set_num_threads(config.threads or 1)
        memory = order.memory
        self.group = TorchGroup(*shard) if memory is None else MemoryGroup(*shard, memory)
        self._runner, arithmetic = pick_runner(config, device, self.group)
        adapters = find_adapters(config, order.target, lambda line: None)
        self._target = target = load_share(config, order.target, adapters, self._runner, shard)
        graphs = [target.hidden_graph]
        if order.assistant is not None:
            graphs.append(load_mtp(config, order.assistant, target).step_graph)
        self._graphs = shared(graphs)
        self._runner.prepare(self._graphs)
        self.device, self.facts = device, facts(arithmetic, target)
        self._caches: dict[int, KVCache] = {}

    def compute(self, forward: Forward) -> None:
        for key in forward.dropped:
            self._caches.pop(key, None)
        if forward.new is not None:
            new = forward.new
            self._caches[forward.cache] = KVCache(
                self._target.layout, dict(new.pages), max_sequences=new.max_sequences, max_tokens=new.max_tokens,
                dtype=new.dtype, device=self.device,
            )  # fmt: skip
            if new.branches:
                self._caches[forward.cache].grow_branches(new.branches)
        cache = self._caches[forward.cache]
        for kind, slots, pages in forward.tables:
            cache.tables[kind][slots] = torch.from_numpy(pages).to(self.device)
        for kind, page in forward.scrubbed:
            cache.scrub(kind, page)
        rows = ForwardBatch.of(forward.numbers, forward.starts, partial(tensors_of, self.device))
        rows.branches, rows.adapters = forward.branches, forward.adapters
        given = {name: torch.from_numpy(value).to(self.device) for name, value in forward.given.items()}
        self._runner.run(self._graphs[forward.graph], rows, cache, given)


def main(line: Connection) -> None:
    sent: queue.SimpleQueue[Forward] = queue.SimpleQueue()
    order: Order = line.recv()
    threading.Thread(target=_receive, args=(line, sent), daemon=True).start()
    try:
        share = Share(order)
        line.send(Ready(share.facts))
        share.group.connect(None if order.port is None else join_store(order.port), share.device)
        while True:
            share.compute(sent.get())
    except BaseException as error:  # noqa: BLE001  rank 0 says it
        ours = error if isinstance(error, PacelineError) else None
        text = str(error) if ours is not None else f"{type(error).__name__}: {first_line(error)}"
        with contextlib.suppress(OSError):
            line.send(Failed(ours, text, isinstance(error, EngineLost)))
        os._exit(1)


def _receive(line: Connection, sent: queue.SimpleQueue[Forward]) -> None:
    """Hand on what rank 0 says. Once it is gone, or has closed the line, end at once, whatever is going on."""
    try:
        while True:
            sent.put(line.recv())
    except (EOFError, OSError):
        os._exit(0)


if __name__ == "__main__":
    main(Connection(int(sys.argv[1])))
