"""Places where a run cannot write or must not, and machines that change under it: disks, links, clocks, locales.

The disks are tmpfs mounts of a limited size, so this study needs Linux and root.
"""

from __future__ import annotations

import io
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from multiprocessing import get_context
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from kills import prepare
from tally import Finding, Tally

from compression_runs import snapshot, weights
from neuronmm.cli import main
from neuronmm.compression import fidelity, memory

RECIPE = "method: fisher\nrefine: 'off'\ncalibration_rows: 6\ncalibration_length: 12\nalign: 2\nrecover: factors\n"
SIZES = 10
Cases = Iterator[tuple[str, Callable[[], str | None]]]
PATIENCE = 1200  # seconds for a run of seconds, on however busy a machine


@contextmanager
def disk(folder: Path, kilobytes: int) -> Iterator[Path]:
    """Mount an empty disk of a limited size on ``folder``."""
    folder.mkdir(exist_ok=True)
    subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={kilobytes}k", "tmpfs", folder], check=True)
    try:
        yield folder
    finally:
        subprocess.run(["umount", folder], check=True)


def remount(folder: Path, option: str) -> None:
    """Change the size of a disk, or whether it can be written."""
    subprocess.run(["mount", "-o", f"remount,{option}", folder], check=True)


def words(work: Path, out: Path, *more: str) -> list[str]:
    """Return a ``compress`` of the model in ``work`` that writes every kind of file."""
    text = ["--calibration", str(work / "text.txt"), "--recipe", str(work / "recipe.yaml")]
    return ["compress", str(work / "model"), "-o", str(out), *text, *more]


def ended(command: list[str], prepare: Callable[[], Any] = lambda: None) -> tuple[int, str]:
    """Run a command in a forked process and return its status and what it wrote to stderr."""
    connection, theirs = get_context("fork").Pipe()

    def child() -> None:
        torch.set_num_threads(1)
        fidelity._NEW_TOKENS = 4
        prepare()
        err = io.StringIO()
        with redirect_stdout(io.StringIO()), redirect_stderr(err):
            status = main(command)
        theirs.send((status, err.getvalue()))

    process = get_context("fork").Process(target=child)
    process.start()
    theirs.close()
    try:
        if not connection.poll(PATIENCE):
            raise Finding(f"{command[0]} hangs")
        result: tuple[int, str] = connection.recv()
    except EOFError:
        raise Finding(f"{command[0]} ended with a traceback") from None
    finally:
        process.kill()
        process.join()
    return result


def refused(command: list[str], reason: str, prepare: Callable[[], Any] = lambda: None) -> str:
    """Check that a command ends with one clear line that gives a reason, and return the line."""
    status, err = ended(command, prepare)
    line = err.rstrip("\n").split("\n")[-1]
    if status not in (1, 2) or "Traceback" in err or not line.startswith("neuronmm") or reason not in line:
        raise Finding(f"status {status}, not one line with {reason!r}: {err[-500:]!r}")
    return line


def succeeds(command: list[str], prepare: Callable[[], Any] = lambda: None) -> None:
    """Check that a command succeeds."""
    status, err = ended(command, prepare)
    if status:
        raise Finding(f"status {status}: {err[-500:]!r}")


def same(out: Path, expected: dict[str, bytes]) -> None:
    """Check that a checkpoint has the expected bytes."""
    if weights(out) != expected:
        raise Finding(f"{out} has other bytes")


def study(work: Path) -> dict[str, Any]:
    """Run every case."""
    expected = _prepare(work)
    kinds = {
        "disk full": _full_disks(work, expected, lambda: None),
        "read-only": _read_only(work),
        "OUT is or is in an input": _inputs(work),
        "symlinks": _links(work, expected),
        "two runs on one OUT": _two_runs(work, expected),
        "clock": _clocks(work, expected),
        "locale": _locales(work, expected),
    }
    return {name: _counted(work, cases) for name, cases in kinds.items()}


def full_disks(work: Path, plant: Callable[[], Any]) -> dict[str, Any]:
    """Run the cases of full disks; ``plant`` is called in each process that writes to one, to plant a fault."""
    return _counted(work, _full_disks(work, _prepare(work), plant))


def _prepare(work: Path) -> dict[str, bytes]:
    """Write the model and a compressed one, and return the files of the compressed one."""
    prepare(work)
    (work / "recipe.yaml").write_text(RECIPE)
    succeeds(words(work, work / "whole"))
    return weights(work / "whole")


def _counted(work: Path, cases: Cases) -> dict[str, Any]:
    """Count how the cases end; the model has to stay as it is."""
    before, tally = snapshot(work / "model"), Tally()
    for case, check in cases:
        tally.add(case, check)
    result = tally.to_dict()
    if snapshot(work / "model") != before:
        result["findings"].append("the model has changed")
    return result


def _full_disks(work: Path, expected: dict[str, bytes], plant: Callable[[], Any]) -> Cases:
    """A disk that fills during the run, at ten sizes: the check at the beginning is told that there is room."""
    room = 2 * sum(map(len, expected.values())) // 1024 + 200

    def full(size: int) -> str:
        usage = shutil.disk_usage(work)

        def blind() -> None:
            patch.object(memory.shutil, "disk_usage", lambda path: usage).start()
            plant()

        with disk(work / "disk", size):
            out = work / "disk" / "out"
            line = refused(words(work, out), "space", blind)
            if out.exists():
                raise Finding("OUT exists")
            remount(work / "disk", f"size={100 * room}k")
            succeeds(words(work, out, "--resume"))
            same(out, expected)
        return line

    for number in range(SIZES):
        size = 8 + room * number // (2 * SIZES)
        yield f"{size} kB", lambda size=size: full(size)


def _read_only(work: Path) -> Cases:
    def parent() -> str:
        with disk(work / "disk", 4000) as folder:
            remount(folder, "ro")
            return refused(words(work, folder / "out"), "Read-only file system")

    def becomes() -> str:
        with disk(work / "disk", 4000) as folder:
            (folder / "out").mkdir()
            (folder / "out.partial").mkdir()
            remount(folder, "ro")
            return refused(words(work, folder / "out"), "ead-only")

    yield "the folder above OUT", parent
    yield "OUT and its work folder", becomes


def _inputs(work: Path) -> Cases:
    model = work / "model"
    for name, out in {
        "OUT is MODEL": model,
        "OUT is in MODEL": model / "out",
        "OUT is deep in MODEL": model / "a" / "b",
        "OUT holds MODEL": work,
        "OUT is MODEL by another path": work / "low" / ".." / "model",
    }.items():
        for flags in ([], ["--force"], ["--resume", "--force"]):
            yield (
                f"{name} {flags}",
                lambda out=out, flags=flags: refused(words(work, out, *flags), "which this run reads"),
            )


def _links(work: Path, expected: dict[str, bytes]) -> Cases:
    def linked(target: str, name: str, reason: str | None) -> str | None:
        link = work / name
        link.symlink_to(target)
        try:
            if reason is not None:
                return refused(words(work, work / name, "--force"), reason)
            succeeds(words(work, work / name, "--force"))
            same(link, expected)
        finally:
            link.unlink()
            shutil.rmtree(work / "elsewhere", ignore_errors=True)
        return None

    def to_folder() -> str | None:
        (work / "elsewhere").mkdir()
        return linked("elsewhere", "link", None)

    def work_folder() -> str:
        (work / "new.partial").symlink_to("model")
        try:
            return refused(words(work, work / "new"), "which this run reads")
        finally:
            (work / "new.partial").unlink()

    yield "OUT links to an empty folder", to_folder
    yield "OUT links to MODEL", lambda: linked("model", "link", "which this run reads")
    yield "OUT links nowhere", lambda: linked("nowhere", "link", "does not exist")
    yield "OUT links to itself", lambda: linked("link", "link", "link")
    yield "the work folder is a link", work_folder


def _two_runs(work: Path, expected: dict[str, bytes]) -> Cases:
    def race(number: int) -> str:
        out = work / f"race{number}"
        with get_context("fork").Pool(2) as pool:
            ends = pool.starmap(_race, [(words(work, out),)] * 2)
        lines = [err.rstrip("\n").split("\n")[-1] for status, err in ends if status]
        same(out, expected)
        if len(lines) != 1 or not any(reason in lines[0] for reason in ("at work there", "exists already")):
            raise Finding(f"{ends}")
        return lines[0]

    for number in range(10):
        yield f"race {number}", lambda number=number: race(number)


def _race(command: list[str]) -> tuple[int, str]:
    torch.set_num_threads(1)
    fidelity._NEW_TOKENS = 4
    err = io.StringIO()
    with redirect_stdout(io.StringIO()), redirect_stderr(err):
        status = main(command)
    return status, err.getvalue()


def _clocks(work: Path, expected: dict[str, bytes]) -> Cases:
    """An interrupted run is resumed while the clock says 1970 or 2100, and its files are from the other end of time."""

    def resumed(now: float, written: float, zone: str) -> None:
        out = work / f"clock{now}{written}"

        def stop() -> None:
            patch("neuronmm.compression.pipeline.last_steps", side_effect=KeyboardInterrupt).start()

        def other_clock() -> None:
            os.environ["TZ"] = zone
            patch("time.time", lambda: now).start()
            patch("time.time_ns", lambda: int(now * 1e9)).start()

        if ended(words(work, out), stop)[0] != 130:
            raise Finding("the run was not interrupted")
        for file in Path(f"{out}.partial").rglob("*"):
            os.utime(file, (written, written))
        succeeds(words(work, out, "--resume"), other_clock)
        same(out, expected)

    for now, written, zone in ((0.0, 4e9, "UTC"), (4e9, 0.0, "Asia/Kathmandu"), (1e9, 1e9 + 9, "America/St_Johns")):
        yield f"now {now:g}, files of {written:g}, {zone}", lambda n=now, w=written, z=zone: resumed(n, w, z)


def _locales(work: Path, expected: dict[str, bytes]) -> Cases:
    """Whole processes, since Python reads the locale when it starts; OUT has a name that ASCII lacks."""

    def located(locale: str, utf8: str) -> str | None:
        out = work / f"größe-{locale}-{utf8}"
        environment = {"LC_ALL": locale, "PYTHONUTF8": utf8, "PYTHONCOERCECLOCALE": "0"}
        done = subprocess.run(
            [sys.executable, "-m", "neuronmm", *words(work, out)],
            env={**os.environ, **environment},
            capture_output=True,
            check=False,
        )
        line = done.stderr.decode(errors="replace").rstrip("\n").split("\n")[-1]
        if done.returncode == 0:
            same(out, expected)
            return None
        if b"Traceback" in done.stderr or not line.startswith("neuronmm"):
            raise Finding(f"status {done.returncode}: {line}")
        return line

    for locale, utf8 in (("C", "0"), ("C", "1"), ("C.UTF-8", "0"), ("tr_TR.UTF-8", "0")):
        yield f"LC_ALL={locale} PYTHONUTF8={utf8}", lambda locale=locale, utf8=utf8: located(locale, utf8)
