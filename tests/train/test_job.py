"""`paceline train` from files to a folder, on a tiny pair."""

from __future__ import annotations

import json
import shutil
import signal
from pathlib import Path

import pytest
from click.testing import CliRunner

from eagle3_files import build_eagle3
from paceline.cli.train import command
from paceline.errors import CapacityError, PacelineError, PairError, UsageError
from paceline.hub.resolve import bundled
from paceline.train import GemmaAssistant
from paceline.train import job as job_module
from paceline.train.card import curves
from paceline.train.compare import Comparison, Score
from paceline.train.dryrun import too_often
from paceline.train.loop import Run
from paceline.train.selfwritten import OwnTexts
from paceline.train.windows import Text
from paceline.train.written import Done, Writer

TINY = [
    "--steps", "3", "--batch", "2", "--length", "40", "--draft-tokens", "2", "--eval-every", "2", "--anchors", "8",
    "--compare-prompts", "2", "--compare-tokens", "6", "--device", "cpu", "--threads", "1",
]  # fmt: skip


@pytest.fixture
def data(tmp_path: Path) -> Path:
    path = tmp_path / "data.jsonl"
    chat = {
        "messages": [{"role": "user", "content": "count"}, {"role": "assistant", "content": "one two three"}]
    }
    lines = [{"text": f"the number {i} is not {i + 1}"} for i in range(20)]
    path.write_text("\n".join(json.dumps(x) for x in [*lines, chat, chat]))
    return path


def train(pair: tuple[Path, Path], data: Path, out: Path, *more: str) -> str:
    arguments = [str(pair[0]), "--data", str(data), "--out", str(out), *TINY, *more]
    return CliRunner().invoke(command, arguments, catch_exceptions=False).output


def test_from_files_to_a_folder_with_a_card(pair: tuple[Path, Path], data: Path, tmp_path: Path) -> None:
    said = train(pair, data, tmp_path / "out", "--init", str(pair[1]), "--keep", "new")
    assert "the drafter is in" in said
    names = {p.name for p in (tmp_path / "out").iterdir()}
    assert {"config.json", "model.safetensors", "README.md", "curves.svg", "tokenizer.json"} <= names
    card = (tmp_path / "out" / "README.md").read_text()
    for piece in (
        "base_model: target",
        "tokens per target step",
        "data.jsonl",
        "torch",
        "objective `hybrid`",
        "| old |",
    ):
        assert piece in card, piece
    numbers = json.loads((tmp_path / "out" / "training.json").read_text())
    assert set(numbers["engine"]) == {"new", "old"}
    assert numbers["engine"]["old"]["0"]["emitted"] == 6  # one held-out prompt


def test_a_drafter_that_is_not_better_is_not_taken(
    pair: tuple[Path, Path], data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def worse(*_: object, **more: object) -> Comparison:
        return {"new": {0.0: Score(10, 8)}, "old": {0.0: Score(10, 5)}}

    monkeypatch.setattr(job_module, "compare", worse)
    said = train(pair, data, tmp_path / "out", "--init", str(pair[1]))
    assert "the old drafter is at least as good and is kept" in said
    assert not (tmp_path / "out" / "config.json").exists()
    assert (tmp_path / "out" / "rejected" / "config.json").exists()


def test_the_target_writes_the_answers_once(pair: tuple[Path, Path], data: Path, tmp_path: Path) -> None:
    arguments = ("--regenerate", "--temperature", "1", "--compare-prompts", "0")
    assert "writing answers: 22 of 22" in train(pair, data, tmp_path / "out", *arguments)
    kept = tmp_path / "out" / "run" / "answers.jsonl"
    before = kept.stat().st_mtime_ns
    train(pair, data, tmp_path / "out", *arguments)  # the run goes on with them
    assert kept.stat().st_mtime_ns == before


def test_a_dry_run_writes_nothing(pair: tuple[Path, Path], data: Path, tmp_path: Path) -> None:
    said = train(pair, data, tmp_path / "out", "--dry-run")
    for word in ("memory", "s per update", "3 updates", "M parameters"):
        assert word in said
    assert "fitting the head" not in said
    assert "fitting the head" in train(
        pair, data, tmp_path / "out", "--dry-run", "--head", "centroid", "--clusters", "12"
    )
    assert not (tmp_path / "out").exists()


def test_ctrl_c_saves_and_the_same_command_goes_on(
    pair: tuple[Path, Path], data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = Run.backward

    def interrupted(run: Run, index: int) -> float:
        if index == 1:
            signal.raise_signal(signal.SIGINT)
        return real(run, index)

    monkeypatch.setattr(Run, "backward", interrupted)
    said = train(pair, data, tmp_path / "out", "--compare-prompts", "0", "--save-every", "100")
    assert "run the same command again to go on" in said
    assert (tmp_path / "out" / "run" / "state.safetensors").exists()
    assert not (tmp_path / "out" / "config.json").exists()
    monkeypatch.setattr(Run, "backward", real)
    assert "the drafter is in" in train(
        pair, data, tmp_path / "out", "--compare-prompts", "0", "--save-every", "100"
    )


def test_an_eagle3_drafter_to_go_on_from_is_the_one_to_beat(llama: Path, data: Path, tmp_path: Path) -> None:
    old = build_eagle3(tmp_path / "old", hidden=48, vocab=96, draft_vocab=40)
    said = train((llama, old), data, tmp_path / "out", "--init", str(old), "--keep", "new")
    assert "drafter: reads after layers 1, 2, 3, drafts 40 of 96 tokens, head of its own" in said
    assert "comparing new, old: " in said
    assert "gained over the old drafter: " in said
    assert "the drafter is in" in said
    with pytest.raises(PairError, match="no EAGLE-3 drafter in speculators format"):
        train((llama, old), data, tmp_path / "other", "--init", str(bundled("assistant")))


def test_folders_that_would_be_overwritten_are_refused(pair: tuple[Path, Path], data: Path) -> None:
    with pytest.raises(UsageError, match="--init"):
        train(pair, data, pair[1], "--init", str(pair[1]))
    with pytest.raises(UsageError, match="already holds a model"):
        train(pair, data, pair[0])


def test_a_target_without_drafter_support_is_named(pair: tuple[Path, Path], tmp_path: Path) -> None:
    raw = json.loads((pair[0] / "config.json").read_text())
    raw |= {
        "layer_types": ["full_attention"] * 4,
        "per_layer_config": {str(i): {"head_dim": 16} for i in range(4)},
    }
    (tmp_path / "config.json").write_text(json.dumps(raw))
    with pytest.raises(PairError, match="no such drafter"):
        GemmaAssistant().teacher(tmp_path)


def test_a_disk_without_room_is_noticed_before_the_work(
    pair: tuple[Path, Path], data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("shutil.disk_usage", lambda path: type("Usage", (), {"free": 1 << 10})())
    with pytest.raises(CapacityError, match="free some space"):
        train(pair, data, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_curves_are_drawn_even_without_points() -> None:
    assert curves([]).startswith("<svg")
    held = {"greedy": [0.5, 0.4], "sampled": [0.6, 0.5]}
    drawn = curves([{"step": 0, "held_out": held}, {"step": 10, "held_out": held}])
    assert drawn.count("<polyline") == 3


def test_another_family_gets_an_eagle3_drafter_from_its_own_texts(llama: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    arguments = [str(llama), "--self-prompts", "70", "--out", str(out), *TINY, "--length", "160"]
    said = CliRunner().invoke(command, arguments, catch_exceptions=False).output
    for piece in (
        "writing texts: 70 of 70",
        "drafter: reads after layers 1, 2, 3, drafts 96 of 96 tokens, head of its own",
        "comparing new, ngram, none: 2 of 2",
        "judging the finished drafter",
        "gained over plain decoding: +",
        "the drafter is in",
    ):
        assert piece in said, piece
    card = (out / "README.md").read_text()
    assert "EAGLE-3 drafter for target" in card
    assert " texts by the target itself" in card
    config = json.loads((out / "config.json").read_text())
    assert config["speculators_model_type"] == "eagle3"
    kept = out / "run" / "texts.jsonl"
    lines = kept.read_text().splitlines()
    assert len(lines) == 3
    kept.write_text("\n".join([*lines[:2], lines[2][:20]]))  # as a killed run leaves it
    again = CliRunner().invoke(command, arguments, catch_exceptions=False).output
    assert "the drafter is in" in again
    assert kept.read_text().splitlines() == lines  # the very same texts once more


def test_a_base_model_writes_texts_from_their_openings(llama: Path, tmp_path: Path) -> None:
    base = shutil.copytree(llama, tmp_path / "base")
    (base / "chat_template.jinja").unlink()
    arguments = [str(base), "--self-prompts", "8", "--out", str(tmp_path / "out"), *TINY]
    assert "the drafter is in" in CliRunner().invoke(command, arguments, catch_exceptions=False).output


def test_a_dry_run_of_own_texts_estimates_every_phase(llama: Path, tmp_path: Path) -> None:
    arguments = [str(llama), "--self-prompts", "9", "--out", str(tmp_path / "out"), *TINY, "--dry-run"]
    said = CliRunner().invoke(command, arguments, catch_exceptions=False).output
    for word in ("writing", "s per update", "s per evaluation", "comparing", "in all", "eagle3"):
        assert word in said
    assert not (tmp_path / "out").exists()


def test_a_dry_run_warns_where_texts_would_be_learned_by_heart() -> None:
    assert too_often(20, 400) == []
    (line,) = too_often(364, 22)  # 1000 updates of 8 windows
    assert "each of the 22 windows would be seen 364 times" in line


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ([], "give --data PATH, or --self-prompts N"),
        (["--self-prompts", "0"], "--self-prompts"),
        (["--self-prompts", "4", "--regenerate"], "--regenerate is for --data"),
        (["--self-prompts", "4", "--method", "medusa"], "--method"),
        (["--self-prompts", "4", "--method", "gemma-assistant"], "use --method eagle3"),
        (["--self-prompts", "4", "--head", "dense"], "--head is of --method gemma-assistant"),
        (["--self-prompts", "4", "--taps", "a,b"], "2,15,27"),
        (["--self-prompts", "4", "--taps", "1,2,7"], "has 4 layers"),
        (["--self-prompts", "4", "--flags", "norm"], "use some of"),
        (["--self-prompts", "4", "--length", "20"], "at least 128"),
    ],
)
def test_bad_input_is_one_line(llama: Path, tmp_path: Path, options: list[str], message: str) -> None:
    arguments = [str(llama), "--out", str(tmp_path / "out"), *TINY, *options]
    found = CliRunner().invoke(command, arguments)
    assert found.exit_code
    said = str(found.exception) if isinstance(found.exception, PacelineError) else found.output
    assert message in said
    assert "\n" not in said or "Usage:" in said


def test_ctrl_c_while_it_writes_keeps_what_is_written(
    llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    arguments = [str(llama), "--self-prompts", "70", "--out", str(tmp_path / "out"), *TINY, "--length", "160"]
    real = OwnTexts.write

    def interrupted(own: OwnTexts, writer: Writer, numbers: range, done: Done) -> list[Text]:
        if numbers[0]:
            raise KeyboardInterrupt
        return real(own, writer, numbers, done)

    monkeypatch.setattr(OwnTexts, "write", interrupted)
    found = CliRunner().invoke(command, arguments)
    assert found.exit_code == 130
    assert "run the same command again to go on" in found.output
    kept = (tmp_path / "out" / "run" / "texts.jsonl").read_text().splitlines()
    assert len(kept) == 2
    monkeypatch.setattr(OwnTexts, "write", real)
    assert "writing texts: 64 of 70" in CliRunner().invoke(command, arguments, catch_exceptions=False).output
    assert (tmp_path / "out" / "run" / "texts.jsonl").read_text().splitlines()[:2] == kept
