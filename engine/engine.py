"""The engine: a model, its tokenizer and a backend behind two verbs, ``generate`` and ``stream``."""

from __future__ import annotations

import secrets
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, cast

import torch
from transformers import PreTrainedTokenizerBase

from neuronmm.engine import continuous
from neuronmm.engine.backends import Host, choose
from neuronmm.engine.loop import Generation, Row, run
from neuronmm.engine.sampling import SamplingParams
from neuronmm.engine.text import TextStream
from neuronmm.models.documents import read_object
from neuronmm.models.errors import UserError, reading
from neuronmm.models.load import load_config, load_tokenizer
from neuronmm.models.source import read_config, resolve
from neuronmm.models.tensors import check_tokens

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}


class Engine:
    """A loaded model that turns prompts into text, the same on every backend.

    Of the checkpoint's generation config only the end-of-sequence tokens are used: sampling is what
    :class:`SamplingParams` says, greedy unless told otherwise.
    """

    def __init__(
        self, host: Host, tokenizer: PreTrainedTokenizerBase, eos: frozenset[int], context: int, vocabulary: int
    ) -> None:
        self.host, self.tokenizer = host, tokenizer
        self.eos, self.context, self.vocabulary = eos, context, vocabulary

    def encode(self, prompt: str, chat: bool = False) -> list[int]:
        """The token ids of a prompt, special tokens as the tokenizer adds them; ``chat``: as one user message.

        Raises:
            UserError: there is no chat template, nothing to encode, no room to answer in the model's context, or a
                token that the model does not know.
        """
        if chat:
            if not self.tokenizer.chat_template:
                raise UserError("this model's tokenizer has no chat template; leave out --chat")
            message = [{"role": "user", "content": prompt}]
            with reading("the chat template of this model's tokenizer fails; leave out --chat"):
                text = self.tokenizer.apply_chat_template(message, tokenize=False, add_generation_prompt=True)
            ids = self.tokenizer(text, add_special_tokens=False).input_ids
        else:
            ids = self.tokenizer(prompt).input_ids
        if not ids and self.tokenizer.bos_token_id is not None:
            ids = [self.tokenizer.bos_token_id]
        if not ids:
            raise UserError("the prompt is empty and the model has no beginning-of-sequence token; give it a word")
        if len(ids) >= self.context:
            raise UserError(
                f"the prompt has {len(ids)} tokens, but prompt and answer have to fit the model's context of "
                f"{self.context} tokens; shorten the prompt"
            )
        check_tokens(torch.tensor(ids), self.vocabulary)
        return list(ids)

    def generate(
        self, prompts: Sequence[str], params: SamplingParams | None = None, *, chat: bool = False
    ) -> list[Generation]:
        """Continue every prompt; the results come in the order of the prompts.

        Prompts run in left-padded batches of up to ``host.max_batch``, similar lengths together; in a continuous batch
        each joins, in order, when a slot is free. Where prompt and ``max_new_tokens`` exceed the model's context,
        generation ends when the context is full and the ``finish_reason`` is ``context``.

        Raises:
            UserError: a prompt does not fit the model's context.
        """
        params = params or SamplingParams()
        rows = self._rows(prompts, params, chat)
        by_length = sorted(rows, key=lambda row: len(row.prompt_ids))
        size = self.host.max_batch
        groups = [by_length[start : start + size] for start in range(0, len(rows), size)]
        for group in [rows] if self.host.continuous else groups:
            for _ in self._run(group, params):
                pass
        return [row.result for row in rows]

    def stream(self, prompt: str, params: SamplingParams | None = None, *, chat: bool = False) -> Stream:
        """Continue one prompt, giving the text as it comes; the same text as :meth:`generate`.

        Raises:
            UserError: the prompt does not fit the model's context.
        """
        params = params or SamplingParams()
        (row,) = self._rows([prompt], params, chat)
        return Stream((piece for _, piece in self._run([row], params)), row.result)

    def _rows(self, prompts: Sequence[str], params: SamplingParams, chat: bool) -> list[Row]:
        seed = secrets.randbits(32) if params.seed is None else params.seed
        rows = []
        for index, prompt in enumerate(prompts):
            ids = self.encode(prompt, chat)
            room = self.context - len(ids)
            limit, reason = min((params.max_new_tokens, "length"), (room, "context"))
            stream = TextStream(self.tokenizer, ids, params.stop)
            rows.append(Row(ids, limit, reason, seed + index, stream, Generation(prompt, len(ids))))
        return rows

    def _run(self, rows: list[Row], params: SamplingParams) -> Iterator[tuple[Row, str]]:
        eos = frozenset() if params.ignore_eos else self.eos
        if self.host.continuous:
            longest = max(len(row.prompt_ids) + row.limit for row in rows)
            slots = cast(continuous.Slots, self.host.decoder(min(len(rows), self.host.max_batch), longest))
            return continuous.run(slots, rows, params, eos, self.host.device)
        longest = max(len(row.prompt_ids) for row in rows)
        decoder = self.host.decoder(len(rows), longest + max(row.limit for row in rows))
        return run(decoder, rows, params, eos, self.host.device)


class Stream:
    """The text of one generation as it comes; ``result`` is complete once the iteration has ended."""

    def __init__(self, pieces: Iterator[str], result: Generation) -> None:
        self._pieces = pieces
        self.result = result

    def __iter__(self) -> Iterator[str]:
        return self._pieces


def load(
    model: str | Path,
    *,
    backend: str = "auto",
    dtype: str = "auto",
    impl: str = "auto",
    amp: str | None = None,
    **options: Any,
) -> Engine:
    """Load a checkpoint, dense or compressed, ready to generate.

    Args:
        model: a folder, a GGUF file or a hub id.
        backend: ``auto`` (CUDA where there is one, else the CPU), ``cpu``, ``cuda`` or ``neuron``.
        dtype: ``bf16``, ``fp16``, ``fp32``; ``auto`` is bf16 for a checkpoint in bf16 or fp16, else fp32.
        impl: the low-rank kernel; ``auto`` is the fastest that serves each call.
        amp: the Neuron hosts' name for ``dtype``.
        options: the backend's own; ``neuron`` has ``tp_degree``, ``batch_size``, ``n_positions``, ``layout``,
            ``continuous`` and ``emulate`` (:class:`~neuronmm.engine.backends.neuron.NeuronOptions`).

    Raises:
        UserError: no such model, a checkpoint that disagrees with its config, an option out of range, or a backend that
            cannot run here.
    """
    chosen = choose(backend, options)
    folder = resolve(model)
    host = chosen.load(folder, pick_dtype(folder, amp or dtype), impl, **options)
    tokenizer = load_tokenizer(folder)
    config = load_config(folder)
    context = min(config.max_position_embeddings, host.max_len or config.max_position_embeddings)
    return Engine(host, tokenizer, end_tokens(folder, config, tokenizer), context, config.vocab_size)


def pick_dtype(folder: Path, name: str) -> torch.dtype:
    """The dtype called ``name``; ``auto`` follows the checkpoint, bf16 standing in for fp16.

    Raises:
        UserError: there is no such dtype here.
    """
    if name == "auto":
        config = read_config(folder)
        stored = str(config.get("dtype") or config.get("torch_dtype") or "float32").removeprefix("torch.")
        return torch.bfloat16 if stored in ("bfloat16", "float16") else torch.float32
    if name not in DTYPES:
        raise UserError(f"unknown dtype {name!r}; there are: auto, {', '.join(DTYPES)}")
    return DTYPES[name]


def end_tokens(folder: Path, config: Any, tokenizer: PreTrainedTokenizerBase) -> frozenset[int]:
    """The ids that end a sequence: the generation config's, else the model config's, else the tokenizer's.

    Raises:
        UserError: generation_config.json is malformed.
    """
    found, path = None, folder / "generation_config.json"
    if path.is_file():
        found = read_object(path).get("eos_token_id")
        ids = found if isinstance(found, list) else [] if found is None else [found]
        if not all(type(number) is int for number in ids):
            raise UserError(f"{path}: eos_token_id has to be a token id or a list of them; mend it or remove the file")
    for fallback in (config.eos_token_id, tokenizer.eos_token_id):
        found = fallback if found is None else found
    if found is None:
        return frozenset()
    return frozenset(found) if isinstance(found, (list, tuple)) else frozenset((found,))
