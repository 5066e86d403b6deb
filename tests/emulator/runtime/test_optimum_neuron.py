"""optimum-neuron, unmodified, builds, compiles, loads and generates on the emulated runtime with HF's tokens."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaForCausalLM

import xla_oracle as xla
from neuronmm.emulator.pyhlo.messages import HloModuleProto
from neuronmm.emulator.runtime import neuron_emulation
from neuronmm.emulator.runtime.compiler import module_bytes

pytest.importorskip("optimum.neuron.version", reason="optimum-neuron is not installed", exc_type=ImportError)

PROMPT = torch.tensor([[1, 17, 5, 88, 42, 9, 60], [1, 3, 71, 71, 20, 35, 8]])
NEW = 12


def load(folder: Path, **options: Any) -> Any:
    """Load a checkpoint with optimum-neuron's own model class. Call it inside the emulation."""
    from optimum.neuron.models.inference.hlo.backend.config import HloNeuronConfig
    from optimum.neuron.models.inference.hlo.llama.model import LlamaHloModel

    model = LlamaHloModel.from_pretrained(folder, neuron_config=HloNeuronConfig(sequence_length=32, **options))
    model.to_neuron()
    return model


def greedy(model: Any, prompt: torch.Tensor, new: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return prompt and new tokens [batch, length + new], and the logits of every step [steps, batch, vocabulary]."""
    batch, length = prompt.shape
    continuous = model.neuron_config.continuous_batching
    start = torch.arange(batch) if continuous else torch.zeros(batch, dtype=torch.int32)
    tokens, steps = prompt, []
    positions = torch.arange(length).expand(batch, -1) if continuous else None
    logits = model.forward(prompt, positions, start)
    for step in range(new):
        steps.append(logits)
        next_token = logits.argmax(-1)[:, None]
        tokens = torch.cat([tokens, next_token], 1)
        shape = (batch, 1) if continuous else (1,)
        position = torch.full(shape, length + step, dtype=torch.int64 if continuous else torch.int32)
        logits = model.forward(next_token, position, start)
    return tokens, torch.stack(steps)


@pytest.mark.parametrize("layout", ["HSB", "BSH"])
@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize(("batch", "continuous"), [(1, False), (2, False), (2, True)])
def test_greedy_tokens_equal_those_of_hf(
    llama: tuple[Path, LlamaForCausalLM], layout: str, ranks: int, batch: int, continuous: bool
) -> None:
    folder, reference = llama
    prompt = PROMPT[:batch]
    expected = reference.generate(
        prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=NEW, do_sample=False, eos_token_id=None,
        pad_token_id=0,
    )  # fmt: skip
    with neuron_emulation() as session:
        model = load(
            folder, batch_size=batch, auto_cast_type="fp32", tp_degree=ranks, attention_layout=layout,
            collectives_layout=layout, continuous_batching=continuous, fuse_qkv=layout == "HSB",
        )  # fmt: skip
        session.calls.clear()
        tokens, _ = greedy(model, prompt, NEW)
    assert torch.equal(tokens, expected)
    runs = NEW + (batch if continuous else 1)
    assert session.calls == {"AwsNeuronRmsNorm": runs * ranks * 5}


def test_bfloat16_logits_are_within_twice_the_error_of_torch(llama: tuple[Path, LlamaForCausalLM]) -> None:
    """The error against float32, with the same tokens, is at most twice that of plain bfloat16 torch."""
    folder, reference = llama
    with neuron_emulation():
        model = load(folder, batch_size=1, auto_cast_type="bf16", tp_degree=2)
        tokens, logits = greedy(model, PROMPT[:1], NEW)
    with torch.no_grad():
        exact = reference(tokens).logits[0, PROMPT.shape[1] - 1 : -1]
        plain = LlamaForCausalLM.from_pretrained(folder, torch_dtype=torch.bfloat16)(tokens).logits
    plain = plain[0, PROMPT.shape[1] - 1 : -1].float()
    assert (logits[:, 0] - exact).norm() <= 2 * (plain - exact).norm()


def test_slots_of_a_continuous_batch_are_independent(llama: tuple[Path, LlamaForCausalLM]) -> None:
    """The prefill of a second prompt does not change the first one's cache."""
    folder, _ = llama
    with neuron_emulation():
        model = load(folder, batch_size=2, auto_cast_type="fp32", tp_degree=1, continuous_batching=True)
        positions = torch.arange(7)[None]
        first = model.forward(PROMPT[:1], positions, torch.tensor([0]))
        alone = model.forward(first.argmax(-1)[:, None], torch.tensor([[7]]), torch.tensor([0]))
        model.forward(PROMPT[1:], positions, torch.tensor([1]))
        again = model.forward(first.argmax(-1)[:, None], torch.tensor([[7]]), torch.tensor([0]))
    assert torch.equal(alone, again)


def test_compiled_programs_are_saved_and_loaded(llama: tuple[Path, LlamaForCausalLM], tmp_path: Path) -> None:
    folder, _ = llama
    with neuron_emulation():
        model = load(folder, batch_size=1, auto_cast_type="fp32", tp_degree=1)
        model.save(tmp_path / "compiled")
        from optimum.neuron.models.inference.hlo.llama.model import LlamaHloModel

        again = LlamaHloModel.from_pretrained(folder, neuron_config=model.neuron_config)
        again.load(tmp_path / "compiled")
        again.to_neuron()
        assert torch.equal(greedy(model, PROMPT[:1], 3)[0], greedy(again, PROMPT[:1], 3)[0])
    assert len(list((tmp_path / "compiled").iterdir())) == 2


def test_graphs_are_dumped_to_the_folder_that_the_environment_names(
    llama: tuple[Path, LlamaForCausalLM], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With ``NEURONX_DUMP_TO`` the host runs the compiler's command; a second load reads its programs."""
    folder, _ = llama
    options = {"batch_size": 1, "auto_cast_type": "fp32", "tp_degree": 2}
    with neuron_emulation():
        expected = greedy(load(folder, **options), PROMPT[:1], 3)[0]
    monkeypatch.setenv("NEURONX_DUMP_TO", str(tmp_path / "graphs of two"))
    with neuron_emulation():
        assert torch.equal(greedy(load(folder, **options), PROMPT[:1], 3)[0], expected)
        graphs = sorted((tmp_path / "graphs of two").glob("*/*.pb"))
        assert len(graphs) == 2
        for graph in graphs:
            assert module_bytes(graph.with_name(f"{graph.name}.neff").read_bytes()) == graph.read_bytes()
            xla.verify(HloModuleProto.FromString(graph.read_bytes()))
        monkeypatch.setenv("PATH", "")  # a second compilation would fail
        assert torch.equal(greedy(load(folder, **options), PROMPT[:1], 3)[0], expected)
