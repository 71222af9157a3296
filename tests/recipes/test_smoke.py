"""The demo recipe in its smallest setting, from corpus to a loadable pair, and its answers to bad input."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

RECIPE = Path(__file__).resolve().parents[2] / "recipes" / "demo"


def build(work: Path, *more: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(RECIPE / "build.py"), "--smoke", "--work", str(work), *more]
    return subprocess.run(command, capture_output=True, text=True, check=False, timeout=600)


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").split("\n") if line]


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    work = tmp_path_factory.mktemp("demo")
    done = build(work, "--minutes", "0.25")
    assert done.returncode == 0, done.stderr[-2000:]
    return work


@pytest.mark.slow
def test_smoke_builds_a_pair_that_transformers_loads(built: Path) -> None:
    import torch
    from transformers import Gemma4AssistantForCausalLM, Gemma4ForCausalLM

    target = Gemma4ForCausalLM.from_pretrained(built / "out/target", dtype=torch.float32)
    assistant, notes = Gemma4AssistantForCausalLM.from_pretrained(
        built / "out/assistant", dtype=torch.float32, output_loading_info=True
    )
    assert not notes["missing_keys"]
    assert not notes["unexpected_keys"]
    ids = torch.tensor([[2, 300, 301, 302, 303]])
    plain = target.generate(ids, max_new_tokens=20, do_sample=False)
    assisted = target.generate(ids, max_new_tokens=20, do_sample=False, assistant_model=assistant)
    assert plain.tolist() == assisted.tolist()
    ordering = assistant.masked_embedding.token_ordering
    assert sorted(ordering.tolist()) == list(range(len(ordering)))


@pytest.mark.slow
def test_smoke_reports_acceptance_and_holds_files_out(built: Path) -> None:
    report = json.loads((built / "report.json").read_text())
    for heat in ("T=0", "T=0.8"):
        for kind in ("mtp", "model", "ngram"):
            assert report[heat][kind]["tokens_per_step"] >= 1.0
    train = {item["id"] for item in lines(built / "corpus/train.jsonl")}
    held = {item["id"] for item in lines(built / "corpus/held.jsonl")}
    assert held
    assert not train & held
    prompts = lines(built / "out/heldout.jsonl")
    assert prompts
    assert all(p["id"].split(":", 1)[1] in held for p in prompts)


@pytest.mark.slow
def test_smoke_run_again_trains_nothing(built: Path) -> None:
    before = (built / "target/checkpoint.pt").stat().st_mtime_ns
    again = build(built, "--minutes", "0.25")
    assert again.returncode == 0, again.stderr[-2000:]
    assert (built / "target/checkpoint.pt").stat().st_mtime_ns == before


@pytest.mark.slow
def test_other_settings_are_refused(built: Path) -> None:
    before = (built / "target/checkpoint.pt").read_bytes()
    done = build(built, "--minutes", "3")
    assert done.returncode == 2
    assert done.stderr.strip().count("\n") == 0
    assert "another config" in done.stderr
    assert (built / "target/checkpoint.pt").read_bytes() == before


@pytest.mark.slow
def test_an_older_pair_is_not_replaced_unasked(built: Path, tmp_path: Path) -> None:
    place = tmp_path / "demo"
    (place / "target").mkdir(parents=True)
    (place / "target/config.json").write_text("mine")
    done = build(built, "--minutes", "0.25", "--out", str(place))
    assert done.returncode == 2
    assert "--replace" in done.stderr
    assert (place / "target/config.json").read_text() == "mine"


@pytest.fixture
def modules(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(RECIPE))
    yield
    for name in [path.stem for path in RECIPE.glob("*.py")]:
        sys.modules.pop(name, None)


@pytest.mark.usefixtures("modules")
def test_a_file_that_is_no_utf8_is_skipped_and_counted() -> None:
    import corpus

    counts = {"not UTF-8": 0, "unsuitable": 0, "duplicate": 0, "near copy": 0}
    good = b"".join(b"def name_%d(value):\n    return value\n" % i for i in range(40))
    files = [("p", "1", "MIT", "p/bad.py", b"# caf\xe9\n" * 200), ("p", "1", "MIT", "p/good.py", good)]
    kept = corpus.collect(iter([*files, ("p", "1", "MIT", "p/again.py", good)]), set(), counts)
    assert [source.path for source in kept] == ["p/good.py"]
    assert counts["not UTF-8"] == 1
    assert counts["duplicate"] == 1


@pytest.mark.usefixtures("modules")
def test_full_disk_is_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import common

    full = shutil._ntuple_diskusage(10, 10, 0)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: full)
    with pytest.raises(common.RecipeError, match="no disk space"):
        common.need_space(tmp_path, 1)


@pytest.mark.usefixtures("modules")
def test_a_failed_write_leaves_the_old_file(tmp_path: Path) -> None:
    import common

    def fail(path: Path) -> None:
        path.write_text("half")
        raise OSError(28, "No space left on device")

    place = tmp_path / "x.json"
    place.write_text("old")
    with pytest.raises(common.RecipeError, match="No space left"):
        common.write_atomic(place, fail)
    assert [p.name for p in tmp_path.iterdir()] == ["x.json"]
    assert place.read_text() == "old"


@pytest.mark.usefixtures("modules")
def test_interrupted_download_is_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import common
    import corpus

    def broken(*_: object, **__: object) -> subprocess.CompletedProcess[str]:
        return subprocess.CompletedProcess([], 1, "", "ERROR: connection lost\nmore\n")

    monkeypatch.setattr(corpus.subprocess, "run", broken)
    pins = tmp_path / "packages.txt"
    pins.write_text("something==1.0\n")
    with pytest.raises(common.RecipeError, match="download interrupted") as caught:
        corpus.download(pins, tmp_path / "wheels")
    assert "\n" not in str(caught.value)


@pytest.mark.usefixtures("modules")
def test_a_damaged_wheel_is_named(tmp_path: Path) -> None:
    import common
    import corpus

    wheel = tmp_path / "thing-1.0-py3-none-any.whl"
    wheel.write_bytes(b"not a zip")
    with pytest.raises(common.RecipeError, match=r"thing-1\.0.*damaged"):
        list(corpus.wheel_files(wheel))


def tiny(window: int) -> Any:
    """A target shape for tests; call it where `modules` are importable."""
    import model

    sizes = {"vocab": 128, "hidden": 64, "inner": 96, "layers": 6, "period": 3, "shared": 3}
    return model.Shape(**sizes, head_dim=16, global_head_dim=32, window=window)


@pytest.mark.usefixtures("modules")
def test_lean_forward_and_loss_match_transformers() -> None:
    import model
    import torch
    from transformers import Gemma4ForCausalLM, Gemma4TextConfig

    shape = tiny(window=8)
    torch.manual_seed(0)
    params = {k: v + 0.05 * torch.randn_like(v) for k, v in model.init_params(shape, 0).items()}
    theirs = Gemma4ForCausalLM(Gemma4TextConfig(**model.text_config(shape))).eval()
    theirs.load_state_dict(params, strict=False)
    params = {k: v.requires_grad_() for k, v in params.items()}
    for length in (7, 19, 24):  # below the window, not a multiple of it, and in blocks
        ids, targets = torch.randint(1, 128, (2, length)), torch.randint(0, 128, (2 * length,))
        hidden, _ = model.hidden_states(params, shape, ids, model.tables(shape, length))
        wanted = theirs(ids).logits
        torch.testing.assert_close(model.logits(params, hidden), wanted, atol=1e-4, rtol=1e-4)
        loss = model.HeadLoss.apply(hidden.flatten(0, 1), params["model.embed_tokens.weight"], targets)
        expected = torch.nn.functional.cross_entropy(wanted.flatten(0, 1), targets)
        torch.testing.assert_close(loss, expected, atol=1e-5, rtol=1e-5)
        mine = torch.autograd.grad(loss, list(params.values()))
        named = dict(theirs.named_parameters())
        for got, want in zip(mine, torch.autograd.grad(expected, [named[k] for k in params])):
            torch.testing.assert_close(got, want, atol=1e-4, rtol=1e-3)


@pytest.mark.usefixtures("modules")
def test_parallel_drafts_match_transformers_assistant() -> None:
    import drafter
    import model
    import torch
    from transformers import Gemma4AssistantConfig, Gemma4AssistantForCausalLM

    big = tiny(window=64)
    small = drafter.DrafterShape(hidden=32, inner=48, layers=2, centroids=16, top_k=3)
    target = model.init_params(big, 0)
    embed = target["model.embed_tokens.weight"]
    params = drafter.init_drafter(small, big, embed, 1)
    params["masked_embedding.centroids.weight"] = torch.randn(16, 32)
    params["masked_embedding.token_ordering"] = torch.randperm(128)
    theirs = Gemma4AssistantForCausalLM(Gemma4AssistantConfig(**drafter.assistant_config(small, big))).eval()
    theirs.load_state_dict(params, strict=False)
    ids = torch.randint(0, 128, (1, 12))
    with torch.no_grad():
        hidden, kv = model.hidden_states(target, big, ids, model.tables(big, 12))
        states = drafter.unroll(
            params, small.text(big), 3, (ids, hidden, kv), embed, drafter.draft_tables(big, 12)
        )
        at = 5  # the round whose last token is at index 5
        state, past = hidden[:, at - 1 : at], {k: (a[:, :, :at], b[:, :, :at]) for k, (a, b) in kv.items()}
        for k in range(3):
            word = embed[ids[:, at + k]][:, None] * 8.0
            out = theirs(
                inputs_embeds=torch.cat((word, state), -1),
                position_ids=torch.tensor([[at]]),
                shared_kv_states=past,
            )
            state = out.last_hidden_state
            mine = drafter.masked_logits(params, states[k][0, at - 1 : at], small.top_k)[0]
            chosen = mine.isfinite()
            torch.testing.assert_close(mine[chosen], out.logits[0, 0][chosen], atol=1e-4, rtol=1e-4)
            assert int(mine.argmax()) == int(out.logits.argmax())


@pytest.mark.usefixtures("modules")
def test_draft_loss_gradient_is_the_mixture_of_kl_and_tv() -> None:
    import drafter
    import torch

    torch.manual_seed(0)
    x, weight = torch.randn(20, 8, requires_grad=True), torch.randn(50, 8, requires_grad=True)
    p = torch.softmax(2 * torch.randn(20, 50), -1)
    loss, accepted = drafter.DraftLoss.apply(x, weight, p)
    mine = torch.autograd.grad(loss, (x, weight))
    q = torch.softmax(x @ weight.T, -1)
    overlap = torch.minimum(q, p).sum(-1)
    mix = float(torch.exp(-3 * overlap.mean().detach()))
    kl = (p * (p.log() - q.log())).sum(-1)
    expected = torch.autograd.grad((mix * kl + (1 - mix) * (1 - overlap)).mean(), (x, weight))
    torch.testing.assert_close(accepted, overlap.mean())
    for got, want in zip(mine, expected):
        torch.testing.assert_close(got, want, atol=1e-5, rtol=1e-4)


@pytest.mark.usefixtures("modules")
def test_rounds_played_over_a_text() -> None:
    import evaluate
    import numpy as np

    right = np.array([[1, 1, 0, 1], [0, 0, 0, 0], [0, 0, 0, 0], [0, 1, 1, 1], [1, 1, 1, 1]], dtype=bool)
    found = evaluate.play(right, 0)  # rounds at 0 (two right), 3 (none), 4 (four right)
    assert (found["rounds"], found["made"]) == (3, 3 + 1 + 5)
    assert found["tried"].tolist() == [3, 2, 2, 1]
    assert found["taken"].tolist() == [2, 2, 1, 1]


@pytest.mark.usefixtures("modules")
def test_sampling_side_by_side_is_greedy_decoding() -> None:
    import model
    import sample
    import torch

    shape = tiny(window=12)
    torch.manual_seed(0)
    params = {k: v + 0.1 * torch.randn_like(v) for k, v in model.init_params(shape, 0).items()}
    prompts = [torch.randint(1, 128, (n,)) for n in (5, 17, 30)]
    for prompt, row in zip(prompts, sample.continue_prompts(params, shape, prompts, 20, 0.0, None)):
        assert row[: len(prompt)].tolist() == prompt.tolist()
        hidden, _ = model.hidden_states(params, shape, row[None], model.tables(shape, len(row)))
        best = model.logits(params, hidden)[0].argmax(-1)
        assert best[len(prompt) - 1 : -1].tolist() == row[len(prompt) :].tolist()
