"""What of an answer is for the reader, token by token or delta by delta."""

from __future__ import annotations

import pytest

from paceline.core import Delta, SamplingParams
from paceline.text.formats.gemma import GEMMA
from paceline.text.marked import Answer, parted
from server.fake_engine import make_tokenizer

CASES = {
    "thought first": ("<|channel>thought\nwhy\n<channel|>Because é🎉.", False, "why\n", "Because é🎉."),
    "opened by the prompt": ("so<channel|>yes", True, "so", "yes"),
    "none": ("Just this.", False, "", "Just this."),
    "stopped": ("Just END this.", False, "", "Just "),
}


@pytest.mark.parametrize(("text", "inside", "thought", "said"), CASES.values(), ids=CASES)
def test_an_answer_is_parted_alike_however_it_comes(text: str, inside: bool, thought: str, said: str) -> None:
    tokenizer = make_tokenizer()
    ids, params = tokenizer.encode(text, add_bos=False), SamplingParams(stop=("END",))
    by_token, by_delta = Answer(tokenizer, params, GEMMA, inside), Answer(tokenizer, params, GEMMA, inside)
    pieces = [parted(events) for events in (*map(by_token.one, ids), by_token.end())]
    deltas = [Delta("r", 0, "", [i], ["target"]) for i in ids]
    deltas[-1].finish_reason = "stop"
    for parts in (pieces, [parted(by_delta.push(delta)) for delta in deltas]):
        assert "".join(p.reasoning for p in parts) == thought
        assert "".join(p.content for p in parts) == said
