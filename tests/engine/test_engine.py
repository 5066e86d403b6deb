"""The engine: streaming equals generating, limits apply, mistakes are one-line errors."""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
import transformers
from transformers import PreTrainedTokenizerBase

from neuronmm.engine import continuous
from neuronmm.engine.backends import BACKENDS, choose
from neuronmm.engine.backends.torch_runner import MAX_BATCH
from neuronmm.engine.engine import load, pick_dtype
from neuronmm.engine.sampling import SamplingParams
from neuronmm.models import UserError
from neuronmm.models.load import end_tokens, load_config, load_pretrained, positions_of
from tiny_models import make_tiny

OLD = int(transformers.__version__.split(".")[0]) < 5


def test_streaming_equals_generating(checkpoint: Callable[..., Path]) -> None:
    engine = load(checkpoint(), dtype="fp32")
    for params in (
        SamplingParams(max_new_tokens=20),
        SamplingParams(max_new_tokens=20, temperature=1.0, seed=1),
        SamplingParams(max_new_tokens=20, ignore_eos=True, stop=("w1",)),
    ):
        (generated,) = engine.generate(["w9 w10"], params)
        stream = engine.stream("w9 w10", params)
        assert "".join(stream) == stream.result.text == generated.text
        assert stream.result.token_ids == generated.token_ids
        assert stream.result.finish_reason == generated.finish_reason


def test_a_stop_string_ends_its_own_row(checkpoint: Callable[..., Path]) -> None:
    engine = load(checkpoint(), dtype="fp32")
    prompts = ["w9 w10", "w40"]
    free = engine.generate(prompts, SamplingParams(max_new_tokens=16, ignore_eos=True))
    word = free[0].text.split()[3]
    stopped = engine.generate(prompts, SamplingParams(max_new_tokens=16, ignore_eos=True, stop=(f" {word}",)))
    for before, after in zip(free, stopped, strict=True):
        assert after.text == before.text.split(f" {word}")[0]
        assert after.finish_reason == ("stop" if f" {word}" in before.text else "length")


def test_results_keep_the_order_of_more_prompts_than_a_batch_holds(checkpoint: Callable[..., Path]) -> None:
    engine = load(checkpoint(), dtype="fp32")
    prompts = [" ".join(f"w{3 + (i * 7 + j) % 60}" for j in range(1 + (i * 5) % 9)) for i in range(2 * MAX_BATCH + 3)]
    params = SamplingParams(max_new_tokens=5, ignore_eos=True)
    together = engine.generate(prompts, params)
    assert [result.prompt for result in together] == prompts
    assert [r.token_ids for r in together] == [engine.generate([p], params)[0].token_ids for p in prompts]


def test_chat_uses_the_template_and_no_second_bos(checkpoint: Callable[..., Path]) -> None:
    engine = load(checkpoint(), dtype="fp32")
    assert engine.encode("w9", chat=True) == [3, 9, 4, 5]
    engine.tokenizer.chat_template = None
    with pytest.raises(UserError, match="no chat template"):
        engine.encode("w9", chat=True)


def test_an_empty_prompt_starts_from_bos_or_is_refused(checkpoint: Callable[..., Path]) -> None:
    engine = load(checkpoint(), dtype="fp32")
    assert engine.encode("") == [1]
    engine.tokenizer.bos_token = None
    with pytest.raises(UserError, match="prompt is empty"):
        engine.encode("")


def test_context_overflow(checkpoint: Callable[..., Path]) -> None:
    engine = load(checkpoint(), dtype="fp32")
    assert engine.context == 128
    with pytest.raises(UserError, match=r"128 tokens, but .* context of 128"):
        engine.generate([" ".join(["w9"] * 128)])
    long, short = engine.generate([" ".join(["w9"] * 120), "w9"], SamplingParams(max_new_tokens=20, ignore_eos=True))
    assert (len(long.token_ids), long.finish_reason) == (8, "context")
    assert (len(short.token_ids), short.finish_reason) == (20, "length")


def test_speed_counts_later_tokens_only(checkpoint: Callable[..., Path]) -> None:
    engine = load(checkpoint(), dtype="fp32")
    (result,) = engine.generate(["w9"], SamplingParams(max_new_tokens=5, ignore_eos=True))
    assert result.ttft > 0
    assert result.tokens_per_second == pytest.approx(4 / result.decode_seconds)
    (single,) = engine.generate(["w9"], SamplingParams(max_new_tokens=1))
    assert single.tokens_per_second is None


def test_results_come_before_later_batches_run(checkpoint: Callable[..., Path]) -> None:
    engine = load(checkpoint(), dtype="fp32")
    prompts = [" ".join(["w9"] * (1 + i % 5)) for i in range(8 * MAX_BATCH + 3)]
    params = SamplingParams(max_new_tokens=2, ignore_eos=True)
    run, events = engine._run, list[str]()

    def recorded(rows: list[Any], params: SamplingParams) -> Any:
        events.append("batch")
        return run(rows, params)

    engine._run = recorded  # type: ignore[method-assign]
    for result in engine.each(prompts, params):
        events.append(result.prompt)
    assert [event for event in events if event != "batch"] == prompts and events.count("batch") == 9
    assert events[-4:] == ["batch", *prompts[8 * MAX_BATCH :]]


def test_a_continuous_batch_gives_a_result_when_all_before_it_are_complete(checkpoint: Callable[..., Path]) -> None:
    engine = load(checkpoint(), dtype="fp32")
    rows = engine._rows(["w3", "w4", "w5"], SamplingParams(), False)
    engine.runner = cast(Any, SimpleNamespace(continuous=True))

    def run(*_: Any) -> Iterator[tuple[Any, str]]:
        for number, ended in ((1, True), (0, False), (0, True), (2, False), (2, True)):
            rows[number].result.finish_reason = "length" if ended else ""
            yield rows[number], "text"

    engine._run = run  # type: ignore[method-assign]
    found = [(result.prompt, rows[2].result.finish_reason) for result in engine._in_order(rows, SamplingParams())]
    assert found == [("w3", ""), ("w4", ""), ("w5", "length")]


def test_a_batch_stays_within_the_context(checkpoint: Callable[..., Path]) -> None:
    engine = load(checkpoint(), dtype="fp32")
    prompts = [" ".join(["w9"] * length) for length in (3, 5, 60, 110, 120)]
    rows = engine._rows(prompts, SamplingParams(max_new_tokens=50), False)
    groups = engine._groups(rows)
    assert engine.context == 128
    assert [[len(row.prompt_ids) for row in group] for group in groups] == [[3, 5, 60], [110], [120]]


def test_one_text_is_not_a_list_of_prompts(checkpoint: Callable[..., Path]) -> None:
    engine = load(checkpoint(), dtype="fp32")
    with pytest.raises(UserError, match="prompts is one text; give a list"):
        engine.generate("w9 w10")
    assert engine.generate([]) == []


def test_backends() -> None:
    assert choose("auto").name == ("cuda" if torch.cuda.is_available() else "cpu")
    with pytest.raises(UserError, match="unknown backend 'tpu'; there are: auto, cuda, cpu, neuron"):
        choose("tpu")
    if BACKENDS["neuron"].missing():
        with pytest.raises(UserError, match=r"the Neuron SDK is not present; install .*; or .* --emulate"):
            choose("neuron")
    with pytest.raises(UserError, match="backend cpu has no option tp_degree; backend neuron has it"):
        choose("cpu", {"tp_degree": 2})
    with pytest.raises(UserError, match="backend neuron has no option speed"):
        choose("neuron", {"speed": 2, "emulate": True})


def test_empty_packages_under_the_sdk_names_do_not_count(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """PyPI has such stubs, with and without an ImportError inside."""
    names = ("neuronxcc", "torch_neuronx", "libneuronxla", "transformers_neuronx")
    for body in ("", "raise ImportError('install from another index')", "raise RuntimeError('a stub')"):
        for name in names:
            (tmp_path / f"{name}.py").write_text(body)
            monkeypatch.delitem(sys.modules, name, raising=False)
        monkeypatch.syspath_prepend(tmp_path)
        assert "not present" in str(BACKENDS["neuron"].missing())
    for name in names:
        sys.modules.pop(name, None)


def test_dtype_follows_the_checkpoint(checkpoint: Callable[..., Path]) -> None:
    folder = checkpoint()
    assert pick_dtype(folder, "auto") == torch.float32
    assert pick_dtype(folder, "bf16") == torch.bfloat16
    config = folder / "config.json"
    config.write_text(config.read_text().replace('"float32"', '"float16"'))
    assert pick_dtype(folder, "auto") == torch.bfloat16
    with pytest.raises(UserError, match="unknown dtype 'int8'"):
        pick_dtype(folder, "int8")


def test_kernels_give_the_same_tokens_and_an_unknown_one_is_refused(checkpoint: Callable[..., Path]) -> None:
    folder = checkpoint()
    params = SamplingParams(max_new_tokens=24, ignore_eos=True)
    tokens = {
        impl: load(folder, dtype="fp32", impl=impl).generate(["w9 w10"], params)[0].token_ids
        for impl in ("auto", "naive", "torch", "reference")
    }
    assert len(set(map(tuple, tokens.values()))) == 1
    with pytest.raises(UserError, match="unknown kernel implementation 'magic'"):
        load(folder, impl="magic")


def test_the_former_name_of_the_runner_works_with_a_warning(checkpoint: Callable[..., Path]) -> None:
    engine = load(checkpoint(), dtype="fp32")
    with pytest.deprecated_call(match=r"Engine\.runner"):
        assert engine.host is engine.runner


def test_a_static_batch_has_positions_for_its_longest_prompt_and_answer(checkpoint: Callable[..., Path]) -> None:
    """A long prompt with a short answer does not share a batch with a short prompt and a long answer."""
    engine = load(checkpoint(), dtype="fp32")
    prompts, params = [" ".join(["w9"] * n) for n in (4, 60, 5, 61)], SamplingParams(max_new_tokens=50, ignore_eos=True)
    expected = [result.token_ids for result in engine.generate(prompts, params)]
    engine.context = engine.runner.max_len = 64
    sizes, decoder = [], engine.runner.decoder

    def recorded(batch: int, positions: int) -> Any:
        sizes.append((batch, positions))
        return decoder(batch, positions)

    engine.runner.decoder = recorded
    found = [result.token_ids for result in engine.generate(prompts, params)]
    assert sizes == [(2, 55), (1, 64), (1, 64)]
    assert found == [expected[0], expected[1][:4], expected[2], expected[3][:3]]


def test_options_choose_a_backend_that_has_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert choose("auto").name == "cuda"
    assert choose("auto", {"weight_dtype": "int4"}).name == "cpu"


def test_numbers_of_sampling_may_be_integers(checkpoint: Callable[..., Path]) -> None:
    engine = load(checkpoint(), dtype="fp32")
    whole = SamplingParams(max_new_tokens=8, temperature=2, repetition_penalty=2, seed=1)
    assert engine.generate(["w9"], whole)[0].token_ids == (
        engine.generate(["w9"], SamplingParams(max_new_tokens=8, temperature=2.0, repetition_penalty=2.0, seed=1))[
            0
        ].token_ids
    )


@pytest.mark.parametrize(
    ("generation", "ends"), [(5, {5, 2}), ([5, 6], {5, 6, 2}), ([], {1, 2}), (None, {1, 2})], ids=str
)
def test_a_sequence_ends_with_the_tokens_of_all_files(
    generation: object, ends: set[int], checkpoint: Callable[..., Path], tokenizer: PreTrainedTokenizerBase
) -> None:
    folder = checkpoint()
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": generation}))
    config = load_config(folder)
    config.eos_token_id = 1
    assert tokenizer.eos_token_id == 2
    assert end_tokens(folder, config, tokenizer) == ends


@pytest.mark.parametrize("stored", [torch.float32, torch.float16, torch.bfloat16])
def test_without_a_dtype_in_the_config_that_of_the_weights_counts(stored: torch.dtype, tmp_path: Path) -> None:
    make_tiny().to(stored).save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({k: v for k, v in config.items() if "dtype" not in k}))
    assert pick_dtype(tmp_path, "auto") is (torch.float32 if stored is torch.float32 else torch.bfloat16)


@pytest.mark.skipif(OLD, reason="transformers before 5 computes yarn's factor from the numbers of positions")
def test_yarn_reads_as_many_positions_as_its_factor_says(checkpoint: Callable[..., Path], tmp_path: Path) -> None:
    """As Qwen's recipe for long texts writes it: the number of positions stays the original one."""
    folder = tmp_path / "long"
    shutil.copytree(checkpoint(compressed=False), folder)
    config = json.loads((folder / "config.json").read_text())
    rope = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128, "rope_theta": 10000.0}
    (folder / "config.json").write_text(json.dumps(config | {"rope_parameters": rope, "rope_scaling": rope}))
    engine, prompt = load(folder, dtype="fp32"), " ".join(f"w{3 + 7 * i % 60}" for i in range(200))
    assert config["max_position_embeddings"] == 128 and engine.context == 512
    (result,) = engine.generate([prompt], SamplingParams(max_new_tokens=8, ignore_eos=True))
    ids = torch.tensor([engine.encode(prompt)])
    expected = load_pretrained(folder, torch.float32).generate(
        ids, max_new_tokens=8, do_sample=False, eos_token_id=None, pad_token_id=0
    )
    assert result.token_ids == expected[0, ids.shape[1] :].tolist()


@pytest.mark.parametrize(
    ("rope", "positions"),
    [
        ({"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}, 256),
        ({"rope_type": "yarn", "factor": 2.0, "original_max_position_embeddings": 16}, 128),
        ({"rope_type": "yarn", "factor": 1e308, "original_max_position_embeddings": 1 << 31}, 1 << 31),
        ({"rope_type": "linear", "factor": 4.0}, 128),
        (None, 128),
    ],
)
def test_positions_are_those_of_the_config_unless_yarn_reads_more(
    rope: dict[str, Any] | None, positions: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = SimpleNamespace(max_position_embeddings=128, rope_parameters=rope)
    assert positions_of(config) == (128 if OLD else positions)
    monkeypatch.setattr("neuronmm.models.load._YARN_BY_FACTOR", False)
    assert positions_of(config) == 128


def test_rope_that_depends_on_the_longest_row_has_each_prompt_alone_and_whole(
    checkpoint: Callable[..., Path], tmp_path: Path
) -> None:
    """longrope takes other factors for a call with a position beyond its original context."""
    folder = tmp_path / "long"
    shutil.copytree(checkpoint(compressed=False), folder)
    config = json.loads((folder / "config.json").read_text())
    half = config["hidden_size"] // config["num_attention_heads"] // 2
    rope = {"rope_type": "longrope", "short_factor": [1.0] * half, "long_factor": [8.0] * half, "factor": 2.0}
    rope |= {"original_max_position_embeddings": 16, "rope_theta": 10000.0}
    config |= {"rope_parameters": rope, "rope_scaling": rope, "original_max_position_embeddings": 16}
    (folder / "config.json").write_text(json.dumps(config | {"max_position_embeddings": 512}))
    engine, params = load(folder, dtype="fp32"), SamplingParams(max_new_tokens=4, ignore_eos=True)
    prompts = [" ".join(f"w{3 + (7 * i + n) % 60}" for i in range(n)) for n in (5, 200)]
    together = [result.token_ids for result in engine.generate(prompts, params)]
    assert together == [engine.generate([prompt], params)[0].token_ids for prompt in prompts]
    served = engine.row(engine.encode(prompts[1]), params, 0)
    for _ in continuous.run(engine.runner.slots(1, 210), [served], params, frozenset(), engine.runner.device):
        pass
    assert served.result.token_ids == together[1]
