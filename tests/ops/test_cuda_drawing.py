"""Draws by Triton kernels, interpreted on the CPU, against the host's: the same token from the same logits."""

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from paceline.core import SamplingParams
from paceline.ops.draws import Draw
from paceline.sampling import choose as choosing
from paceline.sampling import noise
from paceline.sampling.choose import choose, choose_candidates, rule_of
from paceline.sampling.shape import Counts, LogitRow, edited_there

drawing = pytest.importorskip("paceline.ops.cuda.drawing", reason="needs triton")

FILTERS = [
    {}, {"top_k": 1}, {"top_k": 40}, {"top_k": 3000}, {"top_p": 0.1}, {"top_p": 0.95}, {"top_p": 0.9999},
    {"min_p": 0.05}, {"min_p": 1e-9}, {"top_k": 64, "top_p": 0.9}, {"top_k": 500, "top_p": 0.5, "min_p": 1e-3},
]  # fmt: skip
TEMPERATURES = [0.0, 0.01, 0.3, 0.8, 1.0, 1.7, 30.0]


def make_rows(count, seed, **values):
    rng = np.random.default_rng(seed)
    rows = []
    for i in range(count):
        params = {"temperature": TEMPERATURES[(seed + 3 * i) % 7], **FILTERS[(seed + i) % 11], **values}
        position = int(rng.integers(2**33 if i % 2 else 5000))
        rows.append(
            LogitRow(SamplingParams(**params), int(rng.integers(-(2**62), 2**62)), position, Counts())
        )
    return rows


def make_logits(count, width, seed):
    """Peaked and flat rows, tied values, refused tokens."""
    g = torch.Generator().manual_seed(seed)
    x = torch.randn(count, width, generator=g) * [0.01, 1.0, 3.0, 12.0][seed % 4]
    if seed % 3 == 1:
        x = (x * 2).round() / 2  # zeros of both signs, too
    if seed % 5 == 2:
        x[torch.rand(count, width, generator=g) < 0.7] = -torch.inf
    return x


def make_ids(count, width, seed):
    g = torch.Generator().manual_seed(seed)
    return torch.stack([torch.randperm(3 * width, generator=g)[:width] for _ in range(count)])


def draw(logits, ids, rows, edits=None):
    return drawing.draw(logits, ids, [rule_of(row) for row in rows], noise.TARGET, True, edits)


def check(logits, ids, rows):
    """Where top_p cuts within a rounding of the mass, one more value may stay: tokens agree, confidence nearly."""
    tokens, sure = draw(logits, ids, rows)
    wanted = choose_candidates(logits, ids, rows, noise.TARGET)
    assert [max(token, 0) for token in tokens] == wanted.tokens
    for row, own, other in zip(rows, sure, wanted.confidence, strict=True):
        assert own == pytest.approx(other, rel=1e-4 if row.params.top_p == 1 else 1e-3)
    return tokens, sure


@pytest.mark.parametrize(
    ("width", "candidates", "seeds"),
    [
        (1, False, [0, 4, 5]),
        (63, True, [1, 2, 3]),
        (300, False, range(4)),
        (300, True, range(6, 9)),
        (4097, False, [2]),
    ],
)
def test_tokens_are_the_hosts(width, candidates, seeds):
    for seed in seeds:
        ids = make_ids(2, width, seed) if candidates else None
        check(make_logits(2, width, seed), ids, make_rows(2, seed))


def test_candidates_may_be_the_same_for_all_rows():
    logits, ids, rows = make_logits(3, 200, 1), make_ids(1, 200, 1), make_rows(3, 1)
    drawer = drawing.Drawer(4, 200, "cpu")
    drawer.enqueue(
        drawing.Logits(logits, ids), torch.from_numpy(drawing.encode([rule_of(row) for row in rows]))
    )
    assert (
        drawer.tokens[:3].tolist() == choose_candidates(logits, ids.expand(3, -1), rows, noise.TARGET).tokens
    )


@pytest.mark.parametrize("values", FILTERS[3:10:2], ids=str)
def test_a_row_that_has_no_room_is_read_again(values, monkeypatch):
    """Flat rows have more columns to keep than are copied. What is kept is the same to the bit."""
    logits, rows = make_logits(2, 1000, 0), make_rows(2, 4, **{**values, "temperature": 1.0})
    copied = check(logits, None, rows)
    monkeypatch.setattr(drawing, "_NEAR_ROOM", 4)
    drawing.drawer_for.cache_clear()
    assert check(logits, None, rows) == copied
    drawing.drawer_for.cache_clear()


def test_neighbours_change_nothing():
    logits, rows = make_logits(5, 600, 1), make_rows(5, 5)
    together = draw(logits, None, rows)
    alone = [draw(logits[i : i + 1], None, rows[i : i + 1]) for i in range(5)]
    assert ([t[0][0] for t in alone], [t[1][0] for t in alone]) == together


@pytest.mark.parametrize("values", [{"temperature": 0.0}, *FILTERS[2:8:3]], ids=str)
def test_broken_rows_fail_alone(values):
    logits, rows = make_logits(8, 300, 1), make_rows(8, 3, **values)
    whole = check(logits, None, rows)
    logits[1, 70], logits[2, 299], logits[4, 5] = torch.nan, torch.nan, torch.inf
    logits[6], logits[7] = -torch.inf, torch.nan
    tokens, sure = check(logits, None, rows)
    assert [token < 0 for token in tokens] == [i in (1, 2, 4, 6, 7) for i in range(8)]
    assert [tokens[i] for i in (0, 3, 5)] == [whole[0][i] for i in (0, 3, 5)]
    assert [sure[i] for i in (1, 2, 4, 6, 7)] == [0.0] * 5


SINKS = [
    "store_kernel", "attention_kernel", "linear_kernel", "route_kernel", "list_kernel", "experts_kernel",
    "experts_kernel", "mix_kernel", "attention_kernel", "join_kernel", "linear_kernel", "experts_kernel",
    "experts_kernel",
]  # fmt: skip


@pytest.mark.parametrize(
    ("scene", "kernels"),
    [
        ("draws", ["peaks", "scan", "finish", "gather_kernel", "advance_kernel", "advance_kernel"]),
        ("words", ["linear_kernel"] * 4 + SINKS),
    ],
)
def test_the_kernels_compile_for_a_card(scene, kernels, tmp_path):
    """Without one: see tests/compiled.py, which does the same for a whole Gemma."""
    script = Path(__file__).parents[1] / "compiled.py"
    changes = {"TRITON_INTERPRET": "0", "TRITON_CACHE_DIR": str(tmp_path)}
    done = subprocess.run(
        [sys.executable, script, scene],
        env=os.environ | changes,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    assert done.stdout.split() == kernels


@pytest.fixture
def kernels(monkeypatch):
    """`choose` and `choose_candidates` as on a GPU, of tensors on the CPU."""

    def run(ask, *args):
        with monkeypatch.context() as m:
            m.setattr(choosing, "draw_of", lambda *_: Draw(drawing.draw, masks=False))
            return ask(*args)

    return run


def test_requests_of_all_kinds_choose_as_on_the_host(kernels):
    """Masks, edits and plain rows side by side; drafts with noise of their own, too."""
    logits, rows = make_logits(6, 120, 1), make_rows(6, 2)
    rows[1].params = SamplingParams(temperature=1.0, logit_bias={5: 40.0})
    rows[2].params = SamplingParams(temperature=0.8, repetition_penalty=1.4, min_tokens=9, max_tokens=20)
    rows[2].history, rows[2].stop_ids = Counts([4, 5], list(range(8))), (0, 1)
    rows[3].mask = np.arange(100) % 3 == 0
    rows[4].mask, logits[4, 7] = np.arange(120) != 7, torch.nan  # refused, and still an error
    here, there = choose(logits, rows), kernels(choose, logits, rows)
    assert (there.tokens, there.ok) == (here.tokens, here.ok)
    assert there.ok == [i != 4 for i in range(6)]
    torch.testing.assert_close(there.shaped, here.shaped)
    for purpose in (noise.TARGET, noise.DRAFT):
        drafted = choose_candidates(logits, None, rows, purpose, 120)
        own = kernels(choose_candidates, logits, None, rows, purpose, 120)
        assert own.tokens == drafted.tokens
        assert own.confidence == pytest.approx(drafted.confidence, rel=1e-4)


def test_edited_rows_are_the_hosts():
    logits, rows = make_logits(5, 300, 1), make_rows(5, 2)
    kept = logits.clone()
    rows[1].params = SamplingParams(temperature=1.0, logit_bias={5: 40.0})
    rows[2].params = SamplingParams(repetition_penalty=1.4, frequency_penalty=0.3)
    rows[2].history = Counts([4, 5], list(range(200)))
    rows[3].mask = np.arange(300) % 3 == 0
    rows[4].params, logits[4, 7] = SamplingParams(bad_token_ids=(7,)), torch.nan
    kept = logits.clone()
    edits = {i: edited_there(logits[i], None, rows[i]) for i in range(1, 5)}
    tokens, _ = draw(logits, None, rows, edits)
    wanted = choose(logits, rows)
    assert [max(token, 0) for token in tokens] == wanted.tokens
    assert wanted.ok == [token >= 0 for token in tokens] == [True, True, True, True, False]
    assert torch.equal(logits.nan_to_num(9.0), kept.nan_to_num(9.0))
