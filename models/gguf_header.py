"""Read the header of a GGUF file: the sizes of the model, and where each tensor lies, in which shape and type.

The readers of other libraries trust the header: an array declared with 2**60 numbers in a file of one kilobyte keeps
them busy forever. This one compares every declared size with the size of the file.
Source: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md
"""

from __future__ import annotations

import math
import mmap
import struct
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

from gguf import GGML_QUANT_SIZES, GGMLQuantizationType

from neuronmm.models.errors import UserError

_VERSIONS = (2, 3)
_SIZES = {0: 1, 1: 1, 2: 2, 3: 2, 4: 4, 5: 4, 6: 4, 7: 1, 10: 8, 11: 8, 12: 8}
"""GGUF type code -> bytes of a number."""
_INTEGERS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 10: "Q", 11: "q"}
"""GGUF type code of an integer -> its code in :mod:`struct`."""
_SCALARS = {**_INTEGERS, 6: "f", 7: "?", 12: "d"}
"""The same for all numbers."""
_UINT16, _UINT32, _STRING, _ARRAY = 2, 4, 8, 9
_ARCHITECTURE, _SPLITS = b"general.architecture", b"split.count"
_TOKENIZER = "ggml."  # after the first dot of a name such as tokenizer.ggml.pre
SIZES = {
    "block_count": "num_hidden_layers",
    "embedding_length": "hidden_size",
    "feed_forward_length": "intermediate_size",
    "attention.head_count": "num_attention_heads",
    "attention.head_count_kv": "num_key_value_heads",
    "attention.key_length": "head_dim",
}
"""A size of the model, as an entry ``<architecture>.<name>`` names it -> its name in config.json."""
ROTATED = "rope.dimension_count"
"""The end of the name of the entry with the features of a head that RoPE turns."""
ROPE_SCALING = "rope.scal"
"""The beginning of the names of all entries that scale RoPE, ``rope.scaling.type`` and others."""
_MAX_VALUES = (
    1 << 22
)  # in arrays; the largest vocabularies need a quarter of that, and transformers takes 400 bytes each
_MAX_DIMENSIONS = 4
_MAX_WEIGHTS_PER_BYTE = 8  # the densest quantisation packs five
_ALIGNMENT = 32  # bytes, unless the file says otherwise


@dataclass(frozen=True)
class StoredTensor:
    """One tensor of a GGUF file. ``shape`` is in the order of torch; ``offset`` counts from the start of the file."""

    shape: tuple[int, ...]
    type: GGMLQuantizationType
    offset: int

    @property
    def row_bytes(self) -> int:
        """The bytes of one row, that is of ``shape[-1]`` weights."""
        block, size = GGML_QUANT_SIZES[self.type]
        return self.shape[-1] // block * size

    @property
    def end(self) -> int:
        """Where its bytes end, counted from the start of the file."""
        return self.offset + math.prod(self.shape[:-1]) * self.row_bytes


@dataclass(frozen=True)
class Header:
    """What the header says: the architecture, the :data:`SIZES` that it has, named as in config.json, the tensors.

    ``rotated`` is how many features of a head RoPE turns, None if the file does not say. ``rope`` has the entries that
    scale RoPE, without the architecture in their names; ``tokenizer`` those of the tokenizer that are no arrays,
    without ``tokenizer.ggml.``.
    """

    architecture: str
    sizes: dict[str, int]
    rotated: int | None
    rope: dict[str, str | float]
    tokenizer: dict[str, str | float]
    tensors: dict[str, StoredTensor]


def read_header(file: Path) -> Header:
    """Return the header of a GGUF file.

    Raises:
        UserError: the header is damaged, lists more weights than the file can hold, or is of a part of a model.
    """
    with file.open("rb") as stream, mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_READ) as content:
        parser = _Parser(content)
        try:
            header = parser.header()
        except (struct.error, ValueError) as error:
            raise UserError(f"{file}: damaged GGUF file ({error}); download it again") from None
    if parser.parts > 1:
        raise UserError(
            f"{file}: is one of the {parser.parts} parts of a model; join them with llama-gguf-split --merge"
        )
    return header


def _check_apart(stored: dict[str, StoredTensor]) -> None:
    """Check that no two tensors lie in the same bytes, which a damaged offset usually causes.

    Raises:
        ValueError: two do.
    """
    placed = sorted(stored.items(), key=lambda entry: (entry[1].offset, entry[1].end))
    for (name, tensor), (other, following) in pairwise(placed):
        if tensor.end > following.offset:
            raise ValueError(f"the tensors {name} and {other} overlap")


class _Parser:
    """Walks through a GGUF header once, storing only its position.

    ``parts`` is the number of files that the model is in.

    Raises:
        ValueError: the header contains an impossible value.
        struct.error: the header continues past the end of the file.
    """

    def __init__(self, content: mmap.mmap) -> None:
        self._content, self._at, self._values = content, 4, 0  # 4: the magic
        self._alignment = _ALIGNMENT
        self.parts = 1

    def header(self) -> Header:
        """Return the whole header."""
        version = self._number("I")
        if version not in _VERSIONS:
            raise ValueError(f"version {version} is none of {_VERSIONS}")
        tensors, entries = self._number("Q"), self._number("Q")
        architecture, sizes, rotated, rope, tokenizer = "", {}, None, {}, {}
        for _ in range(entries):
            key, kind = self._string(), self._number("I")
            size = key.partition(b".")[2].decode(errors="replace")
            if key == b"general.alignment" and kind == _UINT32:
                self._alignment = self._number("I")
            elif key == _ARCHITECTURE and kind == _STRING:
                architecture = self._string().decode()
            elif key == _SPLITS and kind == _UINT16:
                self.parts = self._number("H")
            elif size in SIZES and kind in _INTEGERS:
                sizes[SIZES[size]] = self._number(_INTEGERS[kind])
            elif size == ROTATED and kind in _INTEGERS:
                rotated = self._number(_INTEGERS[kind])
            elif size.startswith(ROPE_SCALING) and (kind in _SCALARS or kind == _STRING):
                rope[size] = self._text_or_number(kind)
            elif size.startswith(_TOKENIZER) and (kind in _SCALARS or kind == _STRING):
                tokenizer[size.removeprefix(_TOKENIZER)] = self._text_or_number(kind)
            else:
                self._skip_value(kind)
        listed, weights = [], 0
        for _ in range(tensors):
            name, shape = self._string(), self._shape()
            listed.append((name, shape, self._number("I"), self._number("Q")))
            weights += math.prod(shape)
        if weights > _MAX_WEIGHTS_PER_BYTE * len(self._content):
            raise ValueError(f"{weights} weights are more than its {len(self._content)} bytes hold")
        if not self._alignment:
            raise ValueError("its alignment is 0")
        start = -(-self._at // self._alignment) * self._alignment
        stored = {name.decode(): self._stored(shape, kind, start + offset) for name, shape, kind, offset in listed}
        _check_apart(stored)
        return Header(architecture, sizes, rotated, rope, tokenizer, stored)

    def _shape(self) -> tuple[int, ...]:
        dimensions = self._number("I")
        if not 0 < dimensions <= _MAX_DIMENSIONS:
            raise ValueError(f"a tensor has {dimensions} dimensions")
        return tuple(self._number("Q") for _ in range(dimensions))[::-1]

    def _stored(self, shape: tuple[int, ...], kind: int, offset: int) -> StoredTensor:
        tensor = StoredTensor(shape, GGMLQuantizationType(kind), offset)
        if shape[-1] % GGML_QUANT_SIZES[tensor.type][0]:
            raise ValueError(f"rows of {shape[-1]} weights do not fit the type {tensor.type.name}")
        if tensor.end > len(self._content):
            raise ValueError(f"its {len(self._content)} bytes end before its tensors do")
        return tensor

    def _number(self, code: str) -> Any:
        (value,) = struct.unpack_from(f"<{code}", self._content, self._at)
        self._at += struct.calcsize(code)
        return value

    def _text_or_number(self, kind: int) -> str | float:
        return self._string().decode() if kind == _STRING else self._number(_SCALARS[kind])

    def _skip(self, size: int) -> None:
        if size > len(self._content) - self._at:
            raise ValueError(f"its {len(self._content)} bytes end before an entry of the header does")
        self._at += size

    def _string(self) -> bytes:
        size = self._number("Q")
        self._skip(size)
        return self._content[self._at - size : self._at]

    def _skip_value(self, kind: int) -> None:
        if kind in _SIZES:
            self._skip(_SIZES[kind])
        elif kind == _STRING:
            self._skip(self._number("Q"))
        elif kind == _ARRAY:
            inner, count = self._number("I"), self._number("Q")
            self._values += count
            if self._values > _MAX_VALUES or inner == _ARRAY:
                raise ValueError(f"an array of {count} values of type {inner}")
            if inner in _SIZES:
                self._skip(count * _SIZES[inner])
            else:
                for _ in range(count):
                    self._skip_value(inner)
        else:
            raise ValueError(f"a value of type {kind}")
