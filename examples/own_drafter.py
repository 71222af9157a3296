"""A drafter of your own: it proposes the token that came last time after the same token.

Installed packages register such a class under the entry point `paceline.drafters`; here it is put into an engine by hand.
"""

from dataclasses import replace
from itertools import pairwise

from paceline import LLM
from paceline.core import Draft
from paceline.drafters.base import DraftContext, Drafter
from paceline.engine.engine import Engine


class LastTime(Drafter):
    name = "last-time"
    needs_hidden = False
    max_tokens = 4

    def draft(self, context: DraftContext) -> Draft:
        out = Draft.empty(len(context.sequences), "nothing was seen before")
        for row, (sequence, limit) in enumerate(zip(context.sequences, context.limits, strict=True)):
            tokens = list(sequence.tokens)
            seen = dict(pairwise(tokens))
            while len(out.tokens[row]) < limit and tokens[-1] in seen:
                tokens.append(seen[tokens[-1]])
                out.tokens[row].append(tokens[-1])
                out.confidence[row].append(0.5)
            out.drafter[row] = self.name
        return out

    def forget(self, sequence_id: int) -> None:
        pass


llm = LLM("demo", drafter="none")
parts = replace(
    llm.engine.parts, drafters={"last-time": LastTime()}, default_drafter="last-time", draft_tokens=3
)
engine = Engine(parts)
prompt = llm.tokenizer.encode("a = 1\nb = 2\nc = 3\n")
(mine,) = engine.run({"mine": (prompt, llm.params(max_tokens=24))})["mine"]
plain = llm.generate([prompt], llm.params(max_tokens=24))[0]
print(mine.text, mine.stats.drafters)
assert mine.text == plain.text
