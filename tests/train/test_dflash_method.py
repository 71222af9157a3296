"""DFlash: the training forward is the engine's block, position by position, and what is exported drafts and goes on."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from checkpoints import VOCAB, build_target
from decoders import build_decoder
from dflash_files import build_dflash
from paceline import LLM
from paceline.cli.train import make_method
from paceline.errors import PairError, UsageError
from paceline.kv.cache import KVCache
from paceline.models.base import Cached
from paceline.models.drafters.dflash import DFlashNet
from paceline.models.registry import load_network, load_target
from paceline.models.target import GraphTarget
from paceline.ops.reference import EagerRunner
from paceline.train import DFlash, Recipe, Text, TrainOptions, Windows, distil, pack
from paceline.train.capture import TargetTeacher
from paceline.train.export import Exported, export
from paceline.train.networks import BlockModule
from paceline.train.parallel import DraftModule, choose_anchors, valid_steps

STEPS = 3
OPTIONS = TrainOptions(steps=30, batch=4, length=24, draft_tokens=2, eval_every=15, lr=1e-2)
VARIANTS = {
    "fresh": DFlash(vocabulary=30),
    "of the target's head": DFlash(vocabulary=30, shared=True, layers=1),
    "whole vocabulary": DFlash(taps=(0, 2, 4), block=6),
}


def windows(count: int, seed: int) -> Windows:
    return Windows.of_array(np.random.default_rng(seed).integers(3, VOCAB, size=(count, 24)))


def cache_of(model: Cached) -> KVCache:
    pages = dict.fromkeys(model.layout.kinds, 16)
    return KVCache(model.layout, pages, max_sequences=1, max_tokens=128, dtype=model.kv_dtype)


def drafted(target: GraphTarget, net: DFlashNet, text: list[int], t: int) -> torch.Tensor:
    """The engine's draft logits [STEPS, C] with token t pending, entries absorbed in chunks."""
    cache, own, states = cache_of(target), cache_of(net), []
    cache.open(0, text, share=False)
    tail = cache.tail([(0, text[:t])])
    _, *tapped = target.states(tail.rows(), cache)
    states = torch.cat(tapped, 1).clone()
    own.open(0, text, share=False)
    for start in range(0, t, 7):
        tail = own.tail([(0, text[start : min(start + 7, t)])])
        net.absorb(tail.rows(), states[start : start + 7], own)
        tail.commit([len(states[start : start + 7])])
    rows = own.tail([(0, [text[t], *[net.mask] * (net.block - 1)])]).rows()
    return net.logits(net.block_states(rows, own)[net.first : net.first + STEPS]).clone()


def check_equal(target: Path, module: DraftModule, teacher: TargetTeacher, folder: Path) -> None:
    generator = np.random.default_rng(5)
    packed = pack((Text(generator.integers(3, VOCAB, size=n).tolist(), ((0, n),)) for n in (29, 17, 21)), 50)
    captured = teacher.capture(packed)
    anchors = choose_anchors(captured, STEPS, 0, None)
    with torch.no_grad():
        states = [module.logits(s) for s in module.unroll(captured, anchors, STEPS)]
    engine, checked = load_target(target, dtype=torch.float32, runner=EagerRunner()), 0
    net = load_network(folder, engine)
    assert isinstance(net, DFlashNet)
    for row, columns in enumerate(valid_steps(captured, anchors, STEPS).all(-1)):
        for column in columns.nonzero()[:, 0].tolist()[::4]:
            index = int(anchors[row, column])
            t, number = int(captured.positions[row, index]), int(captured.segments[row, index])
            text = captured.tokens[row][captured.segments[row] == number].tolist()
            wanted = drafted(engine, net, text, t)
            for i in range(STEPS):
                torch.testing.assert_close(states[i][row, column], wanted[i], rtol=0, atol=3e-5)
            checked += 1
    assert checked >= 10


def shake(module: DraftModule) -> None:
    """Norms that are not one, or a forgotten one would not show."""
    torch.manual_seed(2)
    with torch.no_grad():
        for p in module.parameters():
            if p.dim() == 1:
                p.add_(0.2 * torch.randn_like(p))


@pytest.mark.parametrize("name", VARIANTS)
def test_the_training_forward_is_drafting_position_by_position(
    name: str, llama: Path, tmp_path: Path
) -> None:
    method = VARIANTS[name]
    teacher = method.teacher(llama)
    start = method.start(teacher, windows(2, 0), "scratch", 0)
    shake(start.module)
    export(method, start.module, tmp_path, Exported(start.config, STEPS, torch.float32))
    check_equal(llama, start.module, teacher, tmp_path)


def test_any_family_gets_a_drafter_and_that_of_others_goes_on(llama: Path, tmp_path: Path) -> None:
    build_target("dense", tmp_path / "gemma")
    build_decoder("qwen3", tmp_path / "qwen3")
    for target in (tmp_path / "gemma", tmp_path / "qwen3"):
        method = DFlash(vocabulary=50)
        teacher = method.teacher(target)
        start = method.start(teacher, windows(2, 0), "scratch", 0)
        shake(start.module)
        export(method, start.module, target / "drafter", Exported(start.config, STEPS, torch.float32))
        check_equal(target, start.module, teacher, target / "drafter")
    build_dflash(tmp_path / "theirs", hidden=48, vocab=VOCAB, draft_vocab=30)
    file = tmp_path / "theirs" / "model.safetensors"
    for table in (None, torch.randn(VOCAB, 48, generator=torch.Generator().manual_seed(3))):
        if table is not None:  # of its own
            save_file(load_file(file) | {"embed_tokens.weight": table}, file, metadata={"format": "pt"})
        teacher = DFlash().teacher(llama)
        start = DFlash().start(teacher, windows(2, 0), tmp_path / "theirs", 0)
        check_equal(llama, start.module, teacher, tmp_path / "theirs")


def test_it_learns_is_exported_and_goes_on(llama: Path, tmp_path: Path) -> None:
    done = distil(
        llama, windows(8, 0), windows(3, 1), tmp_path / "out", Recipe(OPTIONS, method=DFlash(vocabulary=30, block=3))
    )  # fmt: skip
    assert done.after.sampled[0] > done.before.sampled[0] + 0.02
    options = {"max_model_len": 64, "cache_memory": 2**24, "draft_tokens": 2, "threads": 1}
    with LLM(llama, drafter=str(tmp_path / "out"), **options) as llm:
        plain, with_it = (llm.generate([[5, 6, 7]], drafter=d, max_tokens=12)[0] for d in ("none", "dflash"))
    assert plain.token_ids == with_it.token_ids
    assert sum(with_it.stats.drafted_by_position) > 0
    method = DFlash()
    start = method.start(method.teacher(llama), windows(2, 0), tmp_path / "out", 0)
    assert isinstance(start.module, BlockModule)
    for name, tensor in done.module.state_dict().items():
        assert torch.equal(start.module.state_dict()[name], tensor.to(start.dtype).to(tensor.dtype)), name
    with pytest.raises(UsageError, match="blocks of this drafter hold 2 at most"):
        start.module.unroll(method.teacher(llama).capture(windows(1, 0)), torch.ones(1, 1).long(), 3)


def test_what_cannot_be_is_refused_by_name(llama: Path) -> None:
    with pytest.raises(PairError, match="no DFlash drafter in speculators format"):
        DFlash().start(DFlash().teacher(llama), windows(2, 0), llama, 0)
    with pytest.raises(UsageError, match="layers and head are those of --init: leave them out"):
        DFlash(layers=3).start(DFlash().teacher(llama), windows(2, 0), llama, 0)
    with pytest.raises(PairError, match="give --taps that rise from 0 to 4"):
        DFlash(taps=(3, 9)).check(llama)
    with pytest.raises(UsageError, match="a block of 1 rows"):
        DFlash(block=1)
    none = dict.fromkeys(
        (
            "draft_vocabulary",
            "taps",
            "flags",
            "shared_head",
            "layers",
            "head",
            "clusters",
            "recall",
            "draft_tokens",
        )
    )
    assert make_method("dflash", none | {"draft_tokens": 6, "layers": 3, "taps": "1,2"}) == DFlash(
        taps=(1, 2), layers=3, block=7
    )
    with pytest.raises(
        UsageError, match="--layers is of --method dflash and dflash2 and dspark, and this is eagle3"
    ):
        make_method("eagle3", none | {"layers": 2})
