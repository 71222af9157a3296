"""How many short answers are those of float32 activations: paceline as it runs, and llama.cpp, on the same file.

    python recipes/real/answers.py FILE --out answers.json [--llama-python PYTHON] [--questions 100] [--tokens 24]
    python recipes/real/answers.py --report A.json B.json

Each of the questions of `short_questions.py` is answered greedily with float32 activations (`--activations float32`).
The others read that answer: at each of its positions, the token they would write is the likeliest one there, so their
own answer is equal up to the first position where that differs. KL is that of the float32 distribution from theirs.
What they are asked for is the 200 likeliest tokens; all others count as one, for every engine alike.

Questions that are in `--out` are not asked again, so a run that was stopped goes on. PYTHON is one that has `xllamacpp`.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import time
import urllib.request
from collections.abc import Sequence as Seq
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
from short_questions import QUESTIONS
from torch import Tensor

from paceline.checkpoints.loading import Transform
from paceline.config import EngineConfig
from paceline.hub.resolve import locate
from paceline.kv.cache import KVCache
from paceline.models.registry import load_target
from paceline.ops.base import Runner
from paceline.ops.runners import pick_runner
from paceline.provenance import provenance
from paceline.text.chat import ChatTemplate
from paceline.text.tokenizer import Tokenizer

TOGETHER = 10  # questions that are answered side by side
LIKELIEST = 200  # tokens whose chances are compared
PAGES = 400
Row = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Text:
    prompt: list[int]
    answer: list[int]


@dataclass(frozen=True, slots=True)
class Position:
    """What an engine says at one position: its likeliest tokens, most likely first, and their log-probabilities."""

    ids: list[int]
    logprobs: list[float]


class Engine(Protocol):
    def read(self, texts: Seq[Text]) -> list[list[Position]]:
        """For each text one for each token of its answer."""
        ...


class Paceline:
    """A target of its own weights, by one runner."""

    def __init__(self, path: Path, runner: Runner, transform: Transform | None = None) -> None:
        self.target = load_target(path, runner=runner, transform=transform)
        self.cache = KVCache(
            self.target.layout, dict.fromkeys(self.target.layout.kinds, PAGES), max_sequences=TOGETHER,
            max_tokens=512, dtype=self.target.kv_dtype,
        )  # fmt: skip

    @torch.no_grad()
    def write(self, prompts: Seq[list[int]], tokens: int) -> tuple[list[Text], list[Tensor]]:
        """Greedy answers, and the logits of each one's tokens [its tokens, V]."""
        texts = [Text(prompt, []) for prompt in prompts]
        rows: list[list[Tensor]] = [[] for _ in prompts]
        news = dict(enumerate(prompts))
        for i, prompt in news.items():
            self.cache.open(i, prompt, share=False)
        while news:
            ends = torch.tensor([len(new) for new in news.values()]).cumsum(0) - 1
            for i, logits in zip(news, self._forward(news, ends), strict=True):
                rows[i].append(logits)
                texts[i].answer.append(int(logits.argmax()))
            ended = [i for i in news if self._ends(texts[i].answer, tokens)]
            for i in ended:
                self.cache.close(i)
            news = {i: texts[i].answer[-1:] for i in news if i not in ended}
        return texts, [torch.stack(each) for each in rows]

    def _ends(self, answer: list[int], tokens: int) -> bool:
        return len(answer) == tokens or answer[-1] in self.target.eos_token_ids

    @torch.no_grad()
    def logits(self, texts: Seq[Text]) -> list[Tensor]:
        """For each text [its answer, V]."""
        news = {i: text.prompt + text.answer[:-1] for i, text in enumerate(texts)}
        wanted: list[int] = []
        start = 0
        for text, new in zip(texts, news.values(), strict=True):
            wanted += range(start + len(text.prompt) - 1, start + len(new))
            start += len(new)
        for i, new in news.items():
            self.cache.open(i, new, share=False)
        logits = self._forward(news, torch.tensor(wanted))
        for i in news:
            self.cache.close(i)
        return list(torch.split(logits, [len(text.answer) for text in texts]))

    def _forward(self, news: dict[int, list[int]], wanted: Tensor) -> Tensor:
        """Logits of the rows `wanted`, of all new tokens of all sequences one behind the other."""
        with self.cache.tail(list(news.items())) as tail:
            hidden = self.target.forward(tail.rows(), self.cache)
            logits = self.target.logits(hidden[wanted]).clone()
            tail.commit([len(new) for new in news.values()])
        return logits

    def read(self, texts: Seq[Text]) -> list[list[Position]]:
        return [likeliest(logits) for logits in self.logits(texts)]


class Llama:
    """llama.cpp's server. It reads an answer by writing it; behind a token that it would not write it begins again."""

    def __init__(self, python: str, file: Path, threads: int) -> None:
        program = Path(__file__).with_name("llama_wheel.py")
        self._process = subprocess.Popen(
            [python, str(program), str(file), str(threads)], stdin=subprocess.PIPE, stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL, text=True,
        )  # fmt: skip
        assert self._process.stdout is not None
        line = self._process.stdout.readline().strip()
        if not line:
            raise SystemExit(f"{python} {program} did not start: run it by hand")
        self.version, _, self._address = line.rpartition(" ")

    def close(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait()

    def read(self, texts: Seq[Text]) -> list[list[Position]]:
        return [self._read(text) for text in texts]

    def _read(self, text: Text) -> list[Position]:
        positions: list[Position] = []
        while (at := len(positions)) < len(text.answer):
            new = self._write(text.prompt + text.answer[:at], len(text.answer) - at)
            same = 0
            while same < len(new) and new[same].ids[0] == text.answer[at + same]:
                same += 1
            positions += new[: same + 1]
        return positions

    def _write(self, prompt: list[int], tokens: int) -> list[Position]:
        body = {
            "prompt": prompt, "n_predict": tokens, "temperature": 0.0, "samplers": ["temperature"], "top_k": 0,
            "n_probs": LIKELIEST, "cache_prompt": True, "stream": False,
        }  # fmt: skip
        request = urllib.request.Request(
            f"{self._address}/completion", json.dumps(body).encode(), {"Content-Type": "application/json"}
        )
        with urllib.request.urlopen(request, timeout=600) as reply:
            value = json.load(reply)
        if not (told := value.get("completion_probabilities")):
            raise SystemExit(f"llama.cpp gave no probabilities: {str(value)[:300]}")
        tops = [entry["top_logprobs"] for entry in told]
        return [Position([top["id"] for top in each], [top["logprob"] for top in each]) for each in tops]


def likeliest(logits: Tensor) -> list[Position]:
    values, ids = torch.log_softmax(logits.double(), dim=-1).topk(min(LIKELIEST, logits.shape[1]))
    return [Position(i, v) for i, v in zip(ids.tolist(), values.tolist(), strict=True)]


def divergence(true: Tensor, told: Position) -> float:
    """KL in nats of `true`, the log-probabilities [V], from what is told; the tokens it does not name count as one."""
    p, q = true[told.ids], torch.tensor(told.logprobs, dtype=torch.float64)
    kl = float((p.exp() * (p - q)).sum())
    rest_p, rest_q = 1 - float(p.exp().sum()), 1 - float(q.exp().sum())
    if rest_p > 1e-9 and rest_q > 1e-9:
        kl += rest_p * float(torch.log(torch.tensor(rest_p / rest_q, dtype=torch.float64)))
    return max(kl, 0.0)


def compare(logits: Tensor, answer: list[int], told: list[Position]) -> Row:
    """`at`: the first position where another token is likeliest, None if there is none; `gap`: how much less likely, in
    nats, that token is with float32."""
    true = torch.log_softmax(logits.double(), dim=-1)
    differ = [i for i, (token, each) in enumerate(zip(answer, told, strict=True)) if each.ids[0] != token]
    at = differ[0] if differ else None
    gap = None if at is None else round(float(true[at, answer[at]] - true[at, told[at].ids[0]]), 5)
    kl = [round(divergence(row, each), 7) for row, each in zip(true, told, strict=True)]
    return {"at": at, "gap": gap, "differ": len(differ), "kl": kl}


def prompts_of(path: Path, questions: Seq[str]) -> list[list[int]]:
    tokenizer = Tokenizer.load(path)
    template = ChatTemplate.of(tokenizer)
    texts = [template.render([{"role": "user", "content": question}]) for question in questions]
    template.close()
    return [tokenizer.encode(text, add_bos=False) for text in texts]


def runner_of(threads: int, exact: bool) -> tuple[Runner, str]:
    config = EngineConfig(threads=threads, activations="float32" if exact else "auto")
    return pick_runner(config, torch.device("cpu"))


def measure(args: argparse.Namespace, known: Row) -> None:
    """Ask what is not in `known` yet, and write it after each few questions."""
    path = locate(args.file, "target")
    if not isinstance(path, Path):
        raise SystemExit(f"{args.file} is not here: `paceline pull {args.file}`")
    prompts = prompts_of(path, QUESTIONS[: args.questions])
    exact, _ = runner_of(args.threads, exact=True)
    rounded, arithmetic = runner_of(args.threads, exact=False)
    known |= {"file": path.name, "tokens": args.tokens, "arithmetic": arithmetic}
    known["machine"] = provenance(" ".join(sys.argv))
    rows: list[Row] = known.setdefault("rows", [])
    with ExitStack() as stack:
        float32 = Paceline(path, exact)
        engines: dict[str, Engine] = {"paceline": Paceline(path, rounded)}
        if args.llama_python:
            llama = Llama(args.llama_python, path, args.threads)
            stack.callback(llama.close)
            engines["llama.cpp"], known["llama.cpp"] = llama, llama.version
        begin = time.perf_counter()
        while len(rows) < len(prompts):
            texts, logits = float32.write(prompts[len(rows) : len(rows) + TOGETHER], args.tokens)
            told = {name: engine.read(texts) for name, engine in engines.items()}
            for i, (text, true) in enumerate(zip(texts, logits, strict=True)):
                compared = {name: compare(true, text.answer, each[i]) for name, each in told.items()}
                rows.append({"ids": text.answer, **compared})
            args.out.write_text(json.dumps(known))
            equal = ", ".join(f"{name} {count_equal(rows, name)}" for name in engines)
            took = time.perf_counter() - begin
            print(f"{len(rows)} of {len(prompts)} answers, equal: {equal} ({took:.0f} s)", flush=True)


def count_equal(rows: Seq[Row], name: str) -> int:
    return sum(row[name]["at"] is None for row in rows)


def report(paths: Seq[Path]) -> None:
    """The table of docs/performance-reference.md."""
    print(
        "| file | engine | answers equal | tokens equal | KL a token | gap at the first difference, median |"
    )
    print("|---|---|---|---|---|---|")
    for path in paths:
        known: Row = json.loads(path.read_text(encoding="utf-8"))
        rows = known["rows"]
        total = sum(len(row["ids"]) for row in rows)
        for name in (name for name in rows[0] if name != "ids"):
            compared = [row[name] for row in rows]
            kl = sum(sum(row["kl"]) for row in compared) / total
            same = 1 - sum(row["differ"] for row in compared) / total
            gaps = [row["gap"] for row in compared if row["gap"] is not None]
            gap = f"{statistics.median(gaps):.3f}" if gaps else "-"
            equal = f"{count_equal(rows, name)} of {len(rows)}"
            print(f"| {known['file']} | {name} | {equal} | {same:.2%} | {kl:.5f} | {gap} |")


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("file", nargs="?", help="a GGUF file, a folder, or the name of a model that is here")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--llama-python")
    parser.add_argument("--questions", type=int, default=len(QUESTIONS), help="ask the first ones only")
    parser.add_argument("--tokens", type=int, default=24)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--report", type=Path, nargs="+")
    args = parser.parse_args()
    if args.report:
        report(args.report)
        return
    if args.file is None or args.out is None:
        parser.error("give FILE and --out, or --report")
    known: Row = json.loads(args.out.read_text(encoding="utf-8")) if args.out.exists() else {}
    measure(args, known)


if __name__ == "__main__":
    main()
