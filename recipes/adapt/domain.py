"""Two domains as JSONL: `new`, a plant's event log that no model has seen, and `old`, Python source as in demo.

    python domain.py OUT          # writes new.jsonl, new-held.jsonl, old.jsonl, old-held.jsonl

The log is made up here: a line of telemetry and the SQL and YAML that follow from it. Half of it follows from what
stands above (copying, fixed words), half is drawn, so a target that has learnt it is still uncertain in places.
"""

from __future__ import annotations

import json
import random
import sys
import sysconfig
from pathlib import Path

UNITS = ("pump", "valve", "turbine", "feeder", "chiller", "boiler", "rotor", "mixer")
STATES = {
    "NOMINAL": ("INFO ", "none", "log only"),
    "DRIFTING": ("WARN ", "recalibrate", "recalibrate within 6 h"),
    "SATURATED": ("WARN ", "throttle", "reduce inflow by 15 percent"),
    "TRIPPED": ("ALARM", "isolate", "close both isolation valves and call the shift lead"),
}
QUANTITIES = {"pressure": "kPa", "temperature": "degC", "flow": "l/min", "vibration": "mm/s"}


def event(draw: random.Random, when: int) -> str:
    """One event: the log line, the statement that stores it and the work order it causes."""
    unit, number = draw.choice(UNITS), draw.randint(1, 12)
    state = draw.choices(tuple(STATES), (6, 3, 2, 1))[0]
    quantity = draw.choice(tuple(QUANTITIES))
    value = f"{draw.uniform(1, 99):.1f}"
    level, action, order = STATES[state]
    stamp = f"2031-{1 + when // 40000 % 12:02d}-{1 + when // 1440 % 28:02d}T{when // 60 % 24:02d}:{when % 60:02d}:00Z"
    name = f"{unit}-{number}"
    lines = [
        f"{stamp} {level} unit={name} quantity={quantity} value={value}{QUANTITIES[quantity]} state={state}",
        "INSERT INTO readings (stamp, unit, quantity, value, state)",
        f"  VALUES ('{stamp}', '{name}', '{quantity}', {value}, '{state}');",
    ]
    if action != "none":
        lines += [
            "work_order:", f"  unit: {name}", f"  raised: {stamp}", f"  action: {action}", f"  text: {order}",
            f"  reason: {quantity} {state.lower()} at {value} {QUANTITIES[quantity]}",
        ]  # fmt: skip
    return "\n".join(lines) + "\n"


def log_texts(count: int, seed: int) -> list[str]:
    """`count` excerpts of the log, a few events each."""
    draw = random.Random(seed)
    texts = []
    for _ in range(count):
        when = draw.randrange(480_000)
        events = []
        for _ in range(draw.randint(4, 6)):
            when += draw.randint(1, 9)
            events.append(event(draw, when))
        texts.append("".join(events))
    return texts


def python_texts(count: int, seed: int, size: int = 1200) -> list[str]:
    """`count` pieces of the standard library's source, cut at line ends."""
    draw = random.Random(seed)
    folder = Path(sysconfig.get_paths()["stdlib"])
    files = sorted(p for p in folder.glob("*.py") if p.stat().st_size > 4 * size)
    texts: list[str] = []
    while len(texts) < count:
        source = draw.choice(files).read_text(encoding="utf-8", errors="ignore")
        start = source.find("\n", draw.randrange(len(source) - 2 * size)) + 1
        texts.append(source[start : start + size].rpartition("\n")[0] + "\n")
    return texts


def write(path: Path, texts: list[str]) -> None:
    """One text per line."""
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts), encoding="utf-8")


def main(out: Path, train: int = 600, held: int = 40) -> None:
    out.mkdir(parents=True, exist_ok=True)
    write(out / "new.jsonl", log_texts(train, 1))
    write(out / "new-held.jsonl", log_texts(held, 2))
    texts = python_texts(train + held, 3)
    write(out / "old.jsonl", texts[:train])
    write(out / "old-held.jsonl", texts[train:])


if __name__ == "__main__":
    main(Path(sys.argv[1]))
