"""The commands: their output on stdout, and one line with status 2 for every mistake."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from compression_runs import snapshot
from neuronmm.cli import main

Capture = pytest.CaptureFixture[str]


def test_generate_streams_to_stdout_and_reports_on_stderr(checkpoint: Callable[..., Path], capsys: Capture) -> None:
    folder = str(checkpoint())
    assert main(["generate", folder, "--prompt", "w9 w10", "--max-new-tokens", "6"]) == 0
    streamed = capsys.readouterr()
    assert "backend cpu, float32, kernels:" in streamed.err
    assert "TTFT" in streamed.err and "decode" in streamed.err
    assert main(["generate", folder, "--prompt", "w9 w10", "--max-new-tokens", "6", "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert document["text"] + "\n" == streamed.out
    assert document["prompt_tokens"] == 2


def test_generate_from_a_batch_file(checkpoint: Callable[..., Path], tmp_path: Path, capsys: Capture) -> None:
    folder, plain, rows = str(checkpoint()), tmp_path / "prompts.txt", tmp_path / "prompts.jsonl"
    plain.write_text("w9\n\nw10 w11 w12\n")
    rows.write_text('{"prompt": "w9"}\n{"prompt": "w10 w11 w12"}\n')
    texts = []
    for file in (plain, rows):
        assert main(["generate", folder, "--batch-file", str(file), "--max-new-tokens", "4"]) == 0
        lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
        assert [line["prompt"] for line in lines] == ["w9", "w10 w11 w12"]
        texts.append([line["text"] for line in lines])
    assert texts[0] == texts[1]


@pytest.mark.parametrize("content", ["", '{"text": "w9"}', '{"prompt": 9}', "w9", "[1]"])
def test_a_bad_batch_file(checkpoint: Callable[..., Path], tmp_path: Path, capsys: Capture, content: str) -> None:
    file = tmp_path / "prompts.jsonl"
    file.write_text(content)
    assert main(["generate", str(checkpoint()), "--batch-file", str(file)]) == 2
    assert str(file) in capsys.readouterr().err


def test_benchmark_ends_with_one_json_document(
    checkpoint: Callable[..., Path], tmp_path: Path, capsys: Capture
) -> None:
    arguments = ["--prompt-lengths", "4", "--new-tokens", "3", "--batch", "1", "--runs", "1", "--output"]
    command = ["benchmark", str(checkpoint()), "--baseline", str(checkpoint(compressed=False)), *arguments]
    assert main([*command, str(tmp_path / "results")]) == 0
    *table, last = capsys.readouterr().out.splitlines()
    assert json.loads(last)["kind"] == "measured"
    assert len(table) > 10
    assert sorted(p.name for p in (tmp_path / "results").iterdir()) == ["benchmark.json", "benchmark.png"]
    assert main([*command, str(tmp_path / "results"), "--json"]) == 0
    json.loads(capsys.readouterr().out)


def test_benchmark_writes_over_its_own_files_alone_and_not_into_a_model(
    checkpoint: Callable[..., Path], tmp_path: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("neuronmm.measure.benchmark.run_benchmark", lambda *a, **b: pytest.fail("it was measured"))
    model = checkpoint()
    for name, file, content in (
        ("a", "benchmark.json", "[]"),
        ("b", "benchmark.json", '{"mine": 1}'),
        ("c", "benchmark.png", ""),
        ("d", "benchmark.json", '{"what": "benchmark", "draft": "int4"}'),
        ("d", "benchmark.png", "not of the benchmark with drafts, which draws none"),
        ("e", "benchmark.json", '{"what": "benchmark", "backend": "neuron"}'),
        ("e", "benchmark.png", "nor of this one"),
    ):
        (tmp_path / name).mkdir(exist_ok=True)
        (tmp_path / name / file).write_text(content)
    (tmp_path / "file").write_text("mine")
    (tmp_path / "link").symlink_to(model, target_is_directory=True)
    (tmp_path / "nothing").symlink_to("nowhere")
    before = snapshot(tmp_path)
    capsys.readouterr()
    for out in ("a", "b", "c", "d", "e", "file", "file/sub", str(model), f"{model}/sub", "link", "nothing"):
        assert main(["benchmark", str(model), "--output", str(tmp_path / out)]) == 2
        captured = capsys.readouterr()
        assert captured.out == "" and captured.err.count("\n") == 1 and "error: " in captured.err
    monkeypatch.setattr("os.access", lambda path, mode: False)
    assert main(["benchmark", str(model), "--output", str(tmp_path / "a" / "sub")]) == 2
    assert "read-only" in capsys.readouterr().err
    (tmp_path / "a" / "sub").rmdir()
    assert snapshot(tmp_path) == before


def test_evaluate_ends_with_one_json_document(checkpoint: Callable[..., Path], tmp_path: Path, capsys: Capture) -> None:
    text, task = tmp_path / "text.txt", tmp_path / "task.jsonl"
    text.write_text(" ".join(f"w{3 + i % 60}" for i in range(100)))
    task.write_text('{"query": "w3", "choices": ["w4", "w5"], "gold": 0}\n' * 3)
    command = ["evaluate", str(checkpoint()), "--baseline", str(checkpoint(compressed=False))]
    assert main([*command, "--text", str(text), "--tasks", str(task), "--context", "20"]) == 0
    *table, last = capsys.readouterr().out.splitlines()
    measures = [row["measure"] for row in json.loads(last)["results"]]
    assert measures == ["perplexity", "nats per token", "task acc", "task acc_norm"]
    printed = "\n".join(table)
    assert "paired difference" in printed and "5 windows of 20 tokens, stride 20" in printed


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["generate", "{none}", "--prompt", "w9"], "no such file or folder"),
        (["generate", "{model}", "--batch-file", "{none}"], "no such file"),
        (["generate", "{model}", "--batch-file", "{model}"], "is a folder; give a file"),
        (["generate", "{model}", "--prompt", "w9", "--tp", "2"], "on the command line --tp, with --backend neuron"),
        (["generate", "{model}", "--prompt", "w9 " * 200], "context of 128"),
        (["generate", "{model}", "--prompt", "w9", "--backend", "tpu"], "unknown backend"),
        (["generate", "{model}", "--prompt", "w9", "--backend", "neuron"], "transformers-neuronx"),
        (["generate", "{model}", "--prompt", "w9", "--dtype", "int3"], "unknown dtype"),
        (["generate", "{model}", "--prompt", "w9", "--impl", "magic"], "unknown kernel"),
        (["generate", "{model}", "--prompt", "w9", "--temperature", "-1"], "temperature"),
        (["generate", "{model}", "--prompt", "w9", "--stop", ""], "stop"),
        (["benchmark", "{model}", "--baseline", "{none}"], "no such file or folder"),
        (["benchmark", "{model}", "--runs", "0"], "--runs"),
        (["benchmark", "{model}", "--prompt-lengths", "500"], "context of 128"),
        (["evaluate", "{model}"], "--text"),
        (["evaluate", "{model}", "--text", "{none}"], "no such file"),
        (["evaluate", "{model}", "--tasks", "{none}"], "no such file"),
    ],
)
def test_mistakes_are_one_line_and_status_2(
    checkpoint: Callable[..., Path], tmp_path: Path, capsys: Capture, arguments: list[str], message: str
) -> None:
    names = {"model": str(checkpoint()), "none": str(tmp_path / "none")}
    assert main([argument.format(**names) for argument in arguments]) == 2
    captured = capsys.readouterr()
    lines = captured.err.strip().splitlines()
    assert lines[-1].startswith(f"neuronmm {arguments[0]}: error: ")
    assert message in lines[-1]
    assert "Traceback" not in captured.err
    assert captured.out == ""


@pytest.mark.parametrize("command", ["generate", "benchmark", "evaluate"])
def test_broken_checkpoints_are_one_line(checkpoint: Callable[..., Path], capsys: Capture, command: str) -> None:
    folder = checkpoint()
    text = folder / "tokenizer_config.json"
    options = {"generate": ["--prompt", "w9"], "benchmark": [], "evaluate": ["--text", str(text)]}[command]
    weights = folder / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-100])
    assert main([command, str(folder), *options]) == 2
    assert "corrupt shard" in capsys.readouterr().err.strip().splitlines()[-1]
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "architectures": ["T5"], "model_type": "t5"}))
    assert main([command, str(folder), *options]) == 2
    assert "not supported" in capsys.readouterr().err.strip().splitlines()[-1]


def test_malformed_number_lists_are_usage_errors(checkpoint: Callable[..., Path], capsys: Capture) -> None:
    with pytest.raises(SystemExit) as exit_status:
        main(["benchmark", str(checkpoint()), "--batch", "1,x"])
    assert exit_status.value.code == 2
    assert "--batch" in capsys.readouterr().err
