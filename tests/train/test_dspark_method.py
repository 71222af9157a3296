"""DSpark: the training forward is the engine's block and chain, position by position; what is exported drafts."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch

from checkpoints import VOCAB, build_target
from dspark_files import build_dspark
from paceline import LLM
from paceline.cli.train import make_method
from paceline.core import ForwardBatch
from paceline.errors import PairError
from paceline.kv.cache import KVCache
from paceline.models.base import Cached
from paceline.models.drafters.dspark import DSparkNet
from paceline.models.registry import load_network, load_target
from paceline.models.target import GraphTarget
from paceline.ops.reference import EagerRunner
from paceline.train import DSpark, Recipe, Text, TrainOptions, Windows, distil, pack
from paceline.train.capture import TargetTeacher
from paceline.train.export import Exported, export
from paceline.train.methods.dspark import DSparkModule
from paceline.train.objectives import ce_tv
from paceline.train.parallel import DraftModule, choose_anchors, valid_steps
from paceline.train.rounds import Plan, batch_loss

STEPS = 3
VARIANTS = {
    "fresh": DSpark(vocabulary=30, rank=8),
    "of the target's head": DSpark(vocabulary=30, shared=True, layers=1, rank=8),
    "whole vocabulary": DSpark(taps=(0, 2, 4), block=6, rank=8),
}


def windows(count: int, seed: int) -> Windows:
    return Windows.of_array(np.random.default_rng(seed).integers(3, VOCAB, size=(count, 24)))


def cache_of(model: Cached) -> KVCache:
    pages = dict.fromkeys(model.layout.kinds, 16)
    return KVCache(model.layout, pages, max_sequences=1, max_tokens=128, dtype=model.kv_dtype)


def drafted(
    target: GraphTarget, net: DSparkNet, text: list[int], t: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """The engine's logits [STEPS, C] with token t pending, each beside the text's own token before, and confidences."""
    cache, own = cache_of(target), cache_of(net)
    cache.open(0, text, share=False)
    _, *tapped = target.states(cache.tail([(0, text[:t])]).rows(), cache)
    own.open(0, text, share=False)
    tail = own.tail([(0, text[:t])])
    net.absorb(tail.rows(), torch.cat(tapped, 1).clone(), own)
    tail.commit([t])
    rows = own.tail([(0, [text[t], *[net.mask] * (net.block - 1)])]).rows()
    states = net.block_states(rows, own)[net.first : net.first + STEPS].clone()
    places = torch.zeros(STEPS, dtype=torch.int32)
    before = ForwardBatch(torch.tensor(text[t : t + STEPS]), places, places, [0, STEPS])
    logits, sure, _ = net.chain(before, {"base": net.logits(states), "hidden": states})
    assert sure is not None
    return logits.clone(), sure[:, 0].clone()


def check_equal(target: Path, module: DraftModule, teacher: TargetTeacher, folder: Path) -> None:
    assert isinstance(module, DSparkModule)
    generator = np.random.default_rng(5)
    packed = pack((Text(generator.integers(3, VOCAB, size=n).tolist(), ((0, n),)) for n in (29, 17, 21)), 50)
    captured = teacher.capture(packed)
    anchors = choose_anchors(captured, STEPS, 0, None)
    with torch.no_grad():
        states = module.unroll(captured, anchors, STEPS)
    engine, checked = load_target(target, dtype=torch.float32, runner=EagerRunner()), 0
    net = load_network(folder, engine)
    assert isinstance(net, DSparkNet)
    for row, columns in enumerate(valid_steps(captured, anchors, STEPS).all(-1)):
        for column in columns.nonzero()[:, 0].tolist()[::4]:
            index = int(anchors[row, column])
            t, number = int(captured.positions[row, index]), int(captured.segments[row, index])
            text = captured.tokens[row][captured.segments[row] == number].tolist()
            wanted, sure = drafted(engine, net, text, t)
            for i in range(STEPS):
                own = states[i][row, column][None]
                torch.testing.assert_close(module.logits(own)[0], wanted[i], rtol=0, atol=3e-5)
                torch.testing.assert_close(module.sureness(own)[0], sure[i], rtol=0, atol=3e-5)
            checked += 1
    assert checked >= 10


def shake(module: DraftModule) -> None:
    """Norms that are not one and heads that say something, or forgotten ones would not show."""
    torch.manual_seed(2)
    with torch.no_grad():
        for name, p in module.named_parameters():
            if p.dim() == 1 or "markov_w2" in name or "confidence" in name:
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
    config = json.loads((tmp_path / "config.json").read_text())
    assert config["sample_from_anchor"] is True


def test_a_target_whose_embeddings_are_scaled_and_a_drafter_of_others(llama: Path, tmp_path: Path) -> None:
    gemma = tmp_path / "gemma"
    build_target("dense", gemma)
    method = DSpark(vocabulary=50, rank=8)
    teacher = method.teacher(gemma)
    start = method.start(teacher, windows(2, 0), "scratch", 0)
    shake(start.module)
    export(method, start.module, gemma / "drafter", Exported(start.config, STEPS, torch.float32))
    check_equal(gemma, start.module, teacher, gemma / "drafter")
    theirs = build_dspark(tmp_path / "theirs", hidden=48, vocab=VOCAB, draft_vocab=30)
    teacher = DSpark().teacher(llama)
    check_equal(llama, DSpark().start(teacher, windows(2, 0), theirs, 0).module, teacher, theirs)
    for variant in ({"markov": "gated"}, {"rank": 0}, {"reads_token": False}):
        build_dspark(tmp_path / "other", hidden=48, vocab=VOCAB, draft_vocab=30, **variant)  # type: ignore[arg-type]
        with pytest.raises(PairError, match="other heads than a vanilla Markov head"):
            DSpark().start(DSpark().teacher(llama), windows(2, 0), tmp_path / "other", 0)


def test_its_confidence_learns_what_is_kept(llama: Path) -> None:
    """The loss is that of the tokens plus the cross entropy of the confidence with 1 - TV."""
    method = DSpark(vocabulary=30, rank=8)
    teacher = method.teacher(llama)
    module = method.start(teacher, windows(2, 0), "scratch", 0).module
    assert isinstance(module, DSparkModule)
    captured = teacher.capture(windows(2, 0))
    plan = Plan(ce_tv, "decay", 0.78, STEPS, 0)
    shake(module)
    optimizer = torch.optim.Adam(module.confidence_head.parameters(), 0.05)
    losses = []
    for _ in range(40):
        optimizer.zero_grad()
        loss, _ = batch_loss(module, captured, teacher.narrow_logits, plan, None)
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    assert losses[-1] < losses[0] - 0.05
    frozen = dict(module.named_parameters())["lm_head.weight"]
    assert frozen.grad is None


def test_it_learns_is_exported_and_drafts(llama: Path, tmp_path: Path) -> None:
    options = TrainOptions(
        steps=30, batch=4, length=24, draft_tokens=3, eval_every=15, lr=1e-2, objective="ce-tv", weights="decay",
    )  # fmt: skip
    done = distil(
        llama, windows(8, 0), windows(3, 1), tmp_path / "out",
        Recipe(options, method=DSpark(vocabulary=30, block=3, rank=8)),
    )  # fmt: skip
    assert done.after.sampled[0] > done.before.sampled[0] + 0.02
    settings = {"max_model_len": 64, "cache_memory": 2**24, "draft_tokens": 3, "threads": 1}
    with LLM(llama, drafter=str(tmp_path / "out"), **settings) as llm:
        plain, got = (llm.generate([[5, 6, 7]], drafter=d, max_tokens=12)[0] for d in ("none", "dspark"))
    assert plain.token_ids == got.token_ids
    assert got.stats.drafted
    start = DSpark().start(DSpark().teacher(llama), windows(2, 0), tmp_path / "out", 0)
    for name, tensor in done.module.state_dict().items():
        assert torch.equal(start.module.state_dict()[name], tensor.to(start.dtype).to(tensor.dtype)), name


def test_options_of_the_command() -> None:
    none = dict.fromkeys(
        ("head", "clusters", "recall", "draft_vocabulary", "taps", "flags", "shared_head", "layers")
    )
    assert make_method("dspark", none | {"draft_tokens": 6, "layers": 3, "taps": "1,2"}) == DSpark(
        taps=(1, 2), block=6, layers=3
    )
