"""Rows about bits: whether rows depend on their neighbours, and texts on drafters, lengths, temperatures and batches."""

from __future__ import annotations

import io
import json
import sys
import tempfile
import time
from collections.abc import Sequence as Seq
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from journal import Journal
from safetensors.torch import save_file
from subjects import PROMPT, Place, Wanted, prompts
from subjects import engine as made

from paceline import LLM
from paceline.check import forward
from paceline.check.subject import Subject
from paceline.core import Completion, Draft, SamplingParams
from paceline.drafters.base import DraftContext, Drafter
from paceline.drafters.ngram import NgramDrafter
from paceline.engine.engine import Engine

LENGTHS = range(1, 9)
FEW = Wanted("31b", layers=6, batch=8, length=1280)


class Replay(Drafter):
    """Drafts what the text will be, as it was written before, with every fourth token wrong."""

    name, max_tokens = "replay", 16

    def __init__(self, vocab_size: int) -> None:
        self.texts: dict[tuple[int, ...], list[int]] = {}  # by prompt: all tokens
        self._vocab = vocab_size

    def draft(self, context: DraftContext) -> Draft:
        tokens = []
        for sequence, limit in zip(context.sequences, context.limits, strict=True):
            at, known = len(sequence.tokens), self.texts.get(tuple(sequence.tokens[:PROMPT]), [])
            own = known[at : at + limit]
            wrong = [(at + j) * 2654435761 % 4294967296 < 1 << 30 for j in range(len(own))]
            tokens.append([(t + bad) % self._vocab for t, bad in zip(own, wrong, strict=True)])
        sure = [[0.5] * len(own) for own in tokens]
        reasons = [None if own else "no proposal" for own in tokens]
        return Draft(tokens, sure, None, list(reasons), [self.name] * len(tokens))


def invariance(place: Place, journal: Journal) -> None:
    """Logits of rows alone, beside others and in chunks of many sizes, of a 31B-shaped target of few layers."""
    with made(place, FEW) as (engine, _):
        some = tuple(tuple(p.tokens) for p in prompts(engine.state.target.vocab_size, 3))
        found = forward.measure(Subject(engine, some), texts=2, length=24 if place.dry else 96)
        del engine
    words = "bit-exact" if found.logits == 0 else f"moves by up to {found.logits:.3g} ({found.worst})"
    journal.add("bits of rows", f"{words}, {found.rows} rows compared", exact=found.logits == 0, rows=found.rows,
                most=found.logits)  # fmt: skip


def random_texts(place: Place, journal: Journal) -> None:
    """Texts of a 31B-shaped target of few layers with every drafter, against those without."""
    fields = place.fields(FEW.shape, FEW.layers)
    with tempfile.TemporaryDirectory() as scratch:
        folder = random_eagle3(Path(scratch), fields["hidden_size"], fields["vocab_size"])
        with made(place, replace(FEW, network=folder)) as (engine, _):
            vocab = engine.state.target.vocab_size
            engine.state.drafters |= {"ngram": NgramDrafter(), "replay": Replay(vocab)}
            compare(place, journal, "31b-shaped", engine, [p.tokens for p in prompts(vocab, 4)])
            del engine


def demo_texts(place: Place, journal: Journal) -> None:
    """Texts of the bundled pair with every drafter, against those without."""
    options: dict[str, Any] = {
        "draft_tokens": 4,
        "device": place.device,
        "max_batch": 8,
        "max_model_len": 512,
    }
    llm = LLM("demo", drafter="mtp", **options)
    engine, target = llm.engine, llm.engine.state.target
    with tempfile.TemporaryDirectory() as scratch:
        folder = random_eagle3(Path(scratch), target.hidden_size, target.vocab_size)
        other = LLM("demo", drafter=str(folder), **options).engine
    engine.state.drafters["replay"] = other.state.drafters["replay"] = Replay(target.vocab_size)
    text = llm.tokenizer.encode(
        "def moving_average(values, window):\n    total = 0\n    for value in values:\n" * 8
    )
    asked = [text[i : i + PROMPT] for i in (0, 5, 11, 17)]
    compare(place, journal, "demo", engine, asked)
    for name in ("ngram", "replay"):
        del other.state.drafters[name]
    compare(place, journal, "demo eagle3", other, asked)


def random_eagle3(folder: Path, hidden: int, vocab: int) -> Path:
    """Write an EAGLE-3 drafter with random weights, which takes embedding and head of its target."""
    inner, head, heads = 128, 16, 4
    shapes = {
        "fc": (hidden, 3 * hidden), "midlayer.self_attn.q_proj": (heads * head, 2 * hidden),
        "midlayer.self_attn.k_proj": (heads * head, 2 * hidden), "midlayer.self_attn.v_proj": (heads * head, 2 * hidden),
        "midlayer.self_attn.o_proj": (hidden, heads * head), "midlayer.mlp.gate_proj": (inner, hidden),
        "midlayer.mlp.up_proj": (inner, hidden), "midlayer.mlp.down_proj": (hidden, inner),
    }  # fmt: skip
    generator = torch.Generator().manual_seed(0)
    tensors = {
        f"{name}.weight": (torch.randn(shape, generator=generator) * shape[1] ** -0.5).bfloat16()
        for name, shape in shapes.items()
    }
    norms = ("norm", "midlayer.hidden_norm", "midlayer.input_layernorm", "midlayer.post_attention_layernorm")
    tensors |= {f"{name}.weight": torch.ones(hidden, dtype=torch.bfloat16) for name in norms}
    save_file(tensors, folder / "model.safetensors")
    config = {
        "architectures": ["LlamaForCausalLMEagle3"], "model_type": "llama", "hidden_size": hidden,
        "intermediate_size": inner, "num_attention_heads": heads, "num_key_value_heads": heads, "head_dim": head,
        "num_hidden_layers": 1,
        "vocab_size": vocab, "draft_vocab_size": vocab, "target_hidden_size": hidden, "rms_norm_eps": 1e-6,
        "rope_theta": 10_000.0, "max_position_embeddings": 4096, "hidden_act": "silu",
        "eagle_aux_hidden_state_layer_ids": [1, 2, 3],
    }  # fmt: skip
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    return folder


def compare(place: Place, journal: Journal, name: str, engine: Engine, asked: list[list[int]]) -> None:
    """Write the texts of `asked` without a drafter, each alone, then with all of them, alone and side by side."""
    tokens, texts, accepted, drafted, wrong = 0, 0, 0, 0, ""
    length, end = (12, journal.left) if place.dry else (96, min(journal.left - 5, 40.0))
    end += time.time()
    replay = engine.state.drafters.get("replay")
    for temperature in (0.0, 0.8):
        params = [
            SamplingParams(
                max_tokens=length, temperature=temperature, seed=i, ignore_eos=True, drafter="none"
            )
            for i in range(len(asked))
        ]
        plain = [_write(engine, [one], [own])[0] for one, own in zip(asked, params, strict=True)]
        if isinstance(replay, Replay):
            replay.texts = {tuple(p): [*p, *c.token_ids] for p, c in zip(asked, plain, strict=True)}
        for count in LENGTHS:
            for drafter in (d for d in engine.state.drafters if d != "none"):
                for batch in (1, len(asked)):
                    if time.time() > end or wrong:
                        break
                    some = [replace(own, drafter=drafter, draft_tokens=count) for own in params[:batch]]
                    done = _write(engine, asked[:batch], some)
                    for mine, theirs in zip(done, plain, strict=False):
                        tokens, texts = tokens + len(mine.token_ids), texts + 1
                        accepted, drafted = accepted + mine.stats.accepted, drafted + mine.stats.drafted
                        if mine.token_ids != theirs.token_ids and not wrong:
                            at = _differs(mine.token_ids, theirs.token_ids)
                            wrong = f"{drafter} {count}, temperature {temperature}, batch {batch}, token {at}"
    words = f"DIFFERENT with {wrong}" if wrong else "all equal" if tokens else "nothing was compared"
    journal.add(
        f"texts, {name}", f"{words}: {tokens:,} tokens in {texts} texts, {accepted:,} of {drafted:,} drafted tokens kept",
        equal=not wrong and tokens > 0, tokens=tokens, texts=texts, accepted=accepted, drafted=drafted, wrong=wrong,
        target=20_000,
    )  # fmt: skip


def _write(engine: Engine, asked: list[list[int]], params: Seq[SamplingParams]) -> list[Completion]:
    done = engine.run({str(i): (p, own) for i, (p, own) in enumerate(zip(asked, params, strict=True))})
    return [done[str(i)][0] for i in range(len(asked))]


def _differs(mine: Seq[int], theirs: Seq[int]) -> int:
    return next(
        (i for i, (a, b) in enumerate(zip(mine, theirs, strict=False)) if a != b), min(len(mine), len(theirs))
    )


def check_demo(place: Place, journal: Journal) -> None:
    """`paceline check demo --quick` on this device."""
    from paceline.cli import group

    begin, out = time.time(), io.StringIO()
    with tempfile.TemporaryDirectory() as scratch:
        path = Path(scratch) / "check.json"
        words = ["check", "demo", "--quick", "--device", place.device, "--json", str(path)]
        words += ["--seconds", "1", "--tokens", "100"] if place.dry else []
        try:
            with redirect_stdout(out), redirect_stderr(sys.stderr):
                group.main(words, standalone_mode=False)
        except SystemExit:
            pass  # the certificate says why
        (found,) = json.loads(path.read_text(encoding="utf-8"))
    said = {one["name"]: f"{one['outcome']}: {one['words']}" for one in found["findings"]}
    taken, held = time.time() - begin, "HOLDS" if found["holds"] else "DOES NOT HOLD"
    journal.add("check demo --quick", f"{held}, {found['contract']} ({taken:.0f} s)", findings=said, holds=found["holds"],
                contract=found["contract"], seconds=taken)  # fmt: skip
