"""The plugin for vllm-neuron above stand-ins of it: compressed models compute what transformers does.

This shows that the plugin keeps the contract it was written from, not that vllm-neuron keeps it.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor
from transformers import AutoConfig

import fake_vllm_neuron as fake
from neuronmm.emulator.nki import nki_modules
from neuronmm.kernels.hardware import LOGICAL_CORE
from neuronmm.models import UserError
from neuronmm.models.families import TARGETS
from neuronmm.models.neuronx import vllm_modules
from neuronmm.serving.vllm import neuron
from tiny_models import (
    compress_tiny,
    fill_tiny,
    layer_ranks,
    load_plain,
    make_spec,
    make_tiny,
    make_tokens,
    pivot_high,
    pivot_tiny,
    shared_spec,
    vary_norms,
    write_checkpoint,
)

CPU = torch.device("cpu")
PARTIAL = {f"model.layers.{i}.mlp.gate_proj": 12 for i in range(2)}
KINDS: dict[str, Callable[[Any], Any]] = {
    "two": lambda model: compress_tiny(model, layer_ranks((*TARGETS["mlp"], "self_attn.q_proj"))),
    "one linear": lambda model: compress_tiny(model, PARTIAL),
    "attention alone": lambda model: compress_tiny(model, layer_ranks(("self_attn.q_proj", "self_attn.k_proj"))),
    "shared": lambda model: fill_tiny(model, shared_spec()),
    "pivoted": pivot_tiny,
    "pivots of up": lambda model: pivot_tiny(model, leader="up"),
    "high ranks": pivot_high,
    "int8": lambda model: fill_tiny(model, make_spec(layer_ranks(TARGETS["mlp"]), factors="int8")),
    "fp8": lambda model: fill_tiny(model, make_spec(layer_ranks(TARGETS["mlp"]), factors="fp8")),
}
MLP_KERNELS = {"two": 2, "one linear": 2, "attention alone": 0, "shared": 2, "pivoted": 2, "pivots of up": 2}
"""Kernels of a step: one for each whole MLP, else one for each factorised linear."""


@pytest.fixture(autouse=True)
def any_tile(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tiny ranks have no full tiles."""
    monkeypatch.setattr("neuronmm.models.neuronx.intermediate.TILE", 1)


@pytest.fixture(autouse=True)
def nki(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv(LOGICAL_CORE, "1")
    with nki_modules():
        yield


def write(folder: Path, kind: str = "two", model_type: str = "llama", **shape: Any) -> Path:
    model = vary_norms(make_tiny(model_type, **shape))
    return write_checkpoint(model, KINDS[kind](model), folder)


def served(registry: Any, folder: Path, architecture: str = "LlamaForCausalLM") -> Any:
    """Build a model as vllm-neuron's worker and runner do, and load its weights."""
    neuron.register()
    with torch.device("meta"):
        model = getattr(registry, architecture).from_configs(AutoConfig.from_pretrained(folder), None)
    model.load_weights(str(folder), CPU, None)
    assert not [name for name, parameter in model.named_parameters() if parameter.is_meta]
    return model


@pytest.mark.parametrize("kernels", [False, True], ids=["torch", "kernels"])
@pytest.mark.parametrize("kind", KINDS)
def test_a_compressed_llama_has_transformers_logits(tmp_path: Path, kind: str, kernels: bool) -> None:
    folder, tokens = write(tmp_path, kind), make_tokens(batch=1)
    with torch.no_grad(), fake.vllm_neuron(kernels) as registry:
        logits = served(registry, folder)(tokens[0])
        expected = load_plain(folder)(tokens).logits[0]
    assert fake.close(logits, expected)
    if not kernels:
        assert fake.Launched.count == 0
    elif kind in MLP_KERNELS:
        assert fake.Launched.count == MLP_KERNELS[kind]
    else:
        assert fake.Launched.count > 0


def test_weights_that_a_model_has_already_are_replaced(tmp_path: Path) -> None:
    folder, tokens = write(tmp_path, "one linear"), make_tokens(batch=1)
    with torch.no_grad(), fake.vllm_neuron(kernels=False) as registry:
        neuron.register()
        model = registry.LlamaForCausalLM.from_configs(AutoConfig.from_pretrained(folder), None)  # not on meta
        for parameter in model.parameters():
            parameter.fill_(2.0)
        model.load_weights(str(folder), CPU, None)
        assert fake.close(model(tokens[0]), load_plain(folder)(tokens).logits[0])


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_qwen3_is_built_by_its_factory(tmp_path: Path, kind: str, tied: bool) -> None:
    folder, tokens = write(tmp_path, kind, "qwen3", tied=tied), make_tokens(batch=1)
    with torch.no_grad(), fake.vllm_neuron(kernels=True) as registry:
        model = served(registry, folder, "Qwen3ForCausalLM")
        assert type(model) is fake.LlamaForCausalLM  # not the factory
        assert fake.close(model(tokens[0]), load_plain(folder)(tokens).logits[0])


def check_parts(folder: Path, cores: int, kernels: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Check that what the ranks of an MLP compute adds up to what transformers computes."""
    x, total = torch.randn(5, 32), torch.zeros(5, 32)
    whole: Any = load_plain(folder).model.layers[1].mlp
    with torch.no_grad():
        for rank in range(cores):
            monkeypatch.setattr(fake.LlamaForCausalLM, "group", fake.Group(cores, rank))
            with fake.vllm_neuron(kernels) as registry:
                total = total + served(registry, folder).model.layers[1].mlp(x, is_prefill=False)
        assert fake.close(total, whole(x))


@pytest.mark.parametrize("kernels", [False, True], ids=["torch", "kernels"])
@pytest.mark.parametrize("cores", [2, 3])
@pytest.mark.parametrize("kind", ["two", "shared", "pivoted", "one linear"])
def test_the_ranks_parts_of_an_mlp_add_up_to_it(
    tmp_path: Path, kind: str, cores: int, kernels: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    check_parts(write(tmp_path, kind), cores, kernels, monkeypatch)


@pytest.mark.parametrize(("cores", "is_prefill"), [(1, True), (1, False), (2, True), (2, False)])
def test_an_mlp_has_the_hosts_collectives(
    tmp_path: Path, cores: int, is_prefill: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    group = fake.Group(cores)
    monkeypatch.setattr(fake.LlamaForCausalLM, "group", group)
    with torch.no_grad(), fake.vllm_neuron(kernels=False) as registry:
        y = served(registry, write(tmp_path)).model.layers[0].mlp(torch.randn(4, 32), is_prefill=is_prefill)
    gathered = [("all_gather", (4, 32)), ("reduce_scatter", (8, 32))]
    assert group.calls == ([] if cores == 1 else gathered if is_prefill else [("all_reduce", (4, 32))])
    assert y.shape == (4, 32)


def test_a_separate_group_splits_the_mlp(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With data-parallel attention, vllm-neuron splits the MLP over more ranks than the attention."""
    mlp_group = fake.Group(2, 1)
    made = fake.HostMlp.__init__

    def with_group(self: Any, c: Any, group: fake.Group) -> None:
        made(self, c, group)
        self.mlp_tp_group = mlp_group

    monkeypatch.setattr(fake.HostMlp, "__init__", with_group)
    folder = write(tmp_path)
    with torch.no_grad(), fake.vllm_neuron(kernels=False) as registry:
        mlp = served(registry, folder).model.layers[0].mlp
        mlp(torch.randn(4, 32), is_prefill=False)
        assert mlp.gate_B.shape == (24, 12) and mlp.tp_group.calls == []
        assert mlp_group.calls == [("all_reduce", (4, 32))]
        mlp(torch.randn(4, 32), is_prefill=True)  # the host gathers by the group of the attention
        assert mlp.tp_group.calls == [] and len(mlp_group.calls) == 1


def test_more_ranks_than_heads_may_split_the_mlp(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    check_parts(write(tmp_path), 8, True, monkeypatch)  # 4 heads


def test_a_model_to_compile_has_the_modules_of_the_device(tmp_path: Path) -> None:
    """vllm-neuron loads it on the CPU, where no kernel can run, and compiles it on the meta device, where they can."""
    folder = write(tmp_path, "two")
    with fake.vllm_neuron(kernels=lambda device: device != "cpu") as registry:
        neuron.register()
        loaded = {}
        for name, device in (("load_weights", "cpu"), ("load_weights", "meta"), ("load_weights_lite", "cpu")):
            with torch.device("meta"):
                model = registry.LlamaForCausalLM.from_configs(AutoConfig.from_pretrained(folder), None)
            getattr(model, name)(str(folder), torch.device(device), None)
            mlp = model.model.layers[0].mlp
            loaded[name, device] = (mlp.fused is not None, mlp.gate_A.shape)
    assert loaded["load_weights_lite", "cpu"] == loaded["load_weights", "meta"] != loaded["load_weights", "cpu"]


@pytest.mark.parametrize("cores", [None, "2"])
def test_a_logical_core_of_several_is_refused(
    tmp_path: Path, cores: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(LOGICAL_CORE)
    if cores:
        monkeypatch.setenv(LOGICAL_CORE, cores)
    folder = write(tmp_path)
    with fake.vllm_neuron(kernels=True) as registry, pytest.raises(UserError, match="NEURON_LOGICAL_NC_CONFIG=1"):
        served(registry, folder)
    with fake.vllm_neuron(kernels=False) as registry:
        served(registry, folder)


def test_other_checkpoints_are_the_hosts(tmp_path: Path) -> None:
    make_tiny().save_pretrained(tmp_path)
    with fake.vllm_neuron(kernels=True) as registry:
        neuron.register()
        config = AutoConfig.from_pretrained(tmp_path)
        with torch.device("meta"):
            model = registry.LlamaForCausalLM.from_configs(config, None)
        assert type(model) is fake.LlamaForCausalLM and not hasattr(model, "load_weights")
        config.quantization_config = {"quant_method": "awq"}
        with pytest.raises(ValueError, match="unsupported"):
            registry.LlamaForCausalLM.from_configs(config, None)
        assert config.quantization_config == {"quant_method": "awq"}


def test_registration_is_repeatable_and_needs_no_class(tmp_path: Path) -> None:
    with fake.vllm_neuron(kernels=True) as registry:
        del registry.Qwen3ForCausalLM  # a release may not have it
        neuron.register()
        first = registry.LlamaForCausalLM
        neuron.register()
        assert registry.LlamaForCausalLM is first and not hasattr(registry, "Qwen3ForCausalLM")
        assert issubclass(first, fake.LlamaForCausalLM) and first.__name__ == "LlamaForCausalLM"
        assert fake.NeuronPlatform.supported_quantization == ["fp8", "neuronmm"]


def test_models_that_cannot_be_imported_leave_the_host_as_it_is(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    class Half(ModuleType):
        def __getattr__(self, name: str) -> Any:
            raise AttributeError("partially initialised")

    with fake.vllm_neuron(kernels=True) as registry:
        for module in (None, Half("vllm_neuron.vllm.platform")):
            monkeypatch.setitem(sys.modules, "vllm_neuron.vllm.platform", module)
            neuron.register()
            assert registry.LlamaForCausalLM is fake.LlamaForCausalLM
            assert "no compressed models in vllm-neuron" in capsys.readouterr().err


def test_presence_is_that_of_the_models(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert not neuron.present()
    package = tmp_path / "vllm_neuron"
    (package / "model").mkdir(parents=True)
    (package / "__init__.py").write_text("raise RuntimeError('imported')")
    monkeypatch.syspath_prepend(str(tmp_path))
    assert not neuron.present()  # as before 1.0, which had no models
    (package / "model" / "registry.py").touch()
    assert neuron.present()


def test_what_the_hosts_models_cannot_hold_is_refused(tmp_path: Path) -> None:
    biased = make_tiny(attention_bias=True)
    write_checkpoint(biased, KINDS["two"](biased), tmp_path / "biased")
    whole = write(tmp_path / "whole")
    with fake.vllm_neuron(kernels=False) as registry:
        with pytest.raises(UserError, match="biases"):
            served(registry, tmp_path / "biased")
        neuron.register()
        with torch.device("meta"):
            model = registry.LlamaForCausalLM.from_configs(AutoConfig.from_pretrained(whole), None)
        with pytest.raises(UserError, match="not a folder"):
            model.load_weights("meta-llama/Llama-3.2-1B", CPU, None)


def test_a_damaged_checkpoint_is_refused(tmp_path: Path) -> None:
    folder = write(tmp_path)
    settings = json.loads((folder / "config.json").read_text())
    settings["quantization_config"]["ranks"]["model.layers.0.mlp.up_proj"] = 15
    (folder / "config.json").write_text(json.dumps(settings))
    with fake.vllm_neuron(kernels=False) as registry, pytest.raises(UserError, match="up_proj"):
        served(registry, folder)


def test_a_slice_reads_as_safetensors_does(tmp_path: Path) -> None:
    tensor = torch.arange(12).view(3, 4)
    part = vllm_modules.Slice(tensor)
    save_file({"w": tensor}, tmp_path / "w.safetensors")
    with safe_open(tmp_path / "w.safetensors", "pt") as file:
        stored = file.get_slice("w")
        assert part.get_shape() == stored.get_shape() and torch.equal(part[:], stored[:])
        assert torch.equal(part[1:, :2], stored[1:, :2])


@pytest.mark.parametrize("kernels", [False, True], ids=["torch", "kernels"])
@pytest.mark.parametrize("kind", ["two", "shared", "pivoted", "one linear"])
def test_the_mlp_is_one_graph_for_torch_compile(tmp_path: Path, kind: str, kernels: bool) -> None:
    """vllm-neuron compiles a model as one graph for each number of tokens, in which a kernel is one node."""
    torch._dynamo.reset()  # graphs of earlier tests count towards its limit
    with torch.no_grad(), fake.vllm_neuron(kernels) as registry:
        mlp = served(registry, write(tmp_path, kind)).model.layers[0].mlp
        compiled = torch.compile(mlp, fullgraph=True, backend="eager")
        for tokens in (4, 7, 9, 130):
            x = torch.randn(tokens, 32)
            expected: Tensor = mlp(x, is_prefill=True)
            assert torch.equal(compiled(x, is_prefill=True), expected)
