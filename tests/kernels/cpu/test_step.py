"""The decode step and the core's prefill against transformers and against the torch decoder."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from draws import examples
from error_rule import draws_to_pool
from neuronmm.engine.cpu_decoder import CpuDecoder, refuses
from neuronmm.engine.decoder import TorchDecoder
from neuronmm.kernels import KernelError
from neuronmm.kernels.cpu import arena, core
from neuronmm.kernels.cpu.library import isa as isa_in_use
from neuronmm.models.families import FAMILIES, TARGETS
from tiny_models import fill_tiny, layer_ranks, make_spec, make_tiny, make_tokens, shared_spec

pytestmark = pytest.mark.skipif(core() is None, reason="the C++ core is not built")

KINDS = {
    "dense": None,
    "mlp": make_spec(layer_ranks(TARGETS["mlp"])),
    "mixed": make_spec(layer_ranks(("mlp.up_proj", "mlp.down_proj", "self_attn.q_proj", "self_attn.k_proj"))),
    "shared": shared_spec(),
    "int8": shared_spec(factors="int8"),
}
PROMPT, NEW = 9, 12


@pytest.fixture(params=[1, 2])
def threads(request: pytest.FixtureRequest) -> Iterator[int]:
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(before)


def make_model(
    model_type: str, kind: str, *, tied: bool = False, dtype: torch.dtype = torch.float32
) -> torch.nn.Module:
    model = make_tiny(model_type, tied=tied)
    if KINDS[kind]:
        fill_tiny(model, KINDS[kind])
    return model.to(dtype)


def make_prompts(batch: int) -> tuple[Tensor, Tensor]:
    """Return left-padded prompts of several lengths and their mask."""
    ids, mask = make_tokens(batch, PROMPT), torch.ones(batch, PROMPT, dtype=torch.long)
    for row in range(batch):
        mask[row, : row % 4] = 0
    return ids, mask


@torch.no_grad()
def exact_logits(model: torch.nn.Module, ids: Tensor, mask: Tensor) -> Tensor:
    """Return transformers' logits of the last position, without a cache."""
    positions = (mask.cumsum(-1) - 1).clamp(min=0)
    return model(input_ids=ids, attention_mask=mask, position_ids=positions, use_cache=False).logits[:, -1]


def assert_equals_transformers(model: torch.nn.Module, batch: int) -> None:
    """Check greedy decode in the core: equal tokens and close logits at every step."""
    ids, mask = make_prompts(batch)
    decoder = CpuDecoder(model, batch, PROMPT + NEW)
    logits = decoder.prefill(ids, mask)
    for _ in range(NEW):
        token = logits.argmax(-1)
        ids, mask = torch.cat([ids, token[:, None]], 1), torch.cat([mask, torch.ones_like(token)[:, None]], 1)
        logits, expected = decoder.decode(token), exact_logits(model, ids, mask)
        torch.testing.assert_close(logits, expected, rtol=1e-4, atol=1e-4)
        assert torch.equal(logits.argmax(-1), expected.argmax(-1))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("model_type", FAMILIES)
@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
def test_equals_transformers_in_fp32(model_type: str, kind: str, tied: bool, threads: int) -> None:
    assert_equals_transformers(make_model(model_type, kind, tied=tied), batch=3)


@pytest.mark.parametrize("batch", range(1, 9))
def test_every_batch(batch: int) -> None:
    assert_equals_transformers(make_model("qwen3", "mixed"), batch)


def test_any_linear_may_lead_a_shared_a_and_any_may_keep_its_own() -> None:
    """v leads k, up leads gate, q has its own A."""
    names = [f"model.layers.{i}.{name}" for i in range(2) for name in ("self_attn.k_proj", "mlp.gate_proj")]
    leaders = [name.replace("k_proj", "v_proj").replace("gate_proj", "up_proj") for name in names]
    own = ["model.layers.0.self_attn.q_proj", "model.layers.1.mlp.down_proj"]
    model = make_tiny("qwen2")
    fill_tiny(
        model, make_spec(dict.fromkeys((*names, *leaders, *own), 8), shared=dict(zip(names, leaders, strict=True)))
    )
    assert_equals_transformers(model, 2)


@pytest.mark.usefixtures("isa")
def test_every_instruction_set() -> None:
    assert_equals_transformers(make_model("llama", "mlp"), 2)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("model_type", FAMILIES)
def test_bf16_keeps_the_rule(model_type: str, kind: str) -> None:
    """In bf16 the error against fp32 is at most twice that of the torch decoder in bf16, over the same tokens."""
    model, (ids, mask) = make_model(model_type, kind, dtype=torch.bfloat16), make_prompts(4)
    decoders = [CpuDecoder(model, 4, PROMPT + NEW), TorchDecoder(model, 4, PROMPT + NEW)]
    wide = make_model(model_type, kind)
    wide.load_state_dict(model.state_dict())
    decoders.append(TorchDecoder(wide, 4, PROMPT + NEW))
    errors = torch.zeros(2)
    logits = [decoder.prefill(ids, mask) for decoder in decoders]
    for _ in range(NEW):
        token = logits[2].argmax(-1)
        logits = [decoder.decode(token) for decoder in decoders]
        errors += torch.stack([(y.float() - logits[2]).norm() for y in logits[:2]])
    assert errors[0] <= 2 * errors[1]


@pytest.mark.parametrize("length", [2, 9, 70])
@pytest.mark.parametrize("batch", [1, 3, 8])
@pytest.mark.parametrize("kind", KINDS)
def test_prompts_keep_the_rule(kind: str, batch: int, length: int, threads: int) -> None:
    """Logits and cache of a prompt that the core reads; 8 rows of 70 tokens take more than one call."""
    family = "qwen3" if batch == 3 else "qwen2"
    assert_reads_prompts(make_model(family, kind, dtype=torch.bfloat16), make_model(family, kind), batch, length)


@pytest.mark.parametrize("kind", ["dense", "shared", "int8"])
@pytest.mark.parametrize("length", [24, 300])
def test_prompts_keep_the_rule_on_every_instruction_set(kind: str, length: int, isa: str) -> None:
    """300 keys exceed one panel on every instruction set."""
    if isa == "portable":
        assert not CpuDecoder(make_model("qwen2", kind, dtype=torch.bfloat16), 1, 4).reads_prompts
    else:
        assert_reads_prompts(make_model("qwen2", kind, dtype=torch.bfloat16), make_model("qwen2", kind), 2, length)


@pytest.mark.usefixtures("isa")
@examples(10)
@given(st.data())
def test_prompts_of_models_of_any_width(data: st.DataObject) -> None:
    """Widths with tails in panels, vectors and rows, and wider than one panel."""
    draw = data.draw
    heads, hidden = draw(st.sampled_from([1, 2, 6])), draw(st.integers(8, 700))
    shape = {
        "hidden_size": hidden,
        "intermediate_size": draw(st.integers(8, 700)),
        "head_dim": 2 * draw(st.integers(4, 40)),
        "num_attention_heads": heads,
        "num_key_value_heads": draw(st.sampled_from([1, heads])),
        "vocab_size": draw(st.integers(64, 200)),
        "initializer_range": hidden
        ** -0.5,  # the tiny models' default would make wide models attend to one position only
    }
    batch, length = draw(st.integers(1, 3)), draw(st.integers(2, 40))
    errors = torch.zeros(2, 2)
    for seed in range(draws_to_pool(hidden * batch, 8)):
        torch.manual_seed(seed)
        model, wide = make_tiny("qwen2", dtype=torch.bfloat16, **shape), make_tiny("qwen2", **shape)
        errors += prompt_errors(model, wide, batch, length)
    assert (errors[:, 0] <= 4 * errors[:, 1]).all()


def assert_reads_prompts(model: torch.nn.Module, wide: torch.nn.Module, batch: int, length: int) -> None:
    """Check that the core's logits and cache of a prompt keep the rule against torch's."""
    errors = prompt_errors(model, wide, batch, length)
    assert (errors[:, 0] <= 4 * errors[:, 1]).all()


def prompt_errors(model: torch.nn.Module, wide: torch.nn.Module, batch: int, length: int) -> Tensor:
    """Return squared errors [logits or cache, core or torch] of a prompt of the bf16 ``model`` against ``wide``.

    ``wide`` is the same architecture in fp32; its weights are set to those of ``model``.
    """
    wide.load_state_dict(model.state_dict())
    core_decoder = CpuDecoder(model, batch, length + 3)
    if not core_decoder.reads_prompts:
        pytest.skip("torch reads prompts on this processor")
    decoders = [core_decoder, TorchDecoder(model, batch, length + 3), TorchDecoder(wide, batch, length + 3)]
    ids, mask = make_tokens(batch, length), torch.ones(batch, length, dtype=torch.long)
    for row in range(batch):
        mask[row, : min(row % 4 * length // 5, length - 1)] = 0
    logits = [decoder.prefill(ids, mask).float() for decoder in decoders]
    valid = mask.bool()[:, None, :, None]
    cached = [
        torch.stack([torch.where(valid, t[:, :, :length].float(), 0) for t in (*d.cache.keys, *d.cache.values)])
        for d in decoders
    ]
    assert all(torch.isfinite(results[0]).all() for results in (logits, cached))
    return torch.tensor(
        [[(result - exact).square().sum() for result in results] for *results, exact in (logits, cached)]
    )


def test_torch_reads_prompts_in_fp32() -> None:
    assert not CpuDecoder(make_model("llama", "dense"), 1, 16).reads_prompts


def test_torch_reads_prompts_on_processors_with_amx(monkeypatch: pytest.MonkeyPatch) -> None:
    decoder = CpuDecoder(make_model("llama", "dense", dtype=torch.bfloat16), 1, 16)
    for amx in (False, True):
        monkeypatch.setattr(torch.cpu, "get_capabilities", lambda amx=amx: {"amx_bf16": amx}, raising=False)
        assert decoder.reads_prompts is (not amx and isa_in_use() != "portable")


def test_a_decoder_is_reusable_and_full_at_the_end() -> None:
    model, (ids, mask) = make_model("llama", "dense"), make_prompts(2)
    decoder = CpuDecoder(model, 2, PROMPT + 1)
    token = decoder.prefill(ids, mask).argmax(-1)
    first = decoder.decode(token)
    with pytest.raises(ValueError, match="do not fit"):
        decoder.decode(token)
    assert torch.equal(decoder.prefill(ids, mask).argmax(-1), token)
    assert torch.equal(decoder.decode(token), first)


def test_the_arena_moves_weights_without_changing_a_result() -> None:
    model, (ids, mask) = make_model("qwen2", "mlp", tied=True), make_prompts(2)
    before = exact_logits(model, ids, mask)
    parameters = arena.gather(model.parameters())
    assert torch.equal(exact_logits(model, ids, mask), before)
    ends = [parameter.data_ptr() + parameter.nbytes for parameter in parameters]
    assert all(0 <= after.data_ptr() - end < 64 for after, end in zip(parameters[1:], ends[:-1], strict=True))
    assert len({parameter.untyped_storage().data_ptr() for parameter in parameters}) == 1
    assert_equals_transformers(model, 2)


def test_unsupported_models_are_refused() -> None:
    assert refuses(make_model("llama", "mlp"), 8) is None
    assert "9 rows" in (refuses(make_model("llama", "dense"), 9) or "")
    assert "float16" in (refuses(make_model("llama", "dense", dtype=torch.float16), 1) or "")
    model = make_model("llama", "dense")
    model.model.layers[0].mlp.up_proj = torch.nn.Sequential(model.model.layers[0].mlp.up_proj)
    assert "up_proj is a Sequential" in (refuses(model, 1) or "")
    with pytest.raises(KernelError, match="batch 9"):
        CpuDecoder(make_model("llama", "dense"), 9, 16)


def test_wrong_arguments_are_refused_before_they_reach_the_core() -> None:
    decoder = CpuDecoder(make_model("llama", "dense"), 2, 16)
    starts = torch.zeros(2, dtype=torch.int32)
    for token_ids, slot, begin in (
        (torch.zeros(3, 1, dtype=torch.long), 0, starts),
        (torch.zeros(2, dtype=torch.long), 0, starts),
        (torch.zeros(2, 0, dtype=torch.long), 0, starts),
        (torch.zeros(2, 1, dtype=torch.int32), 0, starts),
        (torch.zeros(2, 1, dtype=torch.long), 16, starts),
        (torch.zeros(2, 1, dtype=torch.long), -1, starts),
        (torch.zeros(2, 1, dtype=torch.long), 3, starts + 4),
        (torch.full((2, 1), 64), 0, starts),
        (torch.full((2, 1), -1), 0, starts),
        (torch.zeros(2, 1, dtype=torch.long), 0, starts.long()),
        (torch.zeros(2, 2, dtype=torch.long), 0, starts),  # a prompt in fp32
    ):
        with pytest.raises(KernelError):
            decoder._core_step(token_ids, slot, begin)
