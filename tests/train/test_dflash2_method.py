"""DFlash 2: the training forward is the engine's block and selector, position by position; what is exported drafts."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch

from checkpoints import VOCAB, build_target
from dflash2_files import build_dflash2
from paceline import LLM
from paceline.cli.train import make_method
from paceline.errors import PairError
from paceline.kv.cache import KVCache
from paceline.models.base import Cached
from paceline.models.drafters.dflash2 import DFlash2Net
from paceline.models.registry import load_network, load_target
from paceline.models.target import GraphTarget
from paceline.ops.reference import EagerRunner
from paceline.train import DFlash2, Recipe, Text, TrainOptions, Windows, distil, pack
from paceline.train.capture import TargetTeacher
from paceline.train.export import Exported, export
from paceline.train.methods.dflash2 import AFTER, DFlash2Module
from paceline.train.parallel import DraftModule, choose_anchors, valid_steps

STEPS = 3


def windows(count: int, seed: int) -> Windows:
    return Windows.of_array(np.random.default_rng(seed).integers(3, VOCAB, size=(count, 24)))


def cache_of(model: Cached) -> KVCache:
    pages = dict.fromkeys(model.layout.kinds, 16)
    return KVCache(model.layout, pages, max_sequences=1, max_tokens=128, dtype=model.kv_dtype)


def scored(
    target: GraphTarget, net: DFlash2Net, text: list[int], t: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """The engine's scores [STEPS, V] with token t pending, each beside the text's own token before: (all, the head's)."""
    cache, own = cache_of(target), cache_of(net)
    cache.open(0, text, share=False)
    _, *tapped = target.states(cache.tail([(0, text[:t])]).rows(), cache)
    own.open(0, text, share=False)
    tail = own.tail([(0, text[:t])])
    net.absorb(tail.rows(), torch.cat(tapped, 1).clone(), own)
    tail.commit([t])
    rows = own.tail([(0, [text[t], *[net.mask] * (net.block - 1)])]).rows()
    states = net.block_states(rows, own)[net.first : net.first + STEPS].clone()
    unary, factors, every = net.logits(states).clone(), net.projected(states), torch.arange(VOCAB)
    follows = [net.follows(text[t + i], factors[i], every) for i in range(STEPS)]
    return unary + torch.stack(follows), unary


def check_equal(target: Path, module: DraftModule, teacher: TargetTeacher, folder: Path) -> None:
    assert isinstance(module, DFlash2Module)
    generator = np.random.default_rng(5)
    packed = pack((Text(generator.integers(3, VOCAB, size=n).tolist(), ((0, n),)) for n in (29, 17, 21)), 50)
    captured = teacher.capture(packed)
    anchors = choose_anchors(captured, STEPS, 0, None)
    with torch.no_grad():
        states = module.unroll(captured, anchors, STEPS)
    engine, checked = load_target(target, dtype=torch.float32, runner=EagerRunner()), 0
    net = load_network(folder, engine)
    assert isinstance(net, DFlash2Net)
    for row, columns in enumerate(valid_steps(captured, anchors, STEPS).all(-1)):
        for column in columns.nonzero()[:, 0].tolist()[::4]:
            index = int(anchors[row, column])
            t, number = int(captured.positions[row, index]), int(captured.segments[row, index])
            text = captured.tokens[row][captured.segments[row] == number].tolist()
            wanted, unary = scored(engine, net, text, t)
            for i in range(STEPS):
                own = states[i][row, column][None]
                torch.testing.assert_close(module.logits(own)[0], wanted[i], rtol=0, atol=1e-4)
                torch.testing.assert_close(
                    module.logits(module.beside(own)[0])[0], unary[i], rtol=0, atol=1e-4
                )
            checked += 1
    assert checked >= 10


def shake(module: DraftModule) -> None:
    """Norms that are not one, rows that mix and codebooks that say something, or forgotten ones would not show."""
    torch.manual_seed(2)
    with torch.no_grad():
        for name, p in module.named_parameters():
            if p.dim() == 1 or "_conv." in name or name == AFTER:
                p.add_(0.2 * torch.randn_like(p))


@pytest.mark.parametrize("kind", ["llama", "gemma"])
def test_the_training_forward_is_drafting_position_by_position(
    kind: str, llama: Path, tmp_path: Path
) -> None:
    target = llama
    if kind == "gemma":  # whose embeddings are scaled
        target = tmp_path / "gemma"
        build_target("dense", target)
    method = DFlash2(block=5, rank=8)
    teacher = method.teacher(target)
    start = method.start(teacher, windows(2, 0), "scratch", 0)
    shake(start.module)
    export(method, start.module, tmp_path / "out", Exported(start.config, STEPS, torch.float32))
    check_equal(target, start.module, teacher, tmp_path / "out")
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert (config["selector_rank"], config["conv_kernel_size"], config["draft_vocab_size"]) == (8, 2, VOCAB)


def test_one_of_others_is_gone_on_from_unless_it_scales_its_scores(llama: Path, tmp_path: Path) -> None:
    theirs = build_dflash2(tmp_path / "theirs", hidden=48, vocab=VOCAB, original=False)
    teacher = DFlash2().teacher(llama)
    check_equal(llama, DFlash2().start(teacher, windows(2, 0), theirs, 0).module, teacher, theirs)
    file = theirs / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"output_multiplier": 0.5}))
    with pytest.raises(
        PairError, match="scales or bounds its scores, which is not trained: use --init scratch"
    ):
        DFlash2().start(DFlash2().teacher(llama), windows(2, 0), theirs, 0)


def test_its_loss_falls_is_exported_and_drafts(llama: Path, tmp_path: Path) -> None:
    options = TrainOptions(
        steps=40, batch=4, length=24, draft_tokens=3, eval_every=20, lr=1e-2, objective="hybrid", weights="decay",
    )  # fmt: skip
    method = DFlash2(block=4, rank=8)
    done = distil(llama, windows(32, 0), windows(3, 1), tmp_path / "out", Recipe(options, method=method))
    losses = [entry["loss"] for entry in done.run.state.history if "loss" in entry]
    assert sum(losses[-3:]) < 0.95 * sum(losses[:3])
    assert done.after.sampled[0] > done.before.sampled[0] + 0.02
    learnt = dict(done.module.named_parameters())
    assert learnt[AFTER].abs().max() > 0, "the selector learns, too"
    assert learnt["layers.0.mlp_conv.kernel_projection.weight"].abs().max() > 0
    settings = {"max_model_len": 64, "cache_memory": 2**24, "draft_tokens": 3, "threads": 1}
    with LLM(llama, drafter=str(tmp_path / "out"), **settings) as llm:
        plain, got = (llm.generate([[5, 6, 7]], drafter=d, max_tokens=12)[0] for d in ("none", "dflash2"))
    assert plain.token_ids == got.token_ids
    assert got.stats.drafted
    start = DFlash2().start(DFlash2().teacher(llama), windows(2, 0), tmp_path / "out", 0)
    for name, tensor in done.module.state_dict().items():
        assert torch.equal(start.module.state_dict()[name], tensor.to(start.dtype).to(tensor.dtype)), name


def test_options_of_the_command() -> None:
    none = dict.fromkeys(
        ("head", "clusters", "recall", "draft_vocabulary", "taps", "flags", "shared_head", "layers")
    )
    assert make_method("dflash2", none | {"draft_tokens": 6, "layers": 3, "taps": "1,2"}) == DFlash2(
        taps=(1, 2), block=7, layers=3
    )
