"""Read a checkpoint tensor by tensor, with at most one shard mapped into memory."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from torch import Tensor

from neuronmm.models.contents import weight_files
from neuronmm.models.errors import UserError
from neuronmm.models.tensors import check_finite

_ITEMSIZE = {"F64": 8, "F32": 4, "F16": 2, "BF16": 2, "I64": 8, "I32": 4, "I16": 2}
_ITEMSIZE |= dict.fromkeys(("I8", "U8", "BOOL", "F8_E4M3"), 1)


class Reader:
    """The tensors of a checkpoint folder by name.

    A tensor is a view of the mapped shard; copy it to keep it longer than the mapping.

    Raises:
        UserError: a shard is missing or corrupt, or a tensor does not exist.
    """

    def __init__(self, folder: Path, files: dict[str, Path] | None = None) -> None:
        self.folder = folder
        self._files = weight_files(folder) if files is None else files
        self._open: tuple[Path, Any] | None = None

    @classmethod
    def of_file(cls, file: Path) -> Reader:
        """Return a reader of a single safetensors file."""
        with safe_open(file, framework="pt") as tensors:
            return cls(file.parent, dict.fromkeys(tensors.keys(), file))

    def close(self) -> None:
        """Unmap the shard; reading a tensor maps it again."""
        self._open = None

    @property
    def names(self) -> list[str]:
        """All tensor names, in the order of the shards."""
        return list(self._files)

    @property
    def files(self) -> list[Path]:
        """The shards, in the order of their names."""
        return sorted(set(self._files.values()))

    def total_bytes(self) -> int:
        """Return the size of all shards on disk, in bytes."""
        return sum(file.stat().st_size for file in self.files)

    def modified(self) -> float:
        """Return when a shard was last changed, in seconds since 1970."""
        return max(file.stat().st_mtime for file in self.files)

    def total_parameters(self) -> int:
        """Return the number of elements of all tensors."""
        return sum(map(self.parameters, self.names))

    def under(self, prefix: str) -> list[str]:
        """Return the tensor names that start with ``prefix``."""
        return [name for name in self._files if name.startswith(prefix)]

    def shape(self, name: str) -> list[int]:
        """Return the shape of a tensor, read from the shard's header."""
        return self._shard(name).get_slice(name).get_shape()

    def parameters(self, name: str) -> int:
        """Return the number of elements of a tensor."""
        return math.prod(self.shape(name))

    def nbytes(self, name: str) -> int:
        """Return the size of a tensor in bytes, read from the shard's header."""
        part = self._shard(name).get_slice(name)
        return math.prod(part.get_shape()) * _ITEMSIZE[part.get_dtype()]

    def __getitem__(self, name: str) -> Tensor:
        try:
            return self._shard(name).get_tensor(name)
        except SafetensorError as error:
            raise UserError(f"{self._files[name]}: corrupt shard ({error}); download the checkpoint again") from None

    def check_finite(self) -> None:
        """Check every element, with one tensor in memory at a time.

        Raises:
            UserError: a tensor holds NaN or infinity.
        """
        for name in self.names:
            check_finite(name, self[name], self.folder)
            self.close()  # pages of a mapped shard count as resident

    def _shard(self, name: str) -> Any:
        file = self._files.get(name)
        if file is None:
            raise UserError(f"{self.folder}: tensor {name} is missing; config.json and weights disagree")
        if self._open is None or self._open[0] != file:
            self._open = None  # unmap the old shard before the new one is mapped
            self._open = (file, safe_open(file, framework="pt"))
        return self._open[1]
