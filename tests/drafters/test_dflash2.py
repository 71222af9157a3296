"""DFlash 2 drafts what the published formulas draft; misfits are refused by name."""

from __future__ import annotations

import json
import math
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from checkpoints import VOCAB
from dflash2_files import TOP, DFlash2Reference, build_dflash2
from dflash_files import BLOCK, DFlashReference
from paceline import LLM
from paceline.control.fixed import FixedPolicy
from paceline.core import ForwardBatch
from paceline.errors import ConfigError, LoadError, WeightsError
from paceline.models.drafters.dflash import block_shapes
from paceline.models.drafters.dflash2 import parse_dflash2, path_shapes
from paceline.models.inspection import inspect
from paceline.models.registry import load_network, load_target
from paceline.ops.base import Ops, Rule, Runner, Value
from paceline.sampling import noise
from paceline.sampling.candidates import best_of
from tapping import Pair, params, texts

HIDDEN = 48
WINDOWS = {"layer_types": ["sliding_attention"] * 2, "sliding_window": 12}
VARIANTS: dict[str, dict[str, Any]] = {
    "z-lab": {},
    "speculators": {"original": False},
    "windows": WINDOWS,
    "scales": {
        "inner": {"input_embedding_scale": 0.5, "output_multiplier": 0.2, "final_logit_softcapping": 4.0}
    },
    "final norm": {"taps": (2, 4)},
}


@pytest.mark.parametrize("name", VARIANTS)
def test_drafts_are_those_of_the_published_formulas(
    name: str, llama: Path, tmp_path: Path, runner: Runner
) -> None:
    drafter = build_dflash2(tmp_path, hidden=HIDDEN, vocab=VOCAB, **VARIANTS[name])
    pair = Pair(llama, drafter, DFlash2Reference(llama, drafter), runner)
    assert pair.drafter.max_tokens == BLOCK - 1
    for count in (2, 7):
        engine = pair.engine(policy=FixedPolicy(count), draft_tokens=count)
        for i, text in enumerate(texts(2)):
            engine.add(str(i), text, params(14))
        assert pair.right(engine) > 8


def test_a_sampled_path_goes_through_the_drawn_token(llama: Path, tmp_path: Path, runner: Runner) -> None:
    """A naive loop: candidates after the noise, and the winner of all with noise is the token before the next row."""
    drafter, heat = build_dflash2(tmp_path, hidden=HIDDEN, vocab=VOCAB), 0.8
    reference = DFlash2Reference(llama, drafter)
    pair = Pair(llama, drafter, reference, runner)
    engine = pair.engine()
    for i, text in enumerate(texts(2)):
        engine.add(str(i), text, params(10, temperature=heat, seed=i))
    sequences = {r.request_id: r.sequence for r in engine.state.requests.values()}
    compared = 0
    while engine.has_work:
        before = {name: list(s.tokens) for name, s in sequences.items()}
        for delta in engine.step():
            if not delta.proposed:
                continue
            text, seed = before[delta.request], sequences[delta.request].seed
            tokens: list[int] = []
            for h, own in zip(*reference.walk(text, pair.states(text)), strict=True):
                if len(tokens) == len(delta.proposed):
                    break
                keys = noise.keys(seed, len(text) + len(tokens), noise.TARGET)
                gumbel = torch.from_numpy(noise.host_gumbel(noise.host_bits(keys, np.arange(VOCAB))))
                chosen = (own / heat + gumbel).topk(TOP).indices
                s = own + reference.follows(h, tokens[-1] if tokens else text[-1])
                tokens.append(int(chosen[(s / heat + gumbel)[chosen].argmax()]))
            assert delta.proposed == tokens
            compared += len(tokens)
    assert compared > 30


def test_under_rejection_the_candidates_are_the_largest_scores_whatever_the_noise(
    llama: Path, tmp_path: Path, runner: Runner
) -> None:
    """A candidate that noise has lifted would be drawn from another distribution than the one it is judged by."""
    drafter = build_dflash2(tmp_path, hidden=HIDDEN, vocab=VOCAB)
    reference = DFlash2Reference(llama, drafter)
    pair = Pair(llama, drafter, reference, runner)
    lifted = {}
    for rule in ("reject", "match"):
        engine = pair.engine()
        for i, text in enumerate(texts(2)):
            engine.add(str(i), text, params(16, temperature=3.0, seed=i, verify=rule))
        sequences = {r.request_id: r.sequence for r in engine.state.requests.values()}
        outside = drafted = 0
        while engine.has_work:
            before = {name: list(s.tokens) for name, s in sequences.items()}
            for delta in engine.step():
                text = before[delta.request]
                if not delta.proposed:
                    continue
                _, scores = reference.walk(text, pair.states(text))
                for token, own in zip(delta.proposed, scores, strict=False):
                    outside += token not in own.topk(TOP).indices
                    drafted += 1
        assert drafted > 60
        lifted[rule] = outside
    assert lifted["reject"] == 0
    assert lifted["match"] > 10


def test_with_nothing_in_it_it_is_dflash(llama: Path, tmp_path: Path, runner: Runner) -> None:
    """No dynamic taps, a base of the row itself, empty codebooks: DFlash 1 with the anchor in its first row."""
    drafter = build_dflash2(tmp_path, hidden=HIDDEN, vocab=VOCAB)
    tensors = load_file(drafter / "model.safetensors")
    for name, value in tensors.items():
        if name.endswith("base_kernel"):
            value[:, 0], value[:, 1] = 1, 0
        if "kernel_projection" in name or "codebook" in name:
            value.zero_()
    save_file(tensors, drafter / "model.safetensors")
    reference = DFlashReference(llama, drafter)
    pair = Pair(llama, drafter, reference, runner)
    engine = pair.engine()
    for i, text in enumerate(texts(2)):
        engine.add(str(i), text, params())
    states = {r.request_id: r.sequence for r in engine.state.requests.values()}
    compared = 0
    while engine.has_work:
        before = {name: list(s.tokens) for name, s in states.items()}
        for delta in engine.step():
            if delta.proposed:
                text = before[delta.request]
                assert delta.proposed == reference.draft(text, pair.states(text), len(delta.proposed))[0]
                compared += 1
    assert compared > 10


def test_the_convolution_of_the_sources_example(runner: Runner) -> None:
    x = torch.tensor([[1.0, 2], [3, 4], [5, 6]])
    base = torch.tensor([[1.0, 1], [0.5, 0]])
    mix = torch.zeros(3, 4)

    def graph(ops: Ops) -> tuple[Value, ...]:
        return (ops.block_conv(ops.given("x", 2), ops.given("mix", 4), base),)

    def run(slots: list[int]) -> list[list[float]]:
        positions = torch.arange(3, dtype=torch.int32)
        starts = [0, *(i for i in (1, 2) if slots[i] != slots[i - 1]), 3]
        rows = ForwardBatch(positions.long(), positions, torch.tensor(slots, dtype=torch.int32), starts)
        return runner.run(graph, rows, None, {"x": x, "mix": mix})[0].tolist()  # type: ignore[no-any-return]

    assert run([0, 0, 0]) == [[1, 2], [3.5, 4], [6.5, 6]]
    mix[1, 3] = 0.25  # of row 1, tap 1, the second group
    assert run([0, 0, 0])[1] == [3.5, 4.5]
    assert run([0, 1, 1]) == [[1, 2], [3, 4], [6.5, 6]]  # nothing crosses a block


def test_candidates_are_the_largest_and_lower_ids_first() -> None:
    x = np.array([0.0, 3, 1, 3, 2, -40, 3], dtype=np.float32)
    assert best_of(x, None, 3, None).tolist() == [1, 3, 6]
    assert best_of(x, None, 2, None).tolist() == [1, 3]
    assert best_of(x, None, 6, None).tolist() == [1, 3, 6, 4, 2, 0]
    assert best_of(x, None, 9, None).tolist() == [1, 3, 6, 4, 2, 0, 5]
    ids = np.array([9, 8, 7, 6, 5, 4, 3])
    assert best_of(x, ids, 2, None).tolist() == [6, 3]
    rule = Rule(1.0, 5, 13)
    keys = noise.keys(5, 13, noise.TARGET)
    score = x + noise.host_gumbel(noise.host_bits(keys, np.arange(7)))
    assert best_of(x, None, 3, rule).tolist() == np.argsort(-score)[:3].tolist()


def published(**changes: Any) -> dict[str, Any]:
    """As the header and config of z-lab's Qwen3.8-27B-DFlash2 say it."""
    inner = {
        "block_size": 8, "mask_token_id": 248070, "target_layer_ids": [5, 19, 33, 47, 61], "conv_kernel_size": 2,
        "conv_group_size": 16, "selector_rank": 256, "selector_top_k": 16,
    }  # fmt: skip
    return {
        "architectures": ["DFlash2DraftModel"], "model_type": "qwen3", "hidden_size": 5120, "intermediate_size": 17408,
        "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128, "num_hidden_layers": 5,
        "vocab_size": 248320, "max_position_embeddings": 262144, "rms_norm_eps": 1e-6, "is_causal": False,
        "layer_types": ["sliding_attention"] * 5, "sliding_window": 2048, "rope_parameters": {"rope_theta": 1e7},
        "dflash_config": inner,
    } | changes  # fmt: skip


def test_the_published_size_is_met_to_the_digit() -> None:
    config = parse_dflash2(published())
    shapes = block_shapes(config.block) | path_shapes(config)
    assert len(shapes) == 81
    assert sum(math.prod(shape) for shape in shapes.values()) == 1_924_404_480
    assert config.block.windows == (2048,) * 5
    assert not config.block.causal


BAD: dict[str, tuple[dict[str, Any], type[LoadError], str]] = {
    "an unknown flag": ({"conv_bias": True}, ConfigError, "dflash2: conv_bias=True is not known"),
    "experts": ({"draft_ffn_type": "moe"}, ConfigError, "draft_ffn_type='moe' is not supported"),
    "the other convention": ({"sample_from_anchor": True}, ConfigError, "sample_from_anchor=True is not supported"),
    "two sizes": ({"block_size": 4}, ConfigError, "block_size is 4, and 8 in dflash_config"),
    "groups": ({"conv_group_size": 7}, ConfigError, "conv_group_size=7 does not divide a width of 48"),
    "part of a head": ({"draft_vocab_size": 30}, ConfigError, f"a head of 30 of {VOCAB} tokens"),
    "a narrow window": (WINDOWS | {"sliding_window": 5}, ConfigError, "a window of 5 is shorter than a block"),
    "rank": ({"selector_rank": 8}, WeightsError, "has shape"),
    "causal": ({"is_causal": True}, ConfigError, "is_causal=True is not known"),
}  # fmt: skip


@pytest.mark.parametrize("case", sorted(BAD))
def test_what_does_not_fit_is_refused_in_one_line(case: str, llama: Path, tmp_path: Path) -> None:
    changes, error, words = BAD[case]
    build_dflash2(tmp_path, hidden=HIDDEN, vocab=VOCAB)
    config = json.loads((tmp_path / "config.json").read_text())
    for name in set(changes) & set(config["dflash_config"]) - {"block_size"}:
        del config["dflash_config"][name]
    (tmp_path / "config.json").write_text(json.dumps(config | changes))
    with pytest.raises(error, match=re.escape(words)) as caught:
        load_network(tmp_path, load_target(llama))
    assert "\n" not in str(caught.value)
    assert inspect(tmp_path, target=llama).unsupported == [str(caught.value)]


def test_an_embedding_beside_the_weights_is_not_ignored(llama: Path, tmp_path: Path) -> None:
    (build_dflash2(tmp_path, hidden=HIDDEN, vocab=VOCAB) / "mask_embedding.pt").write_bytes(b"")
    with pytest.raises(ConfigError, match=r"has a mask_embedding.pt, which takes the place"):
        load_network(tmp_path, load_target(llama))


@pytest.mark.parametrize(
    "settings", [{}, {"temperature": 0.8}, {"temperature": 0.8, "verify": "reject"}], ids=str
)
def test_it_runs_as_a_user_loads_it(settings: dict[str, Any], llama: Path, tmp_path: Path) -> None:
    build_dflash2(tmp_path, hidden=HIDDEN, vocab=VOCAB)
    each = params(20, seed=3, **settings)
    engine: dict[str, Any] = {"max_model_len": 128, "profile_dir": "none", "draft_tokens": 3}
    plain = LLM(str(llama), drafter="none", **engine).generate(["0123abc"], each)[0]
    got = LLM(str(llama), drafter=str(tmp_path), **engine).generate(["0123abc"], each)[0]
    assert got.stats.drafters.get("dflash2")
    if "verify" not in settings:
        assert got.token_ids == plain.token_ids
