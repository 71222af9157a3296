"""The engines: what installs each, which program asks it, and the modes of it that are compared."""

from __future__ import annotations

from dataclasses import dataclass

from draft import Kind


@dataclass(frozen=True)
class Mode:
    """One way to draft.

    `drafts`: takes a number of drafted tokens. `draft`: needs a draft model; `foreign`: one of another vocabulary.
    """

    name: str
    drafts: bool = True
    draft: bool = False
    foreign: bool = False


@dataclass(frozen=True)
class Engine:
    """`packages` go into a venv of their own; none: the environment that runs this recipe.

    `promise`: what its makers say of equal text, and where. `times`: how much more memory than its files it takes.
    """

    name: str
    runner: str
    files: Kind
    packages: tuple[str, ...]
    modes: tuple[Mode, ...]
    batches: bool
    promise: str
    times: float = 1.5


PLAIN = "plain"
LLAMA_NGRAMS = ("ngram-simple", "ngram-map-k", "ngram-map-k4v", "ngram-mod", "ngram-cache")

ENGINES = (
    Engine(
        "paceline",
        "with_paceline.py",
        "gguf",
        (),
        (
            Mode("ngram"),
            Mode("lookahead"),
            Mode("draft-model", draft=True),
            Mode("bundled"),
            Mode("auto", drafts=False),
        ),
        True,
        "the same tokens with any drafter or none, bit for bit on one machine ([how a step works](how-a-step-works.md))",
    ),
    Engine(
        "llama.cpp",
        "with_llama_cpp.py",
        "gguf",
        ("xllamacpp",),
        (Mode("draft-simple", draft=True), *(Mode(name) for name in LLAMA_NGRAMS)),
        True,
        "«a technique that can significantly accelerate token generation»; of equal text it says nothing "
        "([docs/speculative.md](https://github.com/ggml-org/llama.cpp/blob/master/docs/speculative.md))",
    ),
    Engine(
        "OpenVINO GenAI",
        "with_openvino.py",
        "q8_0",  # 2026.4 reads the Q4_1 blocks of SmolLM2's file as another model: it says so in any answer
        ("openvino-genai",),
        (Mode("prompt-lookup"), Mode("draft-model", draft=True)),
        False,
        "«The goal of this sampling method is to reduce latency while keeping the main model accuracy» ([model server's "
        "demo](https://docs.openvino.ai/2025/model-server/ovms_demos_continuous_batching_speculative_decoding.html))",
        4.0,
    ),
    Engine(
        "transformers",
        "with_transformers.py",
        "folder",
        ("torch==2.13.0", "transformers>=5.22,<5.23"),
        (
            Mode("assistant", draft=True),
            Mode("assistant-shrinking", draft=True),
            Mode("universal", foreign=True),
            Mode("prompt-lookup"),
        ),
        False,
        "«Validated tokens enter the final output and rejected tokens trigger standard sampling» "
        "([assisted decoding](https://huggingface.co/docs/transformers/main/en/assisted_decoding))",
    ),
    Engine(
        "mlx-lm",
        "with_mlx.py",
        "folder",
        ("mlx[cpu]", "mlx-lm"),
        (Mode("draft-model", draft=True),),
        False,
        "",
    ),
)
