"""What the recurrent states of Qwen3.5 cost: steps of 1 and of 5 rows, with what linear attention takes of them.

    python recipes/compare/hybrid.py [--quantize int4] [--threads 2] [--layers 32] [--grain 8] [--rounds 48]

The model has the shape of Qwen3.5's 4B as far as it is public (32 layers of width 2560; heads and vocabulary as in
transformers' defaults) and random weights. Steps of 1 row and of 5, of which 3 are kept, are done in turn; medians.
`--grain`: at multiples of how many tokens a state may stand. The state's share is measured with a clock around each op.
"""

from __future__ import annotations

import argparse
import statistics
import time

import torch

from paceline.forecast.random_target import RandomWeights
from paceline.kv import states
from paceline.kv.cache import KVCache
from paceline.kv.plan import plan_pages
from paceline.models.families import spec_of
from paceline.ops.native import NativeRunner, Plan
from paceline.ops.recording import Code

SHAPE = {
    "model_type": "qwen3_5_text", "vocab_size": 248_320, "hidden_size": 2560, "intermediate_size": 9216,
    "num_attention_heads": 16, "num_key_value_heads": 4, "head_dim": 256, "linear_num_key_heads": 16,
    "linear_num_value_heads": 32, "linear_key_head_dim": 128, "linear_value_head_dim": 128, "linear_conv_kernel_dim": 4,
    "max_position_embeddings": 262_144, "rms_norm_eps": 1e-6, "tie_word_embeddings": True, "hidden_act": "silu",
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e7, "partial_rotary_factor": 0.25},
}  # fmt: skip
PROMPT, CONTEXT, KEPT = 96, 1024, {1: 1, 5: 3}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quantize", choices=["int8", "int4", "bfloat16"], default="int4")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--layers", type=int, default=32)
    parser.add_argument("--grain", type=int, choices=[1, 2, 4, 8, 16], default=states.GRAIN)
    parser.add_argument("--rounds", type=int, default=48)
    args = parser.parse_args()
    states.GRAIN = args.grain
    spec = spec_of(SHAPE["model_type"])  # type: ignore[arg-type]
    config = spec.parse(SHAPE | {"num_hidden_layers": args.layers})
    runner = NativeRunner(args.threads)
    target = spec.build(config, RandomWeights(spec.shapes(config), args.quantize), runner, torch.float32)  # type: ignore[arg-type]
    pages = plan_pages(
        target.layout, budget=2**31, itemsize=4, max_sequences=1, max_tokens=CONTEXT, chunk=PROMPT
    )
    cache = KVCache(target.layout, pages, max_sequences=1, max_tokens=CONTEXT, dtype=target.kv_dtype)
    text = [(7 * i) % config.vocab_size for i in range(CONTEXT)]
    cache.open(0, text, share=False)
    step(target, cache, text, PROMPT, PROMPT)
    runner.prepare([target.hidden_graph, target.logits_graph])
    plan = runner.plan(target.hidden_graph)
    assert plan is not None
    whole: dict[int, list[float]] = {1: [], 5: []}
    own: dict[int, list[float]] = {1: [], 5: []}
    for clock in (False, True):
        for _ in range(args.rounds):
            for rows, kept in KEPT.items():
                plan.program.profile(clock)
                seconds = step(target, cache, text, rows, kept)
                whole[rows] += [] if clock else [seconds]
                own[rows] += [recurrent(plan)] if clock else []
    one, five = (1e3 * statistics.median(whole[rows]) for rows in KEPT)
    states_one, states_five = (1e3 * statistics.median(own[rows]) for rows in KEPT)
    print(
        f"grain {args.grain}: 1 row {one:.1f} ms (linear attention {states_one:.1f}), 5 rows {five:.1f} ms "
        f"({states_five:.1f}): {five / one:.2f} times, without it {(five - states_five) / (one - states_one):.2f}"
    )


def step(target, cache: KVCache, text: list[int], rows: int, kept: int) -> float:  # type: ignore[no-untyped-def]
    """Seconds of a forward over the next rows with their logits."""
    first = cache.committed(0)
    begin = time.perf_counter()
    with cache.tail([(0, text[first : first + rows])]) as tail:
        target.logits(target.forward(tail.rows(), cache))
        tail.commit([kept])
    return time.perf_counter() - begin


def recurrent(plan: Plan) -> float:
    """Seconds of the ops of linear attention in the last run, but its projections."""
    timed = zip(plan.steps, plan.program.seconds(), strict=True)
    return sum(seconds for nodes, seconds in timed if nodes[0].code is Code.DELTA)


if __name__ == "__main__":
    main()
