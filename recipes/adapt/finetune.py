"""Fine-tune a copy of a target on the new domain, in plain PyTorch. Not a product feature: any fine-tune will do.

python finetune.py TARGET DATA.jsonl OUT --minutes 4
"""

from __future__ import annotations

import argparse
import json
import shutil
import time
from pathlib import Path

import torch
from transformers import AutoTokenizer, Gemma4ForCausalLM

TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "generation_config.json")


def batches(tokens: torch.Tensor, batch: int, length: int, seed: int):
    """Windows [batch, length] from random places of one long text."""
    generator = torch.Generator().manual_seed(seed)
    while True:
        starts = torch.randint(len(tokens) - length, (batch,), generator=generator)
        yield torch.stack([tokens[s : s + length] for s in starts.tolist()])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("target", type=Path)
    parser.add_argument("data", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--minutes", type=float, default=4.0)
    parser.add_argument("--steps", type=int, default=400, help="at most")
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--length", type=int, default=192)
    parser.add_argument("--lr", type=float, default=1e-3)
    a = parser.parse_args()
    tokenizer = AutoTokenizer.from_pretrained(a.target)
    texts = [json.loads(line)["text"] for line in a.data.read_text(encoding="utf-8").splitlines()]
    ids = [i for text in texts for i in tokenizer(text)["input_ids"]]
    model = Gemma4ForCausalLM.from_pretrained(a.target, dtype=torch.float32).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=a.lr, betas=(0.9, 0.95), weight_decay=0.0)
    began, source = time.monotonic(), batches(torch.tensor(ids), a.batch, a.length, 0)
    for step in range(a.steps):
        share = max(step / a.steps, (time.monotonic() - began) / (60 * a.minutes))
        if share >= 1:
            break
        for group in optimizer.param_groups:
            group["lr"] = a.lr * min(1.0, (step + 1) / 10) * (1 - 0.9 * share)
        tokens = next(source)
        loss = model(input_ids=tokens, labels=tokens).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        if step % 10 == 0:
            print(f"step {step}  loss {loss.item():.3f}  {time.monotonic() - began:.0f} s", flush=True)
    model.to(torch.bfloat16).save_pretrained(a.out)
    for name in TOKENIZER_FILES:
        if (a.target / name).exists():
            shutil.copyfile(a.target / name, a.out / name)


if __name__ == "__main__":
    main()
