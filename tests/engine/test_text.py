"""Streamed text is final: complete characters, no part of a stop string."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models
from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

from neuronmm.engine.text import TextStream


def pieces(tokenizer: PreTrainedTokenizerBase, text: str, stop: tuple[str, ...] = ()) -> tuple[list[str], TextStream]:
    """Push ``text`` token by token, as the loop does, and return the pieces and the stream."""
    prompt = tokenizer("Prompt:").input_ids
    stream = TextStream(tokenizer, prompt, stop)
    out = []
    for token in tokenizer(text).input_ids:
        out.append(stream.push(token))
        if stream.stopped:
            return out, stream
    return [*out, stream.finish()], stream


def test_characters_of_many_bytes_come_whole(byte_tokenizer: PreTrainedTokenizerBase) -> None:
    text = "naïve 😀 русский 中文"
    assert len(byte_tokenizer("😀").input_ids) == 4, "the test needs a character of several tokens"
    out, stream = pieces(byte_tokenizer, text)
    assert "".join(out) == stream.text == text
    assert not any("\N{REPLACEMENT CHARACTER}" in piece for piece in out)


def test_half_a_character_at_the_end_is_dropped(byte_tokenizer: PreTrainedTokenizerBase) -> None:
    ids = byte_tokenizer("ok😀").input_ids
    stream = TextStream(byte_tokenizer, byte_tokenizer("x").input_ids, ())
    for token in ids[:-1]:
        stream.push(token)
    assert stream.finish() == ""
    assert stream.text == "ok"


def test_a_character_that_began_in_the_prompt_comes_out(byte_tokenizer: PreTrainedTokenizerBase) -> None:
    ids = byte_tokenizer("aé").input_ids
    stream = TextStream(byte_tokenizer, ids[:-1], ())
    assert stream.push(ids[-1]) == "é"


def test_a_character_whose_beginning_was_given_out_comes_out(byte_tokenizer: PreTrainedTokenizerBase) -> None:
    first, *rest = byte_tokenizer("😀").input_ids
    stream = TextStream(byte_tokenizer, [], ())
    for token in [*[rest[0]] * 8, first, *rest]:
        stream.push(token)
    assert stream.text == "\N{REPLACEMENT CHARACTER}" * 9 + "😀"


def test_text_after_a_prompt_of_single_bytes_is_whole() -> None:
    """A decoder with byte fallback, as Llama 2's, judges a run of bytes as a whole."""
    vocabulary = {"<unk>": 0, **{f"<0x{byte:02X}>": 1 + byte for byte in range(256)}}
    tokenizer = Tokenizer(models.BPE(vocabulary, [], unk_token="<unk>", byte_fallback=True))
    tokenizer.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Fuse()])
    ids = tokenizer.encode("ﷺ").ids
    assert len(ids) == 3
    for repeats in range(5):
        stream = TextStream(PreTrainedTokenizerFast(tokenizer_object=tokenizer), ids * repeats, ())
        for token in ids:
            stream.push(token)
        stream.finish()
        assert stream.text == "ﷺ"


def test_tokens_without_text_cost_no_more_than_others(
    byte_tokenizer: PreTrainedTokenizerBase, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Special tokens, and bytes that complete no character: the window that is decoded stays short."""
    half, end = byte_tokenizer("😀").input_ids[1], byte_tokenizer.eos_token_id
    decoded, decode = [], byte_tokenizer.decode

    def counting(ids: list[int], **options: bool) -> str:
        decoded.append(len(ids))
        return str(decode(ids, **options))

    monkeypatch.setattr(byte_tokenizer, "decode", counting)
    stream = TextStream(byte_tokenizer, [], ())
    for token in [*byte_tokenizer("ab").input_ids, *[end] * 50, *[half] * 50, *byte_tokenizer("cd").input_ids]:
        stream.push(token)
    stream.finish()
    assert stream.text.replace("\N{REPLACEMENT CHARACTER}", "") == "abcd"
    assert max(decoded) < 25


def test_stop_string_across_tokens_is_never_half_printed(byte_tokenizer: PreTrainedTokenizerBase) -> None:
    out, stream = pieces(byte_tokenizer, "a STOQ b STOP c", ("STOP",))
    assert stream.stopped
    assert "".join(out) == stream.text == "a STOQ b "
    assert all("ST" not in piece or "STOQ" in piece for piece in out)


def test_the_earliest_of_several_stops_cuts(byte_tokenizer: PreTrainedTokenizerBase) -> None:
    _, stream = pieces(byte_tokenizer, "one two three", ("three", "two", "w"))
    assert stream.text == "one t"


def test_a_special_token_that_a_stop_string_names_ends_the_text(byte_tokenizer: PreTrainedTokenizerBase) -> None:
    for stop, text in ((("</s>", "x"), "one"), (("x",), "one two")):
        out, stream = pieces(byte_tokenizer, "one</s> two", stop)
        assert ("".join(out), stream.text, stream.stopped) == (text, text, "</s>" in stop)


def test_an_unfinished_stop_string_comes_out_at_the_end(byte_tokenizer: PreTrainedTokenizerBase) -> None:
    _, stream = pieces(byte_tokenizer, "all the ST", ("STOP",))
    assert stream.text == "all the ST"
    assert not stream.stopped


def test_text_continues_the_prompt(tokenizer: PreTrainedTokenizerBase) -> None:
    stream = TextStream(tokenizer, [7, 8], ())
    assert [stream.push(9), stream.push(10)] == [" w9", " w10"]


@given(text=st.text(st.characters(codec="utf-8"), max_size=40), stop=st.text(min_size=1, max_size=3))
def test_any_text_is_cut_at_the_stop_and_nowhere_else(
    byte_tokenizer: PreTrainedTokenizerBase, text: str, stop: str
) -> None:
    text = text.replace("\N{REPLACEMENT CHARACTER}", "")
    out, stream = pieces(byte_tokenizer, text, (stop,))
    assert "".join(out) == stream.text == text.split(stop)[0]
