"""What `draft_tokens="auto"` brings on a real pair: plain, auto and fixed lengths side by side, twelve questions.

    python recipes/real/speed.py TARGET DRAFTER --out speed.json [--temperatures 0 0.8] [--fixed 2 4 6] [--tokens 128]
    python recipes/real/speed.py TARGET DRAFTER --out llama.json --llama-server BINARY [--llama-drafts 4]
    python recipes/real/speed.py --report speed.json [--beside llama.json]

Each way is an engine of its own over the same weights. They write a question in turns of some tokens, so what the machine
does to one it does to all. Counted is the time from the first token to the last. All ways must write the same tokens: the
run ends at the first that differs. Questions that are in `--out` are not asked again, so a run that was stopped goes on;
`--questions 0 6` asks only those, `--seconds` begins no question after so long.

With `--llama-server` the same questions go to llama.cpp, plain and with the same drafter (`draft-simple`), as token ids.
Say how it was built beside the figures.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import time
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

from pair_questions import QUESTIONS

from paceline import LLM, SamplingParams
from paceline.control.fixed import FixedPolicy
from paceline.engine.engine import Engine
from paceline.memory import freeze_objects
from paceline.provenance import provenance

sys.path.insert(0, str(Path(__file__).parents[1] / "compare"))
from llama_server import LlamaServer

TURN = 16  # tokens that a way writes before it is the next one's turn
WARM_UP = "Name three colours."
Row = dict[str, Any]


class Way:
    """One engine, its clock and what it has written."""

    def __init__(self, name: str, engine: Engine, drafts: int | None) -> None:
        """`drafts`: the fixed length, None for auto."""
        self.name, self.engine, self.drafts = name, engine, drafts
        self.ids: list[int] = []
        self.first, self.seconds, self.steps = 0, 0.0, 0

    def begin(self, prompt: list[int], params: SamplingParams) -> None:
        self.ids, self.seconds, self.steps = [], 0.0, 0
        own = params if self.drafts is None else replace(params, draft_tokens=self.drafts)
        self.engine.add("text", prompt, own)
        while not self.ids:
            self._step()
        self.first = len(self.ids)

    def turn(self, until: int) -> None:
        while self.engine.has_work and len(self.ids) < until:
            begin = time.perf_counter()
            self._step()
            self.seconds += time.perf_counter() - begin
            self.steps += 1

    def _step(self) -> None:
        for delta in self.engine.step():
            self.ids += delta.token_ids

    def row(self) -> Row:
        written = len(self.ids) - self.first
        return {"tokens_s": written / self.seconds, "a_step": written / self.steps}


def ways(llm: LLM, fixed: list[int]) -> list[Way]:
    """Plain, auto, and an engine for the fixed lengths, so that auto learns nothing of them."""
    engine = llm.engine
    silent = replace(engine.parts, policy=FixedPolicy(0))
    others = [Way(f"fixed {k}", Engine(silent, engine.ids), k) for k in fixed]
    return [Way("plain", engine.twin(), 0), Way("auto", engine, None), *others]


def ask(each: list[Way], prompt: list[int], params: SamplingParams, first: int) -> list[int]:
    """All ways write one text in turns. Raises SystemExit if two texts differ."""
    for way in each:
        way.begin(prompt, params)
    turn = first
    while any(way.engine.has_work for way in each):
        until = min(min(len(way.ids) for way in each) + TURN, params.max_tokens)
        for n in range(len(each)):
            each[(turn + n) % len(each)].turn(until)
        turn += 1
    for way in each[1:]:
        if way.ids != each[0].ids:
            raise SystemExit(f"{way.name} wrote another text than plain: run `paceline check`")
    return each[0].ids


def sampling(temperature: float, seed: int, tokens: int) -> SamplingParams:
    top_p = 0.95 if temperature else 1.0
    return SamplingParams(max_tokens=tokens, temperature=temperature, top_p=top_p, seed=seed, ignore_eos=True)


def measure(args: argparse.Namespace, known: Row, begin: float) -> None:
    """Ask what is not in `known` yet, and write it after each question."""
    options: dict[str, Any] = {
        "threads": args.threads,
        "max_model_len": 1024,
        "profile_dir": args.profile_dir,
    }
    with LLM(args.target, drafter=args.drafter, **options) as llm:
        freeze_objects()
        each = ways(llm, args.fixed)
        known["machine"] = provenance(" ".join(sys.argv))
        known.setdefault("starts", []).append({k: str(v) for k, v in llm.info.items() if k in SHOWN})
        prompt, _ = llm.render([{"role": "user", "content": WARM_UP}])
        ask([way for way in each if way.drafts is not None], prompt, sampling(0.0, 0, TURN), 0)
        for temperature, i in wanted(args, known):
            if time.perf_counter() - begin > args.seconds:
                break
            kind, question = QUESTIONS[i]
            prompt, _ = llm.render([{"role": "user", "content": question}])
            ids = ask(each, prompt, sampling(temperature, i, args.tokens), i)
            known.setdefault("rows", []).append(
                {"temperature": temperature, "kind": kind, "question": i, "ids": ids}
                | {way.name: way.row() for way in each}
            )
            args.out.write_text(json.dumps(known))
            print(line(known["rows"][-1]), flush=True)


SHOWN = ("cost_profile", "acceptance", "arithmetic", "dtype")


def ask_llama(args: argparse.Namespace, known: Row, begin: float) -> None:
    """The same of llama-server, greedy."""
    common = ["-m", args.target, "-c", "1024", "-np", "1", "-t", str(args.threads), "-tb", str(args.threads)]
    common += ["--cache-ram", "0", "--ctx-checkpoints", "0", "--no-ui", "--offline"]
    drafts = ["-md", args.drafter, "-td", str(args.threads), "--spec-type", "draft-simple"]
    drafts += ["--spec-draft-n-max", str(args.llama_drafts)]
    with tempfile.TemporaryDirectory() as folder, ExitStack() as running:
        plain, drafting = (
            running.enter_context(LlamaServer(args.llama_server, flags, Path(folder) / f"{name}.log"))
            for name, flags in (("plain", common), ("draft", common + drafts))
        )
        with LLM(args.target, drafter="none", threads=1, max_model_len=64) as llm:
            prompts = [llm.render([{"role": "user", "content": question}])[0] for _, question in QUESTIONS]
        for _, i in wanted(argparse.Namespace(temperatures=[0.0], questions=args.questions), known):
            if time.perf_counter() - begin > args.seconds:
                break
            one, other = plain.complete(prompts[i], args.tokens), drafting.complete(prompts[i], args.tokens)
            row = {"temperature": 0.0, "kind": QUESTIONS[i][0], "question": i, "ids": one.token_ids,
                   "equal": one.token_ids == other.token_ids}  # fmt: skip
            for name, reply in (("plain", one), ("drafts", other)):
                row[name] = {
                    "tokens_s": (args.tokens - 1) / reply.decode_seconds,
                    "a_step": args.tokens / reply.steps,
                }
            known.setdefault("rows", []).append(row)
            args.out.write_text(json.dumps(known))
            print(line(row), flush=True)


def wanted(args: argparse.Namespace, known: Row) -> list[tuple[float, int]]:
    """(temperature, question) that are not in `known`: code and talk in turn."""
    done = {(row["temperature"], row["question"]) for row in known.get("rows", [])}
    half = len(QUESTIONS) // 2
    order = [i + off for i in range(half) for off in (0, half)]
    chosen = [i for i in order if args.questions is None or i in args.questions]
    return [(t, i) for t in args.temperatures for i in chosen if (t, i) not in done]


def names(row: Row) -> list[str]:
    return [name for name, value in row.items() if isinstance(value, dict)]


def line(row: Row) -> str:
    base = row["plain"]["tokens_s"]
    parts = [
        f"{n} {row[n]['tokens_s']:.1f} ({row[n]['tokens_s'] / base:.2f}, {row[n]['a_step']:.2f} a step)"
        for n in names(row)
    ]
    equal = "" if row.get("equal", True) else "; texts DIFFER"
    return f"T={row['temperature']:g} {row['kind']} {row['question']}: {'; '.join(parts)}{equal}"


def report(path: Path, beside: Path | None) -> None:
    """What the table of docs/performance-reference.md is made of."""
    rows: list[Row] = json.loads(path.read_text(encoding="utf-8"))["rows"]
    for row in rows:
        print(line(row))
    for temperature in sorted({row["temperature"] for row in rows}):
        own = [row for row in rows if row["temperature"] == temperature]
        for kind in ("code", "talk"):
            each = [row for row in own if row["kind"] == kind]
            for name in names(each[0]) if each else []:
                over = [row[name]["tokens_s"] / row["plain"]["tokens_s"] for row in each]
                print(
                    f"T={temperature:g} {kind} {name}: {statistics.median(over):.2f} of plain, worst {min(over):.2f}"
                )
        if "auto" in own[0]:
            lengths = [name for name in names(own[0]) if name not in ("auto",)]
            of_best = [row["auto"]["tokens_s"] / max(row[n]["tokens_s"] for n in lengths) for row in own]
            print(
                f"T={temperature:g}: auto over the best fixed length, none among them: median "
                f"{statistics.median(of_best):.3f}, worst {min(of_best):.3f}"
            )
    if beside is not None:
        theirs = {row["question"]: row for row in json.loads(beside.read_text(encoding="utf-8"))["rows"]}
        own = [row for row in rows if not row["temperature"] and row["question"] in theirs]
        over = [
            row["auto"]["tokens_s"] / max(theirs[row["question"]][n]["tokens_s"] for n in ("plain", "drafts"))
            for row in own
        ]
        differ = sum(not row["equal"] for row in theirs.values())
        print(
            f"auto over llama.cpp's better mode: median {statistics.median(over):.2f}, worst {min(over):.2f}; "
            f"{differ} of {len(theirs)} of its drafted greedy texts differ from its plain ones"
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("target", nargs="?")
    parser.add_argument("drafter", nargs="?")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--temperatures", type=float, nargs="+", default=[0.0, 0.8])
    parser.add_argument("--fixed", type=int, nargs="+", default=[2, 4, 6])
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--questions", type=int, nargs="+", choices=range(len(QUESTIONS)), default=None)
    parser.add_argument("--seconds", type=float, default=float("inf"))
    parser.add_argument("--profile-dir", default="none")
    parser.add_argument("--llama-server", type=Path)
    parser.add_argument("--llama-drafts", type=int, default=4)
    parser.add_argument("--report", type=Path)
    parser.add_argument("--beside", type=Path)
    args = parser.parse_args()
    if args.report is not None:
        report(args.report, args.beside)
        return
    if args.target is None or args.drafter is None or args.out is None:
        parser.error("give TARGET, DRAFTER and --out, or --report")
    begin = time.perf_counter()
    known: Row = json.loads(args.out.read_text(encoding="utf-8")) if args.out.exists() else {}
    (measure if args.llama_server is None else ask_llama)(args, known, begin)


if __name__ == "__main__":
    main()
