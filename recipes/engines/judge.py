"""Which texts differ from plain decoding, and who is right: a reference in float64 decides at the first other token.

    python recipes/engines/judge.py [--work FOLDER]

For each cell: is plain decoding itself deterministic (asked twice)? Which drafted texts differ from it? At the
first differing token the reference, transformers in float64 on the same weights, reads the common text. The *gap*
is how far, in nats, the lesser of the two tokens lies below the reference's best. Rounding may turn over what lies
close together. So an engine's own *reach* is measured: how far below the reference's best its plain texts ever go.
A gap within twice the reach (at least 0.05 nats, at most 1) is a near-tie, one beyond it a plain error. Greedy cells
only. Sampled texts are compared where an engine keeps seeds; their differences have no gap.

Of copies and edits the opaque identifiers are counted, too: those that plain decoding wrote as they were given, and
those of them that are not in the drafted text.
"""

from __future__ import annotations

import argparse
import hashlib
import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import torch
from draft import Files, Talk, prepare
from engines import PLAIN
from questions import MAKE, Asked
from run import CONTEXT, DEFAULT_WORK, Cell, size_of

LEAST_REACH, MOST_REACH = 0.05, 1.0  # nats of a gap that may still be a near-tie
REACH_TEXTS, FEW_TEXTS = 12, 4  # plain texts of an engine that its reach is taken from; few of a large model
SMALL = 1 << 30  # bytes of a folder's weights


@dataclass(frozen=True)
class Results:
    """One file of results."""

    cell: Cell
    header: dict[str, Any]
    texts: dict[str, list[int]]
    seconds: float
    died: str = ""  # the last line of an engine that went no further

    @property
    def key(self) -> tuple[str, str, float, bool]:
        return self.cell.engine, self.cell.model, self.cell.temperature, self.cell.speeds

    @property
    def is_baseline(self) -> bool:
        """Plain decoding, one request at a time, asked first: what all others are compared with."""
        return self.cell.mode == PLAIN and self.cell.parallel == 1 and not self.cell.repeat

    def without(self, ends: Sequence[int]) -> Results:
        """The same, with no text's end token written down."""
        return replace(self, texts={k: t[:-1] if t and t[-1] in ends else t for k, t in self.texts.items()})


def read(path: Path) -> Results:
    lines = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    answers = [line for line in lines[1:] if "id" in line]
    texts = {line["id"]: line["tokens"] for line in answers}
    died = next((line["died"] for line in lines if "died" in line), "")
    return Results(Cell(**lines[0]["cell"]), lines[0], texts, sum(line["seconds"] for line in answers), died)


def first_difference(one: Sequence[int], other: Sequence[int]) -> int | None:
    """Where two texts part; the end of one text is a token of its own. None: they are equal."""
    for i, (a, b) in enumerate(zip(one, other, strict=False)):
        if a != b:
            return i
    return None if len(one) == len(other) else min(len(one), len(other))


def in_float64(model: Any) -> Any:
    """Let a model compute in float64, holding one layer at a time in it: a large one fits no other way."""

    stored: dict[torch.nn.Parameter, torch.Tensor] = {}  # of the layer at work

    def widen(module: torch.nn.Module, *_: Any) -> None:
        for parameter in module.parameters():
            stored[parameter], parameter.data = parameter.data, parameter.data.double()

    def narrow(module: torch.nn.Module, *_: Any) -> None:
        for parameter in module.parameters():
            parameter.data = stored.pop(parameter)

    model.model.embed_tokens.register_forward_hook(lambda module, given, out: out.double())
    for layer in (*model.model.layers, model.model.norm):
        layer.register_forward_pre_hook(widen)
        layer.register_forward_hook(narrow)

    model.lm_head.forward = partial(_head, model.lm_head.weight)
    return model.eval()


def _head(weight: torch.Tensor, hidden: torch.Tensor) -> torch.Tensor:
    return torch.cat([hidden @ part.double().T for part in weight.split(16384)], -1)


class Memo:
    """What the reference said before, in a file: a judgement that is made again asks for what is new."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._values: dict[str, Any] = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}

    def of(self, key: Sequence[Any], compute: Callable[[], Any]) -> Any:
        name = hashlib.sha256(repr(key).encode()).hexdigest()
        if name not in self._values:
            self._values[name] = compute()
            beside = self._path.with_suffix(".part")
            beside.write_text(json.dumps(self._values), encoding="utf-8")
            beside.replace(self._path)
        return self._values[name]


class Reference:
    """transformers in float64, on the weights of a model's folder."""

    def __init__(self, files: Files, memo: Memo) -> None:
        self._files, self._memo = files, memo
        self._read: dict[str, list[tuple[list[int], torch.Tensor]]] = {}

    @cached_property
    def model(self) -> Any:
        import transformers

        load = transformers.AutoModelForCausalLM.from_pretrained
        return in_float64(load(self._files.folder, dtype=torch.float32, attn_implementation="eager"))

    @cached_property
    def is_small(self) -> bool:
        return size_of(self._files.folder) <= SMALL

    @cached_property
    def _talk(self) -> Talk:
        return Talk(self._files.gguf)

    @cached_property
    def ends(self) -> tuple[int, ...]:
        """Tokens that end a text; some engines write them down, some do not."""
        return tuple(self._talk.tokenizer.eos_ids)

    def prompt(self, question: str) -> list[int]:
        return self._talk.prompt(asked(question).text)

    def words(self, ids: Sequence[int]) -> str:
        return self._talk.tokenizer.decode(list(ids))

    def gaps(self, question: str, text: Sequence[int]) -> list[float]:
        """Nats of each token of `text` below the reference's best at its place."""
        key = ("gaps", self._files.folder.name, question, list(text))
        gaps: list[float] = self._memo.of(key, lambda: self._gaps(question, text))
        return gaps

    def _gaps(self, question: str, text: Sequence[int]) -> list[float]:
        below = self._below(question, text)[:-1]
        gaps: list[float] = below.gather(1, torch.tensor(text)[:, None])[:, 0].tolist()
        return gaps

    @torch.inference_mode()
    def _below(self, question: str, text: Sequence[int]) -> torch.Tensor:
        """[len(text) + 1, V] float32: nats of each token below the best, after each beginning of a text.

        A text that begins as one that was read is not read again.
        """
        for known, below in self._read.setdefault(question, []):
            if known[: len(text)] == list(text):
                return below[: len(text) + 1]
        ids = torch.tensor([[*self.prompt(question), *text]])
        logits = self.model(ids, logits_to_keep=len(text) + 1).logits[0]
        below = (logits.amax(1, keepdim=True) - logits).float()
        self._read[question].append((list(text), below))
        return below

    def gap(self, question: str, common: Sequence[int], pair: Sequence[int]) -> float:
        """How far the lesser of two tokens lies below the best, behind the common text."""
        key = ("gap", self._files.folder.name, question, list(common), sorted(pair))
        return float(self._memo.of(key, lambda: float(self._below(question, common)[-1][list(pair)].max())))


def asked(question: str) -> Asked:
    """A question by its name, `kind-number`."""
    kind, _, number = question.partition("-")
    return Asked(question, kind, MAKE[kind](int(number)))


def identifiers_of(question: str) -> list[str]:
    """What an answer has to repeat letter by letter."""
    one = asked(question)
    if one.kind == "copy":
        return one.text.split("\n")[1:]
    return [one.text.split("'")[1]] if one.kind == "edit" else []


def identifiers(plain: Results, drafted: Results, reference: Reference) -> dict[str, int]:
    """How many plain decoding wrote as they were given, and how many of them the drafted texts have not."""
    right = lost = 0
    for name, text in drafted.texts.items():
        if name in plain.texts and (wanted := identifiers_of(name)):
            mine, other = reference.words(plain.texts[name]), reference.words(text)
            there = [one for one in wanted if one in mine]
            right += len(there)
            lost += sum(one not in other for one in there)
    return {"identifiers": right, "identifiers_lost": lost}


def differences(plain: Results, drafted: Results) -> Iterator[tuple[str, int]]:
    for name, text in drafted.texts.items():
        if name in plain.texts and (at := first_difference(plain.texts[name], text)) is not None:
            yield name, at


def judge(plain: Results, drafted: Results, reference: Reference, reach: float | None) -> dict[str, Any]:
    """One row of the table, with its worst example."""
    found = []
    for name, at in differences(plain, drafted):
        sides = (plain.texts[name], drafted.texts[name])
        pair = [text[at] if at < len(text) else reference.ends[0] for text in sides]
        greedy = plain.cell.temperature == 0
        gap = reference.gap(name, sides[0][:at], pair) if greedy else None
        found.append({"question": name, "at": at, "gap": gap})
    worst = max(found, key=lambda d: d["gap"] if d["gap"] is not None else -1, default=None)
    if worst is not None:
        at, name = worst["at"], worst["question"]
        worst = worst | {
            "asked": asked(name).text,
            "plain": reference.words(plain.texts[name][max(0, at - 8) : at + 8]),
            "drafted": reference.words(drafted.texts[name][max(0, at - 8) : at + 8]),
        }
    limit = min(max(LEAST_REACH, 2 * (reach or 0.0)), MOST_REACH)
    return {
        "settings": drafted.header.get("settings", ""),
        **drafted.header["cell"],
        "version": drafted.header["version"],
        "asked": len(drafted.texts),
        "tokens": sum(map(len, drafted.texts.values())),
        "seconds": drafted.seconds,
        "plain_seconds": plain.seconds * len(drafted.texts) / max(1, len(plain.texts)),
        "differing": len(found),
        "near_ties": sum(d["gap"] is not None and d["gap"] <= limit for d in found),
        "errors": sum(d["gap"] is not None and d["gap"] > limit for d in found),
        "without_gap": sum(d["gap"] is None for d in found),
        "reach": reach,
        "worst": worst,
        "died": drafted.died,
        **identifiers(plain, drafted, reference),
    }


def otherwise(plain: Results, drafted: Results) -> str:
    """Why a cell is not compared: its engine was another one when plain decoding was asked. Empty if it was the same."""
    for key in ("version", "settings", "tokens"):
        was, now = plain.header.get(key), drafted.header.get(key)
        if was != now:
            return (
                f"plain decoding was asked with {key} {was}, this with {now}: remove one file and ask again"
            )
    return ""


def reach_of(plain: Results, others: Sequence[Results], reference: Reference) -> float | None:
    """How far below the reference's best the engine's own plain, greedy texts go. None: no text differs, so it is not
    needed. Texts that others part from come first: the reference reads them anyway.
    """
    parted = dict.fromkeys(name for other in others for name, _ in differences(plain, other))
    if not parted or plain.cell.temperature:
        return None
    most = REACH_TEXTS if reference.is_small else FEW_TEXTS
    names = list(dict.fromkeys([*parted, *plain.texts]))[:most]
    texts = [(name, plain.texts[name]) for name in names]
    return max((max(reference.gaps(name, text)) for name, text in texts if text), default=0.0)


def rows(work: Path) -> Iterator[dict[str, Any]]:
    paths = sorted((work / "results").glob("*.jsonl"))
    failed = [json.loads(p.read_text(encoding="utf-8").split("\n", 1)[0]) for p in paths]
    yield from ({**f["cell"], "failed": f["failed"]} for f in failed if "failed" in f)
    there = [read(p) for p, f in zip(paths, failed, strict=True) if "failed" not in f]
    for model in sorted({r.cell.model for r in there}):
        files = prepare(model, work)
        assert files is not None, f"{model} has results and no files: run `run.py ask` again"
        reference = Reference(files, Memo(work / f"gaps-{model}.json"))
        own = [r.without(reference.ends) for r in there if r.cell.model == model]
        plains = {r.key: r for r in own if r.is_baseline}
        others = [r for r in own if r.key in plains and not r.is_baseline]
        reaches = {
            key: reach_of(plain, [r for r in others if r.key == key], reference)
            for key, plain in plains.items()
        }
        for drafted in others:
            print(drafted.cell.file_name, flush=True)
            if other := otherwise(plains[drafted.key], drafted):
                yield {**drafted.header["cell"], "failed": other}
                continue
            yield judge(plains[drafted.key], drafted, reference, reaches[drafted.key])


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--work", type=Path, default=DEFAULT_WORK)
    given = parser.parse_args()
    judged = {"context": CONTEXT, "rows": list(rows(given.work))}
    (given.work / "judged.json").write_text(json.dumps(judged, indent=1), encoding="utf-8")


if __name__ == "__main__":
    main()
