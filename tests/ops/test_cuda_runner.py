"""The CUDA runner with its kernels interpreted on the CPU: plain torch's results, and one row's bits beside any others.

The interpreter's product of bfloat16 is wrong, so weights are float32 here, or quantized and multiplied in float32.
"""

from dataclasses import replace

import gguf
import pytest
import torch

import interpreted  # noqa: F401
from checkpoints import VOCAB
from decoders import build_decoder
from dflash2_files import build_dflash2
from paceline.core import ForwardBatch
from paceline.errors import UsageError
from paceline.forecast import shapes
from paceline.forecast.random_target import RandomWeights
from paceline.kv.cache import KVCache
from paceline.kv.layout import LayerKV, Layout
from paceline.models.drafters.gemma4_assistant import GemmaAssistant, assistant_shapes
from paceline.models.families.gemma4.config import parse_assistant, parse_gemma
from paceline.models.families.gemma4.target import GemmaTarget, target_shapes
from paceline.models.registry import load_network, load_target
from paceline.ops.base import Experts, Growth, Weight
from paceline.ops.cuda import runner as runners
from paceline.ops.cuda import selftest, shape
from paceline.ops.cuda.kernels.attention import section_of
from paceline.ops.cuda.runner import CudaRunner
from paceline.ops.cuda.shape import lanes_of, round_up
from paceline.ops.cuda.weights import pack
from paceline.ops.quantize import quantize
from paceline.ops.reference import EagerRunner, dequantize
from paceline.soft_tokens import MediaRows

CPU = torch.device("cpu")
SMALL = {
    "vocab_size": 70, "vocab_size_per_layer_input": 70, "hidden_size": 48, "intermediate_size": 40,
    "num_hidden_layers": 2, "head_dim": 16, "global_head_dim": 32, "num_attention_heads": 4, "num_key_value_heads": 2,
    "sliding_window": 3, "max_position_embeddings": 256,
}  # fmt: skip
GEMMAS = {
    "gemma-4-e2b": {"num_key_value_heads": 1, "num_kv_shared_layers": 1, "hidden_size_per_layer_input": 8,
                    "num_hidden_layers": 3},
    "gemma-4-31b": {"num_global_key_value_heads": 1},
    "gemma-4-26b-a4b": {"num_global_key_value_heads": 1, "num_experts": 4, "top_k_experts": 2,
                        "moe_intermediate_size": 12},
}  # fmt: skip
TEXT = [7, 3, 61, 12, 44]


def config_of(name):
    fields = shapes.fields_of(name) | SMALL | GEMMAS[name]
    return parse_gemma(
        fields | {"layer_types": [shapes.SLIDING, shapes.FULL, shapes.FULL][: fields["num_hidden_layers"]]}
    )


def gemma(name, runner, kind="float32"):
    config = config_of(name)
    return GemmaTarget(config, RandomWeights(target_shapes(config), kind), runner, torch.float32)


def cuda_runner(*graphs):
    notes = []
    return CudaRunner(CPU, torch.float32, trusted=True, note=notes.append), notes


def cache_of(target):
    pages = dict.fromkeys(target.layout.kinds, 8)
    return KVCache(target.layout, pages, max_sequences=3, max_tokens=64, dtype=torch.float32)


def written(target, chunks, text=TEXT):
    """Logits of all rows, computed in such chunks."""
    cache, out, at = cache_of(target), [], 0
    cache.open(1, text)
    for count in chunks:
        with cache.tail([(1, text[at : at + count])]) as tail:
            hidden = target.states(tail.rows(), cache)[0].clone()
            out.append(target.logits(hidden).clone())
            tail.commit([count])
        at += count
    return torch.cat(out)


@pytest.fixture(scope="module")
def dense():
    """A dense model on the runner, and the logits of the text in one piece."""
    target = gemma("gemma-4-31b", cuda_runner()[0])
    return target, written(target, [5])


@pytest.mark.parametrize("name", GEMMAS)
def test_gemma_gives_what_plain_torch_gives_and_the_same_bits_in_any_chunks(name):
    runner, notes = cuda_runner()
    target = gemma(name, runner)
    runner.prepare([target.hidden_graph, target.logits_graph])
    wanted = written(gemma(name, EagerRunner()), [5])
    whole = written(target, [5])
    assert not notes, "no graph fell back"
    torch.testing.assert_close(whole, wanted, rtol=1e-4, atol=1e-4)
    assert torch.equal(written(target, [1, 2], TEXT[:3]), whole[:3])


@pytest.mark.parametrize("kind", ["int8", "int4"])
def test_quantized_weights_give_what_plain_torch_gives(kind):
    runner, notes = cuda_runner()
    target = gemma("gemma-4-31b", runner, kind)
    runner.prepare([target.hidden_graph, target.logits_graph])
    wanted = written(gemma("gemma-4-31b", EagerRunner(), kind), [3], TEXT[:3])
    torch.testing.assert_close(written(target, [1, 2], TEXT[:3]), wanted, rtol=1e-4, atol=1e-4)
    assert not notes


@pytest.mark.parametrize(
    ("kind", "width", "inner", "activation"),
    [
        ("int8", 128, 256, "gelu"),
        ("int8", 48, 12, "clamped"),
        ("int4", 64, 288, "gelu"),
        ("mxfp4", 32, 32, "clamped"),
    ],
)
def test_experts_of_few_rows_and_of_many(kind, width, inner, activation):
    generator = torch.Generator().manual_seed(5)

    def made(*shape):
        return torch.randn(*shape, generator=generator) * shape[-1] ** -0.5

    gate_up = tuple(weight_of(made(2 * inner, width), kind) for _ in range(3))
    down = tuple(weight_of(made(width, inner), kind) for _ in range(3))
    experts = Experts(weight_of(made(3, width), "float32"), gate_up, down, 2, activation)
    if activation == "clamped":
        biases = {
            "router_bias": made(3),
            "gate_up_bias": 30 * made(3, 2 * inner),
            "down_bias": made(3, width),
        }
        experts = replace(experts, **biases)
    x = torch.randn(18, width, generator=generator)

    def graph(ops):
        value = ops.given("x", width)
        return (ops.moe(value, value, experts),)

    runner, notes = cuda_runner()
    for count in (2, 18):
        rows = ForwardBatch(
            *(torch.zeros(count, dtype=t) for t in (torch.int64, torch.int32, torch.int32)), [0, count]
        )
        (wanted,) = EagerRunner().run(graph, rows, None, {"x": x[:count]})
        (found,) = runner.run(graph, rows, None, {"x": x[:count]})
        torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-4)
    assert not notes


@pytest.mark.parametrize(
    "name",
    [
        "llama-tied-biases",
        "mistral-window",
        "qwen3-moe",
        "glm4-moe",
        "deepseek",
        "gpt-oss",
        "lfm2-moe",
        "ernie4_5-moe",
        "gemma2",
        "cohere2",
        "nemotron-h-moe",
    ],
)
def test_other_families_give_what_plain_torch_gives(name, tmp_path):
    kinds = {
        "lfm2-moe": ["conv", "full_attention"],
        "cohere2": ["sliding_attention", "full_attention"],
        "nemotron-h-moe": ["moe", "linear_attention", "full_attention"],
    }.get(name)
    changes = (
        {"num_hidden_layers": 2} if kinds is None else {"num_hidden_layers": len(kinds), "layer_types": kinds}
    )
    build_decoder(name, tmp_path, **changes)
    runner, notes = cuda_runner()
    target = load_target(tmp_path, runner=runner)
    text = [token % VOCAB for token in TEXT[:3]]
    wanted = written(load_target(tmp_path, runner=EagerRunner()), [3], text)
    torch.testing.assert_close(written(target, [1, 2], text), wanted, rtol=1e-4, atol=1e-4)
    assert not notes


@pytest.mark.parametrize("few", [4, 1])
@pytest.mark.parametrize(
    ("sinks", "cap"),
    [(None, None), ([0.0, -300.0, 2.0, 300.0, 1.0, -1.0, 0.5, 5.0], None), (None, 1.5)],
    ids=["plain", "sinks", "capped"],
)
def test_heads_of_one_key_in_several_tiles_and_many_rows(monkeypatch, sinks, cap, few):
    """Tiles of two heads of four, and programs that go over all sections, as with many heads and long prompts."""
    monkeypatch.setattr(shape, "COLUMNS", 2)
    monkeypatch.setattr(shape, "FEW", few)
    layout = Layout((LayerKV("full", 2, 16),), {"full": None})
    x = torch.randn(3, 4, 8 * 16, generator=torch.Generator().manual_seed(2))

    def graph(ops):
        ops.store_kv(0, ops.given("k", 32), ops.given("v", 32))
        q = ops.given("q", 8 * 16)
        if sinks is not None:
            return (ops.sink_attention(q, 0, None, torch.tensor(sinks)),)
        return (ops.attention(q, 0, 8, None, True, softcap=cap),)

    found = []
    for runner in (EagerRunner(), cuda_runner()[0]):
        cache = KVCache(layout, {"full": 4}, max_sequences=1, max_tokens=32, dtype=torch.float32)
        cache.open(1, [0] * 4)
        with cache.tail([(1, [0] * 4)]) as tail:
            given = {"q": x[0], "k": x[1, :, :32].contiguous(), "v": x[2, :, :32].contiguous()}
            found.append(runner.run(graph, tail.rows(), cache, given)[0].clone())
    torch.testing.assert_close(found[1], found[0], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("width", [256, 128, 96])
def test_an_embedding_in_words(width):
    weight = weight_of(torch.randn(9, width, generator=torch.Generator().manual_seed(3)), "int8")
    rows = ForwardBatch(torch.tensor([8, 2]), *(torch.zeros(2, dtype=torch.int32) for _ in range(2)), [0, 2])
    runner = CudaRunner(CPU, torch.float32, trusted=True)
    (found,) = runner.run(lambda ops: (ops.embed(ops.tokens(), weight, 2.0),), rows, None, {})
    torch.testing.assert_close(found, dequantize(weight, None, torch.float32)[[8, 2]] * 2)


def test_a_convolution_over_a_block_stays_within_its_text():
    """Three texts beside each other, of which two are neighbours in position; alone each has the same bits."""
    generator = torch.Generator().manual_seed(6)
    x, y, base = (torch.randn(*shape, generator=generator) for shape in ((7, 1056), (7, 12), (3, 12)))
    weight = weight_of(torch.randn(9, 1056, generator=generator) / 32, "float32")  # its product lies in parts
    positions, slots = [4, 5, 6, 4, 5, 6, 7], [1, 1, 1, 2, 2, 0, 0]

    def graph(ops):
        return (ops.block_conv(ops.given("y", 12), ops.linear(ops.given("x", 1056), weight), base),)

    def run(runner, begin, end):
        integers = (torch.tensor(values[begin:end], dtype=torch.int32) for values in (positions, slots))
        starts = [at - begin for at in (0, 3, 5, 7) if begin <= at <= end]
        rows = ForwardBatch(torch.zeros(end - begin, dtype=torch.int64), *integers, starts)
        given = {"x": x[begin:end].contiguous(), "y": y[begin:end].contiguous()}
        return runner.run(graph, rows, None, given)[0].clone()

    runner, notes = cuda_runner()
    whole = run(runner, 0, 7)
    torch.testing.assert_close(whole, run(EagerRunner(), 0, 7), rtol=1e-5, atol=1e-5)
    assert torch.equal(torch.cat([run(runner, *part) for part in ((0, 3), (3, 5), (5, 7))]), whole)
    assert not notes


def test_a_dflash2_drafter_has_a_kernel_for_everything(tmp_path):
    build_decoder("llama", tmp_path / "target", num_hidden_layers=3)
    build_dflash2(tmp_path / "drafter", hidden=48, vocab=VOCAB)
    runner, notes = cuda_runner()
    net = load_network(tmp_path / "drafter", load_target(tmp_path / "target", runner=runner))
    runner.prepare(net.graphs)
    assert not notes


def test_queries_that_grow_with_their_position():
    x, turn = torch.randn(4, 48, generator=torch.Generator().manual_seed(3)), torch.tensor([0.5, 0.01, 0.0])
    growth = Growth(torch.tensor([1.0, 1.5, 0.25]), 7)
    positions = torch.tensor([6, 7, 20, 300], dtype=torch.int32)
    rows = ForwardBatch(
        torch.zeros(4, dtype=torch.int64), positions, torch.arange(4, dtype=torch.int32), [0, 1, 2, 3, 4]
    )

    def graph(ops):
        return (ops.rotary(ops.given("x", 48), turn, 6, 2.0, growth),)

    runner, notes = cuda_runner()
    (wanted,) = EagerRunner().run(graph, rows, None, {"x": x})
    (found,) = runner.run(graph, rows, None, {"x": x})
    torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-5)
    assert not notes


def test_what_has_no_kernel_runs_by_plain_torch_and_is_said():
    weight = weight_of(torch.randn(9, 64, generator=torch.Generator().manual_seed(3)), "int4")
    runner, notes = cuda_runner()
    rows = ForwardBatch(torch.tensor([8, 2]), *(torch.zeros(2, dtype=torch.int32) for _ in range(2)), [0, 2])
    (found,) = runner.run(lambda ops: (ops.embed(ops.tokens(), weight, 1.0),), rows, None, {})
    torch.testing.assert_close(found, dequantize(weight, None, torch.float32)[[8, 2]])
    assert "embedding in int4" in notes[0]
    assert "plain torch" in notes[0]


def test_mamba_gives_what_plain_torch_gives(tmp_path):
    build_decoder(
        "granite4-h", tmp_path, num_hidden_layers=2, layer_types=["linear_attention", "full_attention"]
    )
    runner, notes = cuda_runner()
    target, text = load_target(tmp_path, runner=runner), [token % VOCAB for token in TEXT[:4]]
    whole = written(target, [4], text)
    torch.testing.assert_close(
        whole, written(load_target(tmp_path, runner=EagerRunner()), [4], text), rtol=1e-4, atol=1e-4
    )
    assert torch.equal(written(target, [1, 2], text[:3]), whole[:3])
    assert not notes


@pytest.mark.parametrize("name", ["qwen3_5", "qwen3_next"])
def test_linear_attention_in_any_chunks_and_behind_refused_drafts(name, tmp_path):
    """Texts of two states beside each other; a state is brought on over kept rows, and never over a refused one."""
    build_decoder(name, tmp_path, num_hidden_layers=2, layer_types=["linear_attention", "full_attention"])
    runner, notes = cuda_runner()
    target = load_target(tmp_path, runner=runner)
    text = [(7 * i + 3) % VOCAB for i in range(13)]
    wanted = written(load_target(tmp_path, runner=EagerRunner()), [13], text)
    whole = written(target, [13], text)
    assert not notes
    torch.testing.assert_close(whole, wanted, rtol=1e-4, atol=1e-4)
    cache, at = cache_of(target), 0
    cache.open(1, text)
    cache.open(2, text[:5])
    for kept, refused in ((1, 0), (8, 2), (1, 2), (3, 0)):
        beside = [(2, text[at : at + 1])] if at < 5 else []
        tail = [*text[at : at + kept], *([1] * refused)]
        with cache.tail([*beside, (1, tail)]) as rows:
            hidden = target.states(rows.rows(), cache)[0].clone()
            found = target.logits(hidden)[len(beside) :][:kept]
            rows.commit([*([1] * len(beside)), kept])
        assert torch.equal(found, whole[at : at + kept])
        at += kept


def test_rows_of_several_texts_and_padding_change_no_bit(dense):
    target, alone = dense
    cache = cache_of(target)
    cache.open(1, TEXT)
    cache.open(2, TEXT[:2])
    with cache.tail([(1, TEXT[:3]), (2, TEXT[3:4])]) as tail:
        target.states(tail.rows(), cache)
        tail.commit([3, 1])
    with cache.tail([(2, [5]), (1, TEXT[3:])]) as tail:  # three rows beside each other, one of another text
        hidden = target.states(tail.rows(), cache)[0].clone()
    assert torch.equal(target.logits(hidden)[1:], alone[3:])


def test_a_row_of_a_tree_sees_its_own_branch(dense):
    target, alone = dense
    cache = cache_of(target)
    cache.grow_branches(2)
    cache.open(1, TEXT)
    with cache.tail([(1, TEXT[:1])]) as tail:
        target.states(tail.rows(), cache)
        tail.commit([1])
    tree = [TEXT[1], 8, TEXT[2], TEXT[3]]  # after the first 8, or TEXT[2] and on
    with cache.tail([(1, tree)], [[-1, -1, 1]]) as tail:
        branched = target.logits(target.states(tail.rows(), cache)[0].clone()).clone()
        tail.commit([3], [[1, 2]])
    with cache.tail([(1, [TEXT[4]])]) as tail:
        last = target.logits(target.states(tail.rows(), cache)[0].clone()).clone()
    assert torch.equal(branched[[0, 2, 3]], alone[1:4])
    assert torch.equal(last, alone[4:])


def test_rows_of_a_picture_see_each_other_where_there_is_a_window(dense):
    found = []
    for target in (gemma("gemma-4-31b", EagerRunner()), dense[0]):
        runner, cache = target.runner, cache_of(target)
        cache.open(1, TEXT)
        with cache.tail([(1, TEXT)]) as tail:
            rows = tail.rows()
            rows.media = MediaRows([], [0, 4, 4, 4, 0])  # rows 1 to 3 are one picture
            found.append(runner.run(target.hidden_graph, rows, cache, {})[0].clone())
    torch.testing.assert_close(found[1], found[0], rtol=1e-4, atol=1e-4)


def test_the_assistant_scores_as_with_plain_torch():
    text = shapes.fields_of("gemma-4-e2b") | SMALL | GEMMAS["gemma-4-e2b"]
    assistant = parse_assistant({
        "model_type": "gemma4_assistant", "backbone_hidden_size": 48, "use_ordered_embeddings": True, "num_centroids": 10,
        "centroid_intermediate_top_k": 3, "text_config": text | {
            "hidden_size": 32, "num_hidden_layers": 2, "num_kv_shared_layers": 2, "hidden_size_per_layer_input": 0,
            "layer_types": [shapes.SLIDING, shapes.FULL], "final_logit_softcapping": None,
        },
    })  # fmt: skip
    found = []
    for runner in (EagerRunner(), cuda_runner()[0]):
        target = gemma("gemma-4-e2b", runner)
        net = GemmaAssistant(assistant, RandomWeights(assistant_shapes(assistant), "float32"), target, runner)
        cache = cache_of(target)
        cache.open(1, TEXT)
        with cache.tail([(1, TEXT[:4])]) as tail:
            hidden = target.states(tail.rows(), cache)[0][-1:].clone()
            tail.commit([4])
        rows = ForwardBatch(torch.tensor([TEXT[4]]), torch.tensor([4], dtype=torch.int32),
                            torch.tensor([cache.slot(1)], dtype=torch.int32), [0, 1])  # fmt: skip
        found.append(net.step(rows, hidden, cache))
    wanted, got = found
    assert torch.equal(got.ids, wanted.ids)
    torch.testing.assert_close(got.logits, wanted.logits, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(got.hidden, wanted.hidden, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    ("kind", "outputs", "inputs"),
    [
        ("float32", 70, 96), ("float32", 66, 1056), ("int8", 66, 1056), ("int8", 70, 256), ("int8", 66, 1152),
        ("int4", 70, 96), ("int4", 66, 1056), ("q4_0", 66, 1056), ("q5_0", 70, 96), ("mxfp4", 20, 96),
    ],
)  # fmt: skip
def test_products_of_few_and_many_rows_have_the_same_bits(kind, outputs, inputs):
    data = torch.randn(outputs, inputs, generator=torch.Generator().manual_seed(3))
    weight = weight_of(data, kind)
    runner = CudaRunner(CPU, torch.float32, trusted=True)

    def graph(ops):
        return (ops.linear(ops.given("x", inputs), weight),)

    x = torch.randn(66, inputs, generator=torch.Generator().manual_seed(4))
    matrix = pack([weight], torch.float32)
    assert matrix.splits == (1 if inputs < 1024 else 2)
    wanted = x @ dequantize(weight, None, torch.float32).T

    def rows(n):
        return ForwardBatch(
            *(torch.zeros(n, dtype=t) for t in (torch.int64, torch.int32, torch.int32)), [0, n]
        )

    (many,) = runner.run(graph, rows(66), None, {"x": x})
    torch.testing.assert_close(many, wanted, rtol=1e-4, atol=1e-4)
    many = many.clone()
    for n in (1, 3):
        (few,) = runner.run(graph, rows(n), None, {"x": x})
        assert torch.equal(few, many[:n])


def weight_of(data, kind):
    if kind == "float32":
        return Weight(data, kind)
    if kind in ("int8", "int4"):
        return quantize(data, kind)
    made = gguf.quants.quantize(data.numpy(), gguf.GGMLQuantizationType[kind.upper()])
    return Weight(torch.from_numpy(made), kind)


def test_heads_that_share_keys_are_cut_into_tiles():
    assert [lanes_of(n) for n in (1, 2, 8, 16, 24, 128, 71)] == [
        (1, 1),
        (2, 1),
        (8, 1),
        (16, 1),
        (12, 2),
        (16, 8),
        (1, 71),
    ]


def test_sections_of_keys_grow_with_the_position_alone():
    assert [section_of(p) for p in (0, 127, 128, 4095, 4096, 4607, 4608)] == [0, 0, 1, 31, 32, 32, 33]


def test_rows_are_padded_to_few_sizes():
    assert [round_up(n) for n in (1, 2, 3, 5, 64, 65, 300, 600)] == [1, 2, 4, 8, 64, 128, 320, 768]


def test_a_weight_that_two_graphs_read_is_packed_once_and_others_are_released():
    runner, _ = cuda_runner()
    target = gemma("gemma-4-31b", runner)
    layer = target.layers[0]
    runner.prepare([target.hidden_graph, target.logits_graph])
    assert layer.attention.q.data.is_meta
    assert not target.embedding.data.is_meta
    assert target.head is target.embedding


def test_inputs_of_another_width_are_refused():
    runner, _ = cuda_runner()
    target = gemma("gemma-4-31b", runner)
    with pytest.raises(UsageError, match="input 'hidden' must be"):
        target.logits(torch.zeros(2, 7))


class Wrong:
    """A runner whose results are off in one way."""

    def __init__(self, inner, change):
        self.inner, self.change = inner, change

    def run(self, graph, rows, cache, given):
        return tuple(self.change(out, rows) for out in self.inner.run(graph, rows, cache, given))


def test_the_self_test_passes_what_is_right_and_names_what_is_not():
    right = EagerRunner(torch.float64)  # whose products of one row and of many are alike, nearly
    rounded = Wrong(right, lambda out, rows: out.float().round(decimals=3).double())
    assert not selftest.failures(rounded, ["float", "int8", "mxfp4"], CPU, torch.float32)
    noisy = Wrong(rounded, lambda out, rows: out + (1e-3 if rows.count == 17 else 0.0))
    assert "beside 16 more rows" in selftest.failures(noisy, ["int4"], CPU, torch.float32)[0]
    broken = Wrong(rounded, lambda out, rows: out * 1.1)
    found = selftest.failures(broken, ["float"], CPU, torch.float32)
    assert "float weights are off by" in found[0]
    assert "attention is off by" in found[1]


def test_a_failed_self_test_is_said_and_plain_torch_runs(monkeypatch):
    monkeypatch.setattr(runners, "failures", lambda *args: ["products with int8 weights are off by 90%"])
    notes = []
    runner = CudaRunner(CPU, torch.float32, note=notes.append)
    target = gemma("gemma-4-31b", runner, "int8")
    runner.prepare([target.hidden_graph, target.logits_graph])
    assert "products with int8 weights are off" in notes[0]
    assert torch.equal(written(target, [5]), written(gemma("gemma-4-31b", EagerRunner(), "int8"), [5]))
