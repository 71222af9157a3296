"""What is no number stays none through every native op, and ends its own request only."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from checkpoints import build_target
from paceline.control.fixed import FixedPolicy
from paceline.core import Completion, ForwardBatch, SamplingParams
from paceline.engine.engine import Engine, EngineParts
from paceline.kv.cache import KVCache
from paceline.kv.plan import plan_pages
from paceline.models.registry import load_target
from paceline.ops import native
from paceline.ops.base import Experts, Ops, Value, Weight
from paceline.ops.quantize import quantize, quantizer
from paceline.ops.reference import EagerRunner

pytestmark = pytest.mark.skipif(not native.available(), reason=str(native.why_not()))
NAN, INF = float("nan"), float("inf")
WIDTH = 64


@pytest.fixture(params=["best", "avx2", "generic"], autouse=True)
def instruction_set(request: pytest.FixtureRequest) -> Iterator[None]:
    extension = native._extension()
    assert extension.choose_isa("best")
    best = native.isa()
    if request.param == best or not extension.choose_isa(request.param):
        pytest.skip(f"{request.param} on a processor whose best is {best}")
    yield
    extension.choose_isa("best")


def weight(kind: str, out: int = 40, width: int = WIDTH) -> Weight:
    data = torch.randn(out, width, generator=torch.Generator().manual_seed(1))
    if kind in ("int8", "int4"):
        return quantize(data, kind)  # type: ignore[arg-type]
    return Weight(data.to(getattr(torch, kind)), kind)  # type: ignore[arg-type]


EXPERTS = Experts(
    weight("float32", 6), tuple(weight("float32", 32) for _ in range(6)),
    tuple(weight("float32", WIDTH, 16) for _ in range(6)), 2, "gelu", eps=1e-6, router_scale=torch.ones(WIDTH),
    expert_scale=torch.ones(6),
)  # fmt: skip
GROUPED = Experts(
    EXPERTS.router, EXPERTS.gate_up, EXPERTS.down, 2, "silu", choice_bias=torch.linspace(0.1, -0.1, 6), groups=3,
    kept_groups=2, expert_scale=torch.ones(6),
)  # fmt: skip
BARE = Experts(EXPERTS.router, EXPERTS.gate_up, EXPERTS.down, 2, "silu", renormalize=False)
ONES = {"router_bias": torch.ones(6), "gate_up_bias": torch.ones(6, 32), "down_bias": torch.ones(6, WIDTH)}
BIASED = replace(EXPERTS, activation="clamped", **ONES)
PACKED = Experts(
    EXPERTS.router, tuple(weight("int8", 32) for _ in range(6)), tuple(weight("int8", WIDTH, 16) for _ in range(6)),
    2, "gelu", eps=1e-6, router_scale=torch.ones(WIDTH), expert_scale=torch.ones(6),
)  # fmt: skip
FREQUENCIES, OF_A_HEAD = torch.logspace(0, -3, 16), torch.ones(16)
PLAIN: dict[str, Callable[[Ops, Value], Value]] = {  # a column of the output for each of the input
    "rotary": lambda ops, x: ops.rotary(x, FREQUENCIES, 2),
    "part rotary": lambda ops, x: ops.rotary(x, FREQUENCIES[:6], 2, 1.3),
    "norm of heads": lambda ops, x: ops.rms_norm(x, OF_A_HEAD, 1e-6, 4),
    "add": lambda ops, x: ops.add(x, ops.scale(x, 2.0)),
    "mul": lambda ops, x: ops.mul(x, ops.scale(x, 2.0)),
    "concat": lambda ops, x: ops.concat(x, ops.scale(x, 2.0)),
}
OPS: dict[str, Callable[[Ops, Value], Value]] = PLAIN | {
    "packed experts": lambda ops, x: ops.moe(x, x, PACKED),
    "gelu": lambda ops, x: ops.gelu(x),
    "gated_gelu": lambda ops, x: ops.gated(x, x, "gelu"),
    "gated_silu": lambda ops, x: ops.gated(x, x, "silu"),
    "bias": lambda ops, x: ops.linear(x, EXPERTS.router, torch.ones(6)),
    "softcap": lambda ops, x: ops.softcap(x, 30.0),
    "norm": lambda ops, x: ops.rms_norm(x, None, 1e-6),
    "experts": lambda ops, x: ops.moe(x, x, EXPERTS),
    "grouped experts": lambda ops, x: ops.moe(x, x, GROUPED),
    "biased experts": lambda ops, x: ops.moe(x, x, BIASED),
    "bare experts": lambda ops, x: ops.moe(x, x, BARE),
    **{
        f"linear {kind}": (lambda w: lambda ops, x: ops.linear(x, w))(weight(kind))
        for kind in ("float32", "bfloat16", "float16", "int8", "int4")
    },
}  # fmt: skip


def rows_of(count: int) -> ForwardBatch:
    positions = torch.arange(count, dtype=torch.int32)
    return ForwardBatch(positions.long(), positions, torch.zeros(count, dtype=torch.int32), [0, count])


@pytest.mark.parametrize("column", [0, 17, WIDTH - 1])
@pytest.mark.parametrize("name", sorted(OPS))
def test_nan_of_a_row_stays_and_its_neighbours_keep_their_bits(name: str, column: int) -> None:
    x = torch.randn(6, WIDTH, generator=torch.Generator().manual_seed(2))
    runner = native.NativeRunner(2)

    def graph(ops: Ops) -> tuple[Value, ...]:
        return (OPS[name](ops, ops.given("x", WIDTH)),)

    clean = runner.run(graph, rows_of(6), None, {"x": x})[0].clone()
    assert clean.isfinite().all()
    broken = x.clone()
    broken[2, column] = NAN
    got = runner.run(graph, rows_of(6), None, {"x": broken})[0]
    if name in PLAIN or name in ("gelu", "gated_gelu", "gated_silu", "softcap"):
        assert got[2, column].isnan()
    else:
        assert got[2].isnan().all()
    keep = [0, 1, 3, 4, 5]
    assert torch.equal(got[keep], clean[keep])


@pytest.mark.parametrize("kind", ["int8", "int4"])
@pytest.mark.parametrize("bad", [INF, -INF])
def test_no_integer_stands_for_an_infinity(kind: str, bad: float) -> None:
    x = torch.ones(2, WIDTH)
    x[1, 5] = bad
    got = native.NativeRunner(2).run(
        lambda ops: (ops.linear(ops.given("x", WIDTH), weight(kind)),), rows_of(2), None, {"x": x}
    )[0]
    assert got[0].isfinite().all()
    assert not got[1].isfinite().any()


def engine(folder: Path, kind: str | None, *, eager: bool = False) -> Engine:
    runner = EagerRunner(torch.float32) if eager else native.NativeRunner(2)
    transform = quantizer(kind) if kind in ("int8", "int4") else None  # type: ignore[arg-type]
    dtype = torch.bfloat16 if kind == "bfloat16" else None
    target = load_target(folder, runner=runner, transform=transform, dtype=dtype)
    pages = plan_pages(target.layout, budget=2**24, itemsize=4, max_sequences=4, max_tokens=64, chunk=64)
    cache = KVCache(
        target.layout, pages, max_sequences=4, max_tokens=64, dtype=target.kv_dtype, device=target.device
    )
    return Engine(
        EngineParts(
            target=target, cache=cache, drafters={}, default_drafter="none", policy=FixedPolicy(0),
            max_batch=4, prefix_cache=False,
        )
    )  # fmt: skip


def spoil(folder: Path, change: Callable[[dict[str, torch.Tensor]], Any]) -> None:
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


def run(one: Engine, prompts: list[list[int]]) -> list[Completion]:
    params = SamplingParams(max_tokens=6, ignore_eos=True, logprobs=0)
    return [c[0] for c in one.run({str(i): (p, params) for i, p in enumerate(prompts)}).values()]


SPOILT: dict[str, Callable[[dict[str, torch.Tensor]], Any]] = {
    "all": lambda t: [v.fill_(NAN) for v in t.values()],
    "mlp.down": lambda t: t["model.layers.1.mlp.down_proj.weight"][3].fill_(NAN),
    "final norm": lambda t: t["model.norm.weight"].fill_(NAN),
    "final norm inf": lambda t: t["model.norm.weight"].fill_(INF),
    "keys": lambda t: t["model.layers.0.self_attn.k_proj.weight"].fill_(NAN),
    "values": lambda t: t["model.layers.2.self_attn.v_proj.weight"].fill_(NAN),
}


SPOILT_AND_KIND = [
    (where, kind)
    for where in sorted(SPOILT)
    for kind in (None, "bfloat16", "int8")
    if kind != "int8" or where.startswith("final norm")  # other weights are refused when they are quantized
]


@pytest.mark.parametrize(("where", "kind"), SPOILT_AND_KIND)
def test_spoilt_weights_are_an_error_and_no_text(where: str, kind: str | None, tmp_path: Path) -> None:
    build_target("dense", tmp_path)
    spoil(tmp_path, SPOILT[where])
    for eager in (False, True):
        (text,) = run(engine(tmp_path, kind, eager=eager), [[5, 7, 9]])
        assert (text.finish_reason, text.token_ids) == ("error", []), eager
        assert "NaN" in (text.error or "")


@pytest.mark.parametrize("where", ["router", "expert"])
def test_spoilt_experts_are_an_error(where: str, tmp_path: Path) -> None:
    build_target("26b", tmp_path)
    name = {"router": "router.proj.weight", "expert": "experts.down_proj"}[where]
    spoil(tmp_path, lambda t: t[f"model.layers.1.{name}"].fill_(NAN))
    (text,) = run(engine(tmp_path, None), [[5, 7, 9]])
    assert text.finish_reason == "error"


def test_nan_of_one_request_leaves_its_neighbours_untouched(tmp_path: Path) -> None:
    """Token 3's per-layer embedding is NaN: it poisons the texts that hold it, and nobody else."""
    build_target("e2b", tmp_path)
    others = [[5, 7, 9, 11], [13, 15]]
    expected = run(engine(tmp_path, None), others)
    spoil(tmp_path, lambda t: t["model.embed_tokens_per_layer.weight"][3].fill_(NAN))
    one = engine(tmp_path, None)
    for _ in range(2):  # its pages are used again
        first, poisoned, second = run(one, [others[0], [5, 3, 6], others[1]])
        assert poisoned.finish_reason == "error"
        for got, want in zip((first, second), expected, strict=True):
            assert got.token_ids == want.token_ids
            assert [p.raw for p in got.logprobs or ()] == [p.raw for p in want.logprobs or ()]
