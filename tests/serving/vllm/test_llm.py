"""vLLM with the plugin computes what this project's engine computes, for every family, form and dtype.

vLLM's attention on a CPU errs by more than float32's rounding, so that a token may differ where two are almost equally
likely. The yardstick is vLLM itself: the same matrices in a dense checkpoint, which it serves without the plugin.
"""

from __future__ import annotations

import gc
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple
from unittest.mock import Mock

import pytest
import torch
from safetensors.torch import save_file

import neuronmm
from error_rule import assert_twice_plain
from neuronmm.engine.sampling import SamplingParams
from neuronmm.models import UserError
from tiny_models import load_plain
from word_tokenizer import word_tokenizer

vllm = pytest.importorskip("vllm", reason="vLLM is not installed; `make test-vllm` makes an environment for it")

LENGTHS = (3, 9, 17, 40, 100)
"""Of the prompts; vLLM reads them together, which is more rows than the core multiplies one by one."""
NEW = 12


@pytest.fixture(autouse=True)
def _in_this_process(environment: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
    monkeypatch.setattr(torch, "set_num_threads", torch.set_num_threads)  # vLLM replaces it


class Scores(NamedTuple):
    """For each token of a text but the first: its log-probability, and how far it is below the best one."""

    logprobs: torch.Tensor
    behind: torch.Tensor


def texts(folder: Path) -> list[list[int]]:
    """Random prompts, each with the greedy tokens of our engine."""
    engine = neuronmm.load(folder, backend="cpu")
    engine.tokenizer = word_tokenizer()  # transformers replaces that of a qwen2 folder by its own
    greedy = SamplingParams(max_new_tokens=NEW, temperature=0, ignore_eos=True)
    prompts = [torch.randint(3, 64, (length,), generator=torch.Generator().manual_seed(length)) for length in LENGTHS]
    results = engine.generate([" ".join(f"w{token}" for token in prompt) for prompt in prompts], greedy)
    return [prompt.tolist() + result.token_ids for prompt, result in zip(prompts, results, strict=True)]


def generated(folder: Path, prompts: list[list[int]], params: Any, lora: Any = None, **options: Any) -> list[Any]:
    """Return what vLLM generates after each prompt, with this LoRA request."""
    from vllm.distributed import cleanup_dist_env_and_memory

    llm = vllm.LLM(str(folder), **{"enforce_eager": True, "max_model_len": 128, "max_num_seqs": 8, **options})
    asked = [{"prompt_token_ids": prompt} for prompt in prompts]
    results = llm.generate(asked, params, use_tqdm=False, lora_request=lora)
    del llm
    gc.collect()
    cleanup_dist_env_and_memory()
    return results


def scores(folder: Path, tokens: list[list[int]], **options: Any) -> list[Scores]:
    """Let vLLM read the texts, and generate a token after each."""
    only = vllm.SamplingParams(max_tokens=1, temperature=0, prompt_logprobs=1)
    results = generated(folder, tokens, only, **options)
    found = []
    for result, text in zip(results, tokens, strict=True):
        own = [at[token].logprob for at, token in zip(result.prompt_logprobs[1:], text[1:], strict=True)]
        best = [max(entry.logprob for entry in at.values()) for at in result.prompt_logprobs[1:]]
        found.append(Scores(torch.tensor(own), torch.tensor(best) - torch.tensor(own)))
    return found


def exact(folder: Path, text: list[int]) -> torch.Tensor:
    """The log-probabilities in float64, from transformers."""
    tokens = torch.tensor([text])
    with torch.inference_mode():
        logits = load_plain(folder, torch.float64)(tokens).logits
    return logits[0, :-1].log_softmax(-1).gather(1, tokens[0, 1:, None])[:, 0].float()


def check(folders: Any, **options: Any) -> None:
    """Compare the plugin's errors with those of vLLM's dense model, and the best tokens with our engine's."""
    tokens = texts(folders.compressed)
    ours, dense = scores(folders.compressed, tokens, **options), scores(folders.dense, tokens)
    right = [exact(folders.compressed, text) for text in tokens]
    errors = [score.logprobs - exact(folders.dense, text) for score, text in zip(dense, tokens, strict=True)]
    assert_twice_plain(
        range(len(tokens)), lambda i: ours[i].logprobs, lambda i: right[i] + errors[i], lambda i: right[i]
    )
    largest = max(float(error.abs().max()) for error in errors)
    assert all((score.behind[-NEW:] <= 2 * largest).all() for score in ours)


@pytest.mark.parametrize(
    ("model_type", "kind", "dtype"),
    [
        ("llama", "two", torch.float32),
        ("qwen2", "shared", torch.float32),
        ("llama", "pivoted", torch.float32),
        ("qwen3", "pivoted-shared", torch.float32),
        ("qwen2", "pivoted-int8", torch.float32),
        ("qwen3", "two", torch.bfloat16),
        ("llama", "shared", torch.bfloat16),
        ("qwen2", "pivoted", torch.bfloat16),
        ("llama", "pivoted-shared", torch.bfloat16),
        ("qwen3", "int8", torch.bfloat16),
        ("qwen2", "pivoted-shared", torch.float16),  # not a dtype of the core: plain torch, as on a GPU
        ("llama", "int8", torch.float16),
    ],
    ids=str,
)
def test_every_form_family_and_dtype(
    model_type: str, kind: str, dtype: torch.dtype, served: Callable[..., Any]
) -> None:
    check(served(model_type, kind, dtype))


@pytest.mark.parametrize("kind", ["pivoted", "int8"])
def test_two_tensor_parallel_ranks(kind: str, served: Callable[..., Any]) -> None:
    check(served("qwen2", kind), tensor_parallel_size=2, distributed_executor_backend="mp")


def adapted(folders: Any, folder: Path) -> tuple[Any, Path]:
    """Write a random LoRA adapter of all linears; return ``folders`` with it merged into the dense one, and its folder.

    Its format is PEFT's.
    """
    rank, alpha, adapter, merged = 4, 8, folder / "adapter", folder / "merged"
    model, factors = load_plain(folders.dense, torch.float32), {}
    targets = sorted({name for name, _ in model.named_modules() if name.endswith("_proj")})
    for name in targets:
        weight = model.get_submodule(name).weight.data
        A, B = torch.randn(rank, weight.shape[1]) / weight.shape[1] ** 0.5, torch.randn(weight.shape[0], rank) * 0.1
        weight += alpha / rank * B @ A
        factors |= {f"base_model.model.{name}.lora_A.weight": A, f"base_model.model.{name}.lora_B.weight": B}
    config = {"peft_type": "LORA", "task_type": "CAUSAL_LM", "r": rank, "lora_alpha": alpha, "bias": "none"}
    adapter.mkdir()
    modules = sorted({name.rpartition(".")[2] for name in targets})
    (adapter / "adapter_config.json").write_text(json.dumps({**config, "target_modules": modules}))
    save_file(factors, adapter / "adapter_model.safetensors")
    model.save_pretrained(merged)
    word_tokenizer().save_pretrained(merged)
    return folders._replace(dense=merged), adapter


def next_token(folder: Path, prompts: list[list[int]], adapter: Path | None) -> torch.Tensor:
    """Let vLLM predict the token after each prompt: log-probabilities [prompts, vocabulary].

    Those of the prompts' own tokens are not read: with an adapter, vLLM 0.32.0 fails to return them on a CPU.
    """
    from vllm.lora.request import LoRARequest

    words = load_plain(folder, torch.float32).config.vocab_size
    options = {} if adapter is None else {"enable_lora": True, "max_lora_rank": 8}
    only = vllm.SamplingParams(max_tokens=1, temperature=0, logprobs=words)
    lora = None if adapter is None else LoRARequest("adapter", 1, str(adapter))
    results = generated(folder, prompts, only, lora, max_logprobs=words, **options)
    found = [result.outputs[0].logprobs[0] for result in results]
    return torch.tensor([[entry[token].logprob for token in range(words)] for entry in found])


@pytest.mark.parametrize(("model_type", "kind"), [("llama", "two"), ("qwen2", "pivoted-shared")])
def test_a_lora_adapter(model_type: str, kind: str, served: Callable[..., Any], tmp_path: Path) -> None:
    torch.manual_seed(0)
    folders, adapter = adapted(served(model_type, kind), tmp_path)
    prompts = [torch.randint(3, 64, (length,)).tolist() for length in range(2, 50, 3)]
    exact_model = load_plain(folders.dense, torch.float64)
    with torch.inference_mode():
        logits = [exact_model(torch.tensor([prompt])).logits[0, -1] for prompt in prompts]
    right = torch.stack(logits).log_softmax(-1).float()
    ours, merged = next_token(folders.compressed, prompts, adapter), next_token(folders.dense, prompts, None)
    assert_twice_plain(range(len(prompts)), lambda i: ours[i], lambda i: merged[i], lambda i: right[i])


@pytest.mark.parametrize("tied", [False, True])
def test_on_avx2_dense_linears_and_head_run_in_the_core(
    tied: bool, served: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    from neuronmm.serving.vllm import config, head

    monkeypatch.setattr(head, "isa", lambda: "avx2")
    made, heads = Mock(wraps=config.LowRankMethod), Mock(wraps=head.HeadMethod.apply)
    monkeypatch.setattr(config, "LowRankMethod", made)
    monkeypatch.setattr(head.HeadMethod, "apply", lambda *given, **named: heads(*given, **named))
    check(served("llama", "two", torch.bfloat16, tied=tied))
    names = {name for call in made.call_args_list for name in call.args[1]}
    assert {"model.layers.0.self_attn.o_proj", "model.layers.1.self_attn.o_proj"} <= names  # dense in this checkpoint
    assert heads.called


def test_a_compiled_model(served: Callable[..., Any]) -> None:
    check(served("llama", "pivoted"), enforce_eager=False)


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"method": 3}, "quantization_config.method"),
        ({"format": 9}, "checkpoint format 9"),
        ({"factors": "int8"}, "is stored as F32, not as I8"),
        ({"format": 3, "weights": "int4"}, "stored in int4, which vLLM cannot run"),
        ({"ranks": {"model.layers.0.mlp.down_proj": 3}}, "config.json and weights disagree"),
    ],
)
def test_a_broken_folder_ends_with_one_line(
    changed: dict[str, Any], message: str, served: Callable[..., Any], tmp_path: Path
) -> None:
    for file in served().compressed.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    config = json.loads((tmp_path / "config.json").read_text())
    config["quantization_config"].update(changed)
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(UserError, match=message) as raised:
        scores(tmp_path, [[3, 4]])
    assert "\n" not in str(raised.value)
