"""Errors that are put into a copy of `native/`, to see that each is found."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Plant:
    """`old` stands once in `native/file` and becomes `new`. Found by a `report` of that sanitizer, or by other bits."""

    name: str
    sanitizer: str
    file: str
    old: str
    new: str
    report: str  # words of the report; "": by bits
    model: str = "gemma4-dense"  # in which it shows


PLANTS = (
    Plant(
        "a race in the pool",
        "thread",
        "pool.cpp",
        "if (mine) done.fetch_add(mine, std::memory_order_acq_rel);",
        "if (mine) done.fetch_add(mine, std::memory_order_relaxed);",
        "data race",
    ),
    Plant(
        "a slice left out",
        "address",
        "pool.cpp",
        "job->chunk(s, index, thread);",
        "if (t == 0) job->chunk(s, index, thread);",
        "",
    ),
    Plant(
        "memory that is not set",
        "address",
        "attention.cpp",
        "left_.reset(new std::atomic<int>[left]());",
        "left_.reset(new std::atomic<int>[left]);",
        "",
        "long",
    ),
    Plant(
        "beyond the end of a buffer",
        "address",
        "attention.cpp",
        "partial_.resize(partial);",
        "partial_.resize(partial / 2);",
        "heap-buffer-overflow",
        "long",
    ),
    Plant(
        "beyond the end of a weight",
        "address",
        "bind.cpp",
        "return (out + kernels().tile - 1) / kernels().tile * kernels().tile_bytes(kind, in);",
        "return (out + kernels().tile - 1) / kernels().tile * kernels().tile_bytes(kind, in) - 4;",
        "heap-buffer-overflow",
    ),
    Plant(
        "an integer that overflows",
        "address",
        "program.cpp",
        "threads_ = Pool::instance().size();",
        "threads_ = Pool::instance().size();\n  volatile int most = 0x7fffffff;\n  most = most + threads_;",
        "signed integer overflow",
    ),
)
