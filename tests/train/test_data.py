"""Training data: what is read, what counts, and what is refused with a reason."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from paceline.core import Completion, SamplingParams, Stats
from paceline.errors import UsageError
from paceline.train import Text, pack
from paceline.train.data import DataReport, encode_records, parse_record, read_records
from paceline.train.encoding import TargetEncoder
from paceline.train.selfwritten import regenerate
from paceline.train.windows import batch_rows, split

CHAT = [
    {"role": "user", "content": "say one"}, {"role": "assistant", "content": "one"},
    {"role": "user", "content": "and two"}, {"role": "assistant", "content": "two!"},
]  # fmt: skip


def read(tmp_path: Path, lines: list[object]) -> tuple[list[object], DataReport]:
    path = tmp_path / "data.jsonl"
    path.write_text("\n".join(x if isinstance(x, str) else json.dumps(x) for x in lines))
    report = DataReport()
    return list(read_records([path], report)), report


def test_all_shapes_of_a_line_are_read(tmp_path: Path) -> None:
    shapes = [
        {"messages": CHAT}, {"conversations": [{"from": "human", "value": "a"}, {"from": "gpt", "value": "b"}]},
        {"prompt": "a", "response": "b"}, {"prompt": "a"}, {"text": "abc\u2028def"}, '"plain"',
    ]  # fmt: skip
    lines = [json.dumps(x, ensure_ascii=False) if not isinstance(x, str) else x for x in shapes]
    records, report = read(
        tmp_path, [*lines, "{", {"messages": [{"role": "tool", "content": "x"}]}, {"text": " "}]
    )
    assert len(records) == 6
    assert report.records == 9
    assert report.skipped == {"not JSON": 1, "no messages, prompt or text": 1}
    assert report.empty == 1
    assert len(report.files["data.jsonl"]) == 16


def test_no_usable_text_says_what_was_found(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"no usable text.*1 skipped \(not JSON\)"):
        read(tmp_path, ["{", ""])
    (tmp_path / "binary.txt").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(UsageError, match="not UTF-8"):
        read_records([tmp_path / "binary.txt"], DataReport())
    with pytest.raises(UsageError, match="does not exist"):
        read_records([tmp_path / "nowhere"], DataReport())


def test_only_what_the_model_wrote_counts_in_a_chat(pair: tuple[Path, Path]) -> None:
    encoder = TargetEncoder(pair[0])
    record = parse_record({"messages": CHAT})
    assert record is not None
    (text,) = encode_records([record], encoder, 200, DataReport())
    counted = [encoder.tokenizer.decode(text.tokens[a:b], skip_special=False) for a, b in text.counted]
    assert counted == ["one<turn|>\n", "two!<turn|>\n"]


def test_long_records_are_cut_with_a_count_and_files_are_divided(
    pair: tuple[Path, Path], tmp_path: Path
) -> None:
    encoder, report = TargetEncoder(pair[0]), DataReport()
    (tmp_path / "note.txt").write_text("x" * 100)
    (tmp_path / "data.jsonl").write_text(
        json.dumps({"text": "y" * 100}) + "\n" + json.dumps({"text": "short"})
    )
    texts = encode_records(read_records([tmp_path], report), encoder, 40, report)
    assert [len(t.tokens) for t in texts] == [40, 6, 40, 40, 21]  # one cut, one whole, a file of 101 in three
    assert (report.cut, report.cut_tokens) == (1, 61)
    assert "1 too long (cut, 61 tokens left out" in report.line()


def test_a_chat_that_is_cut_before_its_answer_is_no_text(pair: tuple[Path, Path]) -> None:
    record = parse_record({"messages": CHAT})
    assert record is not None
    with pytest.raises(UsageError, match="no usable text"):
        encode_records([record], TargetEncoder(pair[0]), 12, DataReport())


def test_packing_keeps_every_token_and_marks_what_counts() -> None:
    lengths = [5, 9, 3, 7, 2, 1, 10]
    texts = [Text(list(range(10 * i, 10 * i + n)), ((n // 2, n),)) for i, n in enumerate(lengths)]
    windows = pack(texts, 10)
    assert windows.filled == sum(lengths) - 1  # a single token has nothing to predict
    for row in range(len(windows)):
        for number in range(windows.segments[row].max() + 1):
            at = windows.segments[row] == number
            tokens = windows.tokens[row][at].tolist()
            text = texts[tokens[0] // 10]
            assert tokens == text.tokens
            assert windows.counted[row][at].tolist() == [i >= len(tokens) // 2 for i in range(len(tokens))]


def test_every_epoch_sees_every_row_once_whatever_the_batch() -> None:
    rows = np.concatenate([batch_rows(7, 3, 5, i) for i in range(14)])
    epochs = rows.reshape(6, 7)
    assert (np.sort(epochs) == np.arange(7)).all()
    assert len({tuple(e) for e in epochs.tolist()}) > 1


def test_a_held_out_part_needs_two_texts() -> None:
    train, held = split(10, 0.05, 0)
    assert (len(train), len(held)) == (9, 1)
    assert not set(train) & set(held)
    with pytest.raises(UsageError, match="more data"):
        split(1, 0.05, 0)


class Echo:
    """A writer that says the number of the prompt's tokens, and fails on one prompt."""

    def generate(
        self, prompts: list[list[int]], params: list[SamplingParams], on_done: object
    ) -> list[Completion]:
        reasons = ["error" if p[0] == 9 else "stop" for p in prompts]
        return [
            Completion("r", 0, "", [len(p)] * 3, p, r, Stats(), one.seed or 0, [])  # type: ignore[arg-type]
            for p, r, one in zip(prompts, reasons, params, strict=True)
        ]


def test_regenerated_answers_replace_what_counted() -> None:
    chat, text, broken = (
        Text([1, 2, 3, 4, 5], ((3, 5),)),
        Text(list(range(8)), ((0, 8),)),
        Text([9, 9, 9], ((1, 3),)),
    )
    done = regenerate([chat, text, broken], Echo(), 16, 0.7, range(3), lambda i, done: None)
    assert [list(t.tokens) for t in done] == [[1, 2, 3, 3, 3, 3], [0, 1, 2, 2, 2]]
    assert [t.counted for t in done] == [((3, 6),), ((2, 5),)]
    assert not regenerate([chat, text, broken], Echo(), 16, 0.7, [2], lambda i, done: None)
