"""Real Neuron hosts on the emulated runtime generate what the CPU backend does, and the NKI kernels are seen to run.

Runs on every host that can be imported: optimum-neuron's HLO backend, transformers-neuronx.
"""

from __future__ import annotations

import gc
import json
import os
import re
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from words import word_tokenizer

from neuronmm import cli
from neuronmm.compression.config import CompressionConfig
from neuronmm.compression.pipeline import compress
from neuronmm.emulator.runtime import neuron_emulation
from neuronmm.engine.backends.neuron import NeuronHost
from neuronmm.engine.engine import Engine, load
from neuronmm.engine.sampling import SamplingParams
from neuronmm.models import FAMILIES, UserError
from neuronmm.models.families import LAYERS, TARGETS
from neuronmm.models.neuronx import cache, graph, sdk
from neuronmm.models.source import resolve
from rule import assert_twice_plain
from tiny import compress_tiny, fill_tiny, make_spec, make_tiny, make_tokens, shared_spec, write_checkpoint

NEW = 64
PARAMS = SamplingParams(max_new_tokens=NEW, ignore_eos=True)
PROMPTS = ["w7 w8 w9", "w11 w12 w13 w14 w15"]
POSITIONS = 80
EVERY = {
    "self_attn.q_proj": 8, "self_attn.k_proj": 4, "self_attn.v_proj": 5, "self_attn.o_proj": 7,
    "mlp.gate_proj": 12, "mlp.up_proj": 16, "mlp.down_proj": 8,
}  # fmt: skip
MIXED = {**{f"{LAYERS}.0.{name}": rank for name, rank in EVERY.items()}, f"{LAYERS}.1.mlp.gate_proj": 12}
"""One layer all low-rank, five kernels; the other dense but for gate, one kernel."""


@pytest.fixture(params=list(sdk.HOSTS))
def host(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> str:
    """Each host that is here, alone, with an empty compile cache."""
    name: str = request.param
    if find_spec(sdk.HOSTS[name][0].split(".")[0]) is None:
        pytest.skip(f"{name} is not installed")
    monkeypatch.setattr(sdk, "HOSTS", {name: sdk.HOSTS[name]})
    monkeypatch.setenv("NEURONMM_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("TOKENIZERS_PARALLELISM", "false")
    return name


@pytest.fixture
def checkpoint(tmp_path: Path) -> Callable[..., Path]:
    """``checkpoint("qwen2", "mlp")``: a tiny checkpoint, ``dense``, ``mlp``, ``shared`` (one A for q, k, v and one for
    gate, up) or ``mixed`` (see MIXED)."""

    def make(model_type: str = "llama", kind: str = "dense", dtype: torch.dtype = torch.float32) -> Path:
        folder, model = tmp_path / f"{model_type}-{kind}", make_tiny(model_type, dtype=dtype)
        if kind == "dense":
            model.save_pretrained(folder)
        elif kind == "shared":
            write_checkpoint(model, fill_tiny(model, shared_spec()), folder)
        else:
            ranks = {f"{LAYERS}.{i}.{name}": EVERY[name] for i in range(2) for name in TARGETS["mlp"]}
            write_checkpoint(model, compress_tiny(model, MIXED if kind == "mixed" else ranks), folder)
        word_tokenizer().save_pretrained(folder)
        return folder

    return make


@pytest.fixture
def neuron() -> Iterator[Callable[..., Engine]]:
    """``load(folder, backend="neuron", emulate=True, ...)``, given back at the end."""
    loaded: list[Engine] = []

    def make(folder: Path, **options: Any) -> Engine:
        defaults = {"n_positions": POSITIONS, "amp": "fp32", "emulate": True}
        engine = load(folder, backend="neuron", **{**defaults, **options})
        engine.tokenizer = word_tokenizer()
        loaded.append(engine)
        return engine

    yield make
    for engine in loaded:
        neuron_host(engine).close()


def neuron_host(engine: Engine) -> NeuronHost:
    assert isinstance(engine.host, NeuronHost)
    return engine.host


def cpu_tokens(folder: Path, prompts: list[str]) -> list[list[int]]:
    engine = load(folder, backend="cpu", dtype="fp32")
    engine.tokenizer = word_tokenizer()
    return [result.token_ids for result in engine.generate(prompts, PARAMS)]


KERNELS = {"dense": 0, "mlp": 2, "shared": 2 * 4, "mixed": 5 + 1}
"""NKI kernels in the graph of a two-layer model."""


@pytest.mark.parametrize(("tp_degree", "batch"), [(1, 1), (2, 2)])
@pytest.mark.parametrize(
    ("model_type", "kind"),
    [*((family, kind) for family in FAMILIES for kind in ("dense", "mixed")), ("llama", "mlp"), ("qwen3", "shared")],
)
def test_greedy_tokens_equal_the_cpu_backends(
    host: str, checkpoint: Callable[..., Path], neuron: Callable[..., Engine], model_type: str, kind: str,
    tp_degree: int, batch: int,
) -> None:  # fmt: skip
    folder, prompts = checkpoint(model_type, kind), PROMPTS[:batch]
    engine = neuron(folder, tp_degree=tp_degree, batch_size=batch)
    session, _ = neuron_host(engine).session, neuron_host(engine).model
    session.calls.clear()
    results = engine.generate(prompts, PARAMS)
    assert [result.token_ids for result in results] == cpu_tokens(folder, prompts)
    # A prompt and 63 later tokens: every kernel ran in every one of these steps, on every core, and no reference did.
    assert session.calls["nki"] == NEW * KERNELS[kind] * tp_degree
    assert session.calls["reference"] == 0


@pytest.mark.parametrize("kind", ["mlp", "mixed"])
@pytest.mark.parametrize(("tp_degree", "batch"), [(1, 2), (2, 1), (3, 2)])
def test_layouts_and_sizes(
    host: str, checkpoint: Callable[..., Path], neuron: Callable[..., Engine], kind: str, tp_degree: int, batch: int
) -> None:
    folder, prompts = checkpoint("qwen2", kind), PROMPTS[:batch]
    engine = neuron(folder, tp_degree=tp_degree, batch_size=batch, layout="BSH")
    assert [result.token_ids for result in engine.generate(prompts, PARAMS)] == cpu_tokens(folder, prompts)


@pytest.mark.parametrize("layout", ["HSB", "BSH"])
def test_adding_up_before_b(
    host: str, checkpoint: Callable[..., Path], neuron: Callable[..., Engine], monkeypatch: pytest.MonkeyPatch,
    layout: str,
) -> None:  # fmt: skip
    """Where the small all-reduce is the cheaper one: o and down are two kernels, the tokens are the same."""
    monkeypatch.setattr(graph, "sums_before_b", lambda *sizes: True)
    folder = checkpoint("llama", "mixed")
    engine = neuron(folder, tp_degree=2, layout=layout)
    session, _ = neuron_host(engine).session, neuron_host(engine).model
    session.calls.clear()
    assert engine.generate(PROMPTS[:1], PARAMS)[0].token_ids == cpu_tokens(folder, PROMPTS[:1])[0]
    assert session.calls["nki"] == NEW * (KERNELS["mixed"] + 2) * 2


@pytest.mark.parametrize("tp_degree", [1, 2])
@pytest.mark.parametrize("kind", ["dense", "mixed"])
@pytest.mark.parametrize("model_type", list(FAMILIES))
def test_bfloat16_logits(
    host: str, checkpoint: Callable[..., Path], neuron: Callable[..., Engine], model_type: str, kind: str,
    tp_degree: int,
) -> None:  # fmt: skip
    """Of every step, with the same tokens: no further from float32 than twice plain bfloat16 torch."""
    folder = checkpoint(model_type, kind, torch.bfloat16)
    engine = neuron(folder, tp_degree=tp_degree, batch_size=2, amp="bf16")
    assert_near_float32(folder, engine, make_tokens(2, 20))


def assert_near_float32(folder: Path, engine: Engine, tokens: Tensor) -> None:
    """The rule for bfloat16 logits, after a prompt of 5 tokens and after each later one."""
    plain, exact = (load(folder, backend="cpu", dtype=dtype, impl="naive") for dtype in ("bf16", "fp32"))

    def logits(engine: Engine) -> Tensor:
        decoder = engine.host.decoder(*tokens.shape)
        steps = [decoder.prefill(tokens[:, :5], torch.ones(len(tokens), 5, dtype=torch.long))]
        steps += [decoder.decode(token) for token in tokens[:, 5:].T]
        return torch.stack(steps).to(torch.bfloat16 if engine is not exact else torch.float32)

    assert_twice_plain([None], lambda _: logits(engine), lambda _: logits(plain), lambda _: logits(exact))


def test_the_hosts_own_loops_give_the_same_tokens(
    host: str, checkpoint: Callable[..., Path], neuron: Callable[..., Engine]
) -> None:
    """transformers' ``generate`` through the host, and transformers-neuronx's ``sample``; the prompts are padded."""
    folder = checkpoint("llama", "mlp")
    engine = neuron(folder, batch_size=2)
    want = cpu_tokens(folder, PROMPTS)
    engine.tokenizer.padding_side = "left"
    inputs = engine.tokenizer(PROMPTS, return_tensors="pt", padding=True)
    nothing = 64  # an end of sequence that no token is
    given = neuron_host(engine).generate(
        inputs.input_ids, inputs.attention_mask, max_new_tokens=NEW, do_sample=False, eos_token_id=nothing
    )
    assert given[:, 5:].tolist() == want
    if host == "transformers-neuronx":
        start = inputs.attention_mask.argmax(1)
        model = neuron_host(engine).model
        sampled = model.sample(inputs.input_ids, 5 + NEW, start_ids=start, top_k=1, eos_token_override=nothing)
        assert sampled[:, 5:].tolist() == want


def test_fewer_rows_than_the_batch_and_more(
    host: str, checkpoint: Callable[..., Path], neuron: Callable[..., Engine]
) -> None:
    folder, prompts = checkpoint(), [*PROMPTS, "w20"]
    engine = neuron(folder, batch_size=2)
    assert [result.token_ids for result in engine.generate(prompts, PARAMS)] == cpu_tokens(folder, prompts)


def test_one_core_and_the_torch_reference(
    host: str, checkpoint: Callable[..., Path], neuron: Callable[..., Engine]
) -> None:
    """``impl="reference"`` spares the interpretation of the kernels, says so in the counts, and gives the tokens."""
    folder = checkpoint("llama", "mixed")
    engine = neuron(folder, impl="reference", layout="BSH")
    assert engine.generate(PROMPTS[:1], PARAMS)[0].token_ids == cpu_tokens(folder, PROMPTS[:1])[0]
    calls = neuron_host(engine).session.calls
    assert calls["nki"] == 0 and calls["reference"] >= NEW * KERNELS["mixed"]


def test_compiled_graphs_are_kept(
    host: str, checkpoint: Callable[..., Path], neuron: Callable[..., Engine], monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = checkpoint("llama", "mlp")

    def cached(**options: Any) -> bool:
        engine = neuron(folder, **options)
        said = engine.host.path
        hit = neuron_host(engine).cached
        assert ("compile cache hit" in said) == hit and ("compile cache miss" in said) == (not hit)
        assert engine.generate(PROMPTS[:1], PARAMS)[0].token_ids == tokens
        return bool(hit)

    tokens = cpu_tokens(folder, PROMPTS[:1])[0]
    assert not cached()
    assert cached()
    assert not cached(n_positions=72)
    assert not cached(layout="BSH")
    assert not cached(tp_degree=2)
    monkeypatch.setenv("NEURON_CC_FLAGS", "-O1")
    assert not cached()
    monkeypatch.delenv("NEURON_CC_FLAGS")
    for neff in (Path(os.environ["NEURONMM_CACHE"]) / "neuronx").rglob("*.neff"):
        neff.unlink()
    assert not cached()
    assert cached()


BAD = [
    ({"tp_degree": 5}, "tp_degree 5: has to lie between 1 and the model's 4 attention heads"),
    ({"tp_degree": 0}, "tp_degree 0: has to be 1 or more"),
    ({"batch_size": 0}, "batch_size 0: has to be 1 or more"),
    ({"n_positions": 129}, "n_positions 129 exceeds the model's context of 128"),
    ({"layout": "SBH"}, "layout 'SBH'"),
    ({"impl": "naive"}, "kernel 'naive' is not for backend neuron"),
    ({"amp": "int4"}, "unknown dtype 'int4'"),
    ({"speed": 1}, "backend neuron has no option speed"),
]


@pytest.mark.parametrize(("options", "message"), BAD, ids=[message for _, message in BAD])
def test_bad_options_are_refused_before_anything_compiles(
    host: str, checkpoint: Callable[..., Path], neuron: Callable[..., Engine], monkeypatch: pytest.MonkeyPatch,
    options: dict[str, Any], message: str,
) -> None:  # fmt: skip
    monkeypatch.setattr(cache, "to_cores", lambda *_: pytest.fail("compiled"))
    folder = checkpoint()
    with pytest.raises(UserError, match=message):
        neuron(folder, **options)


def test_too_long_is_refused_before_anything_compiles(
    host: str, checkpoint: Callable[..., Path], neuron: Callable[..., Engine], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cache, "to_cores", lambda *_: pytest.fail("compiled"))
    engine = neuron(checkpoint())
    with pytest.raises(UserError, match="80 tokens, but prompt and answer have to fit the model's context of 80"):
        engine.generate([" ".join(["w9"] * 80)], PARAMS)
    with pytest.raises(UserError, match="2 rows of 90 positions do not fit graphs of batch_size 1 and n_positions 80"):
        engine.host.decoder(2, 90)


def test_a_missing_weight_is_refused_before_anything_compiles(
    host: str, checkpoint: Callable[..., Path], neuron: Callable[..., Engine]
) -> None:
    folder = checkpoint()
    write_checkpoint(make_tiny(), make_spec(MIXED), folder)  # config.json promises factors that are not there
    with pytest.raises(UserError, match=r"config\.json and weights disagree"):
        neuron(folder)


def test_generate_command(host: str, checkpoint: Callable[..., Path], capsys: pytest.CaptureFixture[str]) -> None:
    folder = checkpoint("llama", "mlp")
    command = ["generate", str(folder), "--prompt", "w7 w8 w9", "--max-new-tokens", "8", "--json", "--dtype", "fp32"]
    assert cli.main(command) == 0
    plain = json.loads(capsys.readouterr().out)
    assert cli.main([*command, "--backend", "neuron", "--tp", "2", "--positions", "64", "--emulate"]) == 0
    out, err = capsys.readouterr()
    assert json.loads(out)["token_ids"] == plain["token_ids"]
    assert f"backend neuron, float32, kernels: low-rank NKI; {host}" in err and "emulated on this CPU, tp 2" in err
    assert cli.main([*command, "--tp", "2"]) == 2
    assert "backend cpu has no option tp_degree" in capsys.readouterr().err


BENCHMARK = ["--backend", "neuron", "--prompt-lengths", "8,16", "--new-tokens", "6", "--batch", "1", "--runs", "2"]


def test_an_emulated_benchmark_keeps_prediction_and_emulation_apart(
    host: str, checkpoint: Callable[..., Path], capsys: pytest.CaptureFixture[str]
) -> None:
    dense, low = checkpoint("llama", "dense"), checkpoint("llama", "mlp")
    assert cli.main(["benchmark", str(low), "--baseline", str(dense), *BENCHMARK, "--emulate"]) == 0
    out = capsys.readouterr().out
    assert "predicted for 1 trn1 core(s), not measured" in out and "not of a device" in out
    result = json.loads(out.splitlines()[-1])
    assert (result["kind"], result["emulated"], len(result["points"])) == ("predicted", True, 2)
    for point in result["points"]:
        assert list(point["variants"]) == ["dense", "fused"]
        for figures in point["variants"].values():
            assert set(figures) == {"predicted", "emulation"}
            assert 0 < figures["predicted"]["tpot"] < 1e-3 < figures["emulation"]["tpot"]["median"]


def test_a_benchmark_on_a_device_is_measured(
    host: str, checkpoint: Callable[..., Path], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sdk, "check_cores", lambda wanted: None)
    with neuron_emulation():  # stands in for the device
        assert cli.main(["benchmark", str(checkpoint("llama", "mlp")), *BENCHMARK]) == 0
    out = capsys.readouterr().out
    assert "measured on 1 trn1 core(s): 2 runs of 6 tokens" in out and "predicted" not in out
    result = json.loads(out.splitlines()[-1])
    assert result["kind"] == "measured" and set(result["points"][0]["variants"]["fused"]) == {"measured"}


SMOL_PROMPTS = ["The capital of France is", "Once upon a time there was a small robot who"]


@pytest.mark.slow
@pytest.mark.parametrize(("tp_degree", "batch"), [(1, 1), (2, 1), (1, 2), (2, 2)])
@pytest.mark.parametrize("compressed", [False, True], ids=["dense", "compressed"])
def test_the_real_model(
    host: str, smollm2: Path, neuron: Callable[..., Engine], tmp_path: Path, compressed: bool, tp_degree: int,
    batch: int,
) -> None:  # fmt: skip
    """SmolLM2-135M: 9 heads and 3 key heads, so that two cores need padded heads. All linears at ratio 0.2."""
    folder = resolve(smollm2)
    if compressed:
        settings = CompressionConfig.build(None, ratio=0.2, targets="all", method="svd")
        compress(folder, tmp_path / "low", settings)
        folder = tmp_path / "low"
    prompts = SMOL_PROMPTS[:batch]
    want = [result.token_ids for result in load(folder, backend="cpu", dtype="fp32").generate(prompts, PARAMS)]
    engine = load(
        folder, backend="neuron", emulate=True, tp_degree=tp_degree, batch_size=batch, n_positions=128, amp="fp32"
    )
    session, _ = neuron_host(engine).session, neuron_host(engine).model
    session.calls.clear()
    assert [result.token_ids for result in engine.generate(prompts, PARAMS)] == want
    low = len(neuron_host(engine).shards.checkpoint.ranks) // 30
    assert session.calls["nki"] == NEW * 30 * (low and low - 2) * tp_degree
    neuron_host(engine).close()
    half = load(
        folder, backend="neuron", emulate=True, tp_degree=tp_degree, batch_size=batch, n_positions=128, amp="bf16"
    )
    ids = half.encode("The sky is blue because of the way that light from the sun meets small molecules of air.")
    assert_near_float32(folder, half, torch.tensor([ids[:16]]).repeat(batch, 1))
    neuron_host(half).close()


def test_engines_come_and_go_in_any_order(
    host: str, checkpoint: Callable[..., Path], neuron: Callable[..., Engine]
) -> None:
    """The first engine's end does not end the emulation of the second; a stream outlives the name of its engine."""
    folder = checkpoint("llama", "mlp")
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


def test_the_document(
    host: str, checkpoint: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    """The Python of docs/trainium.md runs as it stands, but for ``emulate`` and a smaller model."""
    monkeypatch.chdir(tmp_path)
    checkpoint("llama", "mlp").rename(tmp_path / "OUT")
    text = (Path(__file__).parents[2] / "docs" / "trainium.md").read_text(encoding="utf-8")
    (block,) = re.findall(r"^```python\n(.*?)^```", text, re.MULTILINE | re.DOTALL)
    exec(block.replace("n_positions=512", "n_positions=128, emulate=True"), {})
    assert "tp 2, batch 1, 128 positions; compile cache miss" in capsys.readouterr().out


def test_closing_leaves_the_emulation(
    host: str, checkpoint: Callable[..., Path], neuron: Callable[..., Engine]
) -> None:
    first = neuron(checkpoint())
    assert sdk.compiler_version() is not None
    neuron_host(first).close()
    assert find_spec("torch_neuronx") is None
    with neuron_emulation():
        assert sdk.missing() is None
