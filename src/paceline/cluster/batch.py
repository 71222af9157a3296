"""Many prompts over actors of a Ray cluster. An actor that dies is started again by Ray, and its prompts with it."""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Iterator, Mapping
from collections.abc import Sequence as Seq
from typing import Any

import ray
from ray.exceptions import RayError, RayTaskError

from paceline.cluster.config import FleetConfig, sized
from paceline.cluster.fleet import join, reason
from paceline.config import EngineConfig
from paceline.core import Completion
from paceline.errors import LoadError, RequestFailed, UsageError
from paceline.llm import LLM
from paceline.sampling.noise import fresh_seed

Asked = tuple[str | list[int], Mapping[str, Any]]  # a prompt, and what is said of its sampling
RETRIES = 5  # times that the same prompts may lose their actor
AHEAD = 2  # pieces of work that an actor has: it need not wait for the next one


class Writer:
    """One engine in a process of its own."""

    def __init__(self, target: str, options: Mapping[str, Any]) -> None:
        self._llm = LLM(target, **options)

    def check(self, asked: Seq[Asked]) -> list[list[int] | str]:
        """The token ids of each prompt, or why it cannot be run."""
        return [self._check(prompt, params) for prompt, params in asked]

    def _check(self, prompt: str | list[int], params: Mapping[str, Any]) -> list[int] | str:
        try:
            ids = self._llm.tokenizer.encode(prompt) if isinstance(prompt, str) else prompt
            self._llm.engine.check(ids, self._llm.params(**params))
        except UsageError as error:
            return str(error)
        return ids

    def write(self, asked: Seq[tuple[list[int], Mapping[str, Any]]]) -> list[Completion]:
        return self._llm.generate(
            [ids for ids, _ in asked], [self._llm.params(**params) for _, params in asked]
        )


class Pool:
    def __init__(self, target: str, options: Mapping[str, Any], fleet: FleetConfig) -> None:
        engine = sized(EngineConfig.of({"target": target, **options}), fleet)
        cores = engine.threads or 1
        join(fleet, fleet.replicas * cores)
        self._size = engine.max_batch
        actor = ray.remote(num_cpus=cores, max_restarts=-1, max_task_retries=RETRIES)(Writer)
        self._actors = [actor.remote(target, {**options, "threads": cores}) for _ in range(fleet.replicas)]

    def check(self, asked: Seq[Asked]) -> list[list[int] | str]:
        """The token ids of each prompt, or why it cannot be run. Raises LoadError when no engine can be started."""
        try:
            checked: list[list[int] | str] = ray.get(self._actors[0].check.remote(list(asked)))
        except RayError as error:
            raise LoadError(f"no engine could be started: {reason([str(error)])}") from error
        return checked

    def write(self, asked: Seq[tuple[list[int], Mapping[str, Any]]]) -> Iterator[Completion]:
        """The answers in the order of the prompts, each as soon as all before it are there."""
        seeded = [
            (ids, {"seed": fresh_seed(), **params}) for ids, params in asked
        ]  # the same text after a death
        pieces = deque(enumerate(seeded[i : i + self._size] for i in range(0, len(seeded), self._size)))
        free = deque(itertools.chain.from_iterable([self._actors] * AHEAD))
        running: dict[Any, tuple[int, Any]] = {}
        done: dict[int, list[Completion]] = {}
        for following in range(len(pieces)):
            while following not in done:
                while pieces and free:
                    i, piece = pieces.popleft()
                    actor = free.popleft()
                    running[actor.write.remote(piece)] = i, actor
                (ready,), _ = ray.wait(list(running))
                i, actor = running.pop(ready)
                done[i] = self._fetch(ready)
                free.append(actor)
            yield from done.pop(following)

    def _fetch(self, ready: Any) -> list[Completion]:
        try:
            answers: list[Completion] = ray.get(ready)
        except RayTaskError as error:  # its process lives: trying again would give the same
            raise RequestFailed(
                f"prompts failed ({reason([str(error)])}): report it with Ray's logs, and run again without them"
            ) from error
        except RayError as error:
            raise RequestFailed(
                f"the same prompts lost their process {RETRIES + 1} times ({reason([str(error)])}): see Ray's logs, and "
                "run again to continue"
            ) from error
        return answers

    def close(self) -> None:
        for actor in self._actors:
            ray.kill(actor)
        ray.shutdown()
