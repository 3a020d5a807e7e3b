"""Finds models on the Hugging Face Hub, and downloads their files."""

from __future__ import annotations

import os
import re

from paxcli.errors import DataError, MissingError, RemoteError, first_line, machine_fault

_NAME = re.compile(r"(\w[\w.-]*/\w[\w.-]*)(?<!\.json)(?:@([\w./-]+))?")
_DUPLICATES = ["*/*", "consolidated*"]  # the same weights in the formats of other tools


def find_model(source: str | os.PathLike[str], commit: str | None = None) -> str:
    """A directory of Hugging Face's format; for a model on the hub, its directory in the cache of `huggingface_hub`.

    Args:
      source: A directory, or a model on the hub: `ORGANIZATION/NAME` or `ORGANIZATION/NAME@REVISION`.
      commit: Download the weights of this commit, the last part of the path that an earlier call returned. None:
        download config and tokenizer.

    Raises:
      DataError: There is neither such a directory nor such a model.
      MissingError: The terms of the model have not been accepted.
      RemoteError: The hub cannot be reached.
    """
    path = os.fspath(source)
    found = _NAME.fullmatch(path)
    if not found or os.path.exists(path):
        return path
    from huggingface_hub import errors, snapshot_download

    (name, revision), wanted = found.groups(), "*.safetensors" if commit else ["*.json", "*.jinja", "*.model"]
    try:
        return snapshot_download(name, revision=commit or revision, allow_patterns=wanted, ignore_patterns=_DUPLICATES)
    except errors.GatedRepoError as error:
        hint = f"Accept its terms on https://huggingface.co/{name}, and log in with `hf auth login`."
        raise MissingError(f"{name} is a gated model of the Hugging Face Hub.", hint) from error
    except (errors.RepositoryNotFoundError, errors.RevisionNotFoundError, errors.HFValidationError) as error:
        problem = f"There is no directory {source}, and no model of this name and revision on the Hugging Face Hub."
        raise DataError(problem, "Check the name. For a private model, log in: `hf auth login`.") from error
    except (OSError, errors.HTTPError) as error:
        if machine_fault(error):
            raise
        fault = first_line(error).partition(". ")[0].rstrip(".")
        problem = f"There is no directory {source}, and the Hugging Face Hub cannot be reached: {fault}."
        raise RemoteError(problem, "Check the path, or the network, and try again.") from error
