"""NxD Inference's own Python, in its CPU mode above an emulated SDK, generates the CPU backend's and HF's tokens.

Skipped unless its sources are on the Python path: `make test-nxd NXD=FOLDER` (docs/trainium.md).
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from neuron_cases import KERNELS, PROMPTS, assert_near_float32, emulated_engines, neuron_host
from neuronmm import cli
from neuronmm.compression.config import CompressionConfig
from neuronmm.compression.pipeline import compress
from neuronmm.engine.backends.neuron_decoder import NeuronSlots
from neuronmm.engine.engine import Engine, load
from neuronmm.engine.sampling import SamplingParams
from neuronmm.models import FAMILIES, UserError
from neuronmm.models.neuronx import intermediate, sdk
from neuronmm.models.source import resolve
from tiny_models import make_tokens, shared_spec
from word_tokenizer import word_tokenizer

HOST = sdk.HOSTS["nxd-inference"]
NEW = 24
PARAMS = SamplingParams(max_new_tokens=NEW, ignore_eos=True)
ONE_TOKEN = "w20"
NO_TOKEN = 64
"""An end of sequence beyond the vocabulary."""

pytestmark = pytest.mark.skipif(
    not HOST.present,
    reason="NxD Inference is not on the Python path: fetch its sources, then make test-nxd NXD=FOLDER",
)


@pytest.fixture(autouse=True)
def settings(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("NEURONMM_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("TOKENIZERS_PARALLELISM", "false")


@pytest.fixture
def nxd() -> Iterator[Callable[..., Engine]]:
    """``nxd(folder, tp_degree=2)``: an emulated engine on this host in float32; closed after the test."""
    with emulated_engines(n_positions=40, host=HOST.name) as make:
        yield make


def tokens_of_hf(folder: Path, prompts: list[str]) -> list[list[int]]:
    """Return the greedy tokens of transformers' own ``generate``, one prompt at a time."""
    engine = load(folder, backend="cpu", dtype="fp32", impl="naive")
    engine.tokenizer = word_tokenizer()
    rows = []
    for prompt in prompts:
        ids = torch.tensor([engine.encode(prompt)])
        options: dict[str, Any] = {"max_new_tokens": NEW, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
        model: Any = engine.runner.model  # type: ignore[attr-defined]
        rows.append(model.generate(ids, attention_mask=torch.ones_like(ids), **options)[0, ids.shape[1] :].tolist())
    return rows


def kernels_run(engine: Engine) -> int:
    """Return the NKI kernels that ran on all ranks since the model was loaded."""
    runner = neuron_host(engine)
    assert runner.ranks is not None
    assert set(runner.session.calls) <= {"nki"}
    return runner.session.calls["nki"] + runner.ranks.calls()["nki"]


def expect_hfs_tokens(engine: Engine, folder: Path, prompts: list[str], kernels: int) -> None:
    """Assert HF's tokens, and that every kernel of the model ran once per step on every core."""
    assert neuron_host(engine).model is not None
    results = engine.generate(prompts, PARAMS)
    assert [result.token_ids for result in results] == tokens_of_hf(folder, prompts)
    assert kernels_run(engine) == NEW * kernels * neuron_host(engine).settings.tp_degree


@pytest.mark.parametrize(
    ("model_type", "kind"),
    [
        *((family, kind) for family in FAMILIES for kind in ("dense", "mixed")),
        ("llama", "pivoted"),
        ("qwen2", "high"),
        ("qwen3", "shared"),
    ],
)
def test_greedy_tokens_equal_those_of_hf(
    neuron_checkpoint: Callable[..., Path], nxd: Callable[..., Engine], model_type: str, kind: str
) -> None:
    folder = neuron_checkpoint(model_type, kind)
    expect_hfs_tokens(nxd(folder, batch_size=2), folder, PROMPTS, KERNELS[kind])


def test_int8_factors(checkpoint: Callable[..., Path], nxd: Callable[..., Engine]) -> None:
    """They are dequantised when they are loaded."""
    folder = checkpoint("llama", spec=shared_spec(factors="int8"))
    expect_hfs_tokens(nxd(folder), folder, PROMPTS[:1], KERNELS["shared"])


@pytest.mark.parametrize(
    ("model_type", "kind", "cores"),
    [
        ("llama", "dense", 2),
        ("qwen2", "mixed", 2),
        pytest.param("llama", "pivoted", 2, marks=pytest.mark.slow),
        pytest.param("qwen3", "shared", 4, marks=pytest.mark.slow),
    ],
)
def test_several_cores(
    neuron_checkpoint: Callable[..., Path], nxd: Callable[..., Engine], monkeypatch: pytest.MonkeyPatch,
    model_type: str, kind: str, cores: int,
) -> None:  # fmt: skip
    """One process per core, with gloo between them. The pivots of tiny linears become ordinary features."""
    folder = neuron_checkpoint(model_type, kind)
    monkeypatch.setattr(intermediate, "TILE", 128)  # the other ranks are processes of their own
    expect_hfs_tokens(nxd(folder, tp_degree=cores), folder, PROMPTS[1:], KERNELS[kind])


def test_the_hosts_own_generate(neuron_checkpoint: Callable[..., Path], nxd: Callable[..., Engine]) -> None:
    """NxD's HuggingFaceGenerationAdapter, with padded prompts."""
    folder = neuron_checkpoint("llama", "mlp")
    engine = nxd(folder, batch_size=2)
    engine.tokenizer.padding_side = "left"
    inputs = engine.tokenizer(PROMPTS, return_tensors="pt", padding=True)
    options: dict[str, Any] = {"max_new_tokens": NEW, "do_sample": False, "eos_token_id": NO_TOKEN}
    generated = neuron_host(engine).generate(inputs.input_ids, inputs.attention_mask, **options)
    assert generated[:, :5].tolist() == inputs.input_ids.tolist()
    assert generated[:, 5:].tolist() == tokens_of_hf(folder, PROMPTS)


def test_a_prompt_of_one_token(neuron_checkpoint: Callable[..., Path], nxd: Callable[..., Engine]) -> None:
    folder = neuron_checkpoint("llama", "dense")
    prompts = [ONE_TOKEN, PROMPTS[0]]
    results = nxd(folder, batch_size=2).generate(prompts, PARAMS)
    assert [result.token_ids for result in results] == tokens_of_hf(folder, prompts)


@pytest.mark.parametrize(("model_type", "kind"), [("qwen2", "mlp"), ("llama", "dense")])
def test_requests_join_a_continuous_batch(
    neuron_checkpoint: Callable[..., Path], nxd: Callable[..., Engine], model_type: str, kind: str
) -> None:
    """Two slots, the second one first; the third request takes the place of the first. Tokens are those alone."""
    folder = neuron_checkpoint(model_type, kind)
    engine = nxd(folder, batch_size=2, continuous=True)
    slots = engine.runner.decoder(2, 40)
    assert isinstance(slots, NeuronSlots)
    prompts = [PROMPTS[0], PROMPTS[1], ONE_TOKEN]
    expected, generated = tokens_of_hf(folder, prompts), [[], [], []]  # type: ignore[var-annotated]
    running: dict[int, int] = {}
    joins, steps = {0: (1, 0), 4: (0, 1), 9: (1, 2)}, 16
    for step in range(steps):
        if step in joins:
            slot, request = joins[step]
            running.pop(slot, None)
            running[slot] = request
            generated[request].append(int(slots.join(slot, torch.tensor(engine.encode(prompts[request]))).argmax()))
        logits = slots.step(list(running), torch.tensor([generated[request][-1] for request in running.values()]))
        for request, row in zip(running.values(), logits, strict=True):
            generated[request].append(int(row.argmax()))
    assert [len(tokens) for tokens in generated] == [10, 13, 8]
    assert generated == [alone[: len(tokens)] for alone, tokens in zip(expected, generated, strict=True)]
    assert kernels_run(engine) == (steps + len(joins)) * KERNELS[kind]


@pytest.mark.parametrize(("kind", "target"), [("dense", "trn1"), ("mixed", "trn1"), ("mixed", "trn2")])
def test_bfloat16_logits(
    neuron_checkpoint: Callable[..., Path], nxd: Callable[..., Engine], monkeypatch: pytest.MonkeyPatch, kind: str,
    target: str,
) -> None:  # fmt: skip
    """On the same tokens, the logits of every step are within twice the error of plain bfloat16 torch."""
    monkeypatch.setenv("NEURON_PLATFORM_TARGET_OVERRIDE", target)
    folder = neuron_checkpoint("qwen2", kind, torch.bfloat16)
    assert_near_float32(folder, nxd(folder, batch_size=2, amp="bf16"), make_tokens(2, 16))


def test_on_trainium_2(
    neuron_checkpoint: Callable[..., Path], nxd: Callable[..., Engine], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The kernels keep to the limits of the core that NxD names, and choose their block sizes for it."""
    monkeypatch.setenv("NEURON_PLATFORM_TARGET_OVERRIDE", "trn2")
    folder = neuron_checkpoint("llama", "mlp")
    expect_hfs_tokens(nxd(folder), folder, PROMPTS[:1], KERNELS["mlp"])


def test_two_engines_and_several_cores(neuron_checkpoint: Callable[..., Path], nxd: Callable[..., Engine]) -> None:
    """Engines on one core can be open together; one on several cores cannot be beside another."""
    folder = neuron_checkpoint("llama", "dense")
    first, second = nxd(folder), nxd(folder)
    expected = tokens_of_hf(folder, PROMPTS[:1])[0]
    for engine in (first, second, first):
        assert engine.generate(PROMPTS[:1], PARAMS)[0].token_ids == expected
    with pytest.raises(UserError, match="an engine that emulates NxD Inference is still open"):
        nxd(folder, tp_degree=2).generate(PROMPTS[:1], PARAMS)


def test_the_command(neuron_checkpoint: Callable[..., Path], capsys: pytest.CaptureFixture[str]) -> None:
    folder = neuron_checkpoint("llama", "mlp")
    command = ["generate", str(folder), "--prompt", "w7 w8 w9", "--max-new-tokens", "8", "--json", "--dtype", "fp32"]
    assert cli.main(command) == 0
    plain = json.loads(capsys.readouterr().out)
    neuron = ["--backend", "neuron", "--host", HOST.name, "--positions", "32", "--emulate"]
    assert cli.main([*command, *neuron]) == 0
    out, err = capsys.readouterr()
    assert json.loads(out)["token_ids"] == plain["token_ids"]
    assert "low-rank NKI; nxd-inference 0.9.0, emulated on this CPU, tp 1" in err and "the host's CPU mode" in err
    sizes = ["--prompt-lengths", "8", "--new-tokens", "4", "--batch", "1", "--runs", "1"]
    assert cli.main(["benchmark", str(folder), *neuron[:4], "--emulate", *sizes]) == 2
    assert "builds no graph to predict a time from" in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["dense", "compressed"])
def test_the_real_model(smollm2: Path, tmp_path: Path, nxd: Callable[..., Engine], kind: str) -> None:
    """SmolLM2-135M, all linears compressed at ratio 0.2; every kernel is interpreted: 32 new tokens."""
    folder, params = resolve(smollm2), SamplingParams(max_new_tokens=32, ignore_eos=True)
    if kind == "compressed":
        compress(
            folder,
            tmp_path / "low",
            CompressionConfig.build(None, ratio=0.2, targets="all", method="svd", refine="off"),
        )
        folder = tmp_path / "low"
    prompt = "The capital of France is"
    expected = load(folder, backend="cpu", dtype="fp32", impl="naive").generate([prompt], params)[0].token_ids
    engine = load(folder, backend="neuron", emulate=True, amp="fp32", n_positions=48, host=HOST.name)
    assert engine.generate([prompt], params)[0].token_ids == expected
    assert kernels_run(engine) == 32 * (30 * 5 if kind == "compressed" else 0)
    neuron_host(engine).close()
