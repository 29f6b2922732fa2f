"""Commands that a sweep over pairs can run without any model: each writes the file it promises."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Sequence
from pathlib import Path

from kvbench.scale.work import Commands, Done

RESULT = {"calibrate": "moments/manifest.json", "evaluate": "run/provenance.json"}


def perform(arguments: Sequence[str], log: Path) -> Done:
    place, command, source = log.parent, arguments[0], arguments[1]
    with log.open("a") as file:
        file.write(" ".join(arguments) + "\n")
    if command == "check" and source == "unfit":
        return Done(4, "printed", "")
    if command == "calibrate" and source == "bad":
        return Done(2, "", "no such text")
    if command == "calibrate" and source == "flaky" and not (place / "tried").exists():
        (place / "tried").touch()
        return Done(1, "", "a crash")
    if command == "calibrate" and source == "killed" and not (place / "tried").exists():
        (place / "tried").touch()
        os.kill(os.getpid(), signal.SIGKILL)
    if command == "calibrate" and source == "slow" and not (place / "tried").exists():
        # Until the test has killed this process; the second attempt goes through at once.
        (place / "tried").touch()
        time.sleep(60)
    if command in RESULT:
        (place / RESULT[command]).parent.mkdir(parents=True, exist_ok=True)
        (place / RESULT[command]).write_text("{}")
    return Done(0)


def reasons(printed: str) -> str:
    return f"because of what was {printed}"


def summarise(place: Path) -> tuple[str | None, str | None]:
    return "supports deploying", place.name


COMMANDS = Commands(perform, reasons, summarise)
