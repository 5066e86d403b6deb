"""Continuous batches in real Neuron hosts with an emulated runtime: a request joins while others run."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from neuron_cases import KERNELS, NEW, PROMPTS, cpu_tokens, neuron_host
from neuronmm import cli
from neuronmm.engine.backends.neuron_decoder import NeuronSlots
from neuronmm.engine.engine import Engine, load
from neuronmm.engine.sampling import SamplingParams
from neuronmm.measure.config import BenchmarkConfig
from neuronmm.measure.neuron_benchmark import benchmark_neuron
from word_tokenizer import word_tokenizer

ONE_TOKEN = "w20"


@pytest.mark.parametrize(("model_type", "kind"), [("llama", "dense"), ("qwen2", "mlp"), ("qwen3", "shared")])
@pytest.mark.parametrize(("tp_degree", "layout"), [(1, "HSB"), (2, "BSH")])
def test_requests_that_join_at_different_steps_give_the_tokens_that_they_give_alone(
    host: str, neuron_checkpoint: Callable[..., Path], neuron: Callable[..., Engine], model_type: str, kind: str,
    tp_degree: int, layout: str,
) -> None:  # fmt: skip
    """Two slots: the second prompt joins at step 9, and the third replaces the first at step 20. All are greedy."""
    folder = neuron_checkpoint(model_type, kind)
    engine = neuron(folder, tp_degree=tp_degree, batch_size=2, layout=layout, continuous=True)
    slots, session = engine.runner.decoder(2, 80), neuron_host(engine).session
    assert isinstance(slots, NeuronSlots)
    prompts = [PROMPTS[0], PROMPTS[1], ONE_TOKEN]
    expected = [cpu_tokens(folder, [prompt])[0] for prompt in prompts]
    generated: list[list[int]] = [[], [], []]
    running: dict[int, int] = {}  # slot -> request

    def take(request: int, logits: Tensor) -> None:
        generated[request].append(int(logits.argmax()))

    session.calls.clear()
    joins, steps = {0: (0, 0), 9: (1, 1), 20: (0, 2)}, 50
    for step in range(steps):
        if step in joins:
            slot, request = joins[step]
            running[slot] = request
            take(request, slots.join(slot, torch.tensor(engine.encode(prompts[request]))))
        logits = slots.step(list(running), torch.tensor([generated[request][-1] for request in running.values()]))
        for request, row in zip(running.values(), logits, strict=True):
            take(request, row)
    assert [len(tokens) for tokens in generated] == [21, 42, 31]
    assert generated == [alone[: len(tokens)] for alone, tokens in zip(expected, generated, strict=True)]
    assert session.calls["nki"] == (steps + len(joins)) * KERNELS[kind] * tp_degree
    assert session.calls["reference"] == 0


def test_more_prompts_than_slots(
    host: str, neuron_checkpoint: Callable[..., Path], neuron: Callable[..., Engine], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rows end at different steps, by a stop word or the limit; text and tokens equal the CPU backend's."""
    folder = neuron_checkpoint("llama", "mlp")
    prompts = [*PROMPTS, ONE_TOKEN, "w30 w31", "w40 w41 w42"]
    cpu = load(folder, backend="cpu", dtype="fp32")
    cpu.tokenizer = word_tokenizer()
    word = cpu.generate(prompts[:1], SamplingParams(max_new_tokens=NEW, ignore_eos=True))[0].text.split()[5]
    params = SamplingParams(max_new_tokens=24, ignore_eos=True, stop=(f" {word} ",))
    expected = cpu.generate(prompts, params)
    engine = neuron(folder, batch_size=2, continuous=True)
    steps: list[int] = []
    step = NeuronSlots.step

    def counted(self: NeuronSlots, slots: list[int], token_ids: Tensor) -> Tensor:
        steps.append(len(slots))
        return step(self, slots, token_ids)

    monkeypatch.setattr(NeuronSlots, "step", counted)
    results = engine.generate(prompts, params)
    assert [(row.text, row.token_ids, row.finish_reason) for row in results] == [
        (row.text, row.token_ids, row.finish_reason) for row in expected
    ]
    assert len({len(row.token_ids) for row in results}) > 1
    assert sum(steps) == sum(len(row.token_ids) - 1 for row in results)
    assert set(steps[:-24]) <= {2}  # no slot is empty while prompts wait
    assert "".join(engine.stream(prompts[2], params)) == expected[2].text


def test_the_hosts_own_generate(
    host: str, neuron_checkpoint: Callable[..., Path], neuron: Callable[..., Engine]
) -> None:
    """transformers' ``generate`` on a continuous batch, whose rows start together."""
    folder = neuron_checkpoint("llama", "mlp")
    engine = neuron(folder, batch_size=2, continuous=True)
    inputs = torch.tensor([engine.encode("w7 w8 w9"), engine.encode("w11 w12 w13")])
    options: dict[str, Any] = {"max_new_tokens": NEW, "do_sample": False, "eos_token_id": 64}
    generated = neuron_host(engine).generate(inputs, torch.ones_like(inputs), **options)
    assert generated[:, 3:].tolist() == cpu_tokens(folder, ["w7 w8 w9", "w11 w12 w13"])


def test_rows_of_a_decoder(host: str, neuron_checkpoint: Callable[..., Path], neuron: Callable[..., Engine]) -> None:
    """If rows start together, as in a benchmark, logits equal those of a static batch, with or without padding."""
    folder = neuron_checkpoint("llama", "mlp")
    ids = torch.tensor([[7, 7, 7, 8, 9], [11, 12, 13, 14, 15]])
    mask = torch.tensor([[0, 0, 1, 1, 1], [1, 1, 1, 1, 1]])
    logits = []
    for continuous in (False, True):
        decoder = neuron(folder, batch_size=2, continuous=continuous).runner.decoder(2, 20)
        logits.append([decoder.prefill(ids, mask), decoder.decode(torch.tensor([3, 4]))])
    torch.testing.assert_close(logits[0], logits[1])


def test_a_benchmark_prefills_one_prompt_after_another(host: str, neuron_checkpoint: Callable[..., Path]) -> None:
    folder = neuron_checkpoint()

    def predicted(batch: int) -> dict[str, float]:
        sizes: dict[str, Any] = {"prompt_lengths": [8], "new_tokens": 4, "batches": [batch], "runs": 1}
        options = {"emulate": True, "continuous": True}
        (point,) = benchmark_neuron(BenchmarkConfig(folder, dtype="fp32", options=options, **sizes)).points
        return dict(point.to_json()["variants"]["dense"]["predicted"])

    one, two = predicted(1), predicted(2)
    assert two["ttft"] > 1.9 * one["ttft"]
    assert two["tpot"] < 1.9 * one["tpot"]


def test_command(host: str, neuron_checkpoint: Callable[..., Path], capsys: pytest.CaptureFixture[str]) -> None:
    folder = neuron_checkpoint("llama", "mlp")
    command = ["generate", str(folder), "--prompt", "w7 w8 w9", "--max-new-tokens", "8", "--json", "--dtype", "fp32"]
    assert cli.main(command) == 0
    plain = json.loads(capsys.readouterr().out)
    assert cli.main([*command, "--backend", "neuron", "--positions", "64", "--emulate", "--continuous"]) == 0
    out, err = capsys.readouterr()
    assert json.loads(out)["token_ids"] == plain["token_ids"]
    assert "tp 1, continuous batch 1, 64 positions" in err
