"""Which 16 candidates DFlash 2's walk should choose from where a text is sampled: those with the best scores before the
target's noise is added, after it, or both.

    python recipes/dflash2/candidates.py

No DFlash 2 network can be had without a hub. So its two scores are taken from the EAGLE-3 head for SmolLM2 that comes
with paceline. What it says of the second token without knowing the first one that was drawn (with the likeliest one in
its place) are the scores by which candidates are found. What it says with it are the scores by which one is chosen.
Both are real distributions beside the real target's, and their difference is what the pair term of DFlash 2 is for.
What is counted: how often the chosen token is the target's own under the same noise.
"""

from __future__ import annotations

import argparse
import math

import numpy as np
import torch

from paceline import LLM, SamplingParams
from paceline.hub.resolve import SMOLLM2_DRAFTER, resolve
from paceline.kv.cache import KVCache
from paceline.models.registry import load_network, load_target
from paceline.ops.native import NativeRunner
from paceline.sampling import noise
from paceline.sampling.candidates import best_of

TOP, ASKED = 16, "Tell me about {} in a few sentences."
TOPICS = (
    "rivers",
    "a sorting algorithm",
    "the moon",
    "bread",
    "a good story",
    "trains",
    "the Romans",
    "bees",
)


def cache_of(model: object) -> KVCache:
    layout = model.layout  # type: ignore[attr-defined]
    return KVCache(
        layout, dict.fromkeys(layout.kinds, 64), max_sequences=2, max_tokens=512, dtype=model.kv_dtype
    )  # type: ignore[attr-defined]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--places", type=int, default=12, help="of each text")
    parser.add_argument("--seeds", type=int, default=64)
    args = parser.parse_args()
    with LLM("smollm2", drafter="none", max_model_len=512) as llm:
        texts = []
        for topic in TOPICS:
            chat = [{"role": "user", "content": ASKED.format(topic)}]
            (got,) = llm.chat(chat, SamplingParams(max_tokens=96, temperature=0.8, seed=1))
            texts.append([*got.prompt_token_ids, *got.token_ids])
    target = load_target(resolve("smollm2", "target"), runner=NativeRunner())
    net = load_network(SMOLLM2_DRAFTER, target)
    counts = {
        (heat, rule): 0 for heat in (0.5, 0.8, 1.0) for rule in ("before", "after", "both", "all tokens")
    }
    tried = dict.fromkeys((0.5, 0.8, 1.0), 0)
    for text in texts:
        for end in np.linspace(24, len(text) - 2, args.places).astype(int).tolist():
            compare(target, net, text[:end], args.seeds, counts, tried)
    print(
        f"{'temperature':>12} {'places':>8} "
        + " ".join(f"{r:>11}" for r in ("before", "after", "both", "all tokens"))
    )
    for heat, number in tried.items():
        shares = [counts[heat, rule] / max(number, 1) for rule in ("before", "after", "both", "all tokens")]
        print(f"{heat:>12} {number:>8} " + " ".join(f"{share:>11.4f}" for share in shares))


def compare(target, net, text, seeds, counts, tried) -> None:  # type: ignore[no-untyped-def]
    """Count agreement of the second token behind `text`."""
    ids = None if net.ids is None else net.ids.numpy()
    first, states = target_logits(target, net, text)
    for heat in (0.5, 0.8, 1.0):
        drawn: dict[int, list[int]] = {}
        for seed in range(seeds):
            drawn.setdefault(draw(first, heat, seed, len(text)), []).append(seed)
        likeliest = second(net, states, text, None)
        for token, own in sorted(drawn.items(), key=lambda item: -len(item[1]))[:6]:
            chosen = second(net, states, text, token)
            truth, _ = target_logits(target, net, [*text, token])
            for seed in own:
                right = draw(truth, heat, seed, len(text) + 1)
                tried[heat] += 1
                rule = (1.0 / heat, seed, len(text) + 1, 0, 1.0, -math.inf)
                before = best_of(likeliest, ids, TOP, None)
                after = best_of(likeliest, ids, TOP, rule)
                for name, places in (("before", before), ("after", after), ("both", np.union1d(before, after)),
                                     ("all tokens", np.arange(len(chosen)))):  # fmt: skip
                    counts[heat, name] += walk(net, chosen, places, heat, seed, len(text) + 1) == right


def target_logits(target, net, text):  # type: ignore[no-untyped-def]
    cache = cache_of(target)
    cache.open(0, text, share=False)
    found = target.states(cache.tail([(0, text)]).rows(), cache)
    states = torch.cat([part.clone() for part in found[1:]], 1)
    return target.logits(found[0][-1:].clone())[0].numpy().copy(), states


def second(net, states, text, token):  # type: ignore[no-untyped-def]
    """Scores of the second token where the first was `token`; None: the drafter's likeliest."""
    cache = cache_of(net)
    cache.open(0, text, share=False)
    rows = cache.tail([(0, text[1:])])
    after, normed = net.absorb(rows.rows(), states[:-1], cache)
    after, first = after[-1:].clone(), net.logits(normed[-1:].clone())[0]
    rows.commit([len(text) - 1])
    if token is None:
        token = int(first.argmax()) if net.ids is None else int(net.ids[int(first.argmax())])
    tail = cache.tail([(0, [token])])
    logits, _ = net.step(tail.rows(), after, cache)
    return logits[0].numpy().copy()


def draw(x, heat, seed, position):  # type: ignore[no-untyped-def]
    gumbel = noise.host_gumbel(noise.host_bits(noise.keys(seed, position, noise.TARGET), np.arange(len(x))))
    return int((x.astype(np.float64) / heat + gumbel).argmax())


def walk(net, scores, places, heat, seed, position):  # type: ignore[no-untyped-def]
    tokens = places if net.ids is None else net.ids.numpy()[places]
    gumbel = noise.host_gumbel(noise.host_bits(noise.keys(seed, position, noise.TARGET), tokens))
    return int(tokens[(scores[places].astype(np.float64) / heat + gumbel).argmax()])


if __name__ == "__main__":
    main()
