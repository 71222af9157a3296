"""Llama and its relatives against transformers, on random checkpoints: logits, greedy texts, configs old and new."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from checkpoints import VOCAB, WINDOW, build_target
from decoders import DECODERS, FULL, LLAMA3, LONG, SIZES, YARN, build_decoder
from layouts import edit
from paceline import LLM, SamplingParams
from paceline.cli import main
from paceline.convert.quantized import save_quantized
from paceline.core import Draft
from paceline.drafters.base import DraftContext, Drafter
from paceline.drafters.draft_model import ModelDrafter
from paceline.drafters.ngram import NgramDrafter
from paceline.errors import ConfigError, PairError, UsageError, WeightsError
from paceline.kv.cache import KVCache
from paceline.models.config import parse_target
from paceline.models.inspection import inspect
from paceline.models.layers.decoder_config import PARTIAL, DecoderConfig
from paceline.models.layers.rotary import inverse_frequencies
from paceline.models.registry import load_assistant, load_target
from paceline.models.target import GraphTarget
from paceline.ops import native
from paceline.ops.base import Runner
from paceline.ops.reference import EagerRunner
from testing import Setup, make_engine, run

TOLERANCE = 1e-4
LENGTHS = (3 * WINDOW + 3, 5, 2 * WINDOW)  # unequal, the longest three windows long


def runner_of(name: str) -> Runner:
    if name == "native" and not native.available():
        pytest.skip(str(native.why_not()))
    return EagerRunner() if name == "eager" else native.NativeRunner(2)


@pytest.fixture(scope="module", params=list(DECODERS))
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Path]:
    folder = tmp_path_factory.mktemp(request.param)
    return build_decoder(request.param, folder), folder


def prompts(seed: int = 5) -> list[list[int]]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(3, VOCAB, (n,), generator=generator).tolist() for n in LENGTHS]


def logits_of(target: GraphTarget, texts: list[list[int]], chunk: int) -> list[torch.Tensor]:
    """Logits of all texts, computed side by side `chunk` tokens at a time."""
    pages = dict.fromkeys(target.layout.kinds, 20)
    cache = KVCache(target.layout, pages, max_sequences=4, max_tokens=64, dtype=target.kv_dtype)
    for i, text in enumerate(texts):
        cache.open(i, text, share=False)
    parts: list[list[torch.Tensor]] = [[] for _ in texts]
    for start in range(0, max(map(len, texts)), chunk):
        live = [(i, t[start : start + chunk]) for i, t in enumerate(texts) if start < len(t)]
        with cache.tail(live) as tail:
            rows = tail.rows()
            logits = target.logits(target.forward(rows, cache))
            for (i, _), a, b in zip(live, rows.starts, rows.starts[1:]):
                parts[i].append(logits[a:b].clone())
            tail.commit([len(tokens) for _, tokens in live])
    return [torch.cat(p) for p in parts]


@torch.no_grad()
def worst_by_text(theirs: Any, target: GraphTarget, chunk: int = 7) -> list[float]:
    worst = []
    for text, got in zip(prompts(), logits_of(target, prompts(), chunk)):
        expected = theirs(torch.tensor([text])).logits[0]
        assert expected.std() > 0.5, "a flat distribution would hide errors"
        worst.append((got - expected).abs().max().item())
    return worst


def worst_of(theirs: Any, target: GraphTarget, chunk: int = 7) -> float:
    return max(worst_by_text(theirs, target, chunk))


INT8 = ("llama", "mistral-window", "qwen2-window", "qwen3-biases", "qwen3_5", "qwen3_next", "gemma3", "smollm3", "olmo3",
        "gemma2", "cohere2",
        "granite", "glm4-moe", "glm4-yarn", "phi3", "ministral3", "gpt-oss")  # fmt: skip


@pytest.mark.parametrize("name", INT8)
def test_keys_and_values_in_int8_are_near_and_depend_on_no_chunk(name: str, tmp_path: Path) -> None:
    changes = {"hidden_size": 128} | ({"head_dim": 32} if "head_dim" in DECODERS[name][1] else {})
    build_decoder(name, tmp_path, **changes)
    exact, rounded = (load_target(tmp_path, runner=runner_of("native")) for _ in range(2))
    rounded.keep_bytes()
    texts = prompts()
    expected, whole, single = (
        logits_of(*each) for each in ((exact, texts, 9), (rounded, texts, 9), (rounded, texts, 1))
    )
    for want, a, b in zip(expected, whole, single, strict=True):
        assert torch.equal(a, b)
        assert not torch.equal(a, want)
        wrong = torch.nn.functional.kl_div(
            a.log_softmax(-1), want.log_softmax(-1), log_target=True, reduction="batchmean"
        )
        assert float(wrong) < 0.01


def test_what_cannot_be_cached_in_int8_is_refused_in_a_line(model: tuple[Any, Path]) -> None:
    for name in ("native", "eager"):
        target = load_target(model[1], runner=runner_of(name))
        layers = target.layout.layers
        if all(layer.head_dim % 32 == 0 and layer.latent is None for layer in layers):
            if name == "native":
                continue
            why = "only the native CPU kernels read it"
        else:
            latent = any(layer.latent is not None for layer in layers)
            why = "a head has .* columns, and each 32 share a scale"
            if latent:
                conv = "conv" in target.layout.kinds
                why = "this model caches " + ("rows of a short convolution" if conv else "latents")
        with pytest.raises(
            UsageError, match=rf"^K/V .* in int8 here \({why}\): leave --kv-cache \(kv_cache\) out$"
        ):
            target.keep_bytes()


@pytest.mark.parametrize(("runner", "chunk"), [("eager", 7), ("native", 1), ("native", 7), ("native", 64)])
def test_logits_equal_transformers(model: tuple[Any, Path], runner: str, chunk: int) -> None:
    theirs, folder = model
    assert worst_of(theirs, load_target(folder, runner=runner_of(runner)), chunk) < TOLERANCE


@pytest.mark.skipif(not native.available(), reason="not built")
def test_bits_do_not_depend_on_chunks_or_neighbours(model: tuple[Any, Path]) -> None:
    target = load_target(model[1], runner=native.NativeRunner(2))
    together = logits_of(target, prompts(), 64)
    for text, whole in zip(prompts(), together):
        (alone,) = logits_of(target, [text], 3)
        assert torch.equal(alone, whole)


def texts_of(target: GraphTarget, params: SamplingParams, drafter: Drafter | None = None) -> list[list[int]]:
    pages = dict.fromkeys(target.layout.kinds, 40)
    cache = KVCache(target.layout, pages, max_sequences=4, max_tokens=96, dtype=target.kv_dtype)
    done = run(make_engine(Setup(), drafter, target=target, cache=cache), prompts(), params)
    assert all(one.finish_reason in ("stop", "length") for one in done), [one.error for one in done]
    return [one.token_ids for one in done]


def test_greedy_is_transformers_greedy(model: tuple[Any, Path]) -> None:
    theirs, folder = model
    want = []
    for text in prompts():
        ids = torch.tensor([text])
        out = theirs.generate(ids, max_new_tokens=24, do_sample=False, eos_token_id=None, pad_token_id=0)
        want.append(out[0, len(text) :].tolist())
    target = load_target(folder, runner=runner_of("native" if native.available() else "eager"))
    assert texts_of(target, SamplingParams(max_tokens=24, ignore_eos=True), NgramDrafter()) == want


@pytest.mark.parametrize("name", ["llama3", "llama-yarn", "mistral-window", "qwen2-window", "qwen3"])
def test_configs_of_older_transformers_say_the_same(name: str, tmp_path: Path) -> None:
    build_decoder(name, tmp_path)
    raw = json.loads((tmp_path / "config.json").read_text())
    assert "rope_parameters" in raw
    new = parse_target(raw)
    rope = dict(raw.pop("rope_parameters"))
    old = raw | {"rope_theta": rope.pop("rope_theta"), "torch_dtype": raw.pop("dtype")}
    old["rope_scaling"] = None if rope["rope_type"] == "default" else {"type": rope.pop("rope_type"), **rope}
    old.pop("layer_types", None)
    assert parse_target(old) == new


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"mscale": 0.7, "mscale_all_dim": 1.0},
        {"factor": 0.5},
        {"original_max_position_embeddings": 2**15},
    ],
)
def test_yarn_is_that_of_transformers(changes: dict[str, Any], tmp_path: Path) -> None:
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    config = build_decoder("qwen3-yarn", tmp_path, rope_parameters=YARN | changes).config
    turns, attention = ROPE_INIT_FUNCTIONS["yarn"](config, torch.device("cpu"))
    mine = parse_target(json.loads((tmp_path / "config.json").read_text()))
    assert isinstance(mine, DecoderConfig)
    assert torch.allclose(inverse_frequencies(mine.rotary, 32), turns, rtol=1e-6, atol=0)
    assert mine.rotary.attention == pytest.approx(attention, abs=1e-12)
    assert mine.max_len == max(512, int(mine.rotary.original * mine.rotary.factor))


BAD: dict[str, tuple[str, dict[str, Any], str]] = {
    "rope": ("llama", {"rope_parameters": {"rope_type": "dynamic", "factor": 4.0}}, "'dynamic' is not supported"),
    "yarn": ("llama", {"rope_parameters": YARN | {"beta_fast": 0.5}}, "is not above beta_slow=1"),
    "yarn lacks": ("llama", {"rope_parameters": {"rope_type": "yarn"}}, "lacks factor"),
    "yarn cuts": ("llama", {"rope_parameters": YARN | {"truncate": "no"}}, "truncate='no' is not supported"),
    "rope lacks": ("llama", {"rope_parameters": {"rope_type": "llama3", "factor": 4.0}}, "lacks low_freq_factor"),
    "rope order": ("llama", {"rope_parameters": LLAMA3 | {"high_freq_factor": 1.0}}, "is not above"),
    "rope list": ("llama", {"rope_parameters": None, "rope_scaling": [1]}, "not an object"),
    "act": ("llama", {"hidden_act": "gelu"}, "hidden_act='gelu' is not supported"),
    "heads": ("llama", {"num_key_value_heads": 3}, "do not divide"),
    "partial": ("llama", {"partial_rotary_factor": 0.5}, "rotate whole heads"),
    "missing": ("llama", {"intermediate_size": None}, "lacks intermediate_size"),
    "gemma3 caps": ("gemma3", {"attn_logit_softcapping": 50.0}, "Gemma 3 caps no scores"),
    "gemma3 kinds": ("gemma3", {"layer_types": ["full_attention"]}, "must name 4 layers"),
    "gemma3 local": (
        "gemma3",
        {"rope_parameters": {"full_attention": {}, "sliding_attention": {"rope_type": "linear", "factor": 2.0}}},
        "layers with a window have plain rotary embeddings",
    ),
    "gemma3 act": ("gemma3", {"hidden_activation": "relu"}, "uses gelu_pytorch_tanh"),
    "smollm3 turns": ("smollm3", {"no_rope_layers": [1, 2, 1, 0]}, "must have a 0 or 1 for each of 4 layers"),
    "olmo2 biases": ("olmo2", {"attention_bias": True}, "have no biases"),
    "kinds": ("mistral", {"layer_types": ["full_attention"] * 4}, "Ministral"),
    "ministral kinds": ("ministral", {"layer_types": ["full_attention"]}, "must name 4 layers"),
    "mistral3 text": ("mistral", {"model_type": "mistral3"}, "text_config is none of mistral, ministral3"),
    "mistral3 growth": ("ministral3", {"rope_parameters": {"llama_4_scaling_beta": 0.1}}, "needs YaRN"),
    "phi3 factors": ("phi4-mini", {"rope_parameters": LONG | {"long_factor": [-1.0]}}, "no lists of numbers above 0"),
    "phi3 pairs": ("phi4-mini", {"rope_parameters": LONG | {"long_factor": [1.0] * 4, "short_factor": [1.0] * 4}},
                   "short_factor has 4 numbers for 6 pairs"),
    "phi3 scaled": ("phi3", {"rope_parameters": {"rope_type": "linear", "factor": 2.0}}, "LongRoPE or none"),
    "glm4 share": ("glm4", {"rope_parameters": {PARTIAL: 1.5}}, "=1.5 of a head of 16 is"),
    "qwen kinds": ("qwen2", {"layer_types": ["full_attention"]}, "layer_types must name 4"),
    "no window": ("qwen2", {"layer_types": ["sliding_attention"] * 4}, "no sliding_window in use"),
    "top": ("qwen3-moe", {"num_experts_per_tok": 7}, "of only 6 experts"),
    "dense": ("qwen3-moe", {"mlp_only_layers": 3}, "no list of layers"),
    "partial share": ("glm4-moe", {"rope_parameters": {PARTIAL: 1.5}}, "=1.5 of a head of 16 is"),
    "partial odd": ("glm4-moe", {"rope_parameters": None, PARTIAL: 0.2}, "=0.2 of a head of 16 is not an even"),
    "partial none": ("glm4-moe", {"rope_parameters": None, PARTIAL: 0.1}, "=0.1 of a head of 16 is not an even"),
    "latent heads": ("deepseek", {"num_key_value_heads": 2}, "share one key each"),
    "latent odd": ("deepseek", {"qk_rope_head_dim": 7}, "qk_rope_head_dim=7 is odd"),
    "latent rank": ("deepseek", {"kv_lora_rank": 0}, "kv_lora_rank is 0, not a whole number"),
    "latent lacks": ("deepseek", {"v_head_dim": None}, "lacks v_head_dim"),
    "latent order": ("deepseek", {"rope_interleave": "yes"}, "rope_interleave='yes' is not supported"),
    "latent scale": ("deepseek", {"rope_parameters": YARN | {"mscale_all_dim": "1"}}, "mscale_all_dim is '1'"),
    "groups": ("deepseek", {"n_group": 3}, "n_routed_experts=8 do not make n_group=3 groups"),
    "groups of one": ("deepseek", {"n_group": 8}, "n_group=8 groups of two or more"),
    "groups kept": ("deepseek", {"topk_group": 5}, "topk_group=5 are kept"),
    "groups top": ("deepseek", {"num_experts_per_tok": 5}, "num_experts_per_tok=5 of only 4 experts in 2 groups"),
    "scores": ("deepseek", {"scoring_func": "softmax"}, "scoring_func='softmax' is not supported"),
    "greedy": ("deepseek", {"topk_method": "greedy"}, "topk_method='greedy' is not supported"),
    "frequency": ("deepseek", {"moe_layer_freq": 2}, "moe_layer_freq=2 is not supported"),
    "factor": ("deepseek", {"routed_scaling_factor": None}, "lacks norm_topk_prob or routed_scaling_factor"),
    "lfm2 kinds": ("lfm2", {"layer_types": ["conv"]}, "must name 4 layers, each conv or full_attention"),
    "lfm2 attention": ("lfm2", {"layer_types": ["conv"] * 4}, "must have layers of conv and of full_attention"),
    "lfm2 taps": ("lfm2", {"conv_L_cache": 17}, "conv_L_cache=17 is more than 16 rows"),
    "lfm2 choice": ("lfm2-moe", {"use_expert_bias": False}, "use_expert_bias=False is not supported"),
    "lfm2 top": ("lfm2-moe", {"num_experts_per_tok": 7}, "num_experts_per_tok=7 of only 6 experts"),
    "mixtral top": ("mixtral", {"num_experts_per_tok": 7}, "num_experts_per_tok=7 of only 6 experts"),
    "ernie top": ("ernie4_5-moe", {"moe_k": 7}, "moe_k=7 of only 6 experts"),
    "exaone4 kinds": ("exaone4", {"layer_types": ["full_attention"]}, "must name 4 layers"),
    "glm flash layers": ("glm4-flash", {"mlp_layer_types": ["sparse", "dense", "sparse", "sparse"]},
                         "is not dense for the first of 4 layers"),
    "muse text": ("muse-glimmer", {"text_config": None}, "config.json has no text_config"),
    "gemma2 act": ("gemma2", {"hidden_activation": "relu"}, "uses gelu_pytorch_tanh"),
    "gemma2 cap": ("gemma2", {"attn_logit_softcapping": -1.0}, "attn_logit_softcapping is -1.0, not a number"),
    "gemma2 kinds": ("gemma2", {"layer_types": ["full_attention"]}, "must name 4 layers"),
    "cohere2 norms": ("cohere2", {"use_qk_norm": True}, "use_qk_norm=True is not supported"),
    "cohere2 kinds": ("cohere2", {"layer_types": ["full_attention"]}, "must name 4 layers"),
    "nemotron kinds": ("nemotron-h", {"layers_block_type": ["mamba", "rwkv", "attention"]}, "only of mamba, attention"),
    "nemotron experts": ("nemotron-h-moe", {"topk_group": 5}, "topk_group=5 are kept"),
    "nemotron groups": ("nemotron-h", {"n_groups": 3}, "8 Mamba heads are no 3 groups"),
    "nemotron act": ("nemotron-h", {"mlp_hidden_act": "silu"}, "uses relu2"),
    "granite kinds": ("granite4", {"layer_types": ["mamba", "rwkv"] * 2}, "must name 4 layers, each attention or"),
    "granite no attention": ("granite4", {"layer_types": ["mamba"] * 4}, "some of them attention"),
    "granite mamba": ("granite4-h", {"mamba_n_heads": 7}, "do not make a width of 96"),
    "granite steps": ("granite4-h", {"time_step_limit": [0.001, 0.1]}, "time_step_limit=.* is not supported"),
    "granite experts": ("granite4-h-moe", {"num_experts_per_tok": 8}, "num_experts_per_tok=8 of only 6 experts"),
    "deepseek 2": ("deepseek", {"model_type": "deepseek_v2"}, "'deepseek_v2' is unknown as a target"),
}  # fmt: skip


@pytest.mark.parametrize("case", sorted(BAD))
def test_what_cannot_be_run_is_one_line(case: str, tmp_path: Path) -> None:
    name, changes, said = BAD[case]
    build_decoder(name, tmp_path)
    edit(tmp_path / "config.json", **changes)
    with pytest.raises(ConfigError, match=said) as caught:
        load_target(tmp_path)
    assert "\n" not in str(caught.value)
    assert inspect(tmp_path).unsupported == [str(caught.value)]


def test_the_text_of_a_gemma3_that_sees_is_read_from_older_configs_too(tmp_path: Path) -> None:
    """As google/gemma-3-4b-it: the text model is a part of config.json, rotary bases and the pattern have old names."""
    build_decoder("gemma3", tmp_path / "text", layer_types=["sliding_attention"] * 3 + ["full_attention"])
    wanted = logits_of(load_target(tmp_path / "text"), prompts(), 7)
    config = json.loads((tmp_path / "text" / "config.json").read_text())
    for key in ("layer_types", "rope_parameters", "model_type", "tie_word_embeddings", "eos_token_id"):
        config.pop(key)
    config |= {"sliding_window_pattern": 4, "rope_theta": 1e6, "rope_local_base_freq": 1e4,
               "rope_scaling": {"rope_type": "linear", "factor": 8.0}}  # fmt: skip
    outer = {"model_type": "gemma3", "text_config": config, "eos_token_id": [1, 5]}
    (tmp_path / "text" / "config.json").write_text(json.dumps(outer))
    (tmp_path / "text" / "generation_config.json").unlink()
    file = tmp_path / "text" / "model.safetensors"
    renamed = {f"language_model.{name}": tensor for name, tensor in load_file(file).items()}
    save_file(renamed | {"vision_tower.vision_model.post_layernorm.weight": torch.ones(3)}, file)
    target = load_target(tmp_path / "text")
    assert target.eos_token_ids == (1, 5)
    for got, known in zip(logits_of(target, prompts(), 7), wanted, strict=True):
        assert torch.equal(got, known)


def test_the_text_of_a_mistral_3_that_sees_is_read(tmp_path: Path) -> None:
    """As Ministral-3 and Mistral-Small-3.1 are stored: the text model is a part of config.json, beside the eye."""
    build_decoder("ministral3", tmp_path)
    wanted = logits_of(load_target(tmp_path), prompts(), 7)
    text, file = json.loads((tmp_path / "config.json").read_text()), tmp_path / "model.safetensors"
    outer = {"model_type": "mistral3", "eos_token_id": [1, 5], "text_config": text | {"eos_token_id": None}}
    (tmp_path / "config.json").write_text(json.dumps(outer))
    (tmp_path / "generation_config.json").unlink()
    renamed = {f"language_model.{name}": tensor for name, tensor in load_file(file).items()}
    save_file(renamed | {"vision_tower.ln_pre.weight": torch.ones(3)}, file)
    target = load_target(tmp_path)
    assert target.eos_token_ids == (1, 5)
    for got, known in zip(logits_of(target, prompts(), 7), wanted, strict=True):
        assert torch.equal(got, known)


def test_long_factors_hold_where_longer_texts_are_asked_for(tmp_path: Path) -> None:
    """transformers takes them for texts that are longer than the original context of 64 tokens."""
    theirs = build_decoder("phi4-mini", tmp_path)
    text = torch.randint(3, VOCAB, (90,), generator=torch.Generator().manual_seed(1)).tolist()
    target = load_target(tmp_path)
    assert target.max_len == 64
    target.expect(96)
    assert target.max_len == 512
    cache = KVCache(target.layout, {FULL: 8}, max_sequences=1, max_tokens=96, dtype=torch.float32)
    cache.open(0, text, share=False)
    with torch.no_grad(), cache.tail([(0, text)]) as tail:
        got = target.logits(target.forward(tail.rows(), cache))
        assert (got - theirs(torch.tensor([text])).logits[0]).abs().max() < TOLERANCE


def test_a_drafter_as_target_is_called_one(tmp_path: Path) -> None:
    build_decoder("llama", tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    config |= {"architectures": ["DFlashDraftModel"], "dflash_config": {}}
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(
        ConfigError, match="this is a DFlash drafter, which drafts for a larger model: give that one"
    ):
        load_target(tmp_path)


@pytest.mark.parametrize("stored", ["one by one", "stacked"])
def test_experts_are_read_as_they_are_stored(stored: str, tmp_path: Path) -> None:
    theirs = build_decoder("qwen3-moe", tmp_path)
    file = tmp_path / "model.safetensors"
    tensors = load_file(file)
    for i in range(SIZES["num_hidden_layers"]):
        at = f"model.layers.{i}.mlp.experts"
        module = theirs.model.layers[i].mlp.experts
        for name in [n for n in tensors if n.startswith(at)]:
            del tensors[name]
        if stored == "stacked":
            tensors |= {f"{at}.{n}": getattr(module, n).data.clone() for n in ("gate_up_proj", "down_proj")}
            continue
        for e, (both, down) in enumerate(zip(module.gate_up_proj.data, module.down_proj.data)):
            gate, up = both.chunk(2)
            parts = {"gate_proj": gate, "up_proj": up, "down_proj": down}
            tensors |= {f"{at}.{e}.{n}.weight": part.clone() for n, part in parts.items()}
    save_file(tensors, file, metadata={"format": "pt"})
    assert worst_of(theirs, load_target(tmp_path)) < TOLERANCE
    if stored == "one by one":
        del tensors["model.layers.2.mlp.experts.3.up_proj.weight"]
        save_file(tensors, file, metadata={"format": "pt"})
        with pytest.raises(WeightsError, match=r"1 missing \(layers.2.mlp.experts.gate_up_proj"):
            load_target(tmp_path)


@pytest.mark.parametrize("kind", ["int8", "int4"])
@pytest.mark.parametrize(
    "name", ["llama-tied-biases", "qwen3-moe", "deepseek", "deepseek-whole", "phi4-mini", "gpt-oss"]
)
def test_quantized_folders_are_what_is_quantized_while_loading(name: str, kind: Any, tmp_path: Path) -> None:
    from paceline.ops.quantize import quantizer

    sizes: dict[str, Any] = {"hidden_size": 64} | (
        {} if name.startswith(("llama", "phi", "gpt")) else {"moe_intermediate_size": 32}
    )
    build_decoder(name, tmp_path / "whole", **sizes)
    save_quantized(tmp_path / "whole", tmp_path / kind, kind)
    want = logits_of(load_target(tmp_path / "whole", transform=quantizer(kind)), prompts(), 64)
    got = logits_of(load_target(tmp_path / kind), prompts(), 64)
    for a, b in zip(got, want):
        assert torch.equal(a, b)


def test_stored_rotary_frequencies_are_skipped(tmp_path: Path) -> None:
    theirs = build_decoder("llama", tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.ones(6)
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    assert worst_of(theirs, load_target(tmp_path)) < TOLERANCE


@pytest.mark.skipif(not native.available(), reason="not built")
@pytest.mark.parametrize("name", ["llama", "qwen3-moe"])
def test_bfloat16_weights(name: str, tmp_path: Path) -> None:
    build_decoder(name, tmp_path, head_dim=32).to(torch.bfloat16).save_pretrained(tmp_path)
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32, attn_implementation="eager")
    assert worst_of(theirs, load_target(tmp_path, runner=native.NativeRunner(2, exact=True))) < TOLERANCE
    fast = load_target(tmp_path, runner=native.NativeRunner(2))
    assert fast.kv_dtype == ("packed" if native.bf16_dot() else torch.float32)
    # a rounded input can tip a near tie between two experts, and then all that follows in that text differs
    assert sorted(worst_by_text(theirs, fast))[-2 if name == "qwen3-moe" else -1] < 0.2


@pytest.mark.skipif(not native.available(), reason="not built")
def test_latents_of_bfloat16_weights_are_kept_as_floats(tmp_path: Path) -> None:
    build_decoder("deepseek", tmp_path).to(torch.bfloat16).save_pretrained(tmp_path)
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32, attn_implementation="eager")
    target = load_target(tmp_path, runner=native.NativeRunner(2, exact=True))
    assert worst_of(theirs, target) < TOLERANCE
    assert load_target(tmp_path, runner=native.NativeRunner(2)).kv_dtype == torch.float32


def test_what_info_says(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    build_decoder("qwen3-moe-mixed", tmp_path / "moe")
    build_decoder("mistral-window", tmp_path / "window")
    found = inspect(tmp_path / "moe")
    assert found.layers == "4 (4 full; 6 experts, 2 active in 3 layers)"
    assert found.unsupported == []
    assert found.parameters == sum(
        t.numel() for t in load_file(tmp_path / "moe" / "model.safetensors").values()
    )
    assert inspect(tmp_path / "window").layers == f"4 (4 sliding; window {WINDOW})"
    assert inspect(tmp_path / "window").windows == {"sliding_attention": WINDOW}
    monkeypatch.setattr("sys.argv", ["paceline", "info", "--no-measure", str(tmp_path / "window")])
    with pytest.raises(SystemExit) as left:
        main()
    assert left.value.code in (0, None)
    assert "mistral" in capsys.readouterr().out


def test_an_assistant_of_gemma_is_refused(tmp_path: Path) -> None:
    from checkpoints import build_assistant

    build_decoder("llama", tmp_path / "llama")
    build_assistant("dense", tmp_path / "assistant")
    with pytest.raises(PairError, match="MTP drafter for Gemma 4"):
        load_assistant(tmp_path / "assistant", load_target(tmp_path / "llama"))
    found = inspect(tmp_path / "assistant", target=tmp_path / "llama")
    assert "MTP drafter for Gemma 4" in found.unsupported[0]


PAIRS = [("llama", "qwen2"), ("qwen3-moe", "mistral-window"), ("gemma", "llama3"), ("qwen3", "gemma")]


@pytest.mark.parametrize(("target", "draft"), PAIRS)
@pytest.mark.parametrize("padded", [-1, 0, 32])
def test_any_family_drafts_for_any_other(target: str, draft: str, padded: int, tmp_path: Path) -> None:
    """With one vocabulary; the draft model's table may be padded, or end before the last token of the target."""

    def build(name: str, folder: Path, vocab: int) -> GraphTarget:
        if name == "gemma":
            build_target("dense", folder, vocab_size=vocab, vocab_size_per_layer_input=vocab)
        else:
            build_decoder(name, folder, vocab_size=vocab)
        return load_target(folder, runner=runner_of("native" if native.available() else "eager"))

    one, other = build(target, tmp_path / "t", VOCAB), build(draft, tmp_path / "d", VOCAB + padded)
    pages = dict.fromkeys(other.layout.kinds, 60)
    cache = KVCache(other.layout, pages, max_sequences=4, max_tokens=128, dtype=other.kv_dtype)
    drafter = CountingDrafter(other, cache, one.vocab_size)
    params = SamplingParams(max_tokens=20, temperature=0.8, seed=3, ignore_eos=True)
    assert max(max(text) for text in prompts()) < VOCAB - 1
    assert texts_of(one, params, drafter) == texts_of(one, params)
    assert drafter.drafted > 20


class CountingDrafter(ModelDrafter):
    drafted = 0

    def draft(self, context: DraftContext) -> Draft:
        draft = super().draft(context)
        self.drafted += sum(map(len, draft.tokens))
        return draft


def test_a_pair_of_two_families_by_name(tmp_path: Path) -> None:
    build_decoder("qwen3", tmp_path / "t")
    build_decoder("llama", tmp_path / "d")
    plain = LLM(str(tmp_path / "t"), drafter="none", threads=2, cache_memory=2**24)
    paired = LLM(str(tmp_path / "t"), drafter=str(tmp_path / "d"), threads=2, cache_memory=2**24)
    assert paired.info["drafter"] == "model+ngram"
    params = SamplingParams(max_tokens=16, temperature=0.7, seed=1)
    for text in prompts():
        assert paired.generate([text], params)[0].token_ids == plain.generate([text], params)[0].token_ids
