"""The instructions by which integers become bfloat16 on a card, carried out one by one: no interpreter knows them."""

from __future__ import annotations

import ast
import inspect
import re
import struct

import pytest
import torch

from paceline.ops.cuda.kernels import linear
from paceline.ops.cuda.weights import in_words

BOTH = 0xFFFFFFFF


def instructions(name: str) -> list[tuple[str, list[str]]]:
    """(operation, operands) of the assembly in a kernel's function."""
    tree = ast.parse(inspect.getsource(linear))
    function = next(n for n in tree.body if isinstance(n, ast.FunctionDef) and n.name == name)
    texts = [n.value for n in ast.walk(function) if isinstance(n, ast.Constant) and isinstance(n.value, str)]
    text = next(t for t in texts if "prmt" in t).strip("{} \n")
    lines = [line.strip() for line in text.split(";")]
    found = [re.split(r"\s+", line, maxsplit=1) for line in lines if line and not line.startswith(".reg")]
    return [(op, [o.strip() for o in re.findall(r"\{[^}]*\}|[^,\s][^,]*", rest)]) for op, rest in found]


def halves(x: int) -> torch.Tensor:
    return torch.frombuffer(bytearray(struct.pack("<I", x)), dtype=torch.bfloat16)


def execute(name: str, inputs: dict[str, int]) -> dict[str, int]:
    """The registers after all instructions; operands $n by number."""
    held = dict(inputs)

    def value(operand: str) -> int:
        return (
            int(operand, 16)
            if operand.startswith("0x")
            else int(operand)
            if operand.isdigit()
            else held[operand]
        )

    for op, (to, *operands) in instructions(name):
        given = [value(operand) for operand in operands]
        if op == "prmt.b32":
            both = given[0] | given[1] << 32
            places = [given[2] >> 4 * i & 15 for i in range(4)]
            assert max(places) < 8, "no signs are spread"
            result = sum((both >> 8 * place & 255) << 8 * i for i, place in enumerate(places))
        elif op == "lop3.b32":
            assert given[3] == 0xEA, "(a and b) or c"
            result = given[0] & given[1] | given[2]
        elif op == "shr.u32":
            result = given[0] >> given[1]
        elif op == "shl.b32":
            result = given[0] << given[1] & BOTH
        elif op == "and.b32":
            result = given[0] & given[1]
        elif op == "mov.b64":
            low, high = (part.strip() for part in to.strip("{}").split(","))
            held[low], held[high] = given[0] & BOTH, given[0] >> 32
            continue
        elif op == "mov.b32":
            result = given[0]
        else:
            kind, *rest = op.split(".")
            assert rest == ["rn", "bf16x2"]
            a, b = halves(given[0]), halves(given[1])
            done = {"add": torch.add, "sub": torch.sub, "mul": torch.mul}[kind](a, b)
            (result,) = struct.unpack("<I", done.view(torch.uint8).numpy().tobytes())
        held[to] = result
    return held


@pytest.mark.parametrize("seed", range(20))
def test_nibbles_of_two_words_are_neighbours_times_their_scales(seed):
    """A block of 256 inputs in words: from words j and j + 1 come inputs j and j + 1 of each 32."""
    generator = torch.Generator().manual_seed(seed)
    values = torch.randint(0, 16, (1, 256), generator=generator)
    packed = (values[:, 0::2] | values[:, 1::2] << 4).to(torch.uint8)
    words = in_words(packed, 256, 4)[0].tolist()
    scales = (torch.rand(8, generator=generator) * 0.3).to(torch.bfloat16)
    low, high = scales.view(torch.uint8).view(torch.int64).tolist()
    j = 2 * (seed % 16)
    at = {"$8": words[j] & BOTH, "$9": words[j + 1] & BOTH} | dict.fromkeys(("$10", "$11"), low)
    done = execute("_nibbles", at | dict.fromkeys(("$12", "$13"), high))
    for i in range(8):
        pair = (values[0, 32 * i + j : 32 * i + j + 2] - 8).to(torch.bfloat16) * scales[i]
        assert torch.equal(halves(done[f"${i}"]), pair)


def test_floats_of_four_bits_are_neighbours_times_their_scales():
    """Every value at every place of a word, with exponents from the smallest to the largest that is kept."""
    exact = torch.tensor(
        [0.0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6], dtype=torch.float64
    )
    generator = torch.Generator().manual_seed(1)
    for j in range(0, 32, 2):
        values = torch.randint(0, 16, (1, 256), generator=generator)
        packed = (values[:, 0::2] | values[:, 1::2] << 4).to(torch.uint8)
        words = in_words(packed, 256, 4)[0].tolist()
        exponents = (
            torch.randint(1, 129, (8,), generator=generator)
            if j
            else torch.tensor([0, 1, 2, 120, 125, 126, 127, 128])
        )
        scales = torch.ldexp(torch.ones(8), exponents - 1).to(torch.bfloat16)
        low, high = scales.view(torch.uint8).view(torch.int64).tolist()
        at = {"$8": words[j] & BOTH, "$9": words[j + 1] & BOTH} | dict.fromkeys(("$10", "$11"), low)
        done = execute("_fractions", at | dict.fromkeys(("$12", "$13"), high))
        for i in range(8):
            pair = exact[values[0, 32 * i + j : 32 * i + j + 2]] * 2.0 ** (int(exponents[i]) - 127)
            assert torch.equal(halves(done[f"${i}"]).double(), pair)


@pytest.mark.parametrize("block", [128, 256])
def test_bytes_of_two_words_are_neighbours(block):
    """All 256 values of a byte."""
    values = torch.arange(-128, 128, dtype=torch.int8)[
        torch.randperm(256, generator=torch.Generator().manual_seed(1))
    ]
    words = in_words(values[None], block, 8)[0].tolist()
    width = block // 4
    for j in range(0, 64, 2):
        done = execute("_bytes", {"$4": words[j] & BOTH, "$5": words[j + 1] & BOTH})
        for i in range(4):
            at = j // width * block + i * width + j % width
            assert torch.equal(halves(done[f"${i}"]), values[at : at + 2].to(torch.bfloat16))
