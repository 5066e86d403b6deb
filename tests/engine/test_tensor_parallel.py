"""Several processes that share a model write the tokens of one, in every form of a factorised linear."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from neuronmm import cli
from neuronmm.engine.engine import load
from neuronmm.engine.sampling import SamplingParams
from neuronmm.engine.tensor_parallel import PivotedOutputs, Summed
from neuronmm.models import FAMILIES, UserError
from neuronmm.models.load import load_pretrained
from several import in_processes, torchrun
from tiny_models import make_tiny, pivoted_spec, shared_spec
from word_tokenizer import word_tokenizer

PIVOTED = (pivoted_spec(), pivoted_spec(shared=True))
PROMPTS = ["w7", "w11 w12 w13 w14 w15", "w20 w21 w3"]
GREEDY = SamplingParams(max_new_tokens=24, ignore_eos=True)
SAMPLED = SamplingParams(max_new_tokens=24, ignore_eos=True, temperature=0.8)


def tokens(folders: list[Path]) -> list[list[list[int]]]:
    engines = [load(folder, backend="cpu", dtype="fp32") for folder in folders]
    return [[result.token_ids for result in engine.generate(PROMPTS, GREEDY)] for engine in engines]


def split_parts(folders: list[Path]) -> list[tuple[list[str], int, list[int]]]:
    """Greedy tokens are compared elsewhere: kinds of modules, stored numbers, and tokens with a random seed."""
    parts = []
    for folder in folders:
        engine = load(folder, backend="cpu", dtype="fp32")
        kinds = sorted({type(module).__name__ for module in engine.runner.model.modules()})
        size = sum(parameter.numel() for parameter in engine.runner.model.model.layers.parameters())
        parts.append((kinds, size, engine.generate(PROMPTS[:1], SAMPLED)[0].token_ids))
    return parts


def refusals(folder: Path, odd: Path) -> list[str]:
    messages = []
    options: list[dict[str, Any]] = [{"impl": "cpu"}, {"weight_dtype": "int8"}, {"draft": "ngram"}]
    for model, choice in [*((folder, option) for option in options), (odd, {})]:
        with pytest.raises(UserError) as caught:
            load(model, backend="cpu", dtype="fp32", **choice)
        messages.append(str(caught.value))
    return messages


def everything(folders: list[Path], odd: Path) -> tuple[Any, Any, list[str]]:
    """In one start of the processes, which takes longer than all of this."""
    return tokens(folders), split_parts(folders), refusals(folders[0], odd)


def test_two_processes_write_the_tokens_of_one(checkpoint: Callable[..., Path], tmp_path: Path) -> None:
    kinds: list[tuple[str, dict[str, Any]]] = [
        ("llama", {"compressed": True, "tied": True}),
        ("qwen2", {"compressed": False}),
        *((family, {"spec": spec}) for family in FAMILIES for spec in (shared_spec(), *PIVOTED)),
        ("qwen2", {"spec": pivoted_spec(factors="int8")}),
    ]
    folders = [checkpoint(family, **kind).rename(tmp_path / str(number)) for number, (family, kind) in enumerate(kinds)]
    alone = tokens(folders)
    assert len({str(result) for result in alone}) == len(folders)  # the models differ
    odd = tmp_path / "odd"
    make_tiny(num_key_value_heads=1).save_pretrained(odd)
    word_tokenizer().save_pretrained(odd)
    first, second = in_processes(2, everything, folders, odd)
    assert first[0] == second[0] == alone
    whole = [sum(p.numel() for p in load_pretrained(f, torch.float32).model.layers.parameters()) for f in folders]
    for (kinds, size, sampled), (_, other, sampled_too), all_of_it in zip(first[1], second[1], whole, strict=True):
        assert Summed.__name__ in kinds and max(size, other) < 0.85 * all_of_it
        assert sampled == sampled_too  # they agree on the random seed
    assert sum(PivotedOutputs.__name__ in kinds for kinds, _, _ in first[1]) == 7
    impl, bits, draft, heads = first[2]
    assert "leave out --impl" in impl and "leave out torchrun" in bits and "needs one process, not 2" in draft
    assert "1 key-value heads cannot be split over 2 processes; start 1" in heads


def test_torchrun_prints_once(checkpoint: Callable[..., Path], tmp_path: Path) -> None:
    folder = checkpoint("qwen2", spec=pivoted_spec())
    words = ["generate", folder, "--prompt", PROMPTS[1], "--dtype", "fp32", "--max-new-tokens", 24, "--json"]
    done = torchrun(2, *words)
    assert done.returncode == 0, done.stderr
    (line,) = done.stdout.splitlines()
    assert (
        json.loads(line)["token_ids"]
        == load(folder, dtype="fp32").generate(PROMPTS[1:2], SamplingParams(24))[0].token_ids
    )
    assert done.stderr.count("kernels: torch modules, split over 2 processes") == 1


@pytest.mark.slow
def test_torchrun_says_what_is_wrong_once(checkpoint: Callable[..., Path]) -> None:
    folder = checkpoint("llama")
    done = torchrun(3, "generate", folder, "--prompt", "w7")
    assert done.returncode != 0 and done.stdout == ""
    assert done.stderr.count("cannot be split over 3 processes") == 1 and "neuronmm generate: error: " in done.stderr


def test_other_commands_refuse_torchrun(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    for name, value in {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "localhost"}.items():
        monkeypatch.setenv(name, value)
    assert cli.main(["inspect", "OUT"]) == 2
    assert "runs in one process, not 2; torchrun starts only compress, recover, generate" in capsys.readouterr().err
    monkeypatch.setenv("RANK", "1")
    with pytest.raises(SystemExit):
        cli.main(["inspect", "OUT"])
    assert capsys.readouterr() == ("", "")
    monkeypatch.setenv("RANK", "2")
    assert cli.main(["generate", "OUT", "--prompt", "w7"]) == 2
    assert "RANK=2, WORLD_SIZE=2: no process of a run" in capsys.readouterr().err
