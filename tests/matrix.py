"""The matrix that switches nothing off: every drafter under everything that a request can ask for.

A cell writes texts without a drafter, each alone, and writes them again with a drafter under its condition. Tokens, text,
end and the bits of the log probabilities have to be the same. tests/lossless/test_matrix.py runs each cell;
scripts/matrix.py runs the same cells for longer and writes docs/matrix.md with what was counted.

The models are random and small. A network that was not trained is refused often and kept now and then, which is what a
test of losslessness needs. The draft model is the target with noise on its weights, and is kept mostly.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from collections.abc import Sequence as Seq
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

import media_models
from decoders import build_decoder
from dflash_files import build_dflash
from dspark_files import build_dspark
from eagle3_files import build_eagle3
from families import tokenizer_of
from heads_files import build_meta
from mtp_files import build_mtp
from paceline import LLM
from paceline.check.scenes import CHURN, SQUEEZE, TOGETHER, Output, Scene, play
from paceline.check.subject import Subject
from paceline.convert.from_meta import convert_meta
from paceline.core import SamplingParams
from paceline.drafters.lookahead import LookaheadDrafter
from paceline.media.talk import MediaItem, Talk
from paceline.soft_tokens import copied

QWEN = "families/qwen3"  # whose marks the vocabulary has, for thoughts and calls
LENGTH = 24  # tokens of an answer
HIDDEN, TEXT, META, SEEING = 48, "text", "meta", "seeing"
OPTIONS: dict[str, Any] = {
    "draft_tokens": 4, "threads": 1, "max_model_len": 1024, "cache_memory": 2**24, "profile_dir": "none",
    "max_batch": 16,
}  # fmt: skip
SIGHTLESS = {"draft model"}  # it is asked for no draft after a picture, which it cannot read

Request = tuple[Seq[int], SamplingParams]


@dataclass(frozen=True)
class Kind:
    """A drafter: the name a request gives, the folder it is loaded from, and the target it is for."""

    name: str
    folder: str | None = None
    target: str = TEXT
    options: Mapping[str, Any] = field(default_factory=dict)


DRAFTERS = {
    "n-gram": Kind("ngram"),
    "lookahead": Kind("lookahead"),
    "draft model": Kind("model", "model"),
    "EAGLE-3": Kind("eagle3", "eagle3"),
    "MTP": Kind("mtp", "mtp"),
    "DFlash": Kind("dflash", "dflash"),
    "DSpark": Kind("dspark", "dspark"),
    "heads": Kind("heads", None, META),
    "trees": Kind("eagle3", "eagle3", TEXT, {"draft_tree": "3x2"}),
}


@dataclass(frozen=True)
class Condition:
    """What a text is written under. `asked`: the model without a drafter, the numbers of requests -> the requests."""

    asked: Callable[[LLM, Seq[int]], list[Request]]
    scene: Scene = TOGETHER
    batch: int = 3
    options: Mapping[str, Any] = field(default_factory=dict)
    target: str | None = None  # None: the drafter's own
    parts: Seq[str] = ()  # what is asked for in turn, where each is counted for itself
    again: bool = False  # each prompt is asked for twice, the second time it is in the cache
    moved: bool = False  # an engine that is lost in the middle of a text; another one goes on


WRITTEN = (
    40,
    52,
    64,
    76,
    88,
    100,
)  # all that is written: what networks nobody trained are right about now and then


def params(number: int, **more: Any) -> SamplingParams:
    """Greedy and sampled in turn, with the log probabilities of all tokens that are written."""
    said: dict[str, Any] = {
        "temperature": 0.8 * (number % 2),
        "seed": number,
        "logprobs": 0,
        "ignore_eos": True,
    }
    said |= {"max_tokens": LENGTH, "draft_tokens": 4, "allowed_token_ids": WRITTEN}
    return SamplingParams(**(said | more))


def prompt(llm: LLM, number: int) -> list[int]:
    """Words that come again, so that what was written before is worth a look."""
    words = ("sky", "sea", "stone", "tree", "bird")
    said = " ".join(words[(number * k + k // 3) % 5] for k in range(5 + number % 4))
    return llm.tokenizer.encode(f"{number}: {said} and {said}")


def plainly(*each: Mapping[str, Any]) -> Callable[[LLM, Seq[int]], list[Request]]:
    """Prompts with these parameters in turn."""

    def asked(llm: LLM, numbers: Seq[int]) -> list[Request]:
        return [(prompt(llm, n), params(n, **each[n % len(each)])) for n in numbers]

    return asked


SCHEMA = {
    "type": "object", "required": ["town", "many"], "additionalProperties": False,
    "properties": {"town": {"type": "string", "maxLength": 8}, "many": {"type": "boolean"}},
}  # fmt: skip
TOOL = {
    "type": "function",
    "function": {"name": "look", "description": "Looks.", "parameters": SCHEMA, "strict": True},
}
FORM = {"type": "json_schema", "json_schema": {"name": "a", "schema": SCHEMA, "strict": True}}
THINKS = {
    "<think>": 9.0,
    "</think>": 5.0,
    '"': 5.0,
    **dict.fromkeys("ĠĊĉč", -20.0),
}  # thoughts begin, and end


def chats(**wanted: Any) -> Callable[[LLM, Seq[int]], list[Request]]:
    def asked(llm: LLM, numbers: Seq[int]) -> list[Request]:
        bias = {llm.tokenizer.token_id(mark): value for mark, value in THINKS.items()}
        out = []
        for n in numbers:
            message = {"role": "user", "content": f"Is the sky over the sea, {n}?"}
            more: dict[str, Any] = {"logit_bias": bias, "allowed_token_ids": None}
            own = params(n, max_tokens=3 * LENGTH, ignore_eos=False, **more)
            (turn,) = llm.turns(
                [[message]], own, {"chat_template_kwargs": {"enable_thinking": True}, **wanted}
            )
            assert turn.params.constraint is not None
            out.append((turn.prompt.ids, turn.params))
        return out

    return asked


def pictures(llm: LLM, numbers: Seq[int]) -> list[Request]:
    assert llm.reader is not None
    items = [MediaItem("image", media_models.picture(60, 40, n % 4)) for n in numbers]
    made = [
        llm.reader.prompt(f"{n}: <|image|> is", Talk([], [item]))
        for n, item in zip(numbers, items, strict=True)
    ]
    return [(one, params(n)) for n, one in zip(numbers, made, strict=True)]


def greedy_too(each: Mapping[str, Mapping[str, Any]]) -> dict[str, dict[str, Any]]:
    """Each of them sampled, at 0.8 where it names no temperature, and then each greedy."""
    sampled: dict[str, dict[str, Any]] = {
        f"{name}, sampled": {"temperature": 0.8, **asked} for name, asked in each.items()
    }
    return sampled | {f"{name}, greedy": {**asked, "temperature": 0.0} for name, asked in each.items()}


def banned(llm: LLM, numbers: Seq[int]) -> list[Request]:
    """Texts of one and of two tokens that are never written: whole words, and anywhere."""
    one, two = llm.tokenizer.decode([WRITTEN[1]]), llm.tokenizer.decode([WRITTEN[2], WRITTEN[3]])
    words = {name: {name: (one, two)} for name in ("bad_words", "banned_strings")}
    return plainly(*greedy_too(words).values())(llm, numbers)


SAMPLERS: dict[str, dict[str, Any]] = {
    "typical": {"temperature": 1.0, "typical_p": 0.6},
    "top-n-sigma": {"temperature": 1.0, "top_n_sigma": 1.0},
    "XTC": {"temperature": 0.8, "xtc_probability": 0.5, "xtc_threshold": 0.05},
    "dynamic temperature": {"temperature": 1.0, "dynatemp_range": 0.9, "dynatemp_exponent": 1.5},
    "temperature last": {"temperature": 1.5, "min_p": 0.2, "temperature_last": True},
    "DRY": {"temperature": 0.8, "dry_multiplier": 2.0, "dry_allowed_length": 1, "dry_sequence_breakers": ("x",)},
    "Mirostat": {"temperature": 1.0, "mirostat": 2, "mirostat_tau": 2.0, "mirostat_eta": 0.5},
}  # fmt: skip
ADAPTED = {"one": {"lora": {"a": 1.0}}, "a blend of two": {"lora": {"a": 0.5, "b": -1.0}}, "none": {}}
PENALTIES = (
    {"repetition_penalty": 1.4},
    {"presence_penalty": 0.7, "frequency_penalty": 0.5},
    {"repetition_penalty": 1.5, "penalty_last_n": 6},
)
CONDITIONS = {
    "tools": Condition(chats(tools=[TOOL], tool_choice="required")),
    "schema after thinking": Condition(chats(response_format=FORM)),
    "thinking budget": Condition(chats(response_format=FORM, thinking_budget=2)),
    "logprobs": Condition(plainly({"logprobs": 5})),
    "min-p": Condition(plainly({"temperature": 1.0, "min_p": 0.1})),
    "logit bias": Condition(plainly({"logit_bias": {40: 9.0, 52: 6.0, 64: -9.0}, "bad_token_ids": (76,)})),
    "penalties": Condition(plainly(*PENALTIES)),
    "banned words": Condition(banned, parts=tuple(greedy_too({"bad_words": {}, "banned_strings": {}}))),
    "new samplers": Condition(plainly(*greedy_too(SAMPLERS).values()), parts=tuple(greedy_too(SAMPLERS))),
    "pictures": Condition(pictures, target=SEEING),
    "adapters": Condition(
        plainly(*greedy_too(ADAPTED).values()), options={"adapters": "ab"}, parts=tuple(greedy_too(ADAPTED))
    ),
    "full prefix hit": Condition(plainly({}), again=True),
    "K/V int8": Condition(plainly({}), options={"kv_cache": "int8"}),
    "batch of 16": Condition(plainly({}, {"temperature": 1.2}), batch=16),
    "cancel": Condition(plainly({}), scene=CHURN),
    "preemption": Condition(plainly({"max_tokens": 2 * LENGTH}), scene=SQUEEZE, batch=4),
    "replica killed": Condition(plainly({}), moved=True),
}
REASONS = {
    ("heads", "pictures"): "they are trained with their target, and no target that sees has them",
}  # cells that cannot be, and why


@dataclass
class Counted:
    """What a cell compared: tokens that were written, drafted, and kept of those; texts, and tokens by part."""

    tokens: int = 0
    drafted: int = 0
    accepted: int = 0
    texts: int = 0
    parts: dict[str, int] = field(default_factory=dict)

    def __add__(self, other: Counted) -> Counted:
        parts = {
            name: self.parts.get(name, 0) + other.parts.get(name, 0) for name in self.parts | other.parts
        }
        return Counted(
            self.tokens + other.tokens,
            self.drafted + other.drafted,
            self.accepted + other.accepted,
            self.texts + other.texts,
            parts,
        )

    def add(self, tokens: int, drafted: int, accepted: int, part: str = "") -> None:
        """Another text."""
        self.tokens += tokens
        self.drafted += drafted
        self.accepted += accepted
        self.texts += 1
        if part:
            self.parts[part] = self.parts.get(part, 0) + tokens


class Differs(AssertionError):
    """A text with a drafter is not the text without."""


class Zoo:
    """The models of the matrix below a folder, and engines over them, loaded when they are asked for."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._llms: dict[str, LLM] = {}
        self._written: dict[tuple[str, ...], tuple[Request, Output]] = {}
        self._stack = ExitStack()

    def __enter__(self) -> Zoo:
        return self

    def __exit__(self, *what: object) -> None:
        self._stack.close()

    @cached_property
    def text(self) -> Path:
        tokenizer = tokenizer_of(QWEN)
        size = tokenizer.vocab_size
        target = self._folder / TEXT
        build_decoder(
            "llama", target, vocab_size=size, eos_token_id=1, max_position_embeddings=1024, head_dim=32
        )
        self._with_tokenizer(target)
        like = {"hidden": HIDDEN, "vocab": size}
        build_eagle3(self._folder / "eagle3", taps=(0, 1), **like)
        build_mtp(target, self._folder / "mtp", "speculators")
        build_dflash(self._folder / "dflash", **like)
        build_dspark(self._folder / "dspark", **like)
        noisy(target, self._folder / "model")
        adapters(self._folder / "text-adapter", HIDDEN)
        return target

    @cached_property
    def meta(self) -> Path:
        build_meta(self._folder / "published", rows=tokenizer_of(QWEN).vocab_size, dim=128, max_seq_len=1024)
        convert_meta(self._folder / "published", self._folder / META)
        self._with_tokenizer(self._folder / META)
        adapters(self._folder / "meta-adapter", 128)
        return self._folder / META

    @cached_property
    def seeing(self) -> Path:
        target = self._folder / SEEING
        media_models.build_seeing("dense31b", target)
        like = {"hidden": HIDDEN, "vocab": media_models.VOCAB}
        build_eagle3(self._folder / "seeing-eagle3", **like)
        build_dflash(self._folder / "seeing-dflash", **like)
        build_dspark(self._folder / "seeing-dspark", **like)
        decoder = {"vocab_size": media_models.VOCAB, "num_hidden_layers": 5}
        build_decoder("llama", self._folder / "like", **decoder)
        build_mtp(self._folder / "like", self._folder / "seeing-mtp", "speculators")
        build_decoder("llama", self._folder / "seeing-model", **decoder)
        media_models.write_tokenizer(self._folder / "seeing-model")
        return target

    def _with_tokenizer(self, folder: Path) -> None:
        tokenizer = tokenizer_of(QWEN)
        (folder / "tokenizer.json").write_text(tokenizer.to_json(), encoding="utf-8")
        config = {"eos_token": "<eos>", "bos_token": "<bos>", "tokenizer_class": "PreTrainedTokenizerFast"}
        (folder / "tokenizer_config.json").write_text(json.dumps(config), encoding="utf-8")
        (folder / "chat_template.jinja").write_text(tokenizer.template or "", encoding="utf-8")

    def llm(self, target: str, drafter: Kind | None, options: Mapping[str, Any]) -> LLM:
        """The engine of a cell. Those that differ in nothing that is loaded are one."""
        path = getattr(self, target)
        asked = OPTIONS | dict(options)
        if "adapters" in asked:
            asked["adapters"] = {
                name: str(self._folder / f"{target}-adapter-{name}") for name in asked["adapters"]
            }
        if drafter is None:
            asked["drafter"] = "none"
        elif drafter.folder is not None:
            prefix = "seeing-" if target == SEEING else ""
            asked |= {"drafter": str(self._folder / f"{prefix}{drafter.folder}"), **drafter.options}
        else:
            asked["drafter"] = drafter.name
        if target == SEEING:
            asked |= {"image_tokens": 70}
        key = f"{target} {asked}"
        if key not in self._llms:
            self._llms[key] = self._stack.enter_context(LLM(str(path), **asked))
        return self._llms[key]

    def plain(self, condition: str, target: str, numbers: Seq[int]) -> list[tuple[Request, Output]]:
        """Requests and their texts without a drafter, each alone, with nothing shared."""
        how = CONDITIONS[condition]
        llm = self.llm(target, None, how.options)
        key = (condition, target)
        missing = [n for n in numbers if (*key, str(n)) not in self._written]
        for n, request in zip(missing, how.asked(llm, missing) if missing else (), strict=True):
            ids, own = request
            alone = Scene("alone", salt=f"{condition} {n}")
            (output,) = play(subject(llm), [(copied(ids), replace(own, drafter="none"))], alone)
            self._written[(*key, str(n))] = request, output
        return [self._written[(*key, str(n))] for n in numbers]


def noisy(source: Path, to: Path, much: float = 0.05) -> None:
    """A copy of a folder with noise on its weights: a draft model that agrees often, and not always."""
    to.mkdir()
    for path in source.iterdir():
        if path.suffix != ".safetensors":
            (to / path.name).write_bytes(path.read_bytes())
    g = torch.Generator().manual_seed(3)
    weights = load_file(source / "model.safetensors")
    changed = {
        k: w + much * w.std() * torch.randn(w.shape, generator=g) if w.dim() > 1 else w
        for k, w in weights.items()
    }
    save_file(changed, to / "model.safetensors", metadata={"format": "pt"})


def adapters(folder: Path, hidden: int) -> None:
    """LoRA adapters a and b of rank 4, on the queries and outputs of two layers."""
    wide = 4 * 32  # all heads
    for seed, letter in enumerate("ab"):
        g = torch.Generator().manual_seed(seed)
        made, own = {}, Path(f"{folder}-{letter}")
        for layer, name, inner, out in ((0, "q_proj", hidden, wide), (2, "o_proj", wide, hidden)):
            at = f"base_model.model.model.layers.{layer}.self_attn.{name}"
            made[f"{at}.lora_A.weight"] = torch.randn(4, inner, generator=g) * 0.2
            made[f"{at}.lora_B.weight"] = torch.randn(out, 4, generator=g) * 0.2
        own.mkdir()
        save_file(made, own / "adapter_model.safetensors")
        config = {"peft_type": "LORA", "r": 4, "lora_alpha": 8, "target_modules": ["q_proj", "o_proj"]}
        (own / "adapter_config.json").write_text(json.dumps(config), encoding="utf-8")


def subject(llm: LLM) -> Subject:
    return Subject(llm.engine, ())


def cell(zoo: Zoo, drafter: str, condition: str, tokens: int, first: int = 0) -> Counted:
    """Compare batch after batch until so many tokens are compared, from the text of this number on. Raises Differs."""
    kind, how, out = DRAFTERS[drafter], CONDITIONS[condition], Counted()
    target = how.target or kind.target
    llm = zoo.llm(target, kind, how.options)
    if kind.name == "lookahead":
        llm.engine.state.drafters.setdefault("lookahead", LookaheadDrafter())
    preempted = llm.engine.state.preemptions
    while out.tokens < tokens:
        numbers = range(first, first + how.batch)
        wanted = zoo.plain(condition, target, numbers)
        asked = [(copied(ids), replace(own, drafter=kind.name)) for (ids, own), _ in wanted]
        others = written(llm, how, asked, f"{drafter} {first}")
        for n, (_, mine), other in zip(numbers, wanted, others, strict=True):
            if bits(mine) != bits(other):
                raise Differs(f"{drafter} under {condition}: {bits(mine)} without, {bits(other)} with")
            part = how.parts[n % len(how.parts)] if how.parts else ""
            out.add(len(mine.tokens), other.stats.drafted, other.stats.accepted, part)
        first += how.batch
    assert how.scene is not SQUEEZE or llm.engine.state.preemptions > preempted, "no text was preempted"
    return out


def written(llm: LLM, how: Condition, asked: list[Request], salt: str) -> list[Output]:
    """The texts with a drafter, under the condition."""
    scene = replace(how.scene, salt=salt)
    if how.moved:
        return [moved(llm, request, salt) for request in asked]
    if how.again:
        play(subject(llm), asked, scene)
    out = play(subject(llm), asked, scene)
    hits = [len(ids) - one.stats.cached_prompt_tokens for (ids, _), one in zip(asked, out, strict=True)]
    assert not how.again or max(hits) <= 16, "a prompt was not found in the cache"
    return out


def moved(llm: LLM, request: Request, salt: str) -> Output:
    """A text whose engine is lost in the middle: what it had said is all that the next one is given."""
    engine, (ids, own) = llm.engine, request
    before, after = Output(), Output()
    engine.add("lost", copied(ids), own, f"{salt} lost")
    while len(before.tokens) < LENGTH // 2:
        for delta in engine.step():
            before.add(delta)
    engine.cancel("lost")
    engine.add("next", copied(ids), own, f"{salt} next", {0: list(before.tokens)})
    while engine.has_work:
        for delta in engine.step():
            after.add(delta)
    return Output(
        before.tokens + after.tokens, before.text + after.text, before.logprobs + after.logprobs, [], after.finish,
        after.error, after.stats,
    )  # fmt: skip


def bits(output: Output) -> tuple[Any, ...]:
    """All that a client is told of a text."""
    said = [(one.token, one.raw, one.shaped, one.top) for one in output.logprobs]
    return output.tokens, output.text, output.finish, output.error, said


def cells() -> Iterator[tuple[str, str]]:
    return (
        (drafter, condition)
        for drafter in DRAFTERS
        for condition in CONDITIONS
        if (drafter, condition) not in REASONS
    )
