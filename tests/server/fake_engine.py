"""An engine without a model, for the server's tests: its text is a function of (prompt, seed) alone."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from tokenizers import AddedToken, decoders, models, pre_tokenizers
from tokenizers import Tokenizer as Backend

from paceline.core import Constraint, Delta, SamplingParams, Stats, TokenLogprob
from paceline.text.stream import TextStream, stop_ids_of
from paceline.text.tokenizer import Tokenizer

WORDS = [
    "def ",
    "return ",
    "self",
    "(",
    ")",
    ":",
    "\n",
    "    ",
    "x",
    "y",
    " = ",
    "print",
    "für ",
    "🎉",
    "naïve ",
    "0",
    "1",
]
SPECIAL = ["<pad>", "<eos>", "<bos>", "<|turn>", "<turn|>"]
MARKS = ["<|tool_call>", "<tool_call|>", '<|"|>', "<|channel>", "<channel|>"]
MAX_LEN = 512
HIDDEN = 24


def make_tokenizer(marks: bool = True) -> Tokenizer:
    """Byte-level BPE without merges; the marks of Gemma 4 as special tokens if asked for."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    names = SPECIAL + (MARKS if marks else [])
    vocab = {token: i for i, token in enumerate(names + alphabet)}
    backend = Backend(models.BPE(vocab=vocab, merges=[]))
    backend.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in names])
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    config = {"bos_token": "<bos>", "eos_token": "<eos>", "pad_token": "<pad>", "add_bos_token": True}
    return Tokenizer(backend, config, eos=[1, 4])


@dataclass
class _Text:
    request: str
    index: int
    prompt: list[int]
    params: SamplingParams
    seed: int
    stream: TextStream
    constraint: Constraint | None
    script: list[int]
    stats: Stats = field(default_factory=Stats)
    said: str = ""
    out: list[int] = field(default_factory=list)


class FakeEngine:
    """`script`: what every text says before it ends, instead of random words. `fail`: raised per step."""

    def __init__(self, tokenizer: Tokenizer, script: str | None = None, delay: float = 0.0) -> None:
        self.tokenizer, self.script, self.delay = tokenizer, script, delay
        self.running: list[_Text] = []
        self.max_len = MAX_LEN
        self.fail: list[Exception] = []
        self.nan_in: str | None = None
        self.salts: list[str] = []
        self.last_params: SamplingParams | None = None
        self.last_prompt: list[int] = []

    @property
    def has_work(self) -> bool:
        return bool(self.running)

    @property
    def info(self) -> Mapping[str, Any]:
        return {}

    def add(
        self,
        request_id: str,
        prompt_ids: list[int],
        params: SamplingParams,
        salt: str = "",
        written: Any = None,
    ) -> None:
        self.salts.append(salt)
        self.last_params, self.last_prompt = params, prompt_ids
        for index in range(params.n):
            constraint = params.constraint() if params.constraint else None
            seed = (params.seed or 0) + index
            script = self.tokenizer.encode(self.script, add_bos=False) if self.script is not None else []
            stream = TextStream(self.tokenizer, params)
            self.running.append(
                _Text(request_id, index, prompt_ids, params, seed, stream, constraint, script)
            )

    def cancel(self, request_id: str) -> None:
        self.running = [t for t in self.running if t.request != request_id]

    def cut_off(self, request_id: str) -> list[Delta]:
        mine = [text for text in self.running if text.request == request_id]
        self.cancel(request_id)
        return [
            Delta(t.request, t.index, t.stream.finish(), [], [], finish_reason="length", stats=t.stats)
            for t in mine
        ]

    def close(self) -> None:
        self.closed = True

    def watch(self) -> None:
        """It can always step."""

    def step(self) -> list[Delta]:
        if self.delay:
            import time

            time.sleep(self.delay)
        if self.fail:
            raise self.fail.pop(0)
        deltas = [self._advance(text) for text in self.running]
        done = {(d.request, d.index) for d in deltas if d.finish_reason}
        self.running = [t for t in self.running if (t.request, t.index) not in done]
        return deltas

    def _advance(self, text: _Text) -> Delta:
        params, count = text.params, 1
        if self.nan_in and self.nan_in in self.tokenizer.decode(text.prompt):
            return Delta(
                text.request, text.index, "", [], [], finish_reason="error", error="logits are not finite"
            )
        drafts = params.draft_tokens != 0 and params.drafter != "none"
        if params.pooling:
            made = Delta(text.request, text.index, "", [], [], finish_reason="stop", stats=text.stats)
            made.embedding = self.vector(text.prompt)
            return made
        if drafts:
            k = 4 if params.draft_tokens in (None, "auto") else int(params.draft_tokens)
            count = 1 + self._noise(text, len(text.out), "accept") % (k + 1)
        new: list[int] = []
        logprobs: list[TokenLogprob] = []
        finish = None
        for _ in range(count):
            token = self._next(text, text.out + new)
            new.append(token)
            if params.logprobs is not None:
                raw = -1.0 / (1 + token)
                top = [(token - j, raw - j) for j in range(params.logprobs)]
                logprobs.append(TokenLogprob(token, raw, raw, top))
            if text.constraint is not None:
                text.constraint.commit([token])
            ends = stop_ids_of(self.tokenizer, params.stop) | {*params.stop_token_ids}
            if (token in self.tokenizer.eos_ids and not params.ignore_eos) or token in ends:
                finish = "stop"
            elif len(text.out) + len(new) >= min(params.max_tokens, self.max_len - len(text.prompt)):
                finish = "length"
            if finish:
                break
        return self._delta(text, new, logprobs, finish, drafts)

    def vector(self, prompt: list[int]) -> np.ndarray:
        """[HIDDEN] of length 1, by the prompt alone."""
        made = np.random.default_rng(prompt).standard_normal(HIDDEN)
        return (made / np.linalg.norm(made)).astype(np.float32)

    def _delta(
        self, text: _Text, new: list[int], logprobs: list[TokenLogprob], finish: Any, drafts: bool
    ) -> Delta:
        pushed = text.stream.push(new)
        shown = pushed.text
        if pushed.stopped:
            new, logprobs, finish = new[: pushed.kept_tokens], logprobs[: pushed.kept_tokens], "stop"
        elif finish:
            shown += text.stream.finish()
        text.out += new
        text.said += shown
        stats = text.stats
        stats.steps += 1
        stats.emitted += len(new)
        kept = len(new) - 1
        if drafts:
            stats.drafted += 4
            stats.accepted += kept
            stats.drafted_by_position = [stats.steps] * 4
            stats.accepted_by_position = [stats.accepted, 0, 0, 0]
            stats.drafters = {"ngram": stats.steps}
        else:
            stats.reasons = {"off": stats.steps}
        origins = ["draft"] * kept + ["target"]
        proposed = [*new[:kept], 7][:4] if drafts else []
        return Delta(
            text.request, text.index, shown, new, origins[: len(new)], proposed, logprobs, finish,
            stats if finish else None,
        )  # fmt: skip

    def _noise(self, text: _Text, position: int, purpose: str) -> int:
        digest = hashlib.sha256(f"{text.seed}/{position}/{purpose}/{len(text.prompt)}".encode()).digest()
        return int.from_bytes(digest[:8], "little")

    def _next(self, text: _Text, out: list[int]) -> int:
        if text.constraint is not None:
            mask = text.constraint.masks([])[0]
            if mask is not None:
                allowed = [int(i) for i in mask.nonzero()[0]]
                ends = [i for i in allowed if i in self.tokenizer.eos_ids]
                return ends[0] if ends else allowed[self._noise(text, len(out), "pick") % len(allowed)]
        if self.script is not None:
            return text.script[len(out)] if len(out) < len(text.script) else 1
        words = "".join(WORDS[self._noise(text, i, "word") % len(WORDS)] for i in range(len(out) + 1))
        return self.tokenizer.encode(words, add_bos=False)[len(out)]
