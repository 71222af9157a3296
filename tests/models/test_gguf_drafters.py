"""Drafters as GGUF files: the assistant beside its target, and draft models of one vocabulary, padded or not."""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

import paceline
from checkpoints import build_target
from decoders import build_decoder
from eagle3_files import EPS, HEAD_DIM, HEADS, INNER, KV_HEADS, THETA, build_eagle3
from gguf_files import gguf_name, interleaved
from gguf_files import write_gguf as write_tensors
from paceline.assembly import choose_drafter
from paceline.checkpoints.gguf.source import GgufCheckpoint
from paceline.config import EngineConfig
from paceline.convert.to_gguf import write_gguf
from paceline.errors import ConfigError, PairError
from paceline.hub.resolve import bundled, find_assistant, resolve
from paceline.models.config import read_config
from small_tokenizers import SIZE, byte_level, fallback

EAGLE = {
    "fc.weight": "fc.weight", "input_norm.weight": "enc.output_norm.weight", "d2t": "d2t", "t2d": "t2d",
    "midlayer.hidden_norm.weight": "blk.0.attn_norm_2.weight",
}  # fmt: skip
GREEDY = paceline.SamplingParams(max_tokens=16, temperature=0, ignore_eos=True)


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The bundled pair as two files in one folder."""
    folder = tmp_path_factory.mktemp("pair")
    write_gguf(bundled("target"), folder / "demo-BF16.gguf", None)
    write_gguf(bundled("assistant"), folder / "mtp-demo-BF16.gguf", None, bundled("target"))
    return folder


def test_the_assistant_beside_a_file_is_found(pair: Path) -> None:
    target = pair / "demo-BF16.gguf"
    assert resolve(pair, "target") == target  # a folder with a target and its assistant holds one model
    assert choose_drafter(EngineConfig(target=str(target)), target)[:2] == (
        "mtp+ngram",
        pair / "mtp-demo-BF16.gguf",
    )
    with paceline.LLM(str(pair), drafter="mtp", draft_tokens=4, max_model_len=128) as llm:
        (found,) = llm.generate([2, 700, 701, 702, 1200], GREEDY)
    assert found.stats.accepted > 2


def test_the_one_with_the_targets_name_comes_first_and_another_width_never(
    pair: Path, tmp_path: Path
) -> None:
    for name in ("demo.gguf", "other.gguf"):
        shutil.copyfile(pair / "demo-BF16.gguf", tmp_path / name)
    for name in ("a-assistant.gguf", "demo-assistant.gguf"):
        shutil.copyfile(pair / "mtp-demo-BF16.gguf", tmp_path / name)
    (tmp_path / "demo-mtp-broken.gguf").write_bytes(b"GGUF")
    config = read_config(tmp_path / "demo.gguf")
    assert find_assistant(tmp_path / "demo.gguf", config)[0] == tmp_path / "demo-assistant.gguf"
    assert find_assistant(tmp_path / "other.gguf", config)[0] == tmp_path / "a-assistant.gguf"
    assert find_assistant(tmp_path / "demo.gguf", config | {"hidden_size": 7})[0] is None


def test_the_assistant_of_another_target_is_refused_in_one_line(pair: Path, tmp_path: Path) -> None:
    folder = tmp_path / "dense"
    build_target("dense", folder)
    fallback(folder)
    with pytest.raises(
        PairError, match=r"was made for another target than .*hidden size 256 against 48"
    ) as caught:
        paceline.LLM(str(folder), drafter=str(pair / "mtp-demo-BF16.gguf"))
    assert "\n" not in str(caught.value)
    llama = tmp_path / "llama"
    build_decoder("llama", llama)
    with pytest.raises(PairError, match=r"is an MTP drafter for Gemma 4, but .* is a llama"):
        paceline.LLM(str(llama), drafter=str(pair / "mtp-demo-BF16.gguf"))


@pytest.fixture(scope="module")
def drafts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A target, two draft models of its vocabulary (one padded) and one of another, as folders and files."""
    root = tmp_path_factory.mktemp("drafts")
    for name, size, layers in (
        ("target", SIZE, 4),
        ("draft", SIZE, 2),
        ("padded", SIZE + 48, 2),
        ("other", SIZE, 2),
    ):
        build_decoder("qwen3", root / name, vocab_size=size, num_hidden_layers=layers)
        byte_level(root / name, "llama-bpe")
    fallback(root / "other")
    raw = (root / "other" / "tokenizer.json").read_text()
    assert raw != (root / "draft" / "tokenizer.json").read_text()
    for name in ("target", "draft", "padded"):
        write_gguf(root / name, root / f"{name}.gguf", None)
    return root


@pytest.mark.parametrize("draft", ["draft.gguf", "padded.gguf", "padded"])
@pytest.mark.parametrize("target", ["target", "target.gguf"])
def test_a_draft_model_of_one_vocabulary_drafts(target: str, draft: str, drafts: Path) -> None:
    with paceline.LLM(
        str(drafts / target), drafter=str(drafts / draft), draft_tokens=4, max_model_len=64
    ) as llm:
        assert llm.engine.info["drafter"] == "model+ngram"
        text = llm.generate([2, 30, 31, 32], GREEDY)[0]
    with paceline.LLM(str(drafts / target), drafter="none", max_model_len=64) as llm:
        assert llm.generate([2, 30, 31, 32], GREEDY)[0].token_ids == text.token_ids
    assert text.stats.drafted


@pytest.mark.parametrize("target", ["target", "target.gguf"])
def test_a_draft_model_of_another_tokenizer_drafts_by_the_text(target: str, drafts: Path) -> None:
    with paceline.LLM(str(drafts / target), drafter=str(drafts / "other"), max_model_len=64) as llm:
        assert llm.info["drafter_reason"] == "as asked; of another vocabulary, so it drafts by the text"


def test_a_draft_model_without_a_tokenizer_is_taken_as_it_is(drafts: Path, tmp_path: Path) -> None:
    shutil.copytree(drafts / "other", tmp_path / "bare")
    (tmp_path / "bare" / "tokenizer.json").unlink()
    with paceline.LLM(str(drafts / "target"), drafter=str(tmp_path / "bare"), max_model_len=64) as llm:
        assert llm.generate([2, 30], GREEDY)[0].token_ids


def test_a_file_is_no_adapter(drafts: Path) -> None:
    with pytest.raises(ConfigError, match="is no LoRA adapter"):
        paceline.LLM(str(drafts / "target"), adapter=str(drafts / "draft.gguf"))


def test_an_eagle_3_drafts_from_a_file_as_from_its_folder(tmp_path: Path) -> None:
    """Written as llama.cpp's converter does: rows of q and k in pairs, ids where the checkpoint has offsets, no mask."""
    build_decoder("llama", tmp_path / "t", vocab_size=SIZE)
    byte_level(tmp_path / "t", "llama-bpe")
    folder = build_eagle3(
        tmp_path / "e", hidden=48, vocab=SIZE, draft_vocab=90, original=True, norm_before_fc=True
    )
    tensors = {}
    for name, value in load_file(folder / "model.safetensors").items():
        data = value.numpy()
        if "q_proj" in name or "k_proj" in name:
            data = interleaved(data, HEADS if "q_proj" in name else KV_HEADS)
        made = EAGLE.get(name) or gguf_name(name.replace("midlayer", "layers.0"))
        tensors[made] = data + np.arange(len(data)) if name == "d2t" else data
    fields = {
        "block_count": 1, "context_length": 512, "embedding_length": 48, "feed_forward_length": INNER,
        "attention.head_count": HEADS, "attention.head_count_kv": KV_HEADS, "attention.key_length": HEAD_DIM,
        "attention.layer_norm_rms_epsilon": EPS, "rope.freq_base": THETA, "vocab_size": SIZE, "norm_before_fc": True,
        "target_layers": [1, 2, 3], "target_hidden_size": 48,
    }  # fmt: skip
    del tensors["t2d"]
    file = write_tensors(tmp_path / "e.gguf", "eagle3", fields, tensors)
    checkpoint = GgufCheckpoint(file)
    for name, value in load_file(folder / "model.safetensors").items():
        if name != "t2d":
            assert torch.equal(checkpoint.tensor(name.replace("midlayer", "layers.0")), value), name
    found = {}
    for drafter in ("none", str(folder), str(file)):
        with paceline.LLM(
            str(tmp_path / "t"), drafter=drafter, draft_tokens=3, max_model_len=64, threads=1
        ) as llm:
            (found[drafter],) = llm.generate([2, 30, 31, 32], GREEDY)
    assert len({tuple(one.token_ids) for one in found.values()}) == 1
    one, other = found[str(folder)].stats, found[str(file)].stats
    assert (one.drafted, one.accepted) == (other.drafted, other.accepted)
    assert one.drafted > 8
