"""Chat templates of unknown origin: each renders, or is refused within its limits of time, memory and text."""

from __future__ import annotations

import gc
import os
import signal
import sys
import time
import weakref
from pathlib import Path

import pytest
from transformers import PreTrainedTokenizerBase

from neuronmm.models import UserError, chat
from neuronmm.models.chat import ChatTemplate
from word_tokenizer import word_tokenizer

CHAT = [{"role": "user", "content": "w9"}]


@pytest.fixture
def words() -> PreTrainedTokenizerBase:
    """Return a tokenizer of its own for each test, since the tests change the template."""
    return word_tokenizer()


def render(tokenizer: PreTrainedTokenizerBase, template: str | None = None) -> str:
    if template is not None:
        tokenizer.chat_template = template
    return ChatTemplate(tokenizer)(CHAT, answer=True, problem="fails")


def open_files() -> int:
    return len(os.listdir("/proc/self/fd"))


def test_the_text_is_that_of_transformers(words: PreTrainedTokenizerBase) -> None:
    assert render(words) == words.apply_chat_template(CHAT, tokenize=False, add_generation_prompt=True) == "w3 w9 w4 w5"
    assert ChatTemplate(words)(CHAT, answer=False, problem="fails") == "w3 w9 w4"


@pytest.mark.skipif(sys.platform != "linux", reason="other systems do not enforce all limits")
@pytest.mark.parametrize(
    ("template", "reason"),
    [
        ("{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}", "it takes more than"),
        ("{{ 10 ** (10 ** 9) }}", "it takes more than"),
        ("{{ 'a' * 10 ** 10 }}", "MB of memory"),
        ("{{ '%999999999999d' % 1 }}", "MB of memory"),
        ("{% set n = namespace(x=[1]) %}{% for i in range(99) %}{% set n.x = n.x + n.x %}{% endfor %}", "MB of memory"),
        ("{% for i in range(99999) %}{{ 'a' * 1000 }}{% endfor %}", "16 MB of text"),
        ("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", "recursion"),
        ("{{ '\ud800' }}", "surrogates"),
    ],
)
def test_a_template_without_end_is_refused(
    template: str, reason: str, words: PreTrainedTokenizerBase, monkeypatch: pytest.MonkeyPatch
) -> None:
    if reason == "it takes more than":  # the others need time, on a slow machine seconds, to reach their own limit
        monkeypatch.setattr(chat, "CPU_SECONDS", 1)
    with pytest.raises(UserError, match=f"fails .*{reason}"):
        render(words, template)


@pytest.mark.parametrize("template", ["{{ ''.__class__.__mro__ }}", "{{ cycler.__init__.__globals__ }}"])
def test_a_template_does_not_reach_python(template: str, words: PreTrainedTokenizerBase) -> None:
    with pytest.raises(UserError, match=r"unsafe|undefined"):
        render(words, template)


@pytest.mark.skipif(not Path("/proc/self/fd").exists(), reason="counts open files in /proc")
def test_the_child_ends_with_its_template_and_keeps_nothing_open(
    words: PreTrainedTokenizerBase, tmp_path: Path
) -> None:
    before = open_files()
    template, (reader, writer) = ChatTemplate(words), os.pipe()
    template(CHAT, answer=True, problem="fails")
    assert template._child is not None
    child = template._child._process
    os.close(writer)
    assert os.read(reader, 1) == b""  # the child does not hold the pipe open
    os.close(reader)
    del template
    assert open_files() == before
    with pytest.raises(ProcessLookupError):
        os.kill(child, 0)


def test_a_new_child_replaces_one_that_was_killed(words: PreTrainedTokenizerBase) -> None:
    template = ChatTemplate(words)
    template(CHAT, answer=True, problem="fails")
    assert template._child is not None
    os.kill(template._child._process, signal.SIGKILL)
    killed = weakref.ref(template._child)
    time.sleep(0.01)
    with pytest.raises(UserError, match="fails"):
        template(CHAT, answer=True, problem="fails")
    gc.collect()
    assert killed() is None  # a server keeps no dead child
    assert template(CHAT, answer=True, problem="fails") == "w3 w9 w4 w5"
