"""Texts over which no repetition reaches (DRY), as the tokens that write them in llama.cpp's way."""

from __future__ import annotations

from collections.abc import Sequence as Seq

from paceline.text.tokenizer import Tokenizer

_MOST_TOKENS = 20  # of what follows the first one, as in llama.cpp


def breakers_of(tokenizer: Tokenizer, texts: Seq[str]) -> tuple[tuple[int, ...], ...]:
    """Every token that holds one of the texts; and tokens that end as one begins, with the tokens of its rest.

    The first call for a text looks at the whole vocabulary; what was found is kept with the tokenizer.
    """
    out: dict[tuple[int, ...], None] = {}
    for text in texts:
        if text not in tokenizer.breakers:
            if len(tokenizer.breakers) >= 1024:
                tokenizer.breakers.clear()
            tokenizer.breakers[text] = _written(tokenizer, text)
        out |= dict.fromkeys(tokenizer.breakers[text])
    return tuple(out)


def _written(tokenizer: Tokenizer, text: str) -> tuple[tuple[int, ...], ...]:
    wanted = text.encode()
    starts = [text[:cut].encode() for cut in range(1, len(text))]
    rests: dict[bytes, tuple[int, ...]] = {}
    out: list[tuple[int, ...]] = []
    for token in range(tokenizer.vocab_size):
        piece = tokenizer.piece(token, skip_special=False)
        if wanted in piece:
            out.append((token,))
            continue
        for start in starts:
            if piece.endswith(start):
                if start not in rests:
                    rest = wanted[len(start) :].decode()
                    rests[start] = tuple(tokenizer.encode(rest, add_bos=False)[:_MOST_TOKENS])
                out.append((token, *rests[start]))
    return tuple(out)
