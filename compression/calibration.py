"""The text that a compression is fitted to: rows of token ids, from files, from shipped texts or from the model itself.

``self`` needs no data set: the model samples its own text, as in data-free distillation. Its rows are in turn free
text, which starts from BOS, chat, which starts from the opening of the chat template, so that the model writes a user's
question and then its answer (Magpie, arXiv 2406.08464), and code, which starts from BOS and the beginning of a program.
docs/results/calibration.md compares these texts and others.
"""

from __future__ import annotations

import math
from array import array
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from pydantic import BaseModel
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from neuronmm.compression.config import SELF, Rows
from neuronmm.compression.continuation import Sampled, around_user, continue_rows, first_token
from neuronmm.compression.memory import check_row_memory
from neuronmm.compression.run import Run
from neuronmm.compression.shipped_texts import SHIPPED, shipped_documents
from neuronmm.compression.streaming import StreamedModel
from neuronmm.models import processes
from neuronmm.models.chat import ChatTemplate
from neuronmm.models.documents import read_rows, read_text
from neuronmm.models.errors import UserError
from neuronmm.models.load import load_config, load_tokenizer, positions_of
from neuronmm.models.model_config import ModelConfig
from neuronmm.models.source import read_config
from neuronmm.models.tensors import check_tokens

NO_ROWS = torch.zeros(0, 1, dtype=torch.long)
"""The rows of a run without calibration text."""

_CACHE_BYTES = 1 << 30  # KV cache of the rows that are sampled together

_PIECE = 1 << 22  # characters that are tokenised together

_PROGRAMS = ("import ", "#include <", "def ", "package ", "class ", "function ", "SELECT ", "```python\n")


def calibration_tokens(run: Run) -> tuple[Tensor, Tensor]:
    """Return the rows [rows, length] that a run is fitted to, and the held-out rows: NO_ROWS if it needs no text.

    They are read from the interrupted run, else from the store, and are made if neither has them. For every eight rows
    there is a held-out row, to which nothing is fitted; only the search for a budget chooses by them. A single row is
    both.

    Raises:
        UserError: as :func:`make_rows`.
    """
    if not run.config.needs_text:
        return NO_ROWS, NO_ROWS
    tokens = NO_ROWS
    if processes.rank() == 0:
        tokens = run.workspace.tokens(lambda: run.store.tokens(lambda: make_rows(run)))
    tokens = processes.of_first(tokens)
    held_out = math.ceil(len(tokens) / 9)
    return tokens[:-held_out] if len(tokens) > held_out else tokens, tokens[-held_out:]


def make_rows(run: Run) -> Tensor:
    """Read or sample the calibration tokens [rows, length] for the dense checkpoint, with the held-out rows at the end.

    Raises:
        UserError: the file or the checkpoint cannot be used, or the rows fit neither the model nor the memory.
    """
    folder, rows = run.dense.folder, run.config.rows
    rows = replace(rows, count=rows.count + math.ceil(rows.count / 8))
    config = ModelConfig.parse(read_config(folder), str(folder / "config.json"))
    context = positions_of(load_config(folder))
    if rows.length > context:
        longest = f"the model's context is {context} tokens"
        raise UserError(f"calibration_length {rows.length}: {longest}; give a lower one")
    tokenizer = load_tokenizer(folder)
    texts = run.config.texts
    if rows.count < len(texts):
        raise UserError(
            f"calibration_rows {run.config.calibration_rows}: too few for {len(texts)} texts; give more rows"
        )
    counts = dict(zip(texts, shares(rows.count, len(texts)), strict=True))
    parts = {
        text: from_text(text, tokenizer, replace(rows, count=count)) for text, count in counts.items() if text != SELF
    }
    for part in parts.values():
        check_tokens(part, config.vocab_size)
    to_sample = counts.get(SELF, 0)
    found = sum(map(len, parts.values())) + to_sample
    check_row_memory(found, rows.length, config.hidden_size, run.config, run.device)
    if to_sample:
        model, sampling = StreamedModel(folder, None, run.device), partial(run.progress, "sampling text")
        parts[SELF] = from_model(model, prefixes(tokenizer), replace(rows, count=to_sample), sampling)
    return mixed([parts[text] for text in texts])


def shares(count: int, parts: int) -> list[int]:
    """Return how many of ``count`` rows each of ``parts`` texts gets; the first ones get one more if they must."""
    return [len(range(first, count, parts)) for first in range(parts)]


def mixed(parts: Sequence[Tensor]) -> Tensor:
    """Return the rows of all parts [rows, length] in one tensor, in which every stretch has its share of each part."""
    places = torch.cat([(torch.arange(len(part)) + 0.5) / len(part) for part in parts])
    return torch.cat(list(parts))[places.argsort(stable=True)]


def from_text(text: str | Path, tokenizer: PreTrainedTokenizerBase, rows: Rows) -> Tensor:
    """Return up to ``rows.count`` rows [count, length] of token ids from a text, in a seeded order.

    ``text`` is ``prose``, ``code``, or a text or .jsonl file. A .jsonl row holds ``text``, or ``messages``
    for the chat template. The tokens of all documents are concatenated and cut into rows. Each row starts with BOS if
    the tokenizer adds it to every text.

    Raises:
        UserError: the file is missing, empty, not text, malformed, or shorter than one row.
    """
    ids = array("i")  # a list would take nine times as much memory
    for document in _documents(text, tokenizer):
        for piece in _pieces(document):
            ids.extend(tokenizer(piece, add_special_tokens=False, verbose=False)["input_ids"])
    bos = _automatic_bos(tokenizer)
    body = rows.length - len(bos)
    available = len(ids) // body
    if available == 0:
        remedy = "lower calibration_length or name other texts" if text in SHIPPED else "give a longer calibration file"
        raise UserError(f"{text}: {len(ids)} tokens are fewer than one row of {body}; {remedy}")
    packed = torch.frombuffer(ids, dtype=torch.int32)[: available * body].reshape(available, body)
    order = torch.randperm(available, generator=torch.Generator().manual_seed(rows.seed))[: rows.count]
    return torch.cat([torch.tensor([bos], dtype=torch.long).expand(len(order), -1), packed[order].long()], dim=1)


def _pieces(document: str) -> Iterator[str]:
    """Yield a document in pieces that end with a line, because what a tokenizer returns is far larger than its text."""
    start = 0
    while len(document) - start > _PIECE:
        end = document.rfind("\n", start, start + _PIECE) + 1 or start + _PIECE
        yield document[start:end]
        start = end
    yield document[start:]


class _Row(BaseModel):
    """A line of a .jsonl calibration file."""

    text: str | None = None
    messages: list[dict[str, Any]] | None = None


def _documents(text: str | Path, tokenizer: PreTrainedTokenizerBase) -> list[str]:
    if text in SHIPPED:
        return shipped_documents(str(text))
    path = Path(text)
    if not path.exists():
        raise UserError(f"{path}: no such calibration file; give a text or .jsonl file, 'self', 'prose' or 'code'")
    if not (path.is_file() or path.is_dir()):
        raise UserError(f"{path}: is a pipe or a device, which cannot be read twice; write the text to a file")
    if path.suffix != ".jsonl":
        return [read_text(path)]
    template = ChatTemplate(tokenizer)
    documents, example = [], '{"text": "..."} or {"messages": [{"role": "user", "content": "..."}, ...]}'
    for where, row in read_rows(path, _Row, example):
        if row.text is not None:
            documents.append(row.text)
            continue
        if row.messages is None:
            raise UserError(f"{where}: neither text nor messages; a row has to be {example}")
        problem = f"{where}: the model's chat template does not take these messages"
        documents.append(template(row.messages, answer=False, problem=problem))
    return documents


def _automatic_bos(tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """Return [BOS] if the tokenizer puts it before every text by itself, else []."""
    first = tokenizer("a", verbose=False)["input_ids"][:1]
    return first if tokenizer.bos_token_id is not None and first == [tokenizer.bos_token_id] else []


def prefixes(tokenizer: PreTrainedTokenizerBase) -> list[list[int]]:
    """Return the openings of sampled rows, used in turn: of free text, of chat (if there is a template), of code."""

    def ids(text: str) -> Any:
        return tokenizer(text, add_special_tokens=False)["input_ids"]

    free = [first_token(tokenizer)]
    chat = [ids(around_user(tokenizer, answer=False)[0]) or free] if tokenizer.chat_template else []
    return [opening for program in _PROGRAMS for opening in (free, *chat, [*free, *ids(program)])]


def from_model(
    model: StreamedModel, starts: Sequence[list[int]], rows: Rows, advance: Callable[[float], None]
) -> Tensor:
    """Sample ``rows.count`` rows [count, length] from the model at temperature 1, seeded, layer by layer from disk.

    The rows continue the openings ``starts`` in turn. ``advance`` is called with each further fraction that is done;
    the fractions add up to 1.
    """
    sizes = ModelConfig.parse(model.config.to_dict(), "config.json")
    per_row = 2 * len(model) * sizes.kv_heads * sizes.head * rows.length * model.dtype.itemsize
    together = max(1, min(rows.count, _CACHE_BYTES // per_row))
    choose = Sampled(rows.seed)
    groups: list[Tensor] = []
    for first in range(0, rows.count, together):
        members = range(first, min(first + together, rows.count))
        openings = [starts[index % len(starts)][: rows.length] for index in members]
        fraction = len(openings) / rows.count / rows.length
        groups.append(continue_rows(model, openings, rows.length, choose, partial(advance, fraction)))
    return torch.cat(groups)
