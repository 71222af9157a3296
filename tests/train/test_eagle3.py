"""EAGLE-3 and MTP: the training forward is drafting, position by position, and what is exported drafts."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from checkpoints import VOCAB, build_target
from decoders import build_decoder
from eagle3_files import build_eagle3
from mtp_files import build_mtp
from paceline import LLM
from paceline.convert.quantized import save_quantized
from paceline.convert.to_gguf import write_gguf
from paceline.errors import PairError, UsageError, WeightsError
from paceline.kv.cache import KVCache
from paceline.models.base import Cached
from paceline.models.drafters.state_net import SteppingNet
from paceline.models.registry import load_network, load_target
from paceline.models.target import GraphTarget
from paceline.ops import native
from paceline.ops.reference import EagerRunner
from paceline.train import (
    Eagle3,
    GemmaAssistant,
    Mtp,
    Recipe,
    Text,
    TrainOptions,
    Windows,
    distil,
    pack,
    rounds,
)
from paceline.train import capture as capture_module
from paceline.train.capture import TargetTeacher, load_frozen
from paceline.train.compare import open_engine
from paceline.train.export import export
from paceline.train.methods.base import Exported
from paceline.train.methods.speculators import default_taps
from paceline.train.networks import SteppingModule
from paceline.train.objectives import find_objective
from paceline.train.parallel import DraftModule, choose_anchors, valid_steps
from small_tokenizers import SIZE, byte_level

STEPS = 3
OPTIONS = TrainOptions(steps=4, batch=2, length=24, draft_tokens=2, eval_every=2, save_every=2)
YARN = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 64}
VARIANTS = {
    "fresh": Eagle3(vocabulary=30),
    "of the target's head": Eagle3(vocabulary=30, shared=True),
    "as published": Eagle3(flags=(), taps=(0, 2, 4)),
    "3.1": Eagle3(vocabulary=40, flags=("fc_norm", "norm_output")),
    "before fc": Eagle3(flags=("norm_before_fc",)),
}


def texts(*lengths: int) -> list[Text]:
    generator = np.random.default_rng(5)
    return [Text(generator.integers(3, VOCAB, size=n).tolist(), ((0, n),)) for n in lengths]


def windows(count: int, seed: int) -> Windows:
    return Windows.of_array(np.random.default_rng(seed).integers(3, VOCAB, size=(count, 24)))


def cache_of(model: Cached) -> KVCache:
    pages = dict.fromkeys(model.layout.kinds, 16)
    return KVCache(model.layout, pages, max_sequences=1, max_tokens=128, dtype=model.kv_dtype)


def drafted(target: GraphTarget, net: SteppingNet, text: list[int], t: int) -> torch.Tensor:
    """The engine's draft logits [STEPS, C] with token t pending and the text's tokens drafted; prompts in chunks."""
    cache, own, states = cache_of(target), cache_of(net), []
    cache.open(0, text, share=False)
    for start in range(0, t, 7):
        tail = cache.tail([(0, text[start : min(start + 7, t)])])
        final, *tapped = target.states(tail.rows(), cache)
        states.append(torch.cat(tapped or [final], 1))
        tail.commit([len(states[-1])])
    own.open(0, text[1:], share=False)
    whole, out = torch.cat(states), []
    for start in range(0, t, 5):  # an entry stands for the token after it
        tail = own.tail([(0, text[start + 1 : min(start + 6, t + 1)])])
        hidden, normed = (x.clone() for x in net.absorb(tail.rows(), whole[start : start + 5], own))
        if start + 5 < t:
            tail.commit([5])
    hidden, logits = hidden[-1:], net.logits(normed[-1:]).clone()
    out.append(logits[0])
    rest = (t - 1) % 5 + 1
    for i in range(1, STEPS):
        tail = own.tail([(0, text[t - rest + 1 : t + 1 + i])])
        logits, hidden = (x.clone() for x in net.step(tail.rows(skip=[rest + i - 1]), hidden, own))
        out.append(logits[0])
    return torch.stack(out)


def check_equal(target: Path, module: DraftModule, teacher: TargetTeacher, folder: Path) -> None:
    captured = teacher.capture(pack(texts(29, 17, 21), 50))
    anchors = choose_anchors(captured, STEPS, 0, None)
    valid = valid_steps(captured, anchors, STEPS)
    with torch.no_grad():
        states = [module.logits(s) for s in module.unroll(captured, anchors, STEPS)]
    exact = teacher.target.head.scale is None and teacher.target.head.blocks is None
    # what is quantized is multiplied as the engine does it
    engine = (
        load_target(target, dtype=torch.float32, runner=EagerRunner())
        if exact
        else load_frozen(target, "cpu")
    )
    net, checked = load_network(folder, engine), 0
    for row, columns in enumerate(valid.all(-1)):
        for column in columns.nonzero()[:, 0].tolist()[::3]:
            index = int(anchors[row, column])
            t, number = int(captured.positions[row, index]), int(captured.segments[row, index])
            text = captured.tokens[row][captured.segments[row] == number].tolist()
            wanted = drafted(engine, net, text, t)
            for i in range(STEPS):
                torch.testing.assert_close(states[i][row, column], wanted[i], rtol=0, atol=3e-5)
            checked += 1
    assert checked >= 15


def shake(module: DraftModule) -> None:
    """Norms that are not one, or a forgotten one would not show."""
    torch.manual_seed(2)
    with torch.no_grad():
        for p in module.parameters():
            if p.dim() == 1:
                p.add_(0.2 * torch.randn_like(p))


@pytest.mark.parametrize("name", VARIANTS)
def test_the_training_forward_is_drafting_position_by_position(
    name: str, llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(capture_module, "ROWS", 11)  # texts are cut into chunks
    method = VARIANTS[name]
    teacher = method.teacher(llama)
    start = method.start(teacher, pack(texts(29, 17, 21), 50), "scratch", 0)
    assert isinstance(start.module, SteppingModule)
    shake(start.module)
    export(method, start.module, tmp_path, Exported(start.config, STEPS, torch.float32))
    check_equal(llama, start.module, teacher, tmp_path)


@pytest.mark.parametrize(
    "more", [{"draft_vocab": 30}, {"width": 64, "norm_before_fc": True}, {"kind": "qwen3"}]
)
def test_a_foreign_drafter_goes_on_as_it_drafts(llama: Path, tmp_path: Path, more: dict[str, object]) -> None:
    build_eagle3(tmp_path / "theirs", hidden=48, vocab=VOCAB, **more)  # type: ignore[arg-type]
    method = Eagle3()
    teacher = method.teacher(llama)
    start = method.start(teacher, windows(2, 0), tmp_path / "theirs", 0)
    assert isinstance(start.module, SteppingModule)
    check_equal(llama, start.module, teacher, tmp_path / "theirs")


def test_biases_of_a_foreign_drafter_are_trained_too(llama: Path, tmp_path: Path) -> None:
    build_eagle3(tmp_path, hidden=48, vocab=VOCAB, draft_vocab=30)
    tensors, config = (
        load_file(tmp_path / "model.safetensors"),
        json.loads((tmp_path / "config.json").read_text()),
    )
    generator = torch.Generator().manual_seed(4)
    for name in ("q_proj", "k_proj", "v_proj", "o_proj"):
        rows = len(tensors[f"layers.0.self_attn.{name}.weight"])
        tensors[f"layers.0.self_attn.{name}.bias"] = torch.randn(rows, generator=generator)
    config["transformer_layer_config"]["attention_bias"] = True
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    (tmp_path / "config.json").write_text(json.dumps(config))
    teacher = Eagle3().teacher(llama)
    module = Eagle3().start(teacher, windows(2, 0), tmp_path, 0).module
    assert "layers.0.self_attn.k_proj.bias" in dict(module.trainable())
    check_equal(llama, module, teacher, tmp_path)


@pytest.mark.parametrize("family", ["gemma", "qwen3", "yarn"])
@pytest.mark.parametrize("method", [Eagle3(vocabulary=50), Mtp()], ids=["eagle3", "mtp"])
def test_any_family_gets_a_drafter_that_drafts(method: Eagle3 | Mtp, family: str, tmp_path: Path) -> None:
    target = tmp_path / "target"
    if family == "gemma":
        build_target("dense", target)
    else:
        build_decoder("qwen3", target, **({"rope_parameters": YARN} if family == "yarn" else {}))
    teacher = method.teacher(target)
    start = method.start(teacher, windows(2, 0), "scratch", 0)
    shake(start.module)
    export(method, start.module, tmp_path / "drafter", Exported(start.config, STEPS, torch.float32))
    check_equal(target, start.module, teacher, tmp_path / "drafter")


@pytest.mark.parametrize("kind", ["int8", "q8_0"])
@pytest.mark.parametrize("shared", [False, True])
def test_a_quantized_target_gets_a_drafter_that_drafts(kind: str, shared: bool, tmp_path: Path) -> None:
    build_decoder("llama", tmp_path / "model", hidden_size=64, vocab_size=SIZE)
    byte_level(tmp_path / "model", "llama-bpe")
    target = tmp_path / ("model.gguf" if kind == "q8_0" else "small")
    if kind == "q8_0":
        write_gguf(tmp_path / "model", target, kind)
    else:
        save_quantized(tmp_path / "model", target, "int8")
    method = Eagle3(vocabulary=50, shared=shared)
    teacher = method.teacher(target)
    start = method.start(teacher, windows(2, 0), "scratch", 0)
    assert isinstance(start.module, SteppingModule)
    export(method, start.module, tmp_path / "drafter", Exported(start.config, STEPS, torch.float32))
    if not shared:  # the engine rounds what it multiplies with a quantized head
        return check_equal(target, start.module, teacher, tmp_path / "drafter")
    scores = teacher.narrow_logits(torch.ones(1, 64))
    torch.testing.assert_close(start.module.logits(torch.ones(1, 64)), scores, rtol=0, atol=2e-2)
    return None


def test_what_is_exported_has_the_published_layout_and_runs(llama: Path, tmp_path: Path) -> None:
    done = distil(
        llama, windows(6, 0), windows(3, 1), tmp_path / "out", Recipe(OPTIONS, method=Eagle3(vocabulary=30))
    )
    assert done.run.stopped == "steps"
    build_eagle3(
        tmp_path / "theirs", hidden=48, vocab=VOCAB, draft_vocab=30, norm_before_residual=True, fc_norm=True,
        without=("embed_tokens.weight",),
    )  # fmt: skip
    names = {}
    for folder in ("out", "theirs"):
        with safe_open(tmp_path / folder / "model.safetensors", "pt") as file:
            names[folder] = {name: file.get_slice(name).get_dtype() for name in file.keys()}  # noqa: SIM118
            if folder == "out":
                d2t, t2d = file.get_tensor("d2t"), file.get_tensor("t2d")
    assert names["out"] == names["theirs"]
    assert torch.equal(t2d.nonzero()[:, 0], d2t + torch.arange(30))
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert config["speculators_config"]["proposal_methods"][0]["speculative_tokens"] == 2
    assert config["transformer_layer_config"]["rope_parameters"]["rope_type"] == "llama3"
    options = {"max_model_len": 64, "cache_memory": 2**24, "draft_tokens": 2, "threads": 1}
    with LLM(llama, drafter=str(tmp_path / "out"), **options) as llm:
        plain, with_it = (llm.generate([[5, 6, 7]], drafter=d, max_tokens=12)[0] for d in ("none", "eagle3"))
    assert plain.token_ids == with_it.token_ids
    assert sum(with_it.stats.drafted_by_position) > 0


def test_a_block_of_multi_token_prediction_is_trained_exported_and_goes_on(
    llama: Path, tmp_path: Path
) -> None:
    done = distil(llama, windows(6, 0), windows(3, 1), tmp_path / "out", Recipe(OPTIONS, method=Mtp()))
    assert done.run.stopped == "steps"
    options = {"max_model_len": 64, "cache_memory": 2**24, "draft_tokens": 2, "threads": 1}
    with LLM(llama, drafter=str(tmp_path / "out"), **options) as llm:
        plain, with_it = (llm.generate([[5, 6, 7]], drafter=d, max_tokens=12)[0] for d in ("none", "mtp"))
    assert plain.token_ids == with_it.token_ids
    assert sum(with_it.stats.drafted_by_position) > 0
    engine = open_engine(
        llama, {"new": tmp_path / "out"}, 2
    )  # with which `paceline train` compares it at its end
    assert "new" in engine.drafter_names
    again = Mtp()
    start = again.start(again.teacher(llama), windows(2, 0), tmp_path / "out", 0)
    for name, tensor in done.module.state_dict().items():
        assert torch.equal(start.module.state_dict()[name], tensor), name
    with pytest.raises(PairError, match="no MTP drafter in speculators format"):
        again.start(again.teacher(llama), windows(2, 0), llama, 0)


def test_an_mtp_drafter_by_others_goes_on_as_it_drafts(tmp_path: Path) -> None:
    build_decoder("qwen3", tmp_path / "target")
    build_mtp(tmp_path / "target", tmp_path / "theirs", "speculators")
    method = Mtp()
    teacher = method.teacher(tmp_path / "target")
    start = method.start(teacher, windows(2, 0), tmp_path / "theirs", 0)
    check_equal(tmp_path / "target", start.module, teacher, tmp_path / "theirs")


def test_it_learns(llama: Path, tmp_path: Path) -> None:
    options = TrainOptions(steps=30, batch=4, length=24, draft_tokens=2, eval_every=15, lr=1e-2)
    done = distil(llama, windows(8, 0), windows(3, 1), tmp_path, Recipe(options, method=Eagle3()))
    assert done.after.sampled[0] > done.before.sampled[0] + 0.02


@pytest.mark.skipif(
    not native.available() or not native.bf16_dot(), reason="this CPU multiplies no pairs of bfloat16"
)
@pytest.mark.parametrize("objective", ["kl", "hybrid", "shaped"])
def test_matrices_in_bfloat16_have_nearly_the_loss_and_the_gradient_of_float32(
    objective: str, llama: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As where they have 512 columns and more."""

    def of(wide: int) -> tuple[float, torch.Tensor]:
        monkeypatch.setattr(rounds, "WIDE", wide)
        teacher = (method := Eagle3(vocabulary=30)).teacher(llama)
        module = method.start(teacher, pack(texts(29, 17, 21), 50), "scratch", 0).module
        shake(module)
        captured = teacher.capture(pack(texts(29, 17, 21), 50))
        plan = rounds.Plan(find_objective(objective), "decay", 0.8, STEPS, 0)
        loss, count = rounds.batch_loss(module, captured, teacher.logits, plan, None)
        loss.backward()
        assert count > 60
        return float(loss.detach()), torch.cat(
            [p.grad.flatten() for p in module.parameters() if p.grad is not None]
        )

    exact, near = of(1 << 20), of(1)
    assert near[0] != exact[0]
    assert near[0] == pytest.approx(exact[0], rel=0.01)
    assert torch.cosine_similarity(near[1], exact[1], dim=0) > 0.999


def test_the_draft_vocabulary_is_what_the_target_writes_most() -> None:
    from paceline.train.methods.speculators import choose

    counted = pack([Text([9, 9, 9, 5, 5, 7, 7, 7, 7], ((2, 9),)), Text([1, 2, 3], ((1, 1),))], 12)
    assert choose(counted, 3, 20, ()).tolist() == [5, 7, 9]
    assert choose(counted, 2, 20, ()).tolist() == [5, 7]
    assert choose(counted, 3, 20, (19,)).tolist() == [5, 7, 19]
    assert choose(counted, 6, 20, ()).tolist() == [0, 1, 2, 5, 7, 9]


def test_taps_are_those_of_eagle3_where_there_are_layers_enough() -> None:
    assert default_taps(30) == (2, 15, 27)
    assert default_taps(4) == (1, 2, 3)
    assert default_taps(2) == (0, 1, 2)


@pytest.mark.parametrize(
    ("method", "message"),
    [
        (lambda: Eagle3(taps=(1, 2, 9)), "which has 4 layers: give --taps"),
        (lambda: Eagle3(vocabulary=1), "at least 2"),
        (lambda: Eagle3(flags=("fc_nrom",)), "use some of"),
        (lambda: Eagle3(flags=("fc_norm", "norm_before_fc")), "exclude"),
        (lambda: GemmaAssistant(), "use --method eagle3"),
    ],
)
def test_what_cannot_be_is_one_line(llama: Path, method: object, message: str) -> None:
    def begin() -> None:
        made = method()  # type: ignore[operator]
        made.start(made.teacher(llama), windows(2, 0), "scratch", 0)

    with pytest.raises((UsageError, PairError), match=message) as found:
        begin()
    assert "\n" not in str(found.value)


def test_options_beside_a_drafter_to_go_on_from_are_refused(llama: Path, tmp_path: Path) -> None:
    build_eagle3(tmp_path, hidden=48, vocab=VOCAB)
    method = Eagle3(vocabulary=20)
    with pytest.raises(UsageError, match="leave them out"):
        method.start(method.teacher(llama), windows(2, 0), tmp_path, 0)


def test_a_target_whose_states_are_no_numbers_is_refused_at_once(llama: Path) -> None:
    teacher = Eagle3().teacher(llama)
    Eagle3().start(teacher, windows(2, 0), "scratch", 0)
    teacher.target.norm[3] = torch.nan
    with pytest.raises(WeightsError, match="not finite"):
        teacher.capture(windows(2, 0))
