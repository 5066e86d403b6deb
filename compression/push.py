"""Upload a finished checkpoint to a new, private repository of the Hugging Face hub."""

from __future__ import annotations

import glob
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from huggingface_hub import HfApi, constants
from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalTokenNotFoundError
from huggingface_hub.utils import validate_repo_id

from neuronmm.models.errors import UserError, printable
from neuronmm.version import VERSION

_FAILURES: tuple[Any, ...] = (OSError, *HfHubHTTPError.__bases__)
"""What the library raises without a connection; its HTTP client, and so the class, differs between its versions."""


def check_push(repo: str) -> None:
    """Check that a checkpoint can be uploaded to ``repo``, before the work that makes it.

    Raises:
        UserError: ``repo`` is not of the form USER/NAME or exists already, the hub cannot be reached, or nobody is
            logged in.
    """
    try:
        validate_repo_id(repo)
    except HFValidationError:
        raise UserError(f"--push {printable(repo)}: is no repository id; give USER/NAME") from None
    if "/" not in repo:
        raise UserError(f"--push {repo}: give USER/NAME, the user or organisation too")
    if constants.HF_HUB_OFFLINE:
        raise UserError(f"--push {repo}: HF_HUB_OFFLINE is set, so nothing can be uploaded; unset it")
    with _one_line(f"--push {repo}"):
        api = _api()
        api.whoami()
        exists = api.repo_exists(repo)
    if exists:
        raise UserError(f"--push {repo}: exists already, and nothing of it is replaced; give another name")


def push(folder: Path, report: dict[str, Any], repo: str) -> str:
    """Upload the files that ``report`` names, those of the checkpoint, from ``folder``; return the address.

    Raises:
        UserError: the upload failed; the message says how to repeat it. The folder stays as it is.
    """
    names = [glob.escape(name) for name in report["files"]]  # a name is no pattern
    with _one_line(
        f"--push {repo}: {folder} is complete, but was not uploaded; repeat it with `hf upload {repo} {folder} "
        "--private`"
    ):
        api = _api()
        address = api.create_repo(repo, private=True)
        api.upload_folder(
            repo_id=repo, folder_path=folder, allow_patterns=names, commit_message=f"Compressed by neuronmm {VERSION}"
        )
    return str(address)


def _api() -> HfApi:
    return HfApi(library_name="neuronmm", library_version=VERSION)


@contextmanager
def _one_line(what: str) -> Iterator[None]:
    """Turn a failure of the hub's library into one line that begins with ``what``."""
    try:
        yield
    except LocalTokenNotFoundError:
        raise UserError(f"{what}: nobody is logged in; run `hf auth login`, or set HF_TOKEN") from None
    except _FAILURES as error:
        status = getattr(getattr(error, "response", None), "status_code", None)
        if status == 401:
            raise UserError(f"{what}: the hub refuses the token; run `hf auth login`, or set HF_TOKEN") from None
        reason = printable(next(iter(str(error).strip().splitlines()), type(error).__name__))
        raise UserError(f"{what}: the hub cannot be reached or refuses this ({reason})") from None
