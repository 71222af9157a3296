"""Two processes that compute one target: texts with every drafter, and what happens when one of them is gone."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from checkpoints import build_assistant, build_target
from paceline import LLM
from paceline.assembly import build_engine
from paceline.cli import group
from paceline.config import EngineConfig
from paceline.core import SamplingParams
from paceline.engine.engine import Engine
from paceline.engine.worker import Worker
from paceline.errors import ConfigError, EngineLost, UsageError
from paceline.parallel import team as teams
from paceline.parallel.runner import undisturbed
from paceline.parallel.team import Team, per_rank
from paceline.server.loading import ServedEngine

SMALL: dict[str, Any] = {"max_model_len": 160, "max_batch": 3, "cache_memory": 2**20, "profile_dir": None}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A target that hardly repeats itself and a drafter that is seldom right."""
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel

    folder = tmp_path_factory.mktemp("pair")
    build_target("dense", folder / "target")
    build_assistant("dense", folder / "assistant")
    for part in ("target", "assistant"):
        words = {chr(ord("0") + i): i for i in range(96)}
        Tokenizer(WordLevel(words, unk_token="0")).save(str(folder / part / "tokenizer.json"))
    return folder


def pids_of(engine: Engine) -> list[int]:
    team = engine.state.target.runner._others  # type: ignore[attr-defined]
    return [member.process.pid for member in team._members]


def gone(pids: list[int], seconds: float = 10) -> bool:
    """Whether all have ended by then, or wait for their parent to see it."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        if not any(alive(pid) for pid in pids):
            return True
        time.sleep(0.05)
    return False


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text(encoding="ascii").rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


@pytest.fixture(scope="module")
def llm(folder: Path) -> Iterator[LLM]:
    with LLM(
        folder / "target", drafter=folder / "assistant", tensor_parallel=2, draft_tokens=3, **SMALL
    ) as llm:
        pids = pids_of(llm.engine)
        yield llm
    assert gone(pids, 2)


PROMPTS = [[2, *range(10, 40)], [2, 5, 6, 5, 6, 5, 6, 5], [2, *range(10, 40), 7, 8, 9], [2, 50, 51]]


@pytest.mark.parametrize("sampling", [{}, {"temperature": 1.0, "seed": 4, "top_p": 0.9}])
def test_texts_with_every_drafter_are_those_of_plain_decoding(llm: LLM, sampling: dict[str, Any]) -> None:
    """Alone and side by side, more texts than are computed at once, with beginnings that are known from before."""

    def texts(drafter: str, together: bool) -> list[list[int]]:
        params = SamplingParams(max_tokens=20, ignore_eos=True, drafter=drafter, **sampling)
        groups = [PROMPTS] if together else [[prompt] for prompt in PROMPTS]
        return [c.token_ids for group in groups for c in llm.generate(group, params)]

    plain = texts("none", together=False)
    for drafter in ("ngram", "mtp", "mtp+ngram"):
        assert texts(drafter, together=True) == plain, drafter
    assert texts("mtp", together=False) == plain
    stats = llm.generate(PROMPTS[0], SamplingParams(max_tokens=8, drafter="mtp"))[0].stats
    assert stats.cached_prompt_tokens
    assert stats.drafted


def test_trees_of_drafts_write_the_same_text(llm: LLM, folder: Path) -> None:
    """Their branches' pages and copies reach the other rank."""
    params = SamplingParams(max_tokens=24, ignore_eos=True, temperature=0.8, seed=1)
    want = [c.token_ids for c in llm.generate(PROMPTS, params)]
    options = SMALL | {"draft_tokens": 6, "draft_tree": "3x2"}
    with LLM(folder / "target", drafter=folder / "assistant", tensor_parallel=2, **options) as trees:
        got = trees.generate(PROMPTS, params)
    assert [c.token_ids for c in got] == want
    assert sum(c.stats.drafted for c in got) > 6


def test_what_is_said_of_it(llm: LLM) -> None:
    assert llm.info["tensor_parallel"] == 2
    assert llm.info["arithmetic"].endswith("2 ranks")


def test_preempted_texts_go_on_as_they_began(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    params = SamplingParams(max_tokens=40, ignore_eos=True)
    want = [llm.generate(prompt, params)[0].token_ids for prompt in PROMPTS[:3]]
    state, step, turn = llm.engine.state, llm.engine.step, iter(range(10**6))

    def stepping() -> Any:
        if next(turn) in (4, 9) and state.scheduler.running:
            state.preempt(state.scheduler.running[-1])
        return step()

    monkeypatch.setattr(llm.engine, "step", stepping)
    before = state.preemptions
    assert [c.token_ids for c in llm.generate(PROMPTS[:3], params)] == want
    assert state.preemptions > before


@pytest.mark.parametrize("native", [True, False])
def test_a_rank_that_is_killed_ends_the_engine_by_name(folder: Path, native: bool) -> None:
    """With shared memory, and with gloo."""
    options = SMALL | {"native": native, "drafter": "none", "draft_tokens": 0}
    with LLM(folder / "target", tensor_parallel=2, **options) as llm:
        stream = llm.stream(PROMPTS[0], max_tokens=100, ignore_eos=True)
        next(stream)
        (pid,) = pids_of(llm.engine)
        os.kill(pid, signal.SIGKILL)
        begin = time.monotonic()
        with pytest.raises(
            EngineLost, match=r"rank 1 of 2 has ended \(killed by SIGKILL.*start paceline again"
        ):
            list(stream)
        assert time.monotonic() - begin < 10
        with pytest.raises(EngineLost, match="rank 1 of 2"):
            llm.generate(PROMPTS[1])


def test_ranks_end_with_rank_0(folder: Path) -> None:
    script = (
        "import sys, time; from paceline import LLM\n"
        f"llm = LLM({str(folder / 'target')!r}, drafter='none', tensor_parallel=2, draft_tokens=0, max_model_len=64)\n"
        "print(*[m.process.pid for m in llm.engine.state.target.runner._others._members], flush=True); time.sleep(60)"
    )
    with subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE) as parent:
        assert parent.stdout is not None
        pids = [int(pid) for pid in parent.stdout.readline().split()]
        assert len(pids) == 1
        assert alive(pids[0])
        parent.kill()
    assert gone(pids)


def test_what_a_rank_cannot_load_reaches_the_user(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    start = teams._start

    started: list[int] = []

    def elsewhere(order: Any) -> Any:
        rank = start(teams.replace(order, target=tmp_path / "missing"))
        started.append(rank.process.pid)
        return rank

    monkeypatch.setattr(teams, "_start", elsewhere)
    with pytest.raises(ConfigError, match=r"rank 1: .*missing"):
        LLM(folder / "target", drafter="none", tensor_parallel=2, **SMALL)
    assert started
    assert gone(started)


def test_a_ctrl_c_waits_for_the_end_of_a_forward() -> None:
    seen, before = [], signal.default_int_handler
    found = signal.signal(signal.SIGINT, before)  # a shell's background jobs ignore it

    def interrupted() -> None:
        with undisturbed():
            signal.raise_signal(signal.SIGINT)
            seen.append("went on")

    try:
        with pytest.raises(KeyboardInterrupt):
            interrupted()
        assert seen == ["went on"]
        assert signal.getsignal(signal.SIGINT) is before
    finally:
        signal.signal(signal.SIGINT, found)


def test_bad_numbers_of_ranks(folder: Path) -> None:
    for bad in (0, 65, 1.5, True):
        with pytest.raises(UsageError, match="tensor_parallel="):
            EngineConfig(tensor_parallel=bad)  # type: ignore[arg-type]
    with pytest.raises(UsageError, match="tensor_parallel=3 does not divide"):
        Team(EngineConfig(tensor_parallel=3), folder / "target", None)


def test_threads_are_shared_out() -> None:
    assert per_rank(EngineConfig(threads=5, tensor_parallel=2)).threads == 2
    assert per_rank(EngineConfig(threads=1, tensor_parallel=2)).threads == 1
    assert per_rank(EngineConfig()).threads is None


@pytest.mark.parametrize(
    "command", [["run", "demo", "x"], ["generate", "IN", "-o", "OUT"], ["check", "demo"]]
)
def test_the_option_reaches_the_engine(command: list[str], tmp_path: Path) -> None:
    """A number that does not divide is refused before any process is started."""
    (tmp_path / "in.jsonl").write_text('{"prompt": "x"}\n', encoding="utf-8")
    places = {"IN": str(tmp_path / "in.jsonl"), "OUT": str(tmp_path / "out.jsonl")}
    done = CliRunner().invoke(
        group, [places.get(part, part) for part in command] + ["--tensor-parallel", "3"]
    )
    assert isinstance(done.exception, UsageError)
    assert "tensor_parallel=3 does not divide this model (4 heads, inner sizes 512): use 2" in str(
        done.exception
    )


def test_a_rank_takes_no_modules_from_where_it_runs(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "queue.py").write_text("raise SystemExit('not this one')", encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    with LLM(folder / "target", drafter="none", tensor_parallel=2, draft_tokens=0, **SMALL) as llm:
        assert len(llm.generate(PROMPTS[0], max_tokens=3, ignore_eos=True)[0].token_ids) == 3


def test_an_idle_server_sees_that_a_rank_has_ended(folder: Path) -> None:
    config = EngineConfig(
        target=folder / "target", drafter="none", tensor_parallel=2, draft_tokens=0, **SMALL
    )
    engines: list[Engine] = []

    def load() -> ServedEngine:
        engines.append(build_engine(config))
        return ServedEngine(engines[0])

    worker = Worker(load)
    worker.start()
    while worker.state == "loading":
        time.sleep(0.05)
    assert worker.state == "ready"
    os.kill(pids_of(engines[0])[0], signal.SIGKILL)
    assert worker.join(10)
    assert worker.state == "failed"
    assert "rank 1 of 2 has ended (killed by SIGKILL" in str(worker.error)
