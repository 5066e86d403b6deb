"""Multiple choice by log-likelihood: the most likely choice counts as the model's answer.

Scores follow lm-evaluation-harness: ``acc`` compares the summed log-likelihoods of the choices, ``acc_norm`` first
divides each by the choice's length in characters. In a query with exactly one ``_`` (WinoGrande) each choice replaces
the blank, and the text after it, the same for every choice, is scored. Queries are used unchanged.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import Annotated, Any

import torch
from pydantic import BaseModel, Field, model_validator
from transformers import PreTrainedTokenizerBase

from neuronmm.measure.scoring import Pack, hidden_states, lay_out, negative_log_likelihood, pack
from neuronmm.models.documents import read_rows
from neuronmm.models.errors import UserError

_BLANK = re.compile(r"(?<![\w])_(?![\w])")
_BATCH_TOKENS = 2048  # padded tokens per forward pass


@dataclass(frozen=True)
class Question:
    """One row of a task: for each choice a pair (text before, scored text) and the length in characters.

    ``where`` is its file and line.
    """

    where: str
    pairs: list[tuple[str, str]]
    lengths: list[int]
    gold: int


@dataclass(frozen=True)
class Choice:
    """One choice as tokens; the last ``scored`` of ``ids`` are scored."""

    ids: list[int]
    scored: int


class _Row(BaseModel):
    """A line of a task's file."""

    query: str
    choices: list[Annotated[str, Field(min_length=1)]] = Field(min_length=2)
    gold: int = Field(ge=0)

    @model_validator(mode="after")
    def _gold_is_a_choice(self) -> _Row:
        if self.gold >= len(self.choices):
            raise ValueError(f"gold {self.gold} is none of {len(self.choices)} choices")
        return self


def read_task(path: Path, limit: int | None) -> list[Question]:
    """Return the first ``limit`` rows {"id", "query", "choices", "gold"} of a .jsonl file.

    Raises:
        UserError: the file is missing or empty, or a row is malformed; the message names its line.
    """
    rows = read_rows(path, _Row, '{"query": text, "choices": [text, text, ...], "gold": index}')
    if not rows:
        raise UserError(f"{path}: there are no rows in it")
    return [_question(where, row) for where, row in rows[:limit]]


def guessing(questions: list[Question]) -> float:
    """Return the expected accuracy of random choices."""
    return sum(1 / len(question.pairs) for question in questions) / len(questions)


def _question(where: str, row: _Row) -> Question:
    query, choices, gold = row.query, row.choices, row.gold
    blanks = list(_BLANK.finditer(query))
    if len(blanks) == 1:
        before, after = query[: blanks[0].start()], query[blanks[0].end() :]
        if after.strip():
            return Question(where, [(before + choice, after) for choice in choices], [len(after)] * len(choices), gold)
    pairs = [(query, choice if choice[0].isspace() else f" {choice}") for choice in choices]
    return Question(where, pairs, [len(choice) for choice in choices], gold)


def encode(tokenizer: PreTrainedTokenizerBase, question: Question, context: int) -> list[Choice]:
    """Tokenise both texts of each choice as one; the tokens beyond those of the text before alone are scored.

    A sequence longer than ``context`` loses its first tokens.

    Raises:
        UserError: nothing precedes the scored tokens, or they fill the context.
    """
    return [_choice(tokenizer, question.where, before, after, context) for before, after in question.pairs]


def _choice(tokenizer: PreTrainedTokenizerBase, where: str, before: str, after: str, context: int) -> Choice:
    ids = tokenizer(before + after).input_ids
    prefix = tokenizer(before.rstrip()).input_ids
    scored = max(len(ids) - len(prefix), 1)
    if len(ids) < 2 or scored >= context:
        raise UserError(
            f"{where}: cannot be scored ({len(ids)} tokens, {scored} of them scored, the context {context}); "
            "change or remove that row"
        )
    return Choice(ids[-context:], min(scored, len(ids) - 1))


def score(model: Any, groups: list[list[Choice]], advance: Callable[[float], None]) -> list[float]:
    """Return the summed log-likelihood (nats) of the scored tokens of every choice, group after group.

    The common prefix of a group's choices runs through the model once. Rows of similar length share a batch.
    ``advance`` receives the fraction of the choices that each batch holds.
    """
    norm = model.model.norm.weight  # a float in every model
    choices = [choice for group in groups for choice in group]
    rows = [row for group in groups for row in pack([choice.ids for choice in group], _BATCH_TOKENS)]
    firsts = [0, *accumulate(len(row.paths) for row in rows)]
    result = [0.0] * len(choices)
    for batch in _batches(rows):
        hidden = hidden_states(model, *lay_out([rows[i] for i in batch], norm.device, norm.dtype))
        states, targets, counts = [], [], {}
        for states_of_row, i in zip(hidden, batch, strict=True):
            for index, path in enumerate(rows[i].paths, firsts[i]):
                choice = choices[index]
                states.append(states_of_row[path[-choice.scored - 1 : -1]])
                targets += choice.ids[-choice.scored :]
                counts[index] = choice.scored
        nll = negative_log_likelihood(model, torch.cat(states), torch.tensor(targets, device=norm.device)).double()
        for index, part in zip(counts, nll.split(list(counts.values())), strict=True):
            result[index] = -part.sum().item()
        advance(len(counts) / len(choices))
    return result


def _batches(rows: list[Pack]) -> Iterator[list[int]]:
    """Yield the indices of ``rows``, longest first, in batches whose padded size stays within the token budget."""
    order = sorted(range(len(rows)), key=lambda i: -len(rows[i].ids))
    while order:
        size = max(1, _BATCH_TOKENS // len(rows[order[0]].ids))
        yield order[:size]
        order = order[size:]


def answer(questions: list[Question], scores: list[float]) -> dict[str, list[float]]:
    """Return for each metric 1.0 or 0.0 per question: whether the most likely choice is the gold one."""
    correct: dict[str, list[float]] = {"acc": [], "acc_norm": []}
    position = 0
    for question in questions:
        sums = scores[position : position + len(question.pairs)]
        position += len(sums)
        means = [score / length for score, length in zip(sums, question.lengths, strict=True)]
        correct["acc"].append(float(sums.index(max(sums)) == question.gold))
        correct["acc_norm"].append(float(means.index(max(means)) == question.gold))
    return correct
