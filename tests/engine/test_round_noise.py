"""Under `reject` and `block` no two rounds of a text share noise, though their draft positions overlap.

`block` judges all of a block at once. Noise addressed by absolute position would be used again by the next round over the
same positions, after it was known to have failed: seen as chi-squared 526 at 37 degrees of freedom on the bundled pair.
"""

from __future__ import annotations

from typing import Any

import pytest

from paceline.core import SamplingParams
from paceline.engine import sampler
from paceline.sampling.verify import uniforms
from testing import Setup, make_engine, prompts, run


def test_overlapping_rounds_have_uniforms_of_their_own() -> None:
    seen: set[float] = set()
    for first in range(50, 70):
        noise = uniforms(7, first, 8)
        values = {*noise.accept, *noise.pick}
        assert len(values) == 17
        assert not values & seen
        seen |= values


@pytest.mark.parametrize("rule", ["reject", "block"])
def test_overlapping_rounds_draw_with_noise_of_their_own(rule: str, monkeypatch: pytest.MonkeyPatch) -> None:
    used: list[tuple[int, int, int]] = []
    whole = sampler.choose_candidates

    def spy(logits: Any, ids: Any, rows: Any, purpose: int, vocab_size: Any) -> Any:
        used.extend((row.seed, row.position, purpose) for row in rows)
        return whole(logits, ids, rows, purpose, vocab_size)

    monkeypatch.setattr(sampler, "choose_candidates", spy)
    params = SamplingParams(max_tokens=30, temperature=1.0, seed=3, verify=rule)  # type: ignore[arg-type]
    done = run(make_engine(Setup(drafter="mtp", k=4)), prompts(1), params)
    assert sum(c.stats.drafted for c in done) == len(used)
    assert sum(c.stats.accepted for c in done) < len(used)  # so rounds did overlap
    assert len(set(used)) == len(used)
    assert len({(seed, position + (purpose >> 8)) for seed, position, purpose in used}) < len(used)
