"""The CPU benchmark: the random model as a GGUF file, and the tables."""

from __future__ import annotations

import argparse
import json
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType, GGUFReader, dequantize
from transformers import AutoTokenizer

from neuronmm.models.load import load_pretrained
from neuronmm.models.source import resolve
from tiny_gguf import write_gguf
from tiny_models import make_tiny

SCRIPTS = Path(__file__).parent.parent.parent / "scripts"


@pytest.fixture
def scripts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the scripts import each other by name."""
    monkeypatch.syspath_prepend(str(SCRIPTS))


@pytest.mark.usefixtures("scripts")
def test_the_random_model_is_a_gguf_file_with_a_vocabulary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import cpu_peers

    model = make_tiny(tied=True, dtype=torch.bfloat16, vocabulary=300)
    model.save_pretrained(tmp_path / "tiny")
    path = cpu_peers.write_random_gguf(tmp_path / "tiny", "BF16")
    assert sorted(file.name for file in tmp_path.iterdir()) == ["tiny", "tiny.BF16.gguf"]

    monkeypatch.setenv("NEURONMM_CACHE", str(tmp_path / "cache"))
    folder = resolve(path)
    read = load_pretrained(folder, torch.bfloat16, "cpu")
    assert {name: p.shape for name, p in read.named_parameters()} == {n: p.shape for n, p in model.named_parameters()}
    for name in ("mlp.gate_proj", "mlp.up_proj", "mlp.down_proj", "self_attn.v_proj", "self_attn.o_proj"):
        full = f"model.layers.1.{name}.weight"
        assert torch.equal(read.get_parameter(full), model.get_parameter(full))
    tokenizer = AutoTokenizer.from_pretrained(folder)
    assert len(tokenizer) == 300
    assert (
        tokenizer.decode(tokenizer("An  ordinary text.", add_special_tokens=False)["input_ids"]) == "An  ordinary text."
    )


@pytest.fixture
def peers(scripts: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    import cpu_peers

    monkeypatch.setattr(cpu_peers, "ENVIRONMENTS", tmp_path / "peers")
    cpu_peers.ENVIRONMENTS.mkdir()
    return cpu_peers


def test_a_file_in_another_type_is_of_the_same_architecture(peers: ModuleType, tmp_path: Path) -> None:
    source = tmp_path / "tiny.gguf"
    write_gguf(source, family="qwen2", kind=GGMLQuantizationType.Q8_0, wide=64)
    written = peers.write_gguf(str(source), "BF16")
    before, after = GGUFReader(source), GGUFReader(written)
    assert after.fields["general.architecture"].contents() == "qwen2"
    assert [tensor.name for tensor in after.tensors] == [tensor.name for tensor in before.tensors]
    for old, new in zip(before.tensors, after.tensors, strict=True):
        values = dequantize(old.data, old.tensor_type), dequantize(new.data, new.tensor_type)
        assert np.allclose(*values, rtol=2**-8)
        assert new.tensor_type.name == ("BF16" if len(old.shape) == 2 else "F32")


def test_the_conversion_of_another_model_of_the_same_name_is_not_taken(peers: ModuleType, tmp_path: Path) -> None:
    sources = []
    for folder, family in (("a", "llama"), ("b", "qwen2")):
        (tmp_path / folder).mkdir()
        sources.append(tmp_path / folder / "model.gguf")
        write_gguf(sources[-1], family=family, kind=GGMLQuantizationType.Q8_0, wide=64)
    one, other = (peers.write_gguf(str(source), "BF16") for source in sources)
    assert one != other and peers.write_gguf(str(sources[0]), "BF16") == one
    assert GGUFReader(other).fields["general.architecture"].contents() == "qwen2"


def test_a_file_that_has_the_type_is_used_as_it_is(peers: ModuleType, tmp_path: Path) -> None:
    source = tmp_path / "tiny.gguf"
    write_gguf(source, kind=GGMLQuantizationType.Q8_0, wide=64)
    assert peers.write_gguf(str(source), "Q8_0") == source
    with pytest.raises(RuntimeError, match="not in Q4_K_M"):
        peers.write_gguf(str(source), "Q4_K_M")
    assert list(peers.ENVIRONMENTS.iterdir()) == []


@pytest.mark.parametrize("tied", [False, True])
def test_an_embedding_apart_from_the_head_is_not_read_in_a_step(peers: ModuleType, tmp_path: Path, tied: bool) -> None:
    source = tmp_path / "tiny.gguf"
    write_gguf(source, tied=tied, vocabulary=64, hidden=32)
    stored = sum(int(tensor.n_bytes) for tensor in GGUFReader(source).tensors)
    assert stored - peers.gguf_bytes_per_step(source) == (0 if tied else 64 * 32 * 4)


@pytest.mark.parametrize("tied", [False, True])
def test_the_bytes_of_a_folder_are_those_of_its_file(peers: ModuleType, tmp_path: Path, tied: bool) -> None:
    model = make_tiny(tied=tied, dtype=torch.bfloat16)
    model.save_pretrained(tmp_path / "tiny", max_shard_size="20KB")
    assert len(list((tmp_path / "tiny").glob("*.safetensors"))) > 1
    parameters = {name: value.nbytes for name, value in model.named_parameters()}
    read = sum(parameters.values()) - (0 if tied else parameters["model.embed_tokens.weight"])
    assert peers.folder_bytes_per_step(tmp_path / "tiny") == read


@pytest.mark.parametrize(
    ("changed", "problem"),
    [
        ({}, None),
        ({"contexts": [512]}, None),
        ({"engines": ["dense"], "contexts": [512]}, None),
        ({"engines": ["dense"], "first_round": 2}, None),
        ({"model": "b/other.gguf"}, None),
        ({"rounds": 9}, None),
        ({"engines": ["dense"]}, "round 0 with other engines; give --first-round"),
        ({"new": 16}, "another new"),
        ({"new": 16, "contexts": [512]}, "another new"),
        ({"threads": 1, "model": "b/m.gguf"}, "another source, threads; give another --output"),
    ],
)
@pytest.mark.usefixtures("scripts")
def test_only_measurements_of_the_same_settings_are_added(changed: dict[str, Any], problem: str | None) -> None:
    import bench_cpu

    def arguments(**changed: Any) -> argparse.Namespace:
        usual = {"model": "a/m.gguf", "contexts": [32], "batches": [1], "rounds": 2, "first_round": 0}
        args = argparse.Namespace(**{**usual, "new": 32, "threads": 2, "engines": ["dense", "vllm"], **changed})
        args.name = Path(args.model).name
        return args

    point = {"model": "m.gguf", "asked": bench_cpu.asked(arguments()), "context": 32, "batch": 1}
    lines = [{"model": "m.gguf", "engine": "dense"}, *({**point, "round": turn} for turn in range(2))]
    found = bench_cpu.check_same(lines, arguments(**changed))
    assert found is None if problem is None else found is not None and problem in found


@pytest.mark.usefixtures("scripts")
def test_a_step_is_the_mean_for_engines_that_time_each_and_for_those_that_time_all(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import bench_cpu

    answers = {"each": {"ttft": 0.5, "tpot": [0.01, 0.01, 0.04]}, "all": {"ttft": 0.5, "tpot": [0.02]}}
    workers = [Mock(takes=lambda *_: True, return_value=answer) for answer in answers.values()]
    for worker, name in zip(workers, answers, strict=True):
        worker.name = name
    monkeypatch.setattr(bench_cpu, "Probe", lambda: lambda: 1e10)
    args = argparse.Namespace(
        name="m", model="m", contexts=[32], batches=[1], rounds=1, first_round=0, new=3, threads=1, engines=["each"]
    )
    with (tmp_path / "lines").open("w") as file:
        bench_cpu.measure(workers, args, set(), file)
    steps = [json.loads(line)["step"] for line in (tmp_path / "lines").read_text().splitlines()]
    assert steps == pytest.approx([0.02, 0.02])


@pytest.mark.usefixtures("scripts")
def test_a_server_of_llama_cpp_answers_once_before_it_is_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    import cpu_engines

    asked: list[int] = []
    replace_llama_cpp(monkeypatch, asked, iter([(0.037, 0.03)] * 9))
    _, run = cpu_engines.prepare_llama_cpp("m.gguf", 1)
    answers = [run(context, new, 1) for context, new in ((32, 2), (32, 30), (512, 30), (32, 30))]
    assert asked == [0, 3, 3, 31, 0, 3, 31, 0, 3, 31]
    assert answers[1] == {"ttft": pytest.approx(0.007), "tpot": [pytest.approx(0.001)]}


@pytest.mark.usefixtures("scripts")
def test_a_step_of_llama_cpp_has_no_prompt_of_another_row_in_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """The row that starts last has waited for none. Here it has neither the shortest step nor the longest."""
    import cpu_engines

    untimed = [(1.0, 1.0)] * 3
    replace_llama_cpp(monkeypatch, [], iter([*untimed, (70.0, 30.0), (100.0, 45.0), (100.0, 90.0)]))
    _, run = cpu_engines.prepare_llama_cpp("m.gguf", 1)
    assert run(32, 30, 3) == {"ttft": pytest.approx(55.0), "tpot": [pytest.approx(1.5)]}


def replace_llama_cpp(monkeypatch: pytest.MonkeyPatch, asked: list[int], rows: Iterator[tuple[float, float]]) -> None:
    """Replace llama.cpp by a server that notes 0 for its start, and for each request the tokens that it is asked for.

    ``rows`` has for each request when it is answered and how long it generated, in seconds.
    """
    import cpu_engines

    thread = threading.local()

    class Server:
        def __init__(self, params: Any) -> None:
            asked.append(0)

        def handle_completions(self, request: dict[str, Any]) -> dict[str, Any]:
            asked.append(request["n_predict"])
            thread.now, generating = next(rows)
            return {"timings": {"predicted_ms": generating * 1e3, "predicted_n": request["n_predict"]}}

    monkeypatch.setitem(sys.modules, "xllamacpp", Mock(Server=Server))
    monkeypatch.setitem(sys.modules, "llama_server", Mock())
    monkeypatch.setattr("importlib.metadata.version", lambda _: "1")
    monkeypatch.setattr(cpu_engines, "time", Mock(perf_counter=lambda: getattr(thread, "now", 0.0)))


@pytest.fixture
def report(scripts: None) -> ModuleType:
    import cpu_report

    return cpu_report


def _lines() -> list[dict[str, object]]:
    machine = {"device": "a processor", "cores": 2, "threads": 2, "versions": {"python": "3"}}
    facts = [
        {"model": "m", "engine": "dense", "machine": machine, "bytes": 2e8, "path": "ours", "load_seconds": 1.0},
        {"model": "m", "engine": "peer", "machine": machine, "bytes": 1e8, "path": "theirs", "load_seconds": 2.0},
        {"model": "m", "engine": "gone", "machine": machine, "absent": "not installed"},
    ]
    point = {"model": "m", "context": 32, "batch": 1, "before": 4e10, "after": 4e10}
    steps = {"dense": (0.010, 0.020, 0.010), "peer": (0.020, 0.020, 0.040)}
    return [
        *facts,
        *(
            {**point, "engine": name, "round": i, "step": step, "ttft": 0.1}
            for name, all_steps in steps.items()
            for i, step in enumerate(all_steps)
        ),
    ]


def test_tables_compare_within_a_round(report: ModuleType) -> None:
    text = report.tables(_lines())
    # 200 MB at 40 GB/s take 5 ms, which is 200 tokens/s; a step of 10 ms reaches half of that.
    speed = "100.0 (50.0 to 100.0) | 0.50 (0.25 to 0.50)"
    assert f"| dense | {speed} | 1.00 (1.00 to 1.00) | 1.00 | 100 (100 to 100) | 200 |" in text
    # Over dense: the median of 0.5, 1 and 0.25, not the ratio of the medians.
    speed = "50.0 (25.0 to 50.0) | 0.12 (0.06 to 0.12)"
    assert f"| peer | {speed} | 0.50 (0.25 to 1.00) | 2.00 | 100 (100 to 100) | 100 |" in text
    assert "| m | gone | absent: not installed |  |" in text


def test_an_engine_that_a_later_run_lacks_keeps_its_rounds(report: ModuleType) -> None:
    lines = _lines()
    assert report.tables([*lines, {**lines[2], "engine": "peer"}]) == report.tables(lines)


def test_an_incomplete_line_of_a_stopped_run_is_skipped(report: ModuleType, tmp_path: Path) -> None:
    lines = [json.dumps(line) for line in _lines()]
    (tmp_path / "figures.jsonl").write_text("\n".join([*lines, lines[-1][:20]]))
    assert report.read(tmp_path / "figures.jsonl") == _lines()
