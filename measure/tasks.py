"""Multiple choice by log-likelihood: the choice the model finds likeliest counts as its answer.

Scores follow lm-evaluation-harness: ``acc`` compares the summed log-likelihood of each choice, ``acc_norm`` divides it
by the choice's length in characters first. A query with one lone ``_`` (WinoGrande) is filled with each choice, and
what follows the blank is scored, which is the same text for every choice. Queries are used as they stand.
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

from neuronmm.measure.packing import Pack, lay_out, pack
from neuronmm.measure.scoring import hidden_states, negative_log_likelihood
from neuronmm.models.documents import read_rows
from neuronmm.models.errors import UserError

_BLANK = re.compile(r"(?<![\w])_(?![\w])")
_BATCH_TOKENS = 2048  # padded tokens that run through the model at once


@dataclass(frozen=True)
class Question:
    """One row of a task: for each choice the text before and the text that is scored, and its length in characters."""

    pairs: list[tuple[str, str]]
    lengths: list[int]
    gold: int


@dataclass(frozen=True)
class Choice:
    """One choice as tokens: the last ``scored`` of ``ids`` are what is scored."""

    ids: list[int]
    scored: int


class _Row(BaseModel):
    """A line of a task's file, as :mod:`.tasks` describes it."""

    query: str
    choices: list[Annotated[str, Field(min_length=1)]] = Field(min_length=2)
    gold: int = Field(ge=0)

    @model_validator(mode="after")
    def _gold_is_a_choice(self) -> _Row:
        if self.gold >= len(self.choices):
            raise ValueError(f"gold {self.gold} is none of {len(self.choices)} choices")
        return self


def read_task(path: Path, limit: int | None) -> list[Question]:
    """The first ``limit`` rows {"id", "query", "choices", "gold"} of a .jsonl file.

    Raises:
        UserError: the file is missing or empty, or a row is malformed (its line is named).
    """
    rows = read_rows(path, _Row, '{"query": text, "choices": [text, text, ...], "gold": index}')
    if not rows:
        raise UserError(f"{path}: there are no rows in it")
    return [_question(row) for _, row in rows[:limit]]


def guessing(questions: list[Question]) -> float:
    """The share of ``questions`` that choosing blindly answers right, on average: what accuracies begin from."""
    return sum(1 / len(question.pairs) for question in questions) / len(questions)


def _question(row: _Row) -> Question:
    query, choices, gold = row.query, row.choices, row.gold
    blanks = list(_BLANK.finditer(query))
    if len(blanks) == 1:
        before, after = query[: blanks[0].start()], query[blanks[0].end() :]
        if after.strip():
            return Question([(before + choice, after) for choice in choices], [len(after)] * len(choices), gold)
    pairs = [(query, choice if choice[0].isspace() else f" {choice}") for choice in choices]
    return Question(pairs, [len(choice) for choice in choices], gold)


def encode(tokenizer: PreTrainedTokenizerBase, before: str, after: str, context: int) -> Choice:
    """Tokenise both texts as one; the tokens beyond those of ``before`` alone are scored.

    A sequence longer than ``context`` loses its beginning.
    """
    kept = before.rstrip()
    whole = tokenizer(before + after).input_ids
    prefix = tokenizer(kept).input_ids
    scored = max(len(whole) - len(prefix), 1)
    if len(whole) < 2 or scored >= context:
        raise UserError(f"a row cannot be scored: {len(whole)} tokens, {scored} of them scored, context {context}")
    return Choice(whole[-context:], min(scored, len(whole) - 1))


def score(model: Any, groups: list[list[Choice]], advance: Callable[[int], None]) -> list[float]:
    """Summed log-likelihood (nats) of the scored tokens of every choice, group after group.

    What the choices of a group have in common at their beginning runs through the model once; rows of similar length
    share a batch.
    """
    weight = model.get_input_embeddings().weight
    choices = [choice for group in groups for choice in group]
    rows = [row for group in groups for row in pack([choice.ids for choice in group], _BATCH_TOKENS)]
    firsts = [0, *accumulate(len(row.paths) for row in rows)]
    result = [0.0] * len(choices)
    for batch in _batches(rows):
        hidden = hidden_states(model, *lay_out([rows[i] for i in batch], weight.device, weight.dtype))
        states, targets, counts = [], [], {}
        for states_of_row, i in zip(hidden, batch, strict=True):
            for index, path in enumerate(rows[i].paths, firsts[i]):
                choice = choices[index]
                states.append(states_of_row[path[-choice.scored - 1 : -1]])
                targets += choice.ids[-choice.scored :]
                counts[index] = choice.scored
        nll = negative_log_likelihood(model, torch.cat(states), torch.tensor(targets, device=weight.device)).double()
        for index, part in zip(counts, nll.split(list(counts.values())), strict=True):
            result[index] = -part.sum().item()
        advance(len(counts))
    return result


def _batches(rows: list[Pack]) -> Iterator[list[int]]:
    """Indices, longest rows first, in groups whose padded size stays within the token budget."""
    order = sorted(range(len(rows)), key=lambda i: -len(rows[i].ids))
    while order:
        size = max(1, _BATCH_TOKENS // len(rows[order[0]].ids))
        yield order[:size]
        order = order[size:]


def answer(questions: list[Question], scores: list[float]) -> dict[str, list[float]]:
    """For each metric, 1.0 or 0.0 a question: is the likeliest choice the gold one?"""
    correct: dict[str, list[float]] = {"acc": [], "acc_norm": []}
    position = 0
    for question in questions:
        own = scores[position : position + len(question.pairs)]
        position += len(own)
        normed = [score / length for score, length in zip(own, question.lengths, strict=True)]
        correct["acc"].append(float(own.index(max(own)) == question.gold))
        correct["acc_norm"].append(float(normed.index(max(normed)) == question.gold))
    return correct
