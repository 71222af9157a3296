"""DSpark drafts what its published source drafts, through the tokens that were drawn; misfits are refused by name."""

from __future__ import annotations

import json
import math
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from checkpoints import VOCAB
from dflash_files import BLOCK, build_dflash
from dspark_files import STYLES, DSparkReference, GemmaDSparkReference, build_dspark, build_gemma_dspark
from paceline import LLM
from paceline.assembly import build_engine
from paceline.config import EngineConfig
from paceline.control.fixed import FixedPolicy
from paceline.core import Sequence
from paceline.drafters.base import DraftContext, Kept
from paceline.drafters.contract import GreedyPicker
from paceline.engine.picker import StepPicker
from paceline.errors import ConfigError, LoadError, PairError, WeightsError
from paceline.models.drafters import dspark
from paceline.models.drafters.dflash import block_shapes
from paceline.models.drafters.dspark import head_shapes, parse_dspark
from paceline.models.inspection import inspect
from paceline.models.registry import load_network, load_target
from paceline.ops import native
from paceline.ops.base import Runner, Stop, shared_chance
from paceline.sampling import noise
from tapping import DEPTH, Pair, params, texts

HIDDEN = 48
WINDOWS = {
    "layer_types": ["sliding_attention", "full_attention"],
    "sliding_window": 20,
    "use_sliding_window": True,
}
VARIANTS: dict[str, dict[str, Any]] = {
    "vanilla": {"draft_vocab": 40},
    "anchor first": {"draft_vocab": 40, "anchored": True},
    "mask first": {"style": "deepseek", "anchored": False},
    "gated": {"markov": "gated", "style": "specforge"},
    "rnn": {"markov": "rnn", "draft_vocab": 30},
    "confidence of states alone": {"reads_token": False, "style": "deepseek"},
    "no Markov head": {"rank": 0, "draft_vocab": 40},
    "pairs side by side": {"style": "liquid", "markov": "gated"},
    "windows": {"layer": WINDOWS},
    "causal windows": {"layer": WINDOWS, "sliding_window_non_causal": False, "anchored": True, "draft_vocab": 40},
    "sinks": {
        "style": "deepseek", "sinks": True, "layer": {"layer_types": ["sliding_attention"] * 2, "sliding_window": 20},
    },
    "final norm": {"style": "deepseek", "taps": (1, 4)},
    "the embedding": {"style": "deepseek", "taps": (0, 2)},
}  # fmt: skip


def pair_of(llama: Path, folder: Path, runner: Runner | None = None, **variant: Any) -> Pair:
    drafter = build_dspark(folder, hidden=HIDDEN, vocab=VOCAB, **variant)
    return Pair(llama, drafter, DSparkReference(llama, drafter), runner)


@pytest.mark.parametrize("name", VARIANTS)
def test_drafts_are_those_of_the_published_source(
    name: str, llama: Path, tmp_path: Path, runner: Runner
) -> None:
    pair = pair_of(llama, tmp_path, runner, **VARIANTS[name])
    reference: Any = pair.reference
    assert pair.drafter.max_tokens == BLOCK - reference.first
    for count in (2, 7):
        engine = pair.engine(policy=FixedPolicy(count), draft_tokens=count)
        for i, text in enumerate(texts(3)):
            engine.add(str(i), text, params())
        assert pair.right(engine) > 20


@pytest.mark.parametrize("k_eq_v", [False, True])
def test_a_backbone_of_gemma_4_drafts_what_its_source_drafts(
    k_eq_v: bool, llama: Path, tmp_path: Path, runner: Runner
) -> None:
    drafter = build_gemma_dspark(tmp_path, hidden=HIDDEN, vocab=VOCAB, k_eq_v=k_eq_v)
    pair = Pair(llama, drafter, GemmaDSparkReference(llama, drafter), runner)
    engine = pair.engine()
    for i, text in enumerate(texts(3)):
        engine.add(str(i), text, params())
    assert pair.right(engine) > 20
    config = json.loads((drafter / "config.json").read_text())
    for key, value in (("layer_types", ["sliding_attention", "full_attention"]), ("gemma_flag", 3)):
        with pytest.raises(ConfigError, match=r"sliding window|gemma_flag=3 is not known"):
            parse_dspark(config | {key: value})


@pytest.mark.parametrize("name", ["vanilla", "anchor first", "gated", "rnn"])
def test_the_chain_goes_through_the_drawn_token(
    name: str, llama: Path, tmp_path: Path, runner: Runner
) -> None:
    """A naive loop: noise of the target's own position and id, and the winner is the next row's token before."""
    pair, heat = pair_of(llama, tmp_path, runner, **VARIANTS[name]), 0.8
    engine = pair.engine()
    for i, text in enumerate(texts(3)):
        engine.add(str(i), text, params(12, temperature=heat, seed=i))
    sequences = {r.request_id: r.sequence for r in engine.state.requests.values()}
    reference: Any = pair.reference
    compared = moved = 0
    while engine.has_work:
        before = {name: list(s.tokens) for name, s in sequences.items()}
        for delta in engine.step():
            if not delta.proposed:
                continue
            text, seed = before[delta.request], sequences[delta.request].seed
            rows, base = reference.walk(text, pair.states(text))
            s = torch.zeros(reference.config["markov_rank"], dtype=torch.float64)
            tokens: list[int] = []
            for h, own in zip(rows[: len(delta.proposed)], base, strict=False):
                logits, _, s = reference.step(h, own, tokens[-1] if tokens else text[-1], s)
                keys = noise.keys(seed, len(text) + len(tokens), noise.TARGET)
                gumbel = torch.from_numpy(noise.host_gumbel(noise.host_bits(keys, reference.ids.numpy())))
                best = int((logits / heat + gumbel).argmax())
                moved += best != int(logits.argmax())
                tokens.append(int(reference.ids[best]))
            assert delta.proposed == tokens
            compared += len(tokens)
    assert compared > 60
    assert moved > 10


def bigram(llama: Path, folder: Path) -> tuple[Path, Path]:
    """A target whose next token hangs on the last one alone, and a drafter whose Markov head is that."""
    target = folder / "target"
    shutil.copytree(llama, target)
    tensors = load_file(target / "model.safetensors")
    for name, value in tensors.items():
        if name.endswith(("o_proj.weight", "down_proj.weight")):
            value.zero_()
    save_file(tensors, target / "model.safetensors")
    table = tensors["model.embed_tokens.weight"]
    eps = json.loads((target / "config.json").read_text())["rms_norm_eps"]
    normed = table * torch.rsqrt(table.pow(2).mean(-1, keepdim=True) + eps) * tensors["model.norm.weight"]
    drafter = build_dspark(folder / "drafter", hidden=HIDDEN, vocab=VOCAB, rank=HIDDEN, anchored=True)
    own = load_file(drafter / "model.safetensors")
    own["markov_head.markov_w1.weight"] = normed
    own["markov_head.markov_w2.weight"] = tensors.get("lm_head.weight", table).clone()
    own["lm_head.weight"] = torch.zeros(VOCAB, HIDDEN)
    save_file(own, drafter / "model.safetensors")
    return target, drafter


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"temperature": 0.8},
        {"temperature": 1.5, "top_p": 0.9},
        {"temperature": 1.0, "top_k": 9, "min_p": 0.05},
    ],
    ids=str,
)
def test_a_drafter_with_the_targets_own_scores_is_kept_in_full(
    settings: dict[str, Any], llama: Path, tmp_path: Path, runner: Runner
) -> None:
    target, drafter = bigram(llama, tmp_path)
    pair = Pair(target, drafter, DSparkReference(target, drafter), runner)
    each = {str(i): (text, params(40, seed=i, **settings)) for i, text in enumerate(texts(3))}
    stats = [got[0].stats for got in pair.engine().run(each).values()]
    assert sum(one.drafted for one in stats) > 80
    for one in stats:  # the last draft may reach past the text's end
        assert one.accepted >= one.drafted - DEPTH


def test_a_chain_by_the_likeliest_token_is_seen(
    llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A planted bug: rows conditioned on tokens that noise has not chosen keep far less."""
    target, drafter = bigram(llama, tmp_path)
    monkeypatch.setattr(native.NativeRunner, "chain_round", lambda *args: None)
    pick = StepPicker.pick

    def wrong(self: StepPicker, rows: Any, step: int, logits: Any, ids: Any = None, sure: Any = None) -> Any:
        pick(self, rows, step, logits, ids, sure)
        return [int(row.argmax()) for row in logits]

    monkeypatch.setattr(StepPicker, "pick", wrong)
    pair = Pair(target, drafter, DSparkReference(target, drafter))
    each = {str(i): (text, params(40, seed=i, temperature=1.5)) for i, text in enumerate(texts(3))}
    stats = [got[0].stats for got in pair.engine().run(each).values()]
    assert sum(one.accepted for one in stats) < 0.7 * sum(one.drafted for one in stats)


def test_without_a_markov_head_it_is_dflash(llama: Path, tmp_path: Path) -> None:
    dspark_pair = pair_of(llama, tmp_path / "a", rank=0, draft_vocab=40)
    plain = build_dflash(tmp_path / "b", hidden=HIDDEN, vocab=VOCAB, draft_vocab=40)
    net: Any = load_network(plain, dspark_pair.target)
    assert not hasattr(net, "chain_graph")
    assert not dspark_pair.net.chained
    for text in texts(3):
        states = dspark_pair.states(text)
        other = Pair(llama, plain, DSparkReference(llama, tmp_path / "a"))
        assert one_draft(dspark_pair, text, states) == one_draft(other, text, states)


def one_draft(
    pair: Pair, text: list[int], states: torch.Tensor, count: int = 7, picker: Any = None
) -> list[int]:
    sequence = Sequence(0, text, len(text), params(), 0)
    pair.drafter.begin(sequence)
    pair.drafter.on_commit([Kept(sequence, 0, [states])])
    picker = picker or GreedyPicker(1)
    pair.drafter.draft(DraftContext([sequence], [count], [0], None, [False], pair.cache, picker))
    pair.drafter.forget(0)
    return list(picker.tokens[0])


def test_how_many_are_wanted_and_what_stands_beside_changes_no_token(llama: Path, tmp_path: Path) -> None:
    pair = pair_of(llama, tmp_path, draft_vocab=40)
    for text in texts(3):
        states = pair.states(text)
        whole = one_draft(pair, text, states)
        for count in range(1, 7):
            assert one_draft(pair, text, states, count) == whole[:count]
    several = [Sequence(i, text, len(text), params(), 0) for i, text in enumerate(texts(3))]
    for sequence in several:
        pair.drafter.begin(sequence)
        pair.drafter.on_commit([Kept(sequence, 0, [pair.states(sequence.tokens)])])
    picker, limits = GreedyPicker(3), [7, 2, 5]
    pair.drafter.draft(DraftContext(several, limits, [0, 1, 2], None, [False] * 3, pair.cache, picker))
    alone = [one_draft(pair, text, pair.states(text)) for text in texts(3)]
    assert picker.tokens == [tokens[:limit] for tokens, limit in zip(alone, limits, strict=True)]


class Words(GreedyPicker):
    def __init__(self) -> None:
        super().__init__(1)
        self.words: list[float] = []

    def pick(self, rows: Any, step: int, logits: Any, ids: Any = None, sure: Any = None) -> list[int]:
        self.words += [1 / (1 + math.exp(-word)) for word in sure]
        return super().pick(rows, step, logits, ids, sure)


@pytest.mark.parametrize("name", ["vanilla", "gated", "rnn", "confidence of states alone"])
def test_confidences_are_those_of_the_published_source(
    name: str, llama: Path, tmp_path: Path, runner: Runner
) -> None:
    pair = pair_of(llama, tmp_path, runner, **VARIANTS[name])
    reference: Any = pair.reference
    for text in texts(2):
        picker = Words()
        states = pair.states(text)
        one_draft(pair, text, states, 6, picker)
        reference.draft(text, states, 6)
        assert picker.words == pytest.approx(reference.sure, abs=2e-3)


def test_what_confidence_is_worth_under_shared_noise() -> None:
    assert shared_chance(0.0) == pytest.approx(0.5 / 1.5)
    assert shared_chance(math.log(9)) == pytest.approx(0.9 / 1.1)
    assert shared_chance(-1e9) == 0.0 == shared_chance(math.nan)


needs_kernels = pytest.mark.skipif(not native.available(), reason="needs the compiled kernels")


@needs_kernels
@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"temperature": 0.8, "top_p": 0.9},
        {"temperature": 0.8, "repetition_penalty": 1.2},
        {"temperature": 0.8, "verify": "reject"},
    ],
    ids=str,
)
@pytest.mark.parametrize("markov", ["vanilla", "rnn"])
def test_one_call_equals_its_steps(
    markov: str, settings: dict[str, Any], llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Tokens, and where confidences end a row beside others that go on."""
    stop = Stop(7, (0.9, 0.9, 0.9, 0.9, 0.9, 0.9), ((0.1, 0.9),) * 12, price=0.25)
    make = StepPicker.__init__
    monkeypatch.setattr(
        StepPicker, "__init__", lambda self, rs, stops, *rest: make(self, rs, [stop] * len(rs), *rest)
    )
    build_dspark(tmp_path, hidden=HIDDEN, vocab=VOCAB, draft_vocab=40, markov=markov)

    def drafts() -> list[tuple[list[int], list[int]]]:
        pair = Pair(llama, tmp_path, DSparkReference(llama, tmp_path), native.NativeRunner(1))
        each = {str(i): (text, params(24, seed=i, **settings)) for i, text in enumerate(texts(3))}
        run = pair.engine(policy=FixedPolicy(7), draft_tokens=7).run(each)
        return [(got[0].token_ids, got[0].stats.drafted_by_position) for got in run.values()]

    rounds: list[bool] = []
    whole = native.NativeRunner.chain_round

    def counted(self: Any, *args: Any) -> Any:
        rounds.append((drawn := whole(self, *args)) is not None)
        return drawn

    monkeypatch.setattr(native.NativeRunner, "chain_round", counted)
    together = drafts()
    assert any(rounds) == (not {"repetition_penalty", "verify"} & set(settings))
    monkeypatch.setattr(native.NativeRunner, "chain_round", lambda *args: None)
    assert drafts() == together
    lengths = [n for _, by_position in together for n in by_position]
    assert lengths[0] > lengths[1] > 0


def test_agreement_of_shared_noise_meets_the_formula() -> None:
    """Two fixed distributions, 100,000 draws each with the same noise (section 4 of the source)."""
    g = torch.Generator().manual_seed(3)
    p, q = (torch.softmax(torch.randn(12, generator=g, dtype=torch.float64) * 1.5, 0) for _ in range(2))
    ratio = torch.maximum(p[None] / p[:, None], q[None] / q[:, None])  # [v, u]
    expected = float((1 / ratio.sum(1)).sum())
    distance = float((p - q).abs().sum() / 2)
    assert (1 - distance) / (1 + distance) <= expected <= 1 - distance
    draws, ids = 100_000, torch.arange(12)
    gumbel = noise.gumbel(noise.uniform([5] * draws, list(range(draws)), ids, noise.TARGET))
    agree = ((p.log() + gumbel).argmax(1) == (q.log() + gumbel).argmax(1)).double().mean()
    assert abs(float(agree) - expected) < 4 * math.sqrt(expected * (1 - expected) / draws)


def of_one_token(llama: Path, folder: Path, *, anchored: bool) -> tuple[Path, Path]:
    """A target of which the last token says all, and a drafter whose first row is right if it is the anchor's."""
    target, drafter = bigram(llama, folder)
    own, theirs = load_file(drafter / "model.safetensors"), load_file(target / "model.safetensors")
    for name, value in own.items():
        if name.endswith(("o_proj.weight", "down_proj.weight", "markov_w2.weight")):
            value.zero_()
    own["lm_head.weight"] = theirs.get("lm_head.weight", theirs["model.embed_tokens.weight"]).clone()
    own["norm.weight"] = theirs["model.norm.weight"].clone()
    save_file(own, drafter / "model.safetensors")
    config = json.loads((drafter / "config.json").read_text()) | {"sample_from_anchor": anchored}
    (drafter / "config.json").write_text(json.dumps(config))
    return target, drafter


@pytest.mark.parametrize("anchored", [True, False])
def test_a_file_with_the_wrong_convention_is_named_within_twenty_drafts(
    anchored: bool, llama: Path, tmp_path: Path
) -> None:
    target, drafter = of_one_token(llama, tmp_path, anchored=anchored)
    lines: list[str] = []
    config = EngineConfig(
        target=str(target), drafter=str(drafter), draft_tokens=3, max_model_len=128, profile_dir="none"
    )
    engine = build_engine(config, lines.append)
    engine.add("0", texts(1)[0], params(22 if anchored else 21))
    while engine.has_work:
        engine.step()
    named = [line for line in lines if "wrong convention (sample_from_anchor)" in line]
    assert len(named) == (not anchored)
    assert engine.info.get("drafter_warning") == (named[0] if named else None)


def test_a_network_that_is_never_asked_is_said_first_and_counted(llama: Path, tmp_path: Path) -> None:
    drafter = build_dspark(tmp_path, hidden=HIDDEN, vocab=VOCAB)
    lines: list[str] = []
    config = EngineConfig(
        target=str(llama), drafter=str(drafter), draft_tokens=0, max_model_len=128, profile_dir="none"
    )
    engine = build_engine(config, lines.append)
    assert "drafter dspark+ngram (as asked), which draft_tokens=0 never asks" in lines[0]
    (got,) = engine.run({"0": (texts(1)[0], params(6))})["0"]
    assert got.stats.drafted == 0
    assert sum(got.stats.reasons.values()) == got.stats.steps


# -- formats -----------------------------------------------------------------------------------------------------


def liquid(vocab: int) -> dict[str, Any]:
    return {
        "architectures": ["Lfm2DSparkDraftModel"], "model_type": "qwen3", "hidden_size": 2048, "num_hidden_layers": 5,
        "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 64, "intermediate_size": 6144,
        "rms_norm_eps": 1e-5, "rope_theta": 1e7, "rope_is_neox_style": False, "markov_rank": 256, "block_size": 9,
        "tie_word_embeddings": True, "vocab_size": vocab, "max_position_embeddings": 32768, "hidden_act": "silu",
        "dflash_config": {"mask_token_id": 3, "target_layer_ids": [2, 9, 17, 21, 27], "num_target_layers": 30},
    }  # fmt: skip


@pytest.mark.parametrize(("vocab", "parameters"), [(65_536, 295_725_953), (128_000, 327_707_521)])
def test_published_sizes_are_met_to_the_digit(vocab: int, parameters: int) -> None:
    """LFM2.5's drafters, as their cards count them: 62 tensors, no embedding and no head."""
    config = parse_dspark(liquid(vocab))
    assert config.block.first == 0
    assert config.block.layers.paired
    shapes = block_shapes(config.block) | head_shapes(config)
    assert len(shapes) == 62
    assert sum(math.prod(shape) for shape in shapes.values()) == parameters


def proposing(tokens: int) -> dict[str, Any]:
    return {
        "speculators_config": {"algorithm": "dspark", "proposal_methods": [{"speculative_tokens": tokens}]}
    }


@pytest.mark.parametrize(
    ("style", "more", "first"),
    [
        *((style, {}, 0) for style in STYLES[1:]),
        ("speculators", {}, 1),
        ("speculators", proposing(BLOCK), 0),
        ("speculators", proposing(BLOCK - 1), 1),
        ("speculators", {"sample_from_anchor": True} | proposing(BLOCK - 1), 0),
        ("deepseek", {"sample_from_anchor": False}, 1),
    ],
    ids=str,
)
def test_the_convention_of_a_block_is_found(
    style: str, more: dict[str, Any], first: int, tmp_path: Path
) -> None:
    raw = json.loads(
        (build_dspark(tmp_path, hidden=HIDDEN, vocab=VOCAB, style=style) / "config.json").read_text()
    )
    assert parse_dspark(raw | more).block.first == first


def test_defaults_that_a_file_may_leave_out(tmp_path: Path) -> None:
    raw = json.loads((build_dspark(tmp_path, hidden=HIDDEN, vocab=VOCAB) / "config.json").read_text())
    config = parse_dspark({name: value for name, value in raw.items() if name not in dspark.HEADS})
    assert (config.rank, config.markov, config.confident, config.reads_token) == (256, "vanilla", True, True)


def test_a_last_state_that_is_not_listed_is_found_by_width(
    llama: Path, tmp_path: Path, runner: Runner
) -> None:
    drafter = build_dspark(tmp_path, hidden=HIDDEN, vocab=VOCAB, taps=(1, 3, 4))
    config = json.loads((drafter / "config.json").read_text()) | {"aux_hidden_state_layer_ids": [1, 3]}
    (drafter / "config.json").write_text(json.dumps(config))
    pair = Pair(llama, drafter, DSparkReference(llama, drafter), runner)
    assert pair.net.taps == (1, 3, -1)
    engine = pair.engine()
    engine.add("0", texts(1)[0], params())
    assert pair.right(engine) > 6


BAD: dict[str, tuple[dict[str, Any], type[LoadError], str]] = {
    "an unknown flag": ({"markov_gamma": 2}, ConfigError, "dspark: markov_gamma=2 is not known"),
    "an unknown head": ({"markov_head_type": "lstm"}, ConfigError, "markov_head_type='lstm'"),
    "a flag of words": ({"enable_confidence_head": "no"}, ConfigError, "enable_confidence_head='no'"),
    "a confidence of nothing": ({"markov_rank": 0}, ConfigError, "markov_rank=0 leaves no Markov head"),
    "rows and drafts": (proposing(3), ConfigError, f"speculative_tokens=3 of blocks of {BLOCK} rows"),
    "other attention": ({"attention_mode": "mla"}, ConfigError, "attention_mode='mla' is not known"),
    "another target": ({"target_hidden_size": 64}, PairError, "hidden size 64 against 48"),
    "taps": ({"aux_hidden_state_layer_ids": [1]*3 + [2]}, WeightsError, "neither the 4 layers that config.json lists"),
    "rank": ({"markov_rank": 8}, WeightsError, "has shape"),
}  # fmt: skip


@pytest.mark.parametrize("case", sorted(BAD))
def test_what_does_not_fit_is_refused_in_one_line(case: str, llama: Path, tmp_path: Path) -> None:
    changes, error, words = BAD[case]
    build_dspark(tmp_path, hidden=HIDDEN, vocab=VOCAB, draft_vocab=30)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | changes))
    with pytest.raises(error, match=re.escape(words)) as caught:
        load_network(tmp_path, load_target(llama))
    assert "\n" not in str(caught.value)
    assert inspect(tmp_path, target=llama).unsupported == [str(caught.value)]


@pytest.mark.parametrize(
    ("kind", "words"), [("qwen4_exp", "Qwen3.8-Flash-Next"), ("deepseek_v4", "DSpark modules")]
)
def test_targets_that_bring_what_is_not_read_are_refused_by_name(
    kind: str, words: str, tmp_path: Path
) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": kind, "dspark_block_size": 5}))
    (trouble,) = inspect(tmp_path).unsupported
    assert words in trouble
    assert "which paceline does not run" in trouble


def test_heads_of_another_vocabulary_are_refused(llama: Path, tmp_path: Path) -> None:
    build_dspark(tmp_path, hidden=HIDDEN, vocab=VOCAB)
    tensors = load_file(tmp_path / "model.safetensors")
    tensors["markov_head.markov_w1.weight"] = tensors["markov_head.markov_w1.weight"][:-4].clone()
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(WeightsError, match=r"markov_w1.weight has shape"):
        load_network(tmp_path, load_target(llama))


@pytest.mark.parametrize("quantize", [None, "none"])
def test_it_runs_as_a_user_loads_it(quantize: Any, llama: Path, tmp_path: Path) -> None:
    target = tmp_path / "mine"
    shutil.copytree(llama, target)
    build_dspark(target / "dspark", hidden=HIDDEN, vocab=VOCAB, draft_vocab=32)
    settings: dict[str, Any] = {"max_model_len": 128, "profile_dir": "none", "draft_tokens": 3}
    each = params(20, temperature=0.8, seed=3)
    plain = LLM(str(target), drafter="none", **settings).generate(["0123abc"], each)[0]
    got = LLM(str(target), drafter="auto", quantize_drafter=quantize, **settings).generate(["0123abc"], each)[
        0
    ]
    assert got.token_ids == plain.token_ids
    assert got.stats.drafters.get("dspark")
