"""Calibration rows, from files and sampled from the model layer by layer."""

from __future__ import annotations

import ast
import json
import os
from collections.abc import Callable
from pathlib import Path
from unittest.mock import Mock, patch

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import AutoModelForCausalLM

from compression_runs import config
from neuronmm.compression import calibration, identity, shipped_texts, streaming
from neuronmm.compression.calibration import Rows, from_model, from_text, prefixes
from neuronmm.compression.config import CompressionConfig
from neuronmm.compression.continuation import Sampled, continue_rows, greedy
from neuronmm.compression.pipeline import compress
from neuronmm.compression.report import REPORT
from neuronmm.compression.shipped_texts import shipped_documents
from neuronmm.compression.streaming import StreamedModel, run_layer
from neuronmm.kernels import grouped_attention
from neuronmm.models import FAMILIES, UserError
from tiny_models import LAYER_COUNT
from word_tokenizer import word_tokenizer


def test_a_text_file_becomes_rows_of_its_own_tokens(text: Path) -> None:
    rows = from_text(text, word_tokenizer(), Rows(5, 16, seed=0))
    assert rows.shape == (5, 16) and rows.dtype == torch.long
    written = [int(word[1:]) for word in text.read_text().split()]
    starts = [written[i : i + 16] for i in range(0, len(written), 16)]
    assert all(row in starts for row in rows.tolist())
    assert torch.equal(rows, from_text(text, word_tokenizer(), Rows(5, 16, seed=0)))
    assert not torch.equal(rows, from_text(text, word_tokenizer(), Rows(5, 16, seed=1)))


def test_a_byte_order_mark_is_no_part_of_a_text(text: Path, tmp_path: Path) -> None:
    marked = tmp_path / "marked.txt"
    marked.write_bytes(b"\xef\xbb\xbf" + text.read_bytes())
    rows, same = (from_text(file, word_tokenizer(), Rows(5, 16, seed=0)) for file in (text, marked))
    assert torch.equal(rows, same)


@given(st.text(alphabet="ab \n", max_size=60), st.integers(1, 20))
def test_the_pieces_of_a_document_are_the_document(document: str, most: int) -> None:
    with patch.object(calibration, "_PIECE", most):
        *pieces, last = calibration._pieces(document)
    assert "".join([*pieces, last]) == document and all(0 < len(piece) <= most for piece in pieces)
    for piece in pieces:
        assert piece.endswith("\n") or ("\n" not in piece and len(piece) == most)


def test_a_text_in_pieces_has_the_same_rows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "lines.txt").write_text("\n".join(f"w{3 + i % 60} w{3 + i * 7 % 60}" for i in range(200)))
    whole = from_text(tmp_path / "lines.txt", word_tokenizer(), Rows(9, 8, seed=0))
    monkeypatch.setattr(calibration, "_PIECE", 64)
    assert torch.equal(from_text(tmp_path / "lines.txt", word_tokenizer(), Rows(9, 8, seed=0)), whole)


def test_the_query_heads_of_sampled_rows_attend_together(
    dense: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    attend = Mock(wraps=grouped_attention._attend)
    monkeypatch.setattr(grouped_attention, "_attend", attend)
    from_model(StreamedModel(dense(), None), [[3, 4], [5]], Rows(2, 6, seed=0), lambda _: None)
    assert attend.call_count == 5 * LAYER_COUNT


def test_a_tokenizer_that_adds_bos_gets_it_in_front_of_every_row(text: Path) -> None:
    from tokenizers.processors import TemplateProcessing

    tokenizer = word_tokenizer()
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    rows = from_text(text, tokenizer, Rows(4, 10, seed=0))
    assert rows.shape == (4, 10) and (rows[:, 0] == 1).all() and (rows[:, 1:] > 2).all()


def test_jsonl_rows_hold_text_or_messages(tmp_path: Path) -> None:
    file = tmp_path / "rows.jsonl"
    chat = {"messages": [{"role": "user", "content": "w9 w10"}]}
    file.write_text("\n".join(json.dumps(row) for row in ({"text": "w7 w8"}, chat)) + "\n\n")
    rows = from_text(file, word_tokenizer(), Rows(9, 3, seed=0))
    assert sorted(rows.tolist()) == [[7, 8, 3], [9, 10, 4]]


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("empty.txt", b"", "0 tokens are fewer than one row of 8"),
        ("short.txt", b"w5 w6", "2 tokens are fewer"),
        ("binary.txt", b"\xff\xfe\x00", "not UTF-8"),
        ("bad.jsonl", b'{"text": "w5"}\nnonsense\n', "bad.jsonl:2: Invalid JSON"),
        ("keys.jsonl", b'{"words": "w5"}\n', "keys.jsonl:1"),
    ],
)
def test_an_unusable_file_is_named(tmp_path: Path, name: str, content: bytes, message: str) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(UserError, match=message):
        from_text(tmp_path / name, word_tokenizer(), Rows(1, 8, seed=0))
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(UserError, match="pipe: is a pipe or a device"):
        from_text(tmp_path / "pipe", word_tokenizer(), Rows(1, 8, seed=0))
    with pytest.raises(UserError, match="no such calibration file"):
        from_text(tmp_path / "absent", word_tokenizer(), Rows(1, 8, seed=0))


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> list[torch.Tensor]:
    """The rows of every run, with the held-out ones."""
    seen: list[torch.Tensor] = []
    inner = calibration.make_rows
    monkeypatch.setattr(calibration, "make_rows", lambda run: seen.append(inner(run)) or seen[-1])
    return seen


def test_several_texts_share_the_rows_everywhere(
    dense: Callable[..., Path], tmp_path: Path, text: Path, made: list[torch.Tensor]
) -> None:
    """Also the held-out rows at the end have some of each text."""
    other = tmp_path / "other.txt"
    other.write_text(" ".join(["w60 w61 w62"] * 300))
    texts = [str(text), "self", str(other)]
    report = compress(dense(), tmp_path / "out", config(method="whitened", calibration=texts, calibration_rows=24))
    (rows,) = made
    words = set(map(int, text.read_text().replace("w", "").split()))
    assert len(rows) == 27 and set(rows[0::3].flatten().tolist()) <= words
    assert set(rows[1::3, 0].tolist()) == {1, 3} and set(rows[2::3].flatten().tolist()) == {60, 61, 62}
    assert report["calibration"]["source"] == texts and "other.txt" in (tmp_path / "out" / REPORT).read_text()


def test_the_default_texts_are_shipped_but_for_one(
    dense: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, made: list[torch.Tensor]
) -> None:
    """A file of the same name is not read."""
    (tmp_path / "prose").write_text("w7 " * 300)
    monkeypatch.chdir(tmp_path)
    words = {"prose": "w60 w61 w62 " * 300, "code": "w50 w51 " * 300}
    monkeypatch.setattr(calibration, "shipped_documents", lambda word: [words[word]])
    texts = CompressionConfig().calibration
    report = compress(dense(), tmp_path / "out", config(method="whitened", calibration=texts, calibration_rows=24))
    (rows,) = made
    assert len(rows) == 27 and set(rows[0::3].flatten().tolist()) == {60, 61, 62}
    assert set(rows[1::3].flatten().tolist()) == {50, 51} and set(rows[2::3, 0].tolist()) == {1, 3}
    assert report["calibration"]["source"] == ["prose", "code", "self"]


def test_the_shipped_texts_are_long_enough_and_the_same_every_time() -> None:
    (prose,) = shipped_documents("prose")
    assert len(prose) > 400_000 and "\ufffd" not in prose
    code = shipped_documents("code")
    assert code == shipped_documents("code") and sum(map(len, code)) > 400_000
    assert Path(calibration.__file__).read_text() in code and Path(__file__).read_text() not in code
    assert all(ast.parse(module) for module in code if module)


def test_a_shipped_text_that_is_too_short_has_another_remedy() -> None:
    with pytest.raises(UserError, match=r"prose: .* lower calibration_length or name other texts"):
        from_text("prose", word_tokenizer(), Rows(1, 10**6, seed=0))


def test_a_run_is_known_by_its_shipped_texts(monkeypatch: pytest.MonkeyPatch) -> None:
    before = identity.of_texts(config(calibration=["prose", "code", "self"]))["content_of_texts"]
    assert list(before) == ["prose", "code"] and None not in before.values()
    monkeypatch.setattr(identity, "shipped_documents", lambda word: ["changed"])
    after = identity.of_texts(config(calibration=["prose", "code", "self"]))["content_of_texts"]
    assert all(after[word] != before[word] for word in before)


def test_code_needs_the_sources_of_the_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shipped_texts, "_folder", lambda _: tmp_path)
    with pytest.raises(UserError, match="installed without its sources; give a file of code"):
        shipped_documents("code")


def test_a_short_text_gives_what_it_has(dense: Callable[..., Path], tmp_path: Path, text: Path) -> None:
    short = tmp_path / "short.txt"
    short.write_text(" ".join(["w60"] * 40))
    settings = config(method="whitened", calibration=[str(text), str(short)], calibration_rows=24)
    report = compress(dense(), tmp_path / "out", settings)
    assert report["calibration"]["rows"] + report["fidelity"]["distance"]["rows"] == 14 + 3


def test_fewer_rows_than_texts_are_refused(dense: Callable[..., Path], tmp_path: Path, text: Path) -> None:
    other = tmp_path / "other.txt"
    other.write_text(text.read_text() + " w60")
    settings = config(method="whitened", calibration=[str(text), str(other), "self"], calibration_rows=1)
    with pytest.raises(UserError, match="calibration_rows 1: too few for 3 texts"):
        compress(dense(), tmp_path / "out", settings)


def test_one_text_twice_is_refused(text: Path) -> None:
    with pytest.raises(UserError, match="names one text twice"):
        config(calibration=[str(text), str(text)])
    assert config(calibration=[str(text)]).calibration == str(text)


def test_one_text_under_two_names_is_refused(dense: Callable[..., Path], tmp_path: Path, text: Path) -> None:
    copy = tmp_path / "copy.txt"
    copy.write_bytes(text.read_bytes())
    with pytest.raises(UserError, match=r"calibration\.txt and .*copy\.txt hold one text; name it once"):
        compress(dense(), tmp_path / "out", config(method="whitened", calibration=[str(text), str(copy)]))
    assert not list(tmp_path.glob("out*"))


def test_sampling_starts_from_bos_and_from_the_chat_template() -> None:
    tokenizer = word_tokenizer()
    opened = prefixes(tokenizer)
    assert opened[0::3] == [[1]] * 8 and opened[1::3] == [[3]] * 8 and all(ids[0] == 1 for ids in opened[2::3])
    assert min(map(len, opened[2::3])) > 1, "the beginning of a program"
    tokenizer.chat_template, tokenizer.bos_token = None, None
    opened = prefixes(tokenizer)
    assert opened[0::2] == [[2]] * 8 and all(ids[0] == 2 and len(ids) > 1 for ids in opened[1::2])


@pytest.mark.parametrize("resident", [True, False])
@pytest.mark.parametrize("model_type", FAMILIES)
def test_streamed_layers_compute_what_the_whole_model_does(
    model_type: str, resident: bool, dense: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    if not resident:
        monkeypatch.setattr(streaming, "RESIDENT_BYTES", 0)
    folder = dense(model_type, tied=model_type == "qwen2", max_shard_size="20KB")
    complete = AutoModelForCausalLM.from_pretrained(folder).eval()
    tokens = torch.randint(3, 64, (3, 7))
    streamed = StreamedModel(folder, torch.float32)
    with torch.no_grad():
        want = complete(tokens).logits
        for _ in range(2):  # a second pass must find the weights again
            hidden = streamed.embed(tokens)
            rotary = streamed.rotary(hidden, torch.arange(7)[None])
            for index in range(len(streamed)):
                with streamed.layer(index) as layer:
                    hidden = run_layer(layer, hidden, rotary)
                assert next(layer.parameters()).is_meta is not resident
            with streamed.head() as logits:
                torch.testing.assert_close(logits(hidden.flatten(0, 1)), want.flatten(0, 1))


def test_sampled_rows_follow_the_models_own_distribution(dense: Callable[..., Path]) -> None:
    """The same uniform numbers and the logits of the complete model give the same tokens."""
    folder = dense()
    fractions: list[float] = []
    rows = from_model(
        StreamedModel(folder, torch.float32), prefixes(word_tokenizer()), Rows(6, 12, 5), fractions.append
    )
    assert rows.shape == (6, 12) and sum(fractions) == pytest.approx(1)
    opened = prefixes(word_tokenizer())[:6]
    complete = AutoModelForCausalLM.from_pretrained(folder).eval()
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        cumulative = complete(rows).logits.double().softmax(-1).cumsum(-1)
    for position in range(11):
        uniform = torch.rand(6, 1, generator=generator).double()
        drawn = torch.searchsorted(cumulative[:, position].contiguous(), uniform)[:, 0]
        for row, opening in enumerate(opened):
            want = opening[position + 1] if position + 1 < len(opening) else int(drawn[row])
            assert int(rows[row, position + 1]) == want


def test_a_checkpoint_in_fp16_is_sampled_in_bf16(dense: Callable[..., Path]) -> None:
    assert StreamedModel(dense(dtype=torch.float16), None).dtype is torch.bfloat16
    assert StreamedModel(dense("qwen2"), None).dtype is torch.float32


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_logits_that_are_not_finite_choose_no_token(value: float) -> None:
    logits = torch.zeros(3, 10)
    assert Sampled(0)(logits).shape == (3,)
    logits[1, 4] = value
    with pytest.raises(UserError, match="logits hold NaN or infinity"):
        Sampled(0)(logits)


def test_an_unknown_name_of_the_cache_is_refused(dense: Callable[..., Path], monkeypatch: pytest.MonkeyPatch) -> None:
    """Layers ignore unknown arguments, so a renamed cache would give text of a model that sees one token."""
    model = StreamedModel(dense(), torch.float32)
    with model.layer(0) as layer:
        monkeypatch.setattr(type(layer), "forward", lambda self, hidden, memory=None, **kwargs: hidden)
        with pytest.raises(UserError, match="renamed the cache"):
            from_model(model, prefixes(word_tokenizer()), Rows(1, 4, 0), lambda fraction: None)


def test_the_tokens_that_all_openings_have_take_one_pass(
    dense: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    model, openings = StreamedModel(dense(), torch.float32), [[3, 4, 5], [6, 7]]
    alone = [continue_rows(model, [opening], 6, greedy, lambda: None) for opening in openings]
    passes, steps = list[int](), list[None]()
    inner = model.layer
    monkeypatch.setattr(model, "layer", lambda index: passes.append(index) or inner(index))
    together = continue_rows(model, openings, 6, greedy, lambda: steps.append(None))
    assert torch.equal(together, torch.cat(alone))
    assert (passes.count(0), len(steps)) == (4, 6)
    assert continue_rows(model, [[3, 4]], 2, greedy, lambda: steps.append(None)).tolist() == [[3, 4]]
    assert len(steps) == 8


def test_rows_are_sampled_in_groups_that_bound_the_cache(
    dense: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    model = StreamedModel(dense(), torch.float32)
    per_row = 2 * 2 * 2 * 8 * 12 * 4  # K and V, layers, KV heads, head dimension, length, bytes
    monkeypatch.setattr(calibration, "_CACHE_BYTES", 2 * per_row)
    sizes: list[int] = []
    inner = calibration.continue_rows
    monkeypatch.setattr(calibration, "continue_rows", lambda m, o, *rest: sizes.append(len(o)) or inner(m, o, *rest))
    rows = from_model(model, prefixes(word_tokenizer()), Rows(5, 12, 0), lambda fraction: None)
    assert sizes == [2, 2, 1] and rows.shape == (5, 12)
    assert rows[:, 0].tolist() == [1, 3, 1, 1, 3]
