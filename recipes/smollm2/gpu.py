"""Write the data and train SmolLM2's drafter on one GPU, within a number of seconds.

python recipes/smollm2/gpu.py --target SmolLM2-135M-Instruct.Q4_1.gguf --out work/gpu --seconds 220 [--device cuda]

The target is the file's own weights, as dense matrices. It writes until `--writing` of the time is over, then the drafter
is trained until the time is over. OUT holds at most six files: the drafter in parts, its config, run.json, texts.npz.
They are written after each third of the training and at the end, also when it is asked to stop (SIGTERM, Ctrl-C).
"""

from __future__ import annotations

import time

BEGAN = time.monotonic()

import argparse  # noqa: E402
import json  # noqa: E402
import math  # noqa: E402
import os  # noqa: E402
import random  # noqa: E402
import signal  # noqa: E402
import threading  # noqa: E402
from dataclasses import dataclass, field  # noqa: E402
from pathlib import Path  # noqa: E402
from typing import Any  # noqa: E402

import numpy as np  # noqa: E402
import torch  # noqa: E402
from dense import DenseTarget  # noqa: E402
from safetensors.torch import save_file  # noqa: E402
from writer import BatchWriter, Manner, Prompt, plain_attend  # noqa: E402

from paceline.models.registry import load_target  # noqa: E402
from paceline.ops.reference import EagerRunner  # noqa: E402
from paceline.train.capture import TargetTeacher  # noqa: E402
from paceline.train.encoding import TargetEncoder  # noqa: E402
from paceline.train.export import _stored  # noqa: E402
from paceline.train.loop import make_optimizers  # noqa: E402
from paceline.train.methods import Eagle3  # noqa: E402
from paceline.train.methods.base import Exported, Start  # noqa: E402
from paceline.train.objectives import acceptance, expected_tokens, find_objective, shaped  # noqa: E402
from paceline.train.openings import opening  # noqa: E402
from paceline.train.options import TrainOptions  # noqa: E402
from paceline.train.parallel import choose_anchors  # noqa: E402
from paceline.train.rounds import Plan, agreement, batch_loss, draft_all  # noqa: E402
from paceline.train.scoring import Scored, Task, score, value_and_gradient  # noqa: E402
from paceline.train.selfwritten import QUESTION, QUESTIONS_AT, OwnTexts  # noqa: E402
from paceline.train.windows import Text, Windows, batch_rows, pack  # noqa: E402

TAPS = (2, 9, 16, 23, 28)
TEMPERATURES = (0.0, 0.0, 0.0, 0.6, 0.6, 0.8, 0.8, 0.8, 1.0, 1.0)  # of answers, by lot
ANSWERS = (192, 256, 256, 480)  # tokens of an answer at most, by lot
TOP_P = 0.95
HELD_OUT = Path(__file__).with_name("heldout.txt")
HELD_TOKENS, DRAFTED = 128, 3  # of a held-out answer, in a step of the evaluation
WARMUP, LAST_RATE = 0.02, 0.01  # shares of the training, and of the learning rate at its end
PART = 15 << 20  # bytes of a file of weights
KEPT_TOKENS = 7_000_000  # of the texts that are saved


@dataclass
class Clock:
    """`--seconds`, and whether somebody asked to stop."""

    seconds: float
    stopped: bool = False
    said: float = field(default=0.0)

    @property
    def now(self) -> float:
        return time.monotonic() - BEGAN

    def until(self, end: float) -> bool:
        return self.now < end and not self.stopped

    def say(self, line: str, *, every: float = 0.0) -> None:
        """Print it, unless the last line was less than `every` seconds ago."""
        if self.now - self.said >= every:
            self.said = self.now
            print(f"{self.now:7.1f} s  {line}", flush=True)


def main() -> None:
    said = argparse.ArgumentParser()
    said.add_argument("--target", type=Path, required=True, help="the GGUF file")
    said.add_argument("--out", type=Path, required=True)
    said.add_argument("--seconds", type=float, default=220.0)
    said.add_argument("--writing", type=float, default=0.36, help="share of the time")
    said.add_argument("--device", default="cuda")
    said.add_argument("--length", type=int, default=640, help="tokens of a text and of a window")
    said.add_argument("--held", type=int, default=60, help="held-out prompts")
    said.add_argument("--slots", type=int, default=2048, help="texts written side by side")
    said.add_argument("--texts", type=int, default=120_000, help="room for so many")
    said.add_argument("--prompts", type=int, default=30_000)
    said.add_argument("--batch", type=int, default=32, help="windows of an update")
    said.add_argument("--vocabulary", type=int, default=8192)
    said.add_argument("--unroll", type=int, default=4)
    said.add_argument("--lr", type=float, default=0.02)
    said.add_argument("--objective", default="shaped")
    said.add_argument("--seed", type=int, default=0)
    args = said.parse_args()
    clock = Clock(args.seconds)
    for sign in (signal.SIGTERM, signal.SIGINT):
        signal.signal(sign, lambda *_: setattr(clock, "stopped", True))
    args.out.mkdir(parents=True, exist_ok=True)
    torch.backends.cuda.matmul.allow_fp16_reduced_precision_reduction = False
    torch.manual_seed(args.seed)
    device = torch.device(args.device)
    target = load_target(args.target, runner=EagerRunner(torch.float32))
    target.tap(TAPS)
    dense = DenseTarget(target, device, torch.float16 if device.type == "cuda" else torch.float32)
    clock.say(f"{args.target.name} is loaded, on {_card(device)}")
    if device.type == "cuda":
        check_kernels(device)
        clock.say("the kernels are checked")
    texts, held = write(args, dense, clock)
    if len(texts) < 2:
        raise SystemExit(f"the target finished {len(texts)} texts: give more --seconds or fewer --slots")
    train = pack(texts, args.length)
    clock.say(
        f"{len(texts)} texts, {train.filled} tokens, {int(train.counted.sum())} of them written, {len(train)} windows"
    )
    keeping = keep_texts(args.out, texts)
    trainer = Trainer(args, target, dense, train, clock)
    trainer.go(held)
    if keeping is not None:
        keeping.join()
    clock.say("done")


def _card(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else "the CPU"


def check_kernels(device: torch.device) -> None:
    """Triton's kernels on this card against plain torch, before any time is spent. Raises AssertionError."""
    import writing_kernels

    q, k, v = (torch.randn(5, n, 64, device=device, dtype=torch.float16) for n in (9, 3 * 640, 3 * 640))
    k, v = (x.view(5, 3, 640, 64) for x in (k, v))
    positions = torch.tensor([0, 3, 63, 300, 639], device=device)
    wanted = plain_attend(q, k, v, positions, 0.125)
    torch.testing.assert_close(
        writing_kernels.attend(q, k, v, positions, 0.125), wanted, atol=5e-3, rtol=1e-2
    )
    log_p = torch.log_softmax(2 * torch.randn(40, 8192, device=device), -1)
    logits = (2 * torch.randn(300, 8192, device=device)).half()
    rows, weights = torch.randint(40, (300,), device=device), torch.rand(300, device=device)
    task = Task(Scored(log_p, log_p.argmax(-1), rows, rows), weights, shaped)
    value, gradient = value_and_gradient(task, slice(0, 300), logits)
    exact = Task(task.scored, weights, lambda given: 1.0 * shaped(given))  # another function: no kernel
    wanted_value, wanted = value_and_gradient(exact, slice(0, 300), logits.float())
    torch.testing.assert_close(value, wanted_value, atol=1e-2, rtol=1e-3)
    torch.testing.assert_close(gradient.float(), wanted, atol=1e-3, rtol=1e-2)
    drawn = writing_kernels.choose(
        logits, torch.tensor([0.0, 0.8, 1.0] * 100, device=device), torch.full((300,), 0.95, device=device),
        torch.tensor([3], device=device),
    )  # fmt: skip
    assert torch.equal(logits[::3].gather(1, drawn[::3, None])[:, 0], logits[::3].max(-1).values)
    assert 0 <= int(drawn.min()) <= int(drawn.max()) < 8192


# -- data --------------------------------------------------------------------------------------------------------------


def prompts_of(args: argparse.Namespace, own: OwnTexts) -> tuple[list[Prompt], int]:
    """The held-out prompts, each at temperature 0 and at 0.8, and the openings behind them; how many are held out."""
    encode, assume = own.encoder.tokenizer.encode, own.before
    assert assume is not None, "SmolLM2 has a chat template"
    lines = HELD_OUT.read_text(encoding="utf-8").splitlines()[: args.held]
    held, question = [line.replace("\\n", "\n") for line in lines], min(QUESTION, own.room // 3)
    out = [
        Prompt(encode(f"{own.before}{line}{own.after}", add_bos=False), temperature, 0, HELD_TOKENS)
        for temperature in (0.0, 0.8) for line in held
    ]  # fmt: skip
    for number in range(args.prompts):
        draw = random.Random(f"gpu {args.seed} {number}")
        text = opening(draw)[1]
        out.append(
            Prompt(
                encode(own.before + text, add_bos=False),
                draw.choice(TEMPERATURES),
                question,
                draw.choice(ANSWERS),
            )
        )
    return out, 2 * len(held)


def write(args: argparse.Namespace, dense: DenseTarget, clock: Clock) -> tuple[list[Text], list[list[Text]]]:
    """What the target wrote: (to train on, held out: greedily and at temperature 0.8)."""
    encoder = TargetEncoder(args.target)
    own, tokenizer = OwnTexts.of(encoder, args.length, args.seed), encoder.tokenizer
    prompts, held = prompts_of(args, own)
    ends, special = (
        frozenset(tokenizer.eos_ids),
        frozenset(tokenizer.special_ids) | frozenset(tokenizer.eos_ids),
    )
    close = tuple(tokenizer.encode(own.after, add_bos=False))
    manner = Manner(close, ends, special, QUESTIONS_AT, TOP_P, args.length)
    writer = BatchWriter(dense, prompts, manner, (args.slots, args.texts), args.seed)
    clock.say(f"{len(prompts)} prompts, {writer.shared} tokens in common")
    writer.start()
    clock.say("the first step is done")
    began, end = clock.now, args.writing * clock.seconds
    while clock.until(end):
        writer.run(4 if dense.device.type == "cuda" else 1)
        texts, tokens = writer.counts
        clock.say(f"writing: {texts} texts, {tokens} tokens, {tokens / (clock.now - began):.0f}/s", every=3)
        if texts == args.texts:
            break
    done = writer.texts()
    half = held // 2
    greedy, sampled = ([t for i, t in done if a <= i < b] for a, b in ((0, half), (half, held)))
    return [t for i, t in done if i >= held], [greedy, sampled]


def keep_texts(out: Path, texts: list[Text]) -> threading.Thread | None:
    """Write texts.npz beside the training: tokens end to end, lengths, and what of each was written."""
    count, total = 0, 0
    for text in texts:
        count, total = count + 1, total + len(text.tokens)
        if total > KEPT_TOKENS:
            break
    kept = texts[:count]
    if not kept:
        return None

    def save() -> None:
        flat = np.concatenate([np.asarray(t.tokens, dtype=np.uint16) for t in kept])
        spans = np.array(
            [[*(x for s in t.counted for x in s), -1, -1, -1, -1][:4] for t in kept], dtype=np.int16
        )
        lengths = np.array([len(t.tokens) for t in kept], dtype=np.int16)
        np.savez_compressed(out / ".texts.npz", tokens=flat, lengths=lengths, spans=spans)
        os.replace(out / ".texts.npz", out / "texts.npz")

    thread = threading.Thread(target=save)
    thread.start()
    return thread


# -- training ----------------------------------------------------------------------------------------------------------


class Trainer:
    """The drafter, trained until the clock says so."""

    def __init__(
        self, args: argparse.Namespace, target: Any, dense: DenseTarget, train: Windows, clock: Clock
    ) -> None:
        self.args, self.dense, self.clock, self.device = args, dense, clock, dense.device
        self.method = Eagle3(vocabulary=args.vocabulary, taps=TAPS)
        self.start: Start = self.method.start(TargetTeacher(target), train, "scratch", args.seed)
        self.module = self.start.module.to(self.device)
        dense.narrow(self.module.ids)
        counted = np.bincount(train.tokens[train.counted], minlength=dense.head.shape[0])
        covered = counted[self.module.ids.cpu().numpy()].sum() / counted.sum()
        size = sum(p.numel() for p in self.module.parameters())
        clock.say(f"{size / 1e6:.2f} million parameters; {covered:.4f} of the tokens can be drafted")
        self.options = TrainOptions(
            objective=args.objective,
            draft_tokens=args.unroll,
            optimizer="muon",
            lr=args.lr,
            batch=args.batch,
            length=args.length,
        )
        self.optimizers = make_optimizers(self.module, self.options)
        self.plan = Plan(find_objective(args.objective), "decay", self.options.decay, args.unroll, 0)
        self.windows = [
            torch.from_numpy(x).to(self.device)
            for x in (train.tokens, train.segments, train.counted)
        ]  # fmt: skip
        self.filled = train.filled / max(1, len(train))  # tokens of a window
        self.history: list[dict[str, float]] = []
        self.figures: dict[str, Any] = {"tokens": train.filled, "covered": float(covered)}

    def go(self, held: list[list[Text]]) -> None:
        clock = self.clock
        reserve = max(6.0, 0.05 * clock.seconds)  # for evaluation and saving
        begin, end = clock.now, clock.seconds - reserve
        step, marks = 0, [1 / 3, 2 / 3]
        total = torch.zeros((), device=self.device)
        since = 0
        while clock.until(end):
            share = min(1.0, (clock.now - begin) / max(1e-6, end - begin))
            total += self._update(step, share)
            step, since = step + 1, since + 1
            if self.device.type == "cuda" and step % 4 == 0:
                torch.cuda.synchronize()  # or the clock runs ahead of the work
            if clock.now - clock.said >= 3:
                loss = float(total) / since
                seen = step * self.args.batch * self.filled
                rate = seen / (clock.now - begin)
                self.history.append({"seconds": clock.now, "step": step, "tokens": seen, "loss": loss})
                clock.say(
                    f"training: update {step}, {seen / 1e6:.2f} million tokens, {rate:.0f}/s, loss {loss:.4f}"
                )
                total.zero_()
                since = 0
            if marks and share >= marks[0]:
                marks.pop(0)
                self._look(held, step)
                self.save()
        self._look(held, step)
        self.save()

    def _update(self, step: int, share: float) -> torch.Tensor:
        rows = torch.from_numpy(batch_rows(len(self.windows[0]), self.args.batch, self.args.seed, step)).to(
            self.device
        )
        tokens, segments, counted = (x[rows] for x in self.windows)
        captured = self.dense.capture_on_device(tokens.long(), segments.long(), counted)
        loss, _ = batch_loss(self.module, captured, self.dense.narrow_logits, self.plan, None)
        loss.backward()  # type: ignore[no-untyped-call]
        torch.nn.utils.clip_grad_norm_([p for _, p in self.module.trainable()], self.options.clip)
        rate = self.options.lr * rate_at(share)
        for optimizer in self.optimizers:
            for group in optimizer.param_groups:
                group["lr"] = rate * group["share"]
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        return loss.detach()

    def _look(self, held: list[list[Text]], step: int) -> None:
        """Acceptance on the held-out answers, as a drafter of DRAFTED tokens would have it."""
        for name, temperature, texts in (("greedy", 0.0, held[0]), ("0.8", 0.8, held[1])):
            if texts:
                rates, tokens = self._judge(texts, temperature)
                self.history.append({"seconds": self.clock.now, "step": step, name: tokens})
                self.figures[name] = {"by_position": rates, "tokens_a_step": tokens, "texts": len(texts)}
                by = " ".join(f"{x:.3f}" for x in rates)
                self.clock.say(
                    f"held out, {name}: {tokens:.3f} tokens a step with {DRAFTED} drafted; kept {by}"
                )

    @torch.no_grad()
    def _judge(self, texts: list[Text], temperature: float) -> tuple[list[float], float]:
        """(share kept by position given that those before were, tokens a step), from every position of the texts."""
        heat, measure = temperature or 1.0, acceptance if temperature else agreement
        windows, chains = pack(texts, self.args.length), []
        for first in range(0, len(windows), 8):
            captured = self.dense.capture(windows.take(list(range(first, min(first + 8, len(windows))))))
            anchors = choose_anchors(captured, DRAFTED, 0, None)
            drafted = draft_all(
                self.module, captured, lambda x: self.dense.logits(x) / heat, anchors, DRAFTED
            )
            kept = score(drafted.states, drafted.scored, lambda x: self.module.logits(x) / heat, (measure,))[
                0
            ]
            whole = drafted.valid.flatten(0, 1).all(1)
            chains.append(drafted.spread(kept)[whole])
        kept = torch.cat(chains)
        chain = kept.cumprod(1).mean(0)
        rates = [
            float(b / a)
            for a, b in zip([1.0, *chain[:-1].clamp_min(1e-9).tolist()], chain.tolist(), strict=True)
        ]
        return rates, expected_tokens(kept, torch.ones_like(kept, dtype=torch.bool))

    def save(self) -> None:
        """The drafter in parts that load as one folder, and what was seen."""
        out = self.args.out
        tensors, configs = self.method.files(
            self.module, Exported(self.start.config, DRAFTED, torch.bfloat16)
        )
        stored = {name: _stored(tensor, torch.bfloat16) for name, tensor in tensors.items()}
        parts: list[dict[str, torch.Tensor]] = [{}]
        for name, tensor in sorted(stored.items(), key=lambda item: -item[1].nbytes):
            if parts[-1] and sum(t.nbytes for t in parts[-1].values()) + tensor.nbytes > PART:
                parts.append({})
            parts[-1][name] = tensor
        names = [f"model-{i + 1:05}-of-{len(parts):05}.safetensors" for i in range(len(parts))]
        index = {tensor: name for part, name in zip(parts, names, strict=True) for tensor in part}
        whole = {"metadata": {"total_size": sum(t.nbytes for t in stored.values())}, "weight_map": index}
        texts = {"model.safetensors.index.json": whole, "run.json": self._run(), **configs}
        for part, name in zip(parts, names, strict=True):
            save_file(part, out / f".{name}", metadata={"format": "pt"})
            os.replace(out / f".{name}", out / name)
        for name, value in texts.items():
            (out / f".{name}").write_text(json.dumps(value, indent=1) + "\n")
            os.replace(out / f".{name}", out / name)
        self.clock.say(f"saved to {out}")

    def _run(self) -> dict[str, Any]:
        said = {k: str(v) if isinstance(v, Path) else v for k, v in vars(self.args).items()}
        return {"arguments": said, "card": _card(self.device), "torch": torch.__version__, "taps": TAPS,
                "figures": self.figures, "history": self.history}  # fmt: skip


def rate_at(share: float) -> float:
    """Of the learning rate: a linear warm-up, then a cosine."""
    if share < WARMUP:
        return max(0.02, share / WARMUP)
    return LAST_RATE + (1 - LAST_RATE) * 0.5 * (1 + math.cos(math.pi * (share - WARMUP) / (1 - WARMUP)))


if __name__ == "__main__":
    main()
