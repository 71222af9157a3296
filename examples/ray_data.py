"""Write the answers to many prompts with Ray Data, for those who have their data there.

    pip install "paceline[ray]" "ray[data]"
    python examples/ray_data.py prompts.jsonl answers/

Each line of the file is an object with `prompt`. `paceline generate --ray` does it with order, resumption and checks.
"""

import sys
from typing import Any

import ray

from paceline import LLM


class Writer:
    """One engine for each actor."""

    def __init__(self) -> None:
        self.llm = LLM("demo", threads=1)

    def __call__(self, batch: dict[str, Any]) -> dict[str, Any]:
        answers = self.llm.generate([str(prompt) for prompt in batch["prompt"]], max_tokens=64, seed=1)
        return {**batch, "text": [answer.text for answer in answers]}


if __name__ == "__main__":
    prompts = ray.data.read_json(sys.argv[1], lines=True)
    prompts.map_batches(Writer, batch_size=16, num_cpus=1, concurrency=(1, 4)).write_json(sys.argv[2])
