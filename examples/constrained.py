"""Let a constraint say which tokens may come next. Drafts are checked against it, too."""

from collections.abc import Sequence

import numpy as np

from paceline import LLM

llm = LLM("demo")
digits = [i for i in range(llm.tokenizer.vocab_size) if llm.tokenizer.token_text(i).isdigit()]
allowed = np.zeros(llm.engine.state.target.vocab_size, dtype=bool)
allowed[digits] = True


class OnlyDigits:
    """Holds no state: every token has to be of digits. `masks` has one entry more than the draft has tokens."""

    def masks(self, draft: Sequence[int]) -> list[np.ndarray | None]:
        return [allowed] * (len(draft) + 1)

    def commit(self, tokens: Sequence[int]) -> None:
        pass


done = llm.generate("x = ", llm.params(max_tokens=6, constraint=OnlyDigits))[0]
print(done.text)
assert done.text.isdigit()
