"""Real Neuron hosts on the emulated runtime generate the CPU backend's tokens, and run the NKI kernels to do so.

The tests run on every host that can be imported: optimum-neuron's HLO backend, transformers-neuronx.
"""

from __future__ import annotations

import gc
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch

from neuron_cases import (
    KERNELS,
    MIXED,
    NEW,
    NORMS,
    PARAMS,
    POSITIONS,
    PROMPTS,
    assert_near_float32,
    cpu_tokens,
    neuron_host,
)
from neuronmm.compression.config import CompressionConfig
from neuronmm.compression.pipeline import compress
from neuronmm.emulator.runtime import Session, neuron_emulation
from neuronmm.engine.engine import Engine, load
from neuronmm.models import FAMILIES, UserError
from neuronmm.models.neuronx import cache, graph, sdk
from neuronmm.models.source import resolve
from tiny_models import make_spec, make_tiny, make_tokens, write_checkpoint
from word_tokenizer import word_tokenizer


def fresh_session(engine: Engine) -> Session:
    """Return the emulation's session after the model is compiled, with its counts at 0."""
    assert neuron_host(engine).model is not None
    session: Session = neuron_host(engine).session
    session.calls.clear()
    return session


@pytest.mark.parametrize(("tp_degree", "batch"), [(1, 1), (2, 2)])
@pytest.mark.parametrize(
    ("model_type", "kind"),
    [
        *((family, kind) for family in FAMILIES for kind in ("dense", "mixed")),
        ("llama", "mlp"),
        ("llama", "pivoted"),
        ("qwen2", "high"),
        ("qwen3", "shared"),
    ],
)
def test_greedy_tokens_equal_the_cpu_backends(
    host: str, neuron_checkpoint: Callable[..., Path], neuron: Callable[..., Engine], model_type: str, kind: str,
    tp_degree: int, batch: int,
) -> None:  # fmt: skip
    folder, prompts = neuron_checkpoint(model_type, kind), PROMPTS[:batch]
    engine = neuron(folder, tp_degree=tp_degree, batch_size=batch)
    session = fresh_session(engine)
    results = engine.generate(prompts, PARAMS)
    assert [result.token_ids for result in results] == cpu_tokens(folder, prompts)
    # One prefill and 63 decode steps: every kernel ran in every step on every core, and no reference ran.
    assert session.calls["nki"] == NEW * KERNELS[kind] * tp_degree
    assert session.calls["reference"] == 0
    norms = NORMS[kind] + (2 * 2 if model_type == "qwen3" else 0)  # norms of queries and keys
    assert session.calls["AwsNeuronRmsNorm"] == NEW * norms * tp_degree


@pytest.mark.parametrize("kind", ["mlp", "mixed"])
@pytest.mark.parametrize(("tp_degree", "batch"), [(1, 2), (2, 1), (3, 2)])
def test_layouts_and_sizes(
    host: str,
    neuron_checkpoint: Callable[..., Path],
    neuron: Callable[..., Engine],
    kind: str,
    tp_degree: int,
    batch: int,
) -> None:
    folder, prompts = neuron_checkpoint("qwen2", kind), PROMPTS[:batch]
    engine = neuron(folder, tp_degree=tp_degree, batch_size=batch, layout="BSH")
    assert [result.token_ids for result in engine.generate(prompts, PARAMS)] == cpu_tokens(folder, prompts)


@pytest.mark.parametrize("layout", ["HSB", "BSH"])
def test_sum_over_cores_before_b(
    host: str, neuron_checkpoint: Callable[..., Path], neuron: Callable[..., Engine], monkeypatch: pytest.MonkeyPatch,
    layout: str,
) -> None:  # fmt: skip
    """With the smaller all-reduce, o and down are two kernels each, and the tokens stay the same."""
    monkeypatch.setattr(graph, "sums_before_b", lambda *sizes: True)
    folder = neuron_checkpoint("llama", "mixed")
    engine = neuron(folder, tp_degree=2, layout=layout)
    session = fresh_session(engine)
    assert engine.generate(PROMPTS[:1], PARAMS)[0].token_ids == cpu_tokens(folder, PROMPTS[:1])[0]
    assert session.calls["nki"] == NEW * (KERNELS["mixed"] + 2) * 2


@pytest.mark.parametrize(("tp_degree", "layout"), [(2, "BSH"), (3, "HSB")])
def test_pivoted_linears_on_several_cores(
    host: str, neuron_checkpoint: Callable[..., Path], neuron: Callable[..., Engine], monkeypatch: pytest.MonkeyPatch,
    tp_degree: int, layout: str,
) -> None:  # fmt: skip
    """A pivoted down is summed after B, whatever is cheaper. On 3 cores some pivots are ordinary features."""
    monkeypatch.setattr(graph, "sums_before_b", lambda *sizes: True)
    folder = neuron_checkpoint("llama", "pivoted")
    engine = neuron(folder, tp_degree=tp_degree, batch_size=2, layout=layout)
    session = fresh_session(engine)
    assert [result.token_ids for result in engine.generate(PROMPTS, PARAMS)] == cpu_tokens(folder, PROMPTS)
    assert session.calls["nki"] == NEW * KERNELS["pivoted"] * tp_degree


@pytest.mark.parametrize("tp_degree", [1, 2])
@pytest.mark.parametrize("kind", ["dense", "mixed", "pivoted"])
@pytest.mark.parametrize("model_type", list(FAMILIES))
def test_bfloat16_logits(
    host: str, neuron_checkpoint: Callable[..., Path], neuron: Callable[..., Engine], model_type: str, kind: str,
    tp_degree: int,
) -> None:  # fmt: skip
    """On the same tokens, the logits of every step are within twice the error of plain bfloat16 torch."""
    folder = neuron_checkpoint(model_type, kind, torch.bfloat16)
    engine = neuron(folder, tp_degree=tp_degree, batch_size=2, amp="bf16")
    assert_near_float32(folder, engine, make_tokens(2, 20))


def test_the_hosts_own_loops_give_the_same_tokens(
    host: str, neuron_checkpoint: Callable[..., Path], neuron: Callable[..., Engine]
) -> None:
    """transformers' ``generate`` through the host, and transformers-neuronx's ``sample``; the prompts are padded."""
    folder = neuron_checkpoint("llama", "mlp")
    engine = neuron(folder, batch_size=2)
    expected = cpu_tokens(folder, PROMPTS)
    engine.tokenizer.padding_side = "left"
    inputs = engine.tokenizer(PROMPTS, return_tensors="pt", padding=True)
    no_token = 64  # an end of sequence beyond the vocabulary
    generated = neuron_host(engine).generate(
        inputs.input_ids, inputs.attention_mask, max_new_tokens=NEW, do_sample=False, eos_token_id=no_token
    )
    assert generated[:, 5:].tolist() == expected
    if host == "transformers-neuronx":
        start = inputs.attention_mask.argmax(1)
        model = neuron_host(engine).model
        sampled = model.sample(inputs.input_ids, 5 + NEW, start_ids=start, top_k=1, eos_token_override=no_token)
        assert sampled[:, 5:].tolist() == expected


def test_fewer_rows_than_the_batch_and_more(
    host: str, neuron_checkpoint: Callable[..., Path], neuron: Callable[..., Engine]
) -> None:
    folder, prompts = neuron_checkpoint(), [*PROMPTS, "w20"]
    engine = neuron(folder, batch_size=2)
    assert [result.token_ids for result in engine.generate(prompts, PARAMS)] == cpu_tokens(folder, prompts)


def test_one_core_and_the_torch_reference(
    host: str, neuron_checkpoint: Callable[..., Path], neuron: Callable[..., Engine]
) -> None:
    """``impl="reference"`` runs the kernels' torch references instead of the kernels, and gives the same tokens."""
    folder = neuron_checkpoint("llama", "mixed")
    engine = neuron(folder, impl="reference", layout="BSH")
    assert engine.generate(PROMPTS[:1], PARAMS)[0].token_ids == cpu_tokens(folder, PROMPTS[:1])[0]
    calls = neuron_host(engine).session.calls
    assert calls["nki"] == 0 and calls["reference"] >= NEW * KERNELS["mixed"]


BAD = [
    ({"tp_degree": 5}, "tp_degree 5: must be between 1 and the model's 4 attention heads"),
    ({"tp_degree": 0}, "tp_degree 0: must be 1 or more"),
    ({"batch_size": 0}, "batch_size 0: must be 1 or more"),
    ({"n_positions": 129}, "n_positions 129 exceeds the model's context of 128"),
    ({"layout": "SBH"}, "layout 'SBH'"),
    ({"impl": "naive"}, "kernel 'naive' is not for backend neuron"),
    ({"amp": "int4"}, "unknown dtype 'int4'"),
    ({"speed": 1}, "backend neuron has no option speed"),
]


@pytest.mark.parametrize(("options", "message"), BAD, ids=[message for _, message in BAD])
def test_bad_options_are_refused_before_anything_compiles(
    host: str, neuron_checkpoint: Callable[..., Path], neuron: Callable[..., Engine], monkeypatch: pytest.MonkeyPatch,
    options: dict[str, Any], message: str,
) -> None:  # fmt: skip
    monkeypatch.setattr(cache, "to_cores", lambda *_: pytest.fail("compiled"))
    folder = neuron_checkpoint()
    with pytest.raises(UserError, match=message):
        neuron(folder, **options)


def test_a_sequence_that_is_too_long_is_refused_before_anything_compiles(
    host: str, neuron_checkpoint: Callable[..., Path], neuron: Callable[..., Engine], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cache, "to_cores", lambda *_: pytest.fail("compiled"))
    engine = neuron(neuron_checkpoint())
    with pytest.raises(UserError, match="80 tokens, but prompt and answer have to fit the context of 80"):
        engine.generate([" ".join(["w9"] * 80)], PARAMS)
    with pytest.raises(UserError, match="2 rows of 90 positions do not fit graphs of batch_size 1 and n_positions 80"):
        engine.runner.decoder(2, 90)


def test_a_missing_weight_is_refused_before_anything_compiles(
    host: str, neuron_checkpoint: Callable[..., Path], neuron: Callable[..., Engine]
) -> None:
    folder = neuron_checkpoint()
    write_checkpoint(make_tiny(), make_spec(MIXED), folder)  # config.json lists factors that no shard has
    with pytest.raises(UserError, match=r"config\.json and weights disagree"):
        neuron(folder)


SMOL_PROMPTS = ["The capital of France is", "Once upon a time there was a small robot who"]


@pytest.fixture(scope="module")
def real_models(smollm2: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """SmolLM2-135M, dense and with all linears compressed at ratio 0.2."""
    dense, low = resolve(smollm2), tmp_path_factory.mktemp("smollm2") / "low"
    compress(dense, low, CompressionConfig.build(None, ratio=0.2, targets="all", method="svd"))
    return {"dense": dense, "compressed": low}


@pytest.mark.slow
@pytest.mark.parametrize(("tp_degree", "batch"), [(1, 1), (2, 1), (1, 2), (2, 2)])
@pytest.mark.parametrize("kind", ["dense", "compressed"])
def test_the_real_model(host: str, real_models: dict[str, Path], kind: str, tp_degree: int, batch: int) -> None:
    """SmolLM2-135M has 9 heads and 3 key heads, so two cores need padded heads. Every kernel is interpreted."""
    folder, prompts = real_models[kind], SMOL_PROMPTS[:batch]
    expected = [result.token_ids for result in load(folder, backend="cpu", dtype="fp32").generate(prompts, PARAMS)]
    sizes = {"tp_degree": tp_degree, "batch_size": batch, "n_positions": 128}
    engine = load(folder, backend="neuron", emulate=True, amp="fp32", **sizes)
    session = fresh_session(engine)
    assert [result.token_ids for result in engine.generate(prompts, PARAMS)] == expected
    kernels = 30 * 5 if kind == "compressed" else 0  # per layer: query, key, value, output, and one for the MLP
    assert session.calls["nki"] == NEW * kernels * tp_degree
    assert session.calls["reference"] == 0
    neuron_host(engine).close()
    bf16 = load(folder, backend="neuron", emulate=True, amp="bf16", **sizes)
    ids = bf16.encode("The sky is blue because of the way that light from the sun meets small molecules of air.")
    assert_near_float32(folder, bf16, torch.tensor([ids[:16]]).repeat(batch, 1))
    neuron_host(bf16).close()


def test_engines_open_and_close_in_any_order(
    host: str, neuron_checkpoint: Callable[..., Path], neuron: Callable[..., Engine]
) -> None:
    """Closing the first engine does not end the emulation of the second; a stream keeps its engine alive."""
    folder = neuron_checkpoint("llama", "mlp")
    first, second = neuron(folder), load(folder, backend="neuron", amp="fp32", n_positions=POSITIONS, emulate=True)
    second.tokenizer = word_tokenizer()
    with pytest.raises(UserError, match="emulates with kernels 'nki' is still open"):
        neuron(folder, impl="reference")
    neuron_host(first).close()
    stream = second.stream(PROMPTS[0], PARAMS)
    del second
    gc.collect()
    assert len(list(stream)) > 1
    assert stream.result.token_ids == cpu_tokens(folder, PROMPTS[:1])[0]


def test_closing_ends_the_emulation(
    host: str, neuron_checkpoint: Callable[..., Path], neuron: Callable[..., Engine]
) -> None:
    first = neuron(neuron_checkpoint())
    assert sdk.compiler_version() is not None
    neuron_host(first).close()
    assert find_spec("torch_neuronx") is None
    with neuron_emulation():
        assert sdk.missing() is None
