"""Damage files by a seed, and check that a command handles them.

A seed gives the same damage on every machine, so a failure can be repeated.
"""

from __future__ import annotations

import json
import random
import resource
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from copy import deepcopy
from pathlib import Path
from typing import Any

from neuronmm.cli import main

SECONDS = 30
"""A command on a tiny file that takes longer hangs, however busy the machine is."""

MAX_GROWTH = 1 << 30
"""Bytes by which a tiny damaged file may raise the process's peak memory."""

VALUES: list[Any] = [
    *(None, True, False, 0, 1, -1, 2, 3, 5, 7, 63, 64, 255, 65_536, 2**31 - 1, 2**31, 2**63, 2**64, 10**30, -(2**63)),
    *(0.0, 0.5, -0.5, 1.5, 1e-300, 1e300, float("nan"), float("inf"), -float("inf")),
    *(
        "",
        "x",
        "0",
        "1e9",
        "a\nb",
        "\u2028",
        "\0",
        "\x1b[2J",
        "../../x",
        "/etc/passwd",
        "llama",
        "neuronmm",
        "x" * 5000,
    ),
    *([], [None], [[]], [0], [-1, "x"], ["x"] * 50, {}, {"x": 1}, {"rope_type": "yarn"}, {"": {"": {}}}),
]

KEYS = (
    *("architectures", "model_type", "rope_scaling", "rope_parameters", "rope_theta", "quantization_config", "dtype"),
    *("torch_dtype", "auto_map", "transformers_weights", "attn_implementation", "_attn_implementation", "layer_types"),
    *("sliding_window", "use_sliding_window", "attention_bias", "mlp_bias", "return_dict", "output_attentions"),
    *("use_cache", "id2label", "num_labels", "pretraining_tp", "pad_token_id", "eos_token_id", "head_dim", "self", "x"),
    *("torchscript", "pruned_heads", "is_encoder_decoder", "chunk_size_feed_forward", "temperature", "max_length"),
    *("tokenizer_class", "chat_template", "extra_special_tokens", "model_max_length", "added_tokens_decoder"),
)


class Hangs(BaseException):
    """Not an Exception, so that no code turns it into a one-line error."""


def damage_json(document: Any, seed: int) -> bytes:
    """Return ``document`` as JSON with one to three entries changed; every sixth seed damages bytes instead."""
    draw = random.Random(seed)
    damaged = deepcopy(document)
    if seed % 6 == 0:
        return damage_bytes(json.dumps(document).encode(), seed)
    for _ in range(draw.choice((1, 1, 1, 2, 3))):
        places = list(_places(damaged))
        if not places:
            break
        container, key = draw.choice(places)
        action = draw.randrange(5)
        if action == 0:
            del container[key]
        elif action == 1 and isinstance(container, dict):
            container[draw.choice(KEYS)] = deepcopy(draw.choice(VALUES))
        elif action == 2 and isinstance(container, dict):
            container[str(draw.choice(VALUES))] = container.pop(key)
        else:
            container[key] = deepcopy(draw.choice(VALUES))
    if draw.randrange(40) == 0:
        damaged = deepcopy(draw.choice(VALUES))
    return json.dumps(damaged).encode()


def _places(document: Any) -> Iterator[tuple[Any, Any]]:
    """Yield every entry of nested dicts and lists as its container and its key."""
    entries = document.items() if isinstance(document, dict) else enumerate(document) if _is_list(document) else ()
    for key, value in entries:
        yield document, key
        yield from _places(value)


def _is_list(document: Any) -> bool:
    return isinstance(document, list)


def damage_bytes(content: bytes, seed: int, first: int = 0, last: int | None = None) -> bytes:
    """Truncate ``content``, or replace, remove or repeat a few bytes between ``first`` and ``last``."""
    draw, damaged = random.Random(seed), bytearray(content)
    at = draw.randrange(first, last or len(content))
    end = at + draw.randrange(1, 40)
    kind = draw.randrange(6)
    if kind == 0:
        damaged = damaged[:at]
    elif kind == 1:
        damaged[at] ^= 1 << draw.randrange(8)
    elif kind == 2:
        damaged[at:end] = draw.randbytes(end - at)
    elif kind == 3:
        damaged[at:end] = b""
    elif kind == 4:
        damaged[at:at] = damaged[at:end] * draw.choice((1, 1000))
    else:
        damaged[at : at + 8] = draw.choice((b"\xff" * 8, bytes(8), (2**60).to_bytes(8, "little"), b"[" * 3000))
    return bytes(damaged)


@contextmanager
def time_limit() -> Iterator[None]:
    """Fail if the block hangs."""

    def end(*_: Any) -> None:
        raise Hangs(f"still at work after {SECONDS} seconds")

    before = signal.signal(signal.SIGALRM, end)
    signal.alarm(SECONDS)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


@contextmanager
def memory_limit() -> Iterator[None]:
    """Fail if the block raises this process's peak memory by more than MAX_GROWTH."""
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    yield
    grown = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) << 10
    assert grown < MAX_GROWTH, f"memory grew by {grown / 1e9:.1f} GB"


def ends_well(command: list[str], capsys: Any) -> bool:
    """Return whether a command succeeds; fail unless it succeeds or ends with a one-line error."""
    with time_limit():
        status = main(command)
    if status == 130:  # the status for Ctrl-C, which no file can cause
        raise KeyboardInterrupt
    out, err = capsys.readouterr()
    if status == 0:
        return True
    last = err.rstrip("\n").split("\n")[-1]
    assert status in (1, 2) and out == "", (status, out, err)
    assert last.startswith(f"neuronmm {command[0]}: error: ") and last.isprintable(), err
    assert "Traceback" not in err, err
    return False


def check_seeds(seeds: range, write: Callable[[int], None], check: Callable[[], bool], path: Path) -> int:
    """Damage a file with every seed, check the result, and return how often the command still succeeded.

    An interruption ends the run without blaming the current file.
    """
    successes = 0
    with memory_limit():
        for seed in seeds:
            write(seed)
            try:
                successes += check()
            except (Exception, SystemExit, Hangs) as error:
                content = path.read_bytes()[:2000]
                raise AssertionError(f"seed {seed} gives {path.name} the content {content!r}") from error
    return successes
