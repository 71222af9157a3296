"""Tokenizers trained in the process: Gemma's style, and byte-level BPE."""

import json

from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers, trainers
from tokenizers import Tokenizer as Backend

SPECIAL = ["<pad>", "<eos>", "<bos>", "<unk>", "<|turn>", "<turn|>"]
CORPUS = [
    "def parse(text):\n    return text.split()\n",
    "class Stack:\n    def push(self, x):\n        pass\n",
] * 3
CONFIG = {"bos_token": "<bos>", "eos_token": {"content": "<eos>", "special": True}, "add_bos_token": True}


def gemma_style():
    backend = Backend(models.BPE(unk_token="<unk>", byte_fallback=True, fuse_unk=True))
    backend.normalizer = normalizers.Replace(" ", "▁")
    backend.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    )
    special = [AddedToken(t, special=True, normalized=False) for t in SPECIAL]
    trainer = trainers.BpeTrainer(vocab_size=200, special_tokens=special, show_progress=False)
    backend.train_from_iterator(CORPUS, trainer)
    state = json.loads(backend.to_str())
    rest = [t for t in state["model"]["vocab"] if t not in SPECIAL]
    pieces = [*SPECIAL, *(f"<0x{b:02X}>" for b in range(256)), *rest]
    state["model"] |= {"vocab": {t: i for i, t in enumerate(pieces)}, "byte_fallback": True}
    backend = Backend.from_str(json.dumps(state))
    backend.add_tokens([AddedToken("[plain]", special=False, normalized=False)])
    return backend


def byte_level():
    backend = Backend(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    special = [AddedToken(t, special=True) for t in SPECIAL]
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=400, special_tokens=special, initial_alphabet=alphabet, show_progress=False
    )
    backend.train_from_iterator(CORPUS, trainer)
    return backend
