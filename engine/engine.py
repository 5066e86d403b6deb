"""The engine: a model, its tokenizer and a backend behind two verbs, ``generate`` and ``stream``."""

from __future__ import annotations

import secrets
import warnings
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, cast

import torch
from transformers import PreTrainedTokenizerBase

from neuronmm.engine import continuous, speculation
from neuronmm.engine.backends import Runner, choose
from neuronmm.engine.continuous import Slots
from neuronmm.engine.cpu_decoder import CpuDecoder
from neuronmm.engine.draft_length import StepTimes
from neuronmm.engine.drafts import Drafts
from neuronmm.engine.loop import Generation, Row, run
from neuronmm.engine.sampling import SamplingParams
from neuronmm.engine.slots import CpuSlots
from neuronmm.engine.speculation import Speculation
from neuronmm.engine.text import TextStream
from neuronmm.kernels import pages
from neuronmm.models import processes
from neuronmm.models.chat import ChatTemplate
from neuronmm.models.contents import chosen_dtype, inspect
from neuronmm.models.errors import UserError, without_panics
from neuronmm.models.load import DTYPES, end_tokens, load_config, load_tokenizer, positions_of
from neuronmm.models.progress import Progress, no_progress
from neuronmm.models.source import resolve
from neuronmm.models.tensors import check_tokens

_BATCHES = 8  # batches of similar lengths that are made at once; their results come in order only at the end


class PromptTooLong(UserError):
    """A prompt that leaves no room for an answer."""


class Engine:
    """A loaded model that turns prompts into text, with one interface for all backends.

    Of the checkpoint's generation config only the end-of-sequence tokens are used; :class:`SamplingParams` controls the
    sampling, and its default is greedy. ``drafts`` predict several tokens per step; the text stays the same.
    """

    def __init__(
        self,
        runner: Runner,
        tokenizer: PreTrainedTokenizerBase,
        eos: frozenset[int],
        context: int,
        vocabulary: int,
        drafts: Drafts | None = None,
    ) -> None:
        self.runner, self.tokenizer = runner, tokenizer
        self.eos, self.context, self.vocabulary = eos, context, vocabulary
        self.drafts, self._step_times = drafts, StepTimes()
        self._chat = ChatTemplate(tokenizer)

    @property
    def host(self) -> Any:
        """The former name of :attr:`runner`."""
        warnings.warn("Engine.host is now Engine.runner", DeprecationWarning, stacklevel=2)
        return self.runner

    def encode(self, prompt: str, chat: bool = False) -> list[int]:
        """Return the token ids of a prompt, with the tokenizer's special tokens; ``chat``: as one user message.

        Raises:
            UserError: there is no chat template, the prompt is empty, it leaves no room in the model's context, or it
                has a token outside the vocabulary.
        """
        if chat:
            return self.encode_chat([{"role": "user", "content": prompt}])
        return self.check_prompt(self._tokens(prompt))

    def encode_chat(self, messages: list[dict[str, str]]) -> list[int]:
        """Return the token ids of a conversation, each message with a ``role`` and its ``content``.

        Raises:
            UserError: as :meth:`encode`.
        """
        if not self.tokenizer.chat_template:
            raise UserError("this model's tokenizer has no chat template; give a plain prompt instead of a chat")
        problem = "the chat template of this model's tokenizer fails on this chat; give a plain prompt"
        text = self._chat(messages, answer=True, problem=problem)
        return self.check_prompt(self._tokens(text, add_special_tokens=False))

    def _tokens(self, text: str, **options: Any) -> list[int]:
        with without_panics():
            return list(cast(Any, self.tokenizer(text, **options).input_ids))

    def check_prompt(self, ids: list[int]) -> list[int]:
        """Return the token ids of a prompt, or the beginning-of-sequence token if there are none.

        Raises:
            UserError: there is no token, they leave no room in the model's context, or one is outside the vocabulary.
        """
        if not ids and self.tokenizer.bos_token_id is not None:
            ids = [cast(int, self.tokenizer.bos_token_id)]
        if not ids:
            raise UserError("the prompt is empty and the model has no beginning-of-sequence token; write a prompt")
        if len(ids) >= self.context:
            raise PromptTooLong(
                f"the prompt has {len(ids)} tokens, but prompt and answer have to fit the context of {self.context} "
                "tokens; shorten the prompt"
            )
        check_tokens(torch.tensor(ids), self.vocabulary)
        return ids

    def generate(
        self, prompts: Sequence[str], params: SamplingParams | None = None, *, chat: bool = False
    ) -> list[Generation]:
        """Continue every prompt and return the results in the order of the prompts.

        Of 64 successive prompts (eight batches), those of similar length run together in left-padded batches of up to
        ``runner.max_batch``. In a continuous batch each prompt joins, in order, when a slot is free. If a prompt and
        ``max_new_tokens`` exceed the model's context, generation ends when the context is full, with the
        ``finish_reason`` ``context``.

        Raises:
            UserError: a prompt does not fit the context, ``prompts`` is one text, or there is a draft for several.

        Examples:
            >>> import neuronmm
            >>> from neuronmm.engine.sampling import SamplingParams
            >>> engine = neuronmm.load("llama-low")
            >>> params = SamplingParams(max_new_tokens=8, ignore_eos=True)
            >>> results = engine.generate(["The sky is", "Water boils at"], params)
            >>> [(result.prompt, len(result.token_ids)) for result in results]
            [('The sky is', 8), ('Water boils at', 8)]
        """
        return list(self.each(prompts, params, chat=chat))

    def each(
        self, prompts: Sequence[str], params: SamplingParams | None = None, *, chat: bool = False
    ) -> Iterator[Generation]:
        """Yield the results of :meth:`generate`, each as soon as it and all before it are complete.

        Raises:
            UserError: as :meth:`generate`, before the first result.
        """
        if isinstance(prompts, str):
            raise UserError("prompts is one text; give a list of texts")
        if self.drafts and len(prompts) > 1:
            raise UserError(f"drafts serve one prompt at a time, not {len(prompts)}; leave out the draft")
        params = params or SamplingParams()
        rows = self._rows(prompts, params, chat)
        size = len(rows) if self.runner.continuous else _BATCHES * self.runner.max_batch
        for first in range(0, len(rows), max(size, 1)):
            yield from self._in_order(rows[first : first + size], params)

    def _in_order(self, rows: list[Row], params: SamplingParams) -> Iterator[Generation]:
        waiting = deque(rows)

        def complete(current: Row | None = None) -> Iterator[Generation]:
            """Yield the results up to the first that is not complete; that of ``current`` may not be."""
            while waiting and waiting[0] is not current and waiting[0].result.finish_reason:
                yield waiting.popleft().result

        if self.runner.continuous:
            for current, _ in self._run(rows, params):
                yield from complete(current)
            yield from complete()
            return
        for group in self._groups(rows):
            for _ in self._run(group, params):
                pass  # whoever takes the results must not slow the batch that is measured
            yield from complete()

    def stream(self, prompt: str, params: SamplingParams | None = None, *, chat: bool = False) -> Stream:
        """Continue one prompt and yield the text as it is generated; the text is that of :meth:`generate`.

        Raises:
            UserError: the prompt does not fit the model's context.

        Examples:
            >>> import neuronmm
            >>> engine = neuronmm.load("llama-low")
            >>> stream = engine.stream("The sky is")
            >>> text = "".join(stream)
            >>> text == stream.result.text
            True
        """
        params = params or SamplingParams()
        (row,) = self._rows([prompt], params, chat)
        return Stream((piece for _, piece in self._run([row], params)), row.result)

    def _rows(self, prompts: Sequence[str], params: SamplingParams, chat: bool) -> list[Row]:
        seed = processes.of_first(secrets.randbits(32)) if params.seed is None else params.seed
        rows = []
        for index, prompt in enumerate(prompts):
            rows.append(self.row(self.encode(prompt, chat), params, seed + index, prompt))
        return rows

    def row(
        self,
        prompt_ids: list[int],
        params: SamplingParams,
        seed: int,
        prompt: str = "",
        alternatives: int | None = None,
    ) -> Row:
        """Prepare the generation of one sequence after the tokens of a prompt."""
        room = self.context - len(prompt_ids)
        limit, reason = min((params.max_new_tokens, "length"), (room, "context"))
        stream = TextStream(self.tokenizer, prompt_ids, params.stop)
        return Row(prompt_ids, limit, reason, seed, stream, Generation(prompt, len(prompt_ids)), alternatives)

    def _groups(self, rows: list[Row]) -> list[list[Row]]:
        """Split ``rows`` by the length of their prompts into batches that the runner has rows for, within the context.

        All prompts of a batch are padded to the longest, and all rows run until the last one has ended.
        """
        groups = list[list[Row]]()
        for row in sorted(rows, key=lambda row: len(row.prompt_ids)):
            full = not groups or len(groups[-1]) == self.runner.max_batch
            if full or _positions([*groups[-1], row]) > self.context:
                groups.append([])
            groups[-1].append(row)
        return groups

    def _run(self, rows: list[Row], params: SamplingParams) -> Iterator[tuple[Row, str]]:
        eos = frozenset() if params.ignore_eos else self.eos
        if self.runner.continuous:
            longest = max(len(row.prompt_ids) + row.limit for row in rows)
            slots = self.runner.slots(min(len(rows), self.runner.max_batch), longest)
            return continuous.run(slots, rows, params, eos, self.runner.device)
        decoder = self.runner.decoder(len(rows), _positions(rows))
        if self.drafts:
            verifier = cast(CpuDecoder, decoder)
            drafts = Speculation(verifier, self.drafts.drafters([verifier])(0), self._step_times)
            return speculation.run(verifier, rows[0], params, eos, drafts)
        return run(decoder, rows, params, eos, self.runner.device)

    def speculate(self, slots: Slots) -> Callable[[int], Speculation] | None:
        """Return what begins the drafts of a new sequence in a slot; None without drafts."""
        drafts, times = self.drafts, self._step_times
        if drafts is None:
            return None
        rows = cast(CpuSlots, slots).rows
        drafter = drafts.drafters(rows)
        return lambda slot: Speculation(rows[slot], drafter(slot), times)


def _positions(rows: list[Row]) -> int:
    """Return the positions of a left-padded batch: those of its longest prompt and of its longest answer."""
    return max(len(row.prompt_ids) for row in rows) + max(row.limit for row in rows)


class Stream:
    """Iterates over the text of one generation; ``result`` is complete when the iteration ends."""

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
    draft: str | Path | None = None,
    progress: Progress = no_progress,
    **options: Any,
) -> Engine:
    """Load a checkpoint, dense or compressed, for generation.

    Args:
        model: a folder, a GGUF file or a hub id.
        backend: ``cpu``, ``cuda``, ``neuron`` or ``auto`` (CUDA if there is a GPU and it has the options, else the
            CPU).
        dtype: ``bf16``, ``fp16``, ``fp32``; ``auto`` is what config.json names, else what is stored, with
            bf16 instead of fp16.
        impl: the low-rank kernel; ``auto`` is the fastest one for each call.
        amp: the Neuron hosts' name for ``dtype``.
        draft: ``ngram``, ``int4`` or ``int8`` (the model itself with its dense weights rounded), or a checkpoint with
            the same tokenizer: guesses several tokens per step, which the model verifies. The text stays the same; one
            prompt at a time, on the CPU.
        progress: is told how much of a GGUF file is unpacked.
        options: options of the backend. ``cpu`` has ``weight_dtype`` (``int8`` or ``int4``: round the dense weights);
            ``neuron`` has ``tp_degree``, ``batch_size``, ``n_positions``, ``layout``, ``continuous``,
            ``emulate`` and ``host`` (:class:`~neuronmm.engine.backends.neuron.NeuronOptions`).

    Raises:
        UserError: the model does not exist, the checkpoint disagrees with its config, an option is out of range, the
            backend cannot run here, or the draft does not fit the model.

    Examples:
        >>> import neuronmm
        >>> engine = neuronmm.load("llama-low", backend="cpu", dtype="bf16")
        >>> engine.encode("The sky is") == engine.tokenizer("The sky is")["input_ids"]
        True
    """
    chosen = choose("cpu" if draft and backend == "auto" else backend, options)
    if processes.size() > 1 and (draft or chosen.name == "neuron"):
        what = "a draft" if draft else "--backend neuron, which shares the model itself (--tp),"
        raise UserError(f"{what} needs one process, not {processes.size()}; leave out torchrun")
    if draft and chosen.name != "cpu":
        raise UserError(f"drafts need --backend cpu, not {chosen.name}")
    if chosen.name != "cpu":
        pages.forget()
    folder = resolve(model, progress)
    inspect(folder)  # before transformers reads anything: a false config.json can cost it hours
    picked = pick_dtype(folder, amp or dtype)
    config, tokenizer = load_config(folder), load_tokenizer(folder)  # the memory of the weights may still be coming
    runner = chosen.load(folder, picked, impl, **options)
    positions = positions_of(config)
    context = min(positions, runner.max_len or positions)
    drafts = None if draft is None else Drafts(draft, folder, runner, tokenizer, config.vocab_size, progress)
    return Engine(runner, tokenizer, end_tokens(folder, config, tokenizer), context, config.vocab_size, drafts)


def pick_dtype(folder: Path, name: str) -> torch.dtype:
    """Return the dtype ``name``; ``auto`` is what config.json names, else what is stored, with bf16 instead of fp16.

    Raises:
        UserError: ``name`` is unknown.
    """
    if name == "auto":
        name = chosen_dtype(folder)
    if name not in DTYPES:
        raise UserError(f"unknown dtype {name!r}; there are: auto, {', '.join(DTYPES)}")
    return DTYPES[name]
