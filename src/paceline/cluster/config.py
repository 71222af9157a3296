"""How many engines, and where. It needs no Ray."""

from __future__ import annotations

from dataclasses import dataclass, replace

from paceline import machine
from paceline.config import EngineConfig
from paceline.errors import UsageError


@dataclass(frozen=True, slots=True, kw_only=True)
class FleetConfig:
    replicas: int = 1
    max_replicas: int | None = None  # more than `replicas`: as many as there is work for
    ray_address: str | None = None  # None: a cluster of this machine alone, which ends with us
    ready_timeout: float = 600.0  # seconds for the first replica to load its model

    def __post_init__(self) -> None:
        if self.replicas < 1:
            raise UsageError(f"replicas={self.replicas} is not possible: give at least 1")
        if self.max_replicas is not None and self.max_replicas < self.replicas:
            raise UsageError(f"max_replicas={self.max_replicas} is below replicas={self.replicas}: raise it")


def sized(engine: EngineConfig, fleet: FleetConfig) -> EngineConfig:
    """`engine` with its threads settled: each replica takes as many cores. Raises UsageError."""
    if engine.threads is not None:
        return engine
    if fleet.ray_address is not None:
        raise UsageError("on a cluster say how many cores of its machine each replica takes: give threads")
    return replace(engine, threads=max(1, machine.processors() // fleet.replicas))
