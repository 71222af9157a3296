"""Train the head on what generate.py wrote; started again, it goes on.

    python recipes/smollm2/train.py --data DIR --held DIR --out DIR --minutes 75

New shards are taken up as they appear. `log.jsonl` has the curve, `head.pt` the newest checkpoint. Then `export.py`.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import time
from pathlib import Path

import torch
import torch.nn.functional as F
from data import Shard, Target, counts, shards
from head import DraftLoss, Head, Shape
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "demo"))
from muon import Optimiser, schedule

SYSTEM = 31  # tokens of the system prompt, the same in all conversations: not learned
DEPTHS, DECAY = 3, 0.8
Batch = list[tuple[Tensor, Tensor]]  # tokens [T] and states [T, 4, 576] of each conversation


class Pool:
    """Conversations by how often they were seen, the least seen first; those of similar length in one batch."""

    def __init__(self, folder: Path, most: int, longest: int) -> None:
        self.folder, self.most, self.longest = folder, most, longest
        self.shards: dict[Path, Shard] = {}
        self.seen: dict[tuple[Path, int], int] = {}
        self.random, self.waiting = random.Random(1), []  # type: ignore[var-annotated]

    def batch(self) -> Batch:
        if not self.waiting:
            self._fill()
        return [self._get(key) for key in self.waiting.pop()]

    def _get(self, key: tuple[Path, int]) -> tuple[Tensor, Tensor]:
        tokens, states = self.shards[key[0]].get(key[1])
        return tokens[: self.longest], states[: self.longest]

    def _fill(self) -> None:
        for file in shards(self.folder):
            if file not in self.shards:
                self.shards[file] = Shard(file)
                self.seen |= dict.fromkeys(((file, i) for i in range(len(self.shards[file]))), 0)
        keys = sorted(self.seen, key=lambda key: (self.seen[key], self.random.random()))[:512]
        for key in keys:
            self.seen[key] += 1
        length = {key: min(self.longest, self.shards[key[0]].length(key[1])) for key in keys}
        batches: list[list[tuple[Path, int]]] = [[]]
        for key in sorted(keys, key=length.__getitem__):
            if (len(batches[-1]) + 1) * length[key] > self.most:
                batches.append([])
            batches[-1].append(key)
        self.random.shuffle(batches)
        self.waiting = [batch for batch in batches if batch]

    @property
    def tokens(self) -> int:
        return sum(len(shard.tokens) for shard in self.shards.values())


def rounds(
    head: Head, target: Target, batch: Batch, depths: int
) -> tuple[Tensor, Tensor, list[Tensor], Tensor]:
    """Tokens [B, T], what the target's head reads [B, T, H], the head's own per depth [B, T - 1, H], lengths [B]."""
    tokens = torch.nn.utils.rnn.pad_sequence([t for t, _ in batch], batch_first=True)
    states = torch.nn.utils.rnn.pad_sequence([s for _, s in batch], batch_first=True).float()
    lengths = torch.tensor([len(t) for t, _ in batch])
    following = F.pad(tokens[:, 1:], (0, depths - 1))
    out = head(states[:, :-1, :3], target.embedding[following], depths)
    return tokens, target.final(states[:, :, 3]), out, lengths


def loss_of(head: Head, target: Target, small: Tensor, batch: Batch) -> tuple[Tensor, list[float]]:
    """The loss of a batch over the draft vocabulary, whose rows of the target's head are `small`; alpha by depth."""
    tokens, final, out, lengths = rounds(head, target, batch, DEPTHS)
    laws = F.linear(final.to(small.dtype), small).float().softmax(-1)  # of the token after each row
    total, alphas = final.new_zeros(()), []
    entry = torch.arange(tokens.shape[1] - 1)
    for j, x in enumerate(out):
        valid = (entry >= SYSTEM) & (entry + 1 + j < lengths[:, None])
        where = valid.nonzero()
        p = laws[where[:, 0], where[:, 1] + 1 + j]
        loss, alpha = DraftLoss.apply(x[valid], small, p)
        total = total + DECAY**j * loss
        alphas.append(float(alpha.detach()))
    return total, alphas


@torch.no_grad()
def judge(
    head: Head, target: Target, shard: Shard, vocabulary: Tensor, temperature: float, depths: int = 5
) -> dict[str, object]:
    """Teacher-forced over the answers: agreement by depth given that all before agreed, tokens a step at 3 drafted.

    At temperature 0 agreement is that of the argmax, and steps are walked as an engine walks them. Else it is
    sum min(p, q), the chance under rejection sampling; `match` keeps a little less.
    """
    kept = [[0.0, 0.0] for _ in range(depths)]
    steps = emitted = 0.0
    for begin in range(0, len(shard), 10):
        items = range(begin, min(begin + 10, len(shard)))
        with torch.autocast("cpu", torch.bfloat16):
            _, final, out, lengths = rounds(head, target, [shard.get(i) for i in items], depths)
        for b, i in enumerate(items):
            first, end = shard.answers[i] - 1, int(lengths[b])  # entries from the last of the prompt on
            logits = F.linear(final[b, :end], target.embedding)
            agree = torch.zeros(end, depths)
            for j in range(depths):
                rows = torch.arange(first, max(first, end - 1 - j))
                mine = F.linear(out[j][b, rows], target.embedding[vocabulary])
                if temperature == 0:
                    agree[rows, j] = (vocabulary[mine.argmax(-1)] == logits[rows + 1 + j].argmax(-1)).float()
                else:
                    q = (mine / temperature).softmax(-1)
                    p = (logits[rows + 1 + j] / temperature).softmax(-1)[:, vocabulary]
                    agree[rows, j] = torch.minimum(p, q).sum(-1)
            full = torch.arange(first, max(first, end - depths))
            chain = agree[full].cumprod(-1)
            for j in range(depths):
                kept[j][0] += float(chain[:, j].sum())
                kept[j][1] += float(chain[:, j - 1].sum()) if j else len(full)
            if temperature == 0:
                at = first
                while at < end - depths:
                    more = 1 + int(agree[at, :3].cumprod(0).sum())
                    at, steps, emitted = at + more, steps + 1, emitted + more
            else:
                steps, emitted = steps + len(full), emitted + len(full) + float(chain[:, :3].sum())
    return {
        "by position": [round(a / max(b, 1), 3) for a, b in kept],
        "tokens a step": round(emitted / max(steps, 1), 3),
    }


def main() -> None:
    said = argparse.ArgumentParser()
    said.add_argument("--data", type=Path, required=True)
    said.add_argument("--held", type=Path, required=True)
    said.add_argument("--out", type=Path, required=True)
    said.add_argument("--minutes", type=float, default=75, help="by the clock, from the first start on")
    said.add_argument("--inner", type=int, default=1536, help="width of the feed-forward part")
    said.add_argument("--vocabulary", type=int, default=6000)
    said.add_argument("--batch", type=int, default=1536, help="tokens, padding included")
    said.add_argument("--longest", type=int, default=320)
    said.add_argument("--rates", type=float, nargs=3, default=(0.02, 0.002, 0.003))
    said.add_argument("--every", type=float, default=5, help="minutes between looks at the held-out prompts")
    args = said.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    torch.manual_seed(1)
    target, head = Target(), Head(Shape(args.inner))
    head.norm.data.copy_(target.norm)
    optimiser = Optimiser(dict(head.named_parameters()), *args.rates)
    elapsed, tokens, count, started, last = 0.0, 0, 0, time.time(), False
    file = args.out / "head.pt"
    if file.exists():
        state = torch.load(file)
        head.load_state_dict(state["head"])
        optimiser.load(state["optimiser"])
        elapsed, tokens, count = state["elapsed"], state["tokens"], state["count"]
        vocabulary, started = state["vocabulary"], state["started"]
    else:
        often = torch.from_numpy(counts(args.data, len(target.embedding)))
        vocabulary = often.argsort(descending=True, stable=True)[: args.vocabulary].sort().values
    small = target.embedding[vocabulary].bfloat16()
    pool = Pool(args.data, args.batch, args.longest)
    held = [Shard(args.held / f"{i:05d}.npz") for i in (0, 1)]
    log = (args.out / "log.jsonl").open("a")
    mean: list[float] = []
    told = saved = time.time()
    while not last:
        began = time.time()
        with torch.autocast("cpu", torch.bfloat16):
            batch = pool.batch()
            loss, alphas = loss_of(head, target, small, batch)
        loss.backward()
        with torch.autocast("cpu", torch.bfloat16):  # of Newton-Schulz
            optimiser.step(schedule((time.time() - started) / (60 * args.minutes)))
        count, tokens = count + 1, tokens + sum(len(t) for t, _ in batch)
        elapsed += time.time() - began
        mean = [m + 0.02 * (a - m) for m, a in zip(mean or alphas, alphas, strict=True)]
        last = time.time() - started >= 60 * args.minutes
        if time.time() - told > 30 or last:
            shown = " ".join(f"{m:.3f}" for m in mean)
            print(
                f"{elapsed / 60:.1f} min, step {count}, {tokens} of {pool.tokens} tokens, alpha {shown}",
                flush=True,
            )
            told = time.time()
        if time.time() - saved > 60 * args.every or last:
            state = {"head": head.state_dict(), "optimiser": optimiser.state(), "elapsed": elapsed, "tokens": tokens,
                     "count": count, "vocabulary": vocabulary, "inner": args.inner, "started": started}  # fmt: skip
            torch.save(state, file.with_suffix(".part"))
            file.with_suffix(".part").rename(file)
            seen = {
                name: judge(head, target, held[i], vocabulary, 0.8 * i)
                for i, name in enumerate(("greedy", "0.8"))
            }
            entry = {"minutes": round(elapsed / 60, 1), "steps": count, "tokens": tokens, "data": pool.tokens,
                     "alpha": [round(m, 3) for m in mean], **seen}  # fmt: skip
            print(json.dumps(entry), file=log, flush=True)
            print(json.dumps(entry), flush=True)
            saved = time.time()


if __name__ == "__main__":
    main()
