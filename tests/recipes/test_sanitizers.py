"""The recipe that runs native code under sanitizers: its plants fit the code, and a report is told from noise."""

from __future__ import annotations

import importlib.util
import sys
from dataclasses import replace
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).resolve().parents[2]
FOLDER = ROOT / "recipes" / "sanitizers"

RACE = """==================
WARNING: ThreadSanitizer: data race (pid=7)
  Write of size 8 at 0x7b0400000010 by main thread:
    #0 paceline::avx512::store(float*, float) native/simd.h:80 (_native.cpython-311-x86_64-linux-gnu.so+0x1)
  Previous read of size 8 at 0x7b0400000010 by thread T1:
    #0 paceline::Program::chunk(int, int, int) native/program.cpp:200 (_native.cpython-311-x86_64-linux-gnu.so+0x2)
SUMMARY: ThreadSanitizer: data race native/simd.h:80 in paceline::avx512::store(float*, float)
==================
"""
FOREIGN = """==================
WARNING: ThreadSanitizer: data race (pid=7)
  Write of size 8 at 0x7b0400000010 by main thread:
    #0 gomp_team_start <null> (libgomp.so.1+0x1)
SUMMARY: ThreadSanitizer: data race (libgomp.so.1+0x1) in gomp_team_start
==================
"""
BEYOND = """=================================================================
==12==ERROR: AddressSanitizer: heap-buffer-overflow on address 0x602000000011 at pc 0x1 bp 0x2 sp 0x3
WRITE of size 4 at 0x602000000011 thread T0
    #0 0x1 in prepare_int16 native/linear.h:330
"""
OVERFLOW = """native/program.cpp:160:18: runtime error: signed integer overflow: 2147483647 + 2
    #0 0x1 in paceline::Program::replay(paceline::Rows const&) native/program.cpp:160
"""
FOREIGN_OVERFLOW = (
    "/usr/include/c++/12/bits/x.h:1:2: runtime error: signed integer overflow\n    #0 0x1 in f libtorch.so\n"
)


@pytest.fixture(scope="module")
def run() -> ModuleType:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "path", [str(FOLDER), *sys.path])
        spec = importlib.util.spec_from_file_location("sanitizers_run", FOLDER / "run.py")
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        patch.setitem(sys.modules, spec.name, module)
        spec.loader.exec_module(module)
    return module


def test_each_plant_fits_the_code_as_it_is(run: ModuleType) -> None:
    for plant in run.PLANTS:
        text = (ROOT / "native" / plant.file).read_text(encoding="utf-8")
        changed = run.planted(text, plant)
        assert changed != text
        assert plant.new in changed
        with pytest.raises(ValueError, match="mend the plant"):
            run.planted(text.replace(plant.old, ""), plant)
    assert {plant.sanitizer for plant in run.PLANTS} == set(run.SANITIZERS)


def test_reports_are_those_of_our_code(run: ModuleType) -> None:
    assert run.reports("") == []
    assert run.reports(FOREIGN + FOREIGN_OVERFLOW) == []
    for text in (RACE, BEYOND, OVERFLOW):
        assert len(run.reports(text)) == 1
        assert len(run.reports(FOREIGN + text + FOREIGN_OVERFLOW)) == 1
    assert len(run.reports(RACE + FOREIGN + RACE + OVERFLOW)) == 3


def test_what_counts_as_found(run: ModuleType) -> None:
    told = {"dense": {"logits": "a"}}
    clean = run.Run("x", 0, '{"model": "dense", "bits": {"logits": "a"}}\n', "", [], 1.0)
    other = replace(clean, out=clean.out.replace('"a"', '"b"'))
    raced = replace(clean, reports=run.reports(RACE))
    by_bits = next(plant for plant in run.PLANTS if not plant.report)
    by_report = next(plant for plant in run.PLANTS if plant.report == "data race")
    assert [run.found(one, by_bits, told) for one in (clean, other)] == [False, True]
    assert [run.found(one, by_report, told) for one in (clean, other, raced)] == [False, False, True]
    assert run.complaint(clean, told) == ""
    assert run.complaint(raced, told) == "1 reports"
    assert run.complaint(other, told) == "other bits of dense"
    assert run.complaint(replace(clean, out="", code=1), told) == "other bits of dense"
    assert run.complaint(replace(clean, code=1), None) == "ended with 1"
