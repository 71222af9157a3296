"""Parallel heads compute what Meta's forward computes, are found in the target's own files, and keep every law."""

from __future__ import annotations

import itertools
import json
import re
import shutil
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from checkpoints import build_target
from heads_files import HeadsReference, build_meta, meta_forward
from paceline import LLM
from paceline.assembly import choose_drafter
from paceline.check.chi2 import compare
from paceline.config import EngineConfig
from paceline.convert.from_meta import convert_meta
from paceline.convert.quantized import save_quantized
from paceline.errors import LoadError, PairError, UsageError, WeightsError
from paceline.models.inspection import inspect
from paceline.models.registry import load_network, load_target
from paceline.ops.base import Runner
from tapping import Pair, cache_of, params, texts


@pytest.fixture(scope="module")
def meta(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_meta(tmp_path_factory.mktemp("meta") / "meta")


@pytest.fixture
def made(meta: Path, llama: Path, tmp_path: Path) -> Path:
    convert_meta(meta, tmp_path / "made")
    shutil.copy(llama / "tokenizer.json", tmp_path / "made")
    return tmp_path / "made"


@pytest.mark.parametrize(
    "changes", [{}, {"n_kv_heads": None, "rope_theta": 5e4}, {"n_future_tokens": 6}], ids=str
)
def test_logits_are_those_of_metas_forward(changes: dict[str, Any], tmp_path: Path, runner: Runner) -> None:
    """Of the trunk and of every head, at every row, however the rows are cut."""
    meta, made = build_meta(tmp_path / "meta", **changes), tmp_path / "made"
    convert_meta(meta, made)
    target = load_target(made, runner=runner)
    net: Any = load_network(made, target)
    target.runner.prepare([target.hidden_graph, target.logits_graph, *net.graphs])
    (text,) = texts(1)
    right = meta_forward(meta, text)
    for cut in (1, 7, len(text)):
        cache, own = cache_of(target), cache_of(net)
        cache.open(0, text)
        own.open(0, text)
        for first in range(0, len(text), cut):
            piece = text[first : first + cut]
            with cache.tail([(0, piece)]) as tail:
                hidden, states = (part.clone() for part in target.states(tail.rows(), cache))
                tail.commit([len(piece)])
            with own.tail([(0, piece)]) as tail:
                heads = [part.clone() for part in net.look(tail.rows(), states, own)]
                tail.commit([len(piece)])
            scores = [target.logits(hidden).clone(), *(net.logits(head).clone() for head in heads)]
            expected = right[first : first + cut].transpose(0, 1)
            assert float((torch.stack(scores) - expected).abs().max()) < 1e-4 * float(right.abs().max())


def test_they_are_found_inside_the_target(made: Path) -> None:
    kind, source, why = choose_drafter(EngineConfig(target=str(made)), made)
    assert (kind, source, why) == ("heads+ngram", made, f"{made} holds 3 parallel heads")
    assert choose_drafter(EngineConfig(target=str(made), drafter="heads"), made)[:2] == ("heads", made)
    assert inspect(made).skipped.keys() == {"parallel heads"}
    seen = inspect(made, target=made)
    assert (seen.role, seen.unsupported) == ("drafter", [])
    with pytest.raises(UsageError, match="is a drafter of another kind"):
        choose_drafter(EngineConfig(target=str(made), drafter="mtp"), made)


@pytest.mark.parametrize("quantize", [None, "int8"])
def test_it_runs_as_a_user_loads_it(quantize: Any, made: Path, llama: Path, tmp_path: Path) -> None:
    """Also after `paceline quantize`, which keeps the heads."""
    if quantize is not None:
        convert_meta(build_meta(tmp_path / "wide", dim=64), made, force=True)
        shutil.copy(llama / "tokenizer.json", made)
        save_quantized(made, tmp_path / "quantized", quantize)
        made = tmp_path / "quantized"
    settings: dict[str, Any] = {"max_model_len": 128, "profile_dir": "none", "draft_tokens": 5}
    each = params(20, temperature=0.8, seed=3)
    plain = LLM(str(made), drafter="none", **settings).generate(["0123abc"], each)[0]
    llm = LLM(str(made), **settings)
    assert llm.info["drafter"] == "heads+ngram"
    got = llm.generate(["0123abc"], each)[0]
    assert got.token_ids == plain.token_ids
    assert got.stats.drafters.get("heads")


def test_texts_follow_the_exact_distribution_under_reject(meta: Path, made: Path) -> None:
    allowed, count, length, heat = (20, 50, 90), 400, 2, 4.0
    pair = Pair(made, made, HeadsReference(meta))
    (prompt,) = texts(1, 10)
    law = {}
    for text in itertools.product(allowed, repeat=length):
        rows = meta_forward(meta, [*prompt, *text])[len(prompt) - 1 : -1, 0, list(allowed)] / heat
        law[text] = float(torch.softmax(rows, -1)[range(length), [allowed.index(t) for t in text]].prod())
    wanted = params(length, temperature=heat, allowed_token_ids=allowed, seed=5, n=count, verify="reject")
    got = pair.engine().run({"a": (prompt, wanted)})["a"]
    seen = Counter(tuple(one.token_ids) for one in got)
    drafted, kept = (sum(getattr(one.stats, name) for one in got) for name in ("drafted", "accepted"))
    assert drafted > kept > 0
    assert not compare([seen[text] for text in law], list(law.values()), alpha=1e-5).refuted


def test_a_promise_that_the_file_does_not_keep_is_said(made: Path) -> None:
    tensors = load_file(made / "model.safetensors")
    save_file({n: t for n, t in tensors.items() if "extra" not in n}, made / "model.safetensors")
    kind, source, why = choose_drafter(EngineConfig(target=str(made)), made)
    assert (kind, source) == ("ngram", None)
    assert why.startswith(
        "config.json promises parallel heads (n_future_tokens=4), which the weights do not hold"
    )
    llm = LLM(str(made), max_model_len=128, profile_dir="none")
    assert llm.info["drafter_reason"] == why
    assert llm.generate(["0123abc"], params(4))[0].token_ids
    with pytest.raises(UsageError, match="promises parallel heads"):
        choose_drafter(EngineConfig(target=str(made), drafter="heads"), made)


def without(head: str) -> Any:
    return lambda tensors, config: [tensors.pop(name) for name in list(tensors) if name.startswith(head)]


def narrower(tensors: dict[str, Any], config: dict[str, Any]) -> None:
    name = "extra_heads.1.mlp.up_proj.weight"
    tensors[name] = tensors[name][:, :-1].clone()


def far_away(tensors: dict[str, Any], config: dict[str, Any]) -> None:
    tensors["extra_heads.999999999.x"] = torch.zeros(1)


BAD: dict[str, tuple[Any, str]] = {
    "a gap": (without("extra_heads.1."), "holds the parallel heads 0, 2, where config.json says n_future_tokens=4"),
    "fewer than promised": (without("extra_heads.2."), "holds the parallel heads 0, 1, where config.json says"),
    "a missing part": (without("extra_heads.1.mlp.up"), "1 missing (extra_heads.1.mlp.up_proj.weight)"),
    "another trunk's": (narrower, "extra_heads.1.mlp.up_proj.weight has shape [64, 47] where config.json needs [64, 48]"),
    "a huge number": (far_away, "holds the parallel heads 0, 1, 2, 999999999"),
    "an odd promise": (lambda t, config: config.update(n_future_tokens="four"), "says n_future_tokens='four'"),
}  # fmt: skip


@pytest.mark.parametrize("case", sorted(BAD))
def test_what_does_not_fit_is_refused_in_one_line(case: str, made: Path) -> None:
    change, said = BAD[case]
    tensors = load_file(made / "model.safetensors")
    config = json.loads((made / "config.json").read_text(encoding="utf-8"))
    change(tensors, config)
    save_file(tensors, made / "model.safetensors")
    (made / "config.json").write_text(json.dumps(config), encoding="utf-8")
    with pytest.raises(WeightsError, match=re.escape(said)) as caught:
        load_network(made, load_target(made))
    assert "\n" not in str(caught.value)
    assert inspect(made, target=made).unsupported == [str(caught.value)]
    kind, _, why = choose_drafter(
        EngineConfig(target=str(made)), made
    )  # not asked for, so the target runs without
    assert kind == "ngram"
    assert str(caught.value) in why


def test_heads_of_another_family_are_refused(tmp_path: Path) -> None:
    build_target("dense", tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    save_file(tensors | {"extra_heads.0.x": torch.zeros(1)}, tmp_path / "model.safetensors")
    with pytest.raises(PairError, match="holds parallel heads, which are not read of a gemma4"):
        load_network(tmp_path, load_target(tmp_path))


def test_metas_layout_itself_is_no_model_folder(meta: Path) -> None:
    with pytest.raises(LoadError, match="is in Meta's layout: `paceline convert"):
        load_target(meta)
