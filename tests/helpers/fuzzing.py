"""Damaged files in large numbers: how a file is damaged, and what may come of it.

A number, the seed, gives the same damage everywhere, so a failure can be repeated.
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
"""Nothing tiny takes as long, on however busy a machine; what does, hangs."""

MOST_GROWTH = 1 << 30
"""Bytes by which a tiny damaged file may raise the peak of the process's memory."""

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
    """Not an Exception: whoever turns those into a line of text must not turn this one."""


def damage_json(document: Any, seed: int) -> bytes:
    """``document`` as JSON with one to three places of it changed, every sixth time as bytes."""
    draw = random.Random(seed)
    damaged = deepcopy(document)
    if seed % 6 == 0:
        return damage_bytes(json.dumps(document).encode(), seed)
    for _ in range(draw.choice((1, 1, 1, 2, 3))):
        places = list(_places(damaged))
        if not places:
            break
        holder, key = draw.choice(places)
        action = draw.randrange(5)
        if action == 0:
            del holder[key]
        elif action == 1 and isinstance(holder, dict):
            holder[draw.choice(KEYS)] = deepcopy(draw.choice(VALUES))
        elif action == 2 and isinstance(holder, dict):
            holder[str(draw.choice(VALUES))] = holder.pop(key)
        else:
            holder[key] = deepcopy(draw.choice(VALUES))
    if draw.randrange(40) == 0:
        damaged = deepcopy(draw.choice(VALUES))
    return json.dumps(damaged).encode()


def _places(document: Any) -> Iterator[tuple[Any, Any]]:
    """Every entry of nested dicts and lists, as what holds it and its key there."""
    entries = document.items() if isinstance(document, dict) else enumerate(document) if _is_list(document) else ()
    for key, value in entries:
        yield document, key
        yield from _places(value)


def _is_list(document: Any) -> bool:
    return isinstance(document, list)


def damage_bytes(content: bytes, seed: int, first: int = 0, last: int | None = None) -> bytes:
    """``content`` cut short, or a few bytes of it, from ``first`` up to ``last``, replaced, removed or doubled."""
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
def bounded() -> Iterator[None]:
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
def modest() -> Iterator[None]:
    """Fail if the block raises the peak of this process's memory by more than MOST_GROWTH."""
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    yield
    grown = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) << 10
    assert grown < MOST_GROWTH, f"memory grew by {grown / 1e9:.1f} GB"


def ends_well(command: list[str], capsys: Any) -> bool:
    """Whether a command succeeds; fail unless it does, or ends with one line that says what is wrong."""
    with bounded():
        status = main(command)
    if status == 130:  # the command's answer to Ctrl-C, which no file can press
        raise KeyboardInterrupt
    out, err = capsys.readouterr()
    if status == 0:
        return True
    last = err.rstrip("\n").split("\n")[-1]
    assert status in (1, 2) and out == "", (status, out, err)
    assert last.startswith(f"neuronmm {command[0]}: error: ") and last.isprintable(), err
    assert "Traceback" not in err, err
    return False


def each(seeds: range, write: Callable[[int], None], check: Callable[[], bool], path: Path) -> int:
    """Damage a file by every seed and check what comes of it; the number of times that it still served.

    A run that is interrupted ends there: the file of that moment is not to blame.
    """
    served = 0
    with modest():
        for seed in seeds:
            write(seed)
            try:
                served += check()
            except (Exception, SystemExit, Hangs) as error:
                content = path.read_bytes()[:2000]
                raise AssertionError(f"seed {seed} made of {path.name}: {content!r}") from error
    return served
