"""Greedy texts of the whole engine against transformers' `generate()`: token-identical, with and without drafts.

Random models have near-ties; the fixture insists that along every text the two best logits lie further apart than
any difference between kernels, so that equality is demanded and not luck.
"""

from __future__ import annotations

import pytest
import torch

from checkpoints import FAMILIES, VOCAB, build_assistant, build_target
from paceline.core import SamplingParams
from paceline.drafters.assistant import MTPDrafter
from paceline.kv.cache import KVCache
from paceline.models.registry import load_assistant, load_target
from testing import ScriptedDrafter, Setup, make_engine, run, totals

NEW = 24
GAP = 5e-4  # logits; the largest difference seen between the two implementations is 3e-5


@pytest.fixture(scope="module", params=list(FAMILIES))
def case(request, tmp_path_factory):
    """(target, prompts, transformers' greedy texts, folder of the drafter)."""
    folder = tmp_path_factory.mktemp(request.param)
    theirs = build_target(request.param, folder / "target", eos_token_id=None)
    build_assistant(request.param, folder / "assistant", ordered=True)
    prompts = [torch.arange(3, 3 + 7 * n, 7).remainder(VOCAB - 3).add(3).tolist() for n in (21, 2, 9)]
    texts = []
    for prompt in prompts:
        out = theirs.generate(
            torch.tensor([prompt]), do_sample=False, max_new_tokens=NEW, eos_token_id=None, pad_token_id=0,
            return_dict_in_generate=True, output_logits=True,
        )  # fmt: skip
        best = torch.cat(out.logits).topk(2).values
        assert (best[:, 0] - best[:, 1]).min() > GAP, "choose another seed"
        texts.append(out.sequences[0].tolist())
    return load_target(folder / "target"), prompts, texts, folder / "assistant"


@pytest.mark.parametrize("drafter", ["none", "scripted", "mtp"])
def test_greedy_is_transformers_greedy(case, drafter):
    target, prompts, texts, assistant = case
    cache = KVCache(
        target.layout,
        dict.fromkeys(target.layout.kinds, 40),
        max_sequences=4,
        max_tokens=96,
        dtype=target.dtype,
    )
    kind = {
        "none": lambda: None,
        "scripted": lambda: ScriptedDrafter(texts, lambda j: j % 3 == 2),
        "mtp": lambda: MTPDrafter(load_assistant(assistant, target)),
    }[drafter]()
    engine = make_engine(Setup(), kind, target=target, cache=cache)
    done = run(engine, prompts, SamplingParams(max_tokens=NEW, ignore_eos=True))
    assert [d.prompt_token_ids + d.token_ids for d in done] == texts
    drafted, accepted = totals(done)
    if drafter != "none":
        assert drafted > accepted, "some drafts must be refused"
    if drafter == "scripted":
        assert accepted > NEW, "some drafts must be kept"
