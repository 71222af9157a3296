"""Matrices packed by the makers of quantized checkpoints, with the values of their own code: tests/models/quantized.npz.

The libraries are no dependency of the project, so what they say is kept: a run of this file in an environment of its own

    pip install --no-deps compressed-tensors bitsandbytes mlx mlx-cpu gptqmodel autoawq hqq   # and what they ask for
    python recipes/quantized/make.py tests/models/quantized.npz

writes, for each case, the tensors as a checkpoint has them (bfloat16 and 8-bit floats as their bits), the
quantization_config, and the float32 values. A library that is missing is named, and its cases are left out.
"""

from __future__ import annotations

import importlib.util
import json
import sys
from collections.abc import Callable, Iterator
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

OUT, IN = 32, 256
Case = tuple[str, dict[str, Tensor], dict[str, Any], Tensor]  # name, tensors, quantization_config, values


def weights(dtype: torch.dtype = torch.float32) -> Tensor:
    w = torch.randn(OUT, IN, generator=torch.Generator().manual_seed(5)) * 0.05
    w[3, 17], w[9, :32] = 1.0, 0.0
    return w.to(dtype)


def compressed() -> Iterator[Case]:
    import compressed_tensors.compressors  # noqa: F401
    from compressed_tensors.compressors.base import BaseCompressor
    from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme
    from compressed_tensors.quantization.utils import calculate_qparams

    def case(name: str, form: str, **how: Any) -> Case:
        args = QuantizationArgs(**how)
        scheme = QuantizationScheme(targets=["Linear"], weights=args)
        w = weights(torch.bfloat16)
        size = args.group_size if args.group_size and args.group_size > 0 else IN
        parts = w.view(OUT, -1, size) if args.strategy != "tensor" else w.view(1, 1, -1)
        extra = {}
        if form == "nvfp4-pack-quantized":
            extra["global_scale"] = (6 * 448 / w.abs().max().float()).reshape(1)
        scale, zero = calculate_qparams(parts.amin(-1).float(), parts.amax(-1).float(), args, **extra)
        scale = scale.to(torch.bfloat16) if not extra else scale
        if args.strategy == "tensor":
            scale, zero = scale.reshape(1), zero.reshape(1)
        state = {"weight": w.clone(), "weight_scale": scale, "weight_zero_point": zero}
        if extra:
            state["weight_global_scale"] = extra["global_scale"]
        if args.actorder:
            order = torch.randperm(IN, generator=torch.Generator().manual_seed(1))
            state["weight_g_idx"] = (torch.arange(IN) // size)[order].to(torch.int32)
        compressor = BaseCompressor.get_value_from_registry(form)
        stored = compressor.compress(state, scheme)
        values = compressor.decompress(dict(stored), scheme)["weight"]
        config = {"quant_method": "compressed-tensors", "format": form, "config_groups": {"group_0": {
            "targets": ["Linear"], "weights": json.loads(args.model_dump_json())}}}  # fmt: skip
        return name, dict(stored), config, values

    four = {"num_bits": 4, "type": "int"}
    for size in (32, 64, 128):
        yield case(f"w4a16 g{size}", "pack-quantized", **four, strategy="group", group_size=size)
    yield case("w4a16 channel", "pack-quantized", **four, strategy="channel")
    yield case(
        "w4a16 g128 asymmetric", "pack-quantized", **four, strategy="group", group_size=128, symmetric=False
    )
    yield case("w8a16 g128", "pack-quantized", num_bits=8, type="int", strategy="group", group_size=128)
    yield case("w8a8 channel", "int-quantized", num_bits=8, type="int", strategy="channel")
    yield case("w8a8 tensor", "int-quantized", num_bits=8, type="int", strategy="tensor")
    yield case("fp8 tensor", "float-quantized", num_bits=8, type="float", strategy="tensor")
    yield case("fp8 channel", "float-quantized", num_bits=8, type="float", strategy="channel")
    yield case(
        "nvfp4", "nvfp4-pack-quantized", num_bits=4, type="float", strategy="tensor_group", group_size=16
    )


def bitsandbytes_() -> Iterator[Case]:
    import bitsandbytes.functional as F

    for kind, twice in (("nf4", True), ("nf4", False), ("fp4", True)):
        packed, state = F.quantize_4bit(weights(torch.bfloat16), quant_type=kind, compress_statistics=twice)
        stored = {"weight": packed} | {f"weight.{k}": v for k, v in state.as_dict(packed=True).items()}
        config = {"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_type": kind}
        yield f"{kind} {'twice' if twice else 'once'}", stored, config, F.dequantize_4bit(packed, state)
    w = weights(torch.float16)
    largest = w.abs().amax(1).float()
    q = (
        (w.float() * 127 / largest[:, None]).round().to(torch.int8)
    )  # its quantizer needs a GPU, its arithmetic does not
    values = F.int8_vectorwise_dequant(q, largest)
    yield (
        "llm.int8",
        {"weight": q, "SCB": largest},
        {"quant_method": "bitsandbytes", "load_in_8bit": True},
        values,
    )


def mlx() -> Iterator[Case]:
    import mlx.core as mx

    def torched(x: Any) -> Tensor:
        if x.dtype == mx.bfloat16:
            return torch.from_numpy(np.array(x.view(mx.uint16))).view(torch.bfloat16)
        return torch.from_numpy(np.array(x))

    w = mx.array(weights().numpy())
    for bits, size in ((4, 64), (4, 32), (8, 64), (3, 64), (2, 128), (6, 64), (5, 32)):
        for dtype in (mx.bfloat16, mx.float16) if (bits, size) == (4, 64) else (mx.bfloat16,):
            q, scales, biases = mx.quantize(w.astype(dtype), group_size=size, bits=bits)
            floats = (part.astype(mx.float32) for part in (scales, biases))
            values = mx.dequantize(q, *floats, group_size=size, bits=bits)
            stored = {"weight": torched(q), "scales": torched(scales), "biases": torched(biases)}
            name = f"mlx {bits} bits g{size}{'' if dtype == mx.bfloat16 else ' f16'}"
            yield name, stored, {"group_size": size, "bits": bits}, torched(values)
    q, scales = mx.quantize(w, group_size=32, bits=4, mode="mxfp4")
    values = mx.dequantize(q, scales, group_size=32, bits=4, mode="mxfp4")
    config = {"group_size": 32, "bits": 4, "mode": "mxfp4"}
    yield (
        "mlx mxfp4",
        {"weight": torched(q), "scales": torched(scales)},
        config,
        torched(values.astype(mx.float32)),
    )


def hqq() -> Iterator[Case]:
    from hqq.core.quantize import BaseQuantizeConfig, HQQLinear, Quantizer

    for bits, size, axis in ((4, 64, 1), (4, 64, 0), (8, 128, 1), (2, 32, 1)):
        linear = torch.nn.Linear(IN, OUT, bias=False)
        linear.weight.data = weights()
        config = BaseQuantizeConfig(nbits=bits, group_size=size, axis=axis)
        made = HQQLinear(linear, config, compute_dtype=torch.bfloat16, device="cpu")
        stored = {name: value for name, value in made.state_dict().items() if isinstance(value, Tensor)}
        said = {
            "quant_method": "hqq",
            "quant_config": {"weight_quant_params": {"nbits": bits, "group_size": size, "axis": axis}},
        }
        exact = {
            "scale": made.meta["scale"].float(),
            "zero": made.meta["zero"].float(),
            "compute_dtype": torch.float32,
        }
        values = Quantizer.dequantize(made.W_q, made.meta | exact)  # in bfloat16 it would round twice
        yield f"hqq {bits} bits g{size} axis {axis}", stored, said, values


def _grid(bits: int, size: int, symmetric: bool) -> tuple[Tensor, Tensor]:
    """(scales, zero points), [out, groups]."""
    parts = weights().view(OUT, -1, size)
    low, high = parts.amin(-1).clamp(max=0), parts.amax(-1).clamp(min=0)
    if symmetric:
        high = torch.maximum(-low, high)
        low = -high
    scale = ((high - low) / (2**bits - 1)).clamp(min=1e-6).half()
    zero = torch.full_like(scale, 2 ** (bits - 1)) if symmetric else (-low / scale.float()).round().half()
    return scale, zero.clamp(0, 2**bits - 1)


def gptq() -> Iterator[Case]:
    from gptqmodel.nn_modules.qlinear.torch import TorchLinear
    from gptqmodel.utils.model import convert_gptq_v2_to_v1_format_module

    for bits, size, symmetric, ordered, form in (
        (4, 128, True, False, "gptq"), (4, 128, True, True, "gptq"), (4, 32, False, False, "gptq"),
        (8, 128, True, False, "gptq"), (4, 128, False, False, "gptq_v2"), (4, 64, False, True, "gptq_v2"),
        (3, 64, False, False, "gptq"), (2, 64, True, False, "gptq"),
    ):  # fmt: skip
        linear = torch.nn.Linear(IN, OUT, bias=False)
        linear.weight.data = weights()
        scale, zero = _grid(bits, size, symmetric)
        order = torch.arange(IN) // size
        if ordered:
            order = order[torch.randperm(IN, generator=torch.Generator().manual_seed(2))]
        made = TorchLinear(
            bits=bits,
            group_size=size,
            sym=symmetric,
            desc_act=ordered,
            in_features=IN,
            out_features=OUT,
            bias=False,
            pack_dtype=torch.int32,
            register_buffers=True,
        )
        made.pack_original(linear, scale, zero, order.to(torch.int32))
        made.qzero_format(2)
        made.post_init()
        values = made.dequantize_weight().T
        if form == "gptq":
            from gptqmodel.quantization import METHOD  # noqa: F401

            convert_gptq_v2_to_v1_format_module(
                made, type("C", (), {"bits": bits, "pack_dtype": torch.int32})()
            )
        stored = {name: getattr(made, name).clone() for name in ("qweight", "qzeros", "scales", "g_idx")}
        config = {
            "quant_method": "gptq",
            "bits": bits,
            "group_size": size,
            "sym": symmetric,
            "desc_act": ordered,
            "checkpoint_format": form,
        }
        marks = ((not symmetric, " asymmetric"), (ordered, " desc_act"), (form != "gptq", " v2"))
        name = f"gptq {bits} bits g{size}" + "".join(text for wanted, text in marks if wanted)
        yield name, stored, config, values


def awq() -> Iterator[Case]:
    found = importlib.util.find_spec("awq")
    if found is None or not found.submodule_search_locations:
        raise ImportError("awq")
    folder = Path(next(iter(found.submodule_search_locations)))
    path = folder / "utils" / "packing_utils.py"  # the package itself needs CUDA
    spec = importlib.util.spec_from_file_location("packing_utils", path)
    assert spec is not None
    assert spec.loader is not None
    utils = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(utils)
    for size in (128, 64):
        scale, zero = _grid(4, size, False)
        wide = scale.float().repeat_interleave(size, 1), zero.float().repeat_interleave(size, 1)
        q = (weights() / wide[0] + wide[1]).round().clamp(0, 15).to(torch.int32)

        def packed(values: Tensor) -> Tensor:  # [n, out], as WQLinear_GEMM.from_linear packs columns
            words = torch.zeros(len(values), OUT // 8, dtype=torch.int32)
            for i, at in enumerate(utils.AWQ_ORDER):
                words |= values[:, at::8] << 4 * i
            return words

        stored = {"qweight": packed(q.T.contiguous()), "qzeros": packed(zero.T.to(torch.int32).contiguous()),
                  "scales": scale.T.contiguous()}  # fmt: skip
        values = utils.dequantize_gemm(
            stored["qweight"], stored["qzeros"], stored["scales"].float(), 4, size
        ).T
        config = {"quant_method": "awq", "bits": 4, "group_size": size, "zero_point": True, "version": "gemm"}
        yield f"awq g{size}", stored, config, values


MAKERS: dict[str, Callable[[], Iterator[Case]]] = {
    "compressed-tensors": compressed,
    "bitsandbytes": bitsandbytes_,
    "mlx": mlx,
    "gptqmodel": gptq,
    "autoawq": awq,
    "hqq": hqq,
}


def bits(tensor: Tensor) -> np.ndarray:
    """What numpy can hold: floats that it does not know as their bits."""
    tensor = tensor.detach().contiguous().cpu()
    small = {torch.bfloat16: torch.int16, torch.float8_e4m3fn: torch.uint8}
    return tensor.view(small.get(tensor.dtype, tensor.dtype)).numpy()


def main() -> None:
    held: dict[str, np.ndarray] = {}
    cases: dict[str, Any] = {}
    for maker, make in MAKERS.items():
        try:
            for name, stored, config, values in make():
                cases[name] = {
                    "config": config,
                    "maker": f"{maker} {version(maker)}",
                    "computed": str(values.dtype).removeprefix("torch."),
                    "types": {k: str(v.dtype).removeprefix("torch.") for k, v in stored.items()},
                }
                held |= {f"{name}/{key}": bits(value) for key, value in stored.items()}
                held[f"{name}/="] = values.detach().float().cpu().numpy()
        except ImportError as error:
            print(f"{maker} is left out: {error}")
    held["cases"] = np.array(json.dumps(cases))
    np.savez_compressed(sys.argv[1], **held)
    print(f"{len(cases)} cases: {', '.join(cases)}")


if __name__ == "__main__":
    main()
