"""Draft rounds as they are on a GPU, on its stand-in: the same drafts as step by step, in one read of the host."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("triton")

from checkpoints import VOCAB
from dspark_files import DSparkReference, build_dspark
from eagle3_files import build_eagle3, eagle3_reference
from mtp_files import MtpReference, build_mtp
from paceline import LLM, SamplingParams, assembly
from paceline.control.fixed import FixedPolicy
from paceline.engine.picker import StepPicker
from paceline.models.registry import load_target
from paceline.ops import native_sampling
from paceline.ops.base import RoundStart, Stop
from paceline.ops.cuda import round as rounds
from paceline.ops.reference import EagerRunner
from standin import NativeDrawer, ReferencePlan, StandInRunner
from tapping import DEPTH, Pair, Reference, params, play, texts

pytestmark = pytest.mark.skipif(not native_sampling.available(), reason="needs the compiled draws")
MAKE = StepPicker.__init__
PROMPTS = ["class Stack:", "def parse(self, text):\n    return", "import os\n"]


@pytest.fixture
def runner(monkeypatch: pytest.MonkeyPatch) -> StandInRunner:
    """What the next engine runs on."""
    monkeypatch.setattr(rounds, "Drawer", NativeDrawer)
    made = StandInRunner()
    monkeypatch.setattr(assembly, "pick_runner", lambda *args: (made, "a stand-in"))
    return made


def drafts(params: SamplingParams, **config: Any) -> tuple[list[list[int]], list[list[list[int]]]]:
    """The texts of a batch, and every proposal of each alone."""
    llm = LLM("demo", **{"drafter": "mtp", "draft_tokens": 4, "max_model_len": 256, **config})
    together = [t.token_ids for t in llm.generate(PROMPTS, params)]
    return together, [[d.proposed for d in llm.stream(prompt, params)] for prompt in PROMPTS[:1]]


@pytest.mark.parametrize(
    "values",
    [{}, {"temperature": 1.0, "top_p": 0.9, "top_k": 40, "min_p": 0.01}],
    ids=str,
)
def test_a_round_equals_its_steps(
    values: dict[str, Any], runner: StandInRunner, monkeypatch: pytest.MonkeyPatch
) -> None:
    params = SamplingParams(max_tokens=6, seed=4, **values)
    whole = drafts(params)
    assert runner.drawn
    (plan,) = runner.plans.values()
    assert plan.captures <= 3  # of one text, two and four; and then nothing but replays
    assert plan.replays > 6
    monkeypatch.setattr(StandInRunner, "draft_round", EagerRunner.draft_round)
    assert drafts(params) == whole
    assert drafts(params, drafter="none")[0] == whole[0]


def planned(monkeypatch: pytest.MonkeyPatch, stop: Stop) -> None:
    monkeypatch.setattr(
        StepPicker,
        "__init__",
        lambda self, requests, stops, *rest: MAKE(self, requests, [stop] * len(requests), *rest),
    )


@pytest.mark.parametrize("step", [0.0, 0.3])
def test_rows_end_by_their_stops(step: float, runner: StandInRunner, monkeypatch: pytest.MonkeyPatch) -> None:
    """Piece by piece, as the picker ends them step by step, where rows pay for a step together, too."""
    planned(monkeypatch, Stop(6, (0.5,) * 8, ((0.2, 0.8),) * 12, price=0.05, step=step))
    params = SamplingParams(max_tokens=6, seed=1, temperature=0.8)
    whole = drafts(params, draft_tokens=6)
    lengths = {len(drawn.tokens) for drawn in runner.drawn}
    assert len(lengths) > 1
    assert max(lengths) <= 6
    monkeypatch.setattr(StandInRunner, "draft_round", EagerRunner.draft_round)
    assert drafts(params, draft_tokens=6) == whole


def test_a_row_without_a_token_ends_alone(runner: StandInRunner, monkeypatch: pytest.MonkeyPatch) -> None:
    llm = LLM("demo", drafter="mtp", draft_tokens=3, max_model_len=256)
    llm.generate(PROMPTS[:2], SamplingParams(max_tokens=4))
    net, state = llm.engine.state.drafters["mtp"].net, llm.engine.state  # type: ignore[attr-defined]
    start, rule = RoundStart([5, 6], [3, 3], [0, 1]), (0.0, 1, 4, 0, 1.0, -math.inf)
    sound = net.draft_round(start, state.hidden, state.cache, [rule] * 2, [Stop(3)] * 2)
    assert state.hidden is not None
    state.hidden[0] = math.nan
    broken = net.draft_round(start, state.hidden, state.cache, [rule] * 2, [Stop(3)] * 2)
    assert [tokens[0] for tokens in broken.tokens] == [-1, -1, -1]
    assert [tokens[1] for tokens in broken.tokens] == [tokens[1] for tokens in sound.tokens]
    with pytest.raises(ValueError, match="worth"):
        net.draft_round(start, state.hidden, state.cache, [rule] * 2, [Stop(4, (0.5,))] * 2)


@pytest.mark.parametrize("scene", ["partly", "preempted"])
@pytest.mark.parametrize("kind", ["eagle3", "mtp", "dspark", "dspark rnn"])
def test_networks_with_a_cache_of_their_own(
    kind: str, scene: str, runner: StandInRunner, llama: Path, tmp_path: Path
) -> None:
    """All of a draft in one read, its first token too; it is what the published source drafts."""
    if kind == "mtp":
        target = drafter = build_mtp(llama, tmp_path / "drafter")
        reference: Reference = MtpReference(target, drafter)
    elif kind.startswith("dspark"):
        target, markov = llama, "rnn" if "rnn" in kind else "vanilla"
        hidden = load_target(target).hidden_size
        drafter = build_dspark(tmp_path, hidden=hidden, vocab=VOCAB, draft_vocab=40, markov=markov)
        reference = DSparkReference(target, drafter)
    else:
        target = llama
        hidden = load_target(target).hidden_size
        drafter = build_eagle3(tmp_path / "drafter", hidden=hidden, vocab=VOCAB, draft_vocab=40)
        reference = eagle3_reference(target, drafter)
    play(scene, target, drafter, reference, runner)
    assert len(runner.drawn) > 6
    assert max(len(drawn.tokens) for drawn in runner.drawn) == DEPTH


@pytest.mark.parametrize("temperature", [0.0, 0.8])
@pytest.mark.parametrize("markov", ["vanilla", "rnn"])
def test_a_chain_equals_its_steps(
    markov: str,
    temperature: float,
    runner: StandInRunner,
    llama: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Tokens, and where confidences end a row beside others that go on."""
    planned(monkeypatch, Stop(7, (0.9,) * 6, ((0.1, 0.9),) * 12, price=0.25))
    build_dspark(tmp_path, hidden=48, vocab=VOCAB, draft_vocab=40, markov=markov)
    reference = DSparkReference(llama, tmp_path)
    each = {str(i): (text, params(16, seed=i, temperature=temperature)) for i, text in enumerate(texts(3))}

    def run() -> list[tuple[list[int], list[int]]]:
        pair = Pair(llama, tmp_path, reference, runner)
        found = pair.engine(policy=FixedPolicy(7), draft_tokens=7).run(each)
        return [(got[0].token_ids, got[0].stats.drafted_by_position) for got in found.values()]

    whole = run()
    assert any(len(drawn.tokens) > 1 for drawn in runner.drawn)
    monkeypatch.setattr(StandInRunner, "chain_round", EagerRunner.chain_round)
    assert run() == whole


def test_a_step_that_cannot_be_captured_is_launched(
    runner: StandInRunner, monkeypatch: pytest.MonkeyPatch
) -> None:
    params = SamplingParams(max_tokens=4, seed=4)
    whole = drafts(params)
    monkeypatch.setattr(ReferencePlan, "captured", lambda self, launch, what: None)
    runner.plans.clear()
    runner.rounds.clear()
    assert drafts(params) == whole
