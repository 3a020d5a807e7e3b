"""`pax data`."""

from __future__ import annotations

import functools
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from paxcli.cli.options import DryRunOption, JsonOption, directory_option
from paxcli.cli.output import say_result
from paxcli.errors import ConfigError, DataError

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from paxcli.inputs.token_files import TokenFileInfo
    from paxcli.inputs.tokenizers import TokenizerTemplate
    from paxcli.inputs.tokenizing import Part

app = typer.Typer(help="Write token files for training, and check them.")

FilesArgument = Annotated[list[str], typer.Argument(metavar="FILE...", help="Files and globs, local or gs://.")]
OutOption = Annotated[str, directory_option("The directory for the token files. Required.")]
TokenizerOption = Annotated[
    str, typer.Option(metavar="NAME", help="byte, hf:DIR|NAME, spm:FILE, tiktoken:FILE, *.model or *.json.")
]


def _token_option(place: str) -> Any:
    return typer.Option(metavar="TOKEN", help=f"{place}-of-document token of a tokenizer.json. Default: none.")


EosOption = Annotated[str | None, _token_option("End")]
BosOption = Annotated[str | None, _token_option("Start")]
FormatOption = Annotated[
    Literal["text", "jsonl", "csv", "tsv", "parquet", "arrayrecord"] | None,
    typer.Option(help="Format of all files. Default: by suffix."),
]
FieldOption = Annotated[str, typer.Option(metavar="NAME", help="The field or column with the text.")]
Workers = Annotated[int, typer.Option(min=0, help="Tokenizing processes; 0 = only this process.")]
BadOption = Annotated[Literal["error", "skip"], typer.Option(help="What to do with a record that cannot be read.")]
Budget = Annotated[int, typer.Option(min=0, help="The most records that `skip` may drop.")]


@app.command("tokenize")
def tokenize(
    files: FilesArgument,
    out: OutOption,
    tokenizer: TokenizerOption = "byte",
    eos_token: EosOption = None,
    bos_token: BosOption = None,
    format: FormatOption = None,
    text_field: FieldOption = "text",
    num_workers: Workers = 0,
    on_bad_record: BadOption = "error",
    bad_record_budget: Budget = 100,
    dry_run: DryRunOption = False,
    as_json: JsonOption = False,
) -> None:
    """Tokenize text into token files for TextInput. An interrupted run resumes with the same command.

    \b
    Examples:
      pax data tokenize 'text/**/*.txt' --out tokens
      pax data tokenize 'c4/*.json.gz' --out tokens --tokenizer c4.model --num-workers 8
    """
    from etils import epath

    from paxcli.inputs.documents import TOKENS, Reading, format_of
    from paxcli.inputs.files import find_files
    from paxcli.inputs.tokenizing import Tokenizing, plan_parts

    tokenizing = Tokenizing(
        Reading(format, text_field, on_bad_record, bad_record_budget),
        _tokenizer_template(tokenizer, eos_token, bos_token),
    )
    vocab_size = tokenizing.tokenizer().vocab_size
    found = find_files(files)
    if format is None and any(format_of(file.name) == TOKENS for file in found):
        raise ConfigError("FILE has token files, *.bin, which have no text.", "Leave them out, or set `--format`.")
    parts = plan_parts(found, epath.Path(out).expanduser())
    done = tokenizing.find_written_parts(parts)
    result: dict[str, Any] = {"out": out, "vocab_size": vocab_size, "parts": len(parts), "parts_done": len(done)}
    result["bytes"] = sum(part.num_bytes for part in parts)
    if dry_run:
        text = f"Would write {len(parts) - len(done)} of {len(parts)} token files to {out}"
        return say_result(result, f"{text} from {result['bytes']:,} bytes, with {vocab_size:,} ids.", as_json)
    began = time.perf_counter()
    left = [part for part in parts if part not in done]
    for part, info in _with_progress(tokenizing.write_all(left, num_workers, done.values()), left):
        done[part] = info
    seconds = time.perf_counter() - began
    documents = sum(info.num_documents or 0 for info in done.values())
    tokens = sum(info.num_tokens or 0 for info in done.values())
    bad = [record for info in done.values() for record in info.bad_records]
    result |= {"documents": documents, "tokens": tokens, "bad_records": bad, "seconds": seconds}
    text = f"{out}/*.bin: {documents:,} documents, {tokens:,} tokens of {vocab_size:,} ids"
    say_result(result, text + (f"; dropped {len(bad)} bad records" if bad else ""), as_json)


@app.command("verify")
def verify(files: FilesArgument, as_json: JsonOption = False) -> None:
    """Read token files in full, and check them. Compares with the checksums that `pax data tokenize` wrote.

    \b
    Examples:
      pax data verify 'tokens/*.bin'
      pax data verify gs://bucket/tokens/part-00000.bin --json
    """
    from paxcli.inputs.files import find_files
    from paxcli.inputs.token_files import check_contents, open_token_file, read_info

    sizes, unknown = [], []
    for file in find_files(files):
        if file.path.is_dir():
            raise DataError(f"{file.path} is a directory.", f"Give the files in it: '{file.path}/*.bin'.")
        info = read_info(file.path)
        tokens, _ = open_token_file(file.path, info, None)
        check_contents(file.path, tokens, info)
        sizes.append(len(tokens))
        unknown += [str(file.path)] if info.checksum is None else []
    result = {"files": len(sizes), "tokens": sum(sizes), "without_checksum": unknown}
    text = f"{len(sizes)} token files, {sum(sizes):,} tokens: {len(sizes) - len(unknown)} match their checksums"
    say_result(result, text + (f", {len(unknown)} have none." if unknown else "."), as_json)


def _tokenizer_template(name: str, eos_token: str | None, bos_token: str | None) -> TokenizerTemplate:
    """The tokenizer of `--tokenizer`: a short form, or a `*.model` or `*.json` file.

    Raises:
      ConfigError: The name is unknown, or the tokenizer has no end-of-document token, or its file defines it.
    """
    from paxcli.inputs.tokenizers import HuggingFaceTokenizer, TokenizerConfig

    find = TokenizerConfig.from_short_form
    found = find(name) or find({".model": "spm:", ".json": "hf:"}.get(Path(name).suffix, "") + name)
    if found is None:
        hint = "Use `byte`, hf:DIR, spm:FILE or tiktoken:FILE; or a *.model or *.json file."
        raise ConfigError(f"There is no tokenizer `{name}`.", hint)
    cls, fields = found
    tokens = {"eos_token": eos_token, "bos_token": bos_token}
    given = {token: value for token, value in tokens.items() if value is not None}
    if cls is HuggingFaceTokenizer and "eos_token" not in fields | given:
        raise ConfigError(f"{name} does not define an end-of-document token.", "Set it, such as --eos-token '</s>'.")
    if given and cls is not HuggingFaceTokenizer:
        raise ConfigError(f"Tokenizer {name} defines its own eos and bos.", "Leave out --eos-token and --bos-token.")
    return functools.partial(cls, **fields | given)


def _with_progress(
    written: Iterable[tuple[Part, TokenFileInfo]], parts: Sequence[Part]
) -> Iterator[tuple[Part, TokenFileInfo]]:
    """Yields the parts as they are written, with a progress bar on a terminal and a line for each in a pipe."""
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn

    from paxcli.training.progress import progress_console

    console = progress_console()
    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console, disable=not sys.stderr.isatty(), transient=True) as progress:
        task = progress.add_task("tokenizing", total=sum(part.num_bytes for part in parts))
        for number, (part, info) in enumerate(written, 1):
            yield part, info
            progress.update(task, advance=part.num_bytes)
            if not sys.stderr.isatty():
                line = f"{part.path.name} · {info.num_documents:,} documents · {info.num_tokens:,} tokens"
                console.print(f"{line} · {number} of {len(parts)}", markup=False)
