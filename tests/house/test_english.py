"""The package, the recipes and the documentation use the field's English.

Checks what can be checked by patterns: phrases of a dialect that readers of JAX, MaxText and Hugging Face would have to
translate, functions named by participles, field terms that must occur, and class names with two meanings.

As a command it prints each offending line: `python tests/house/test_english.py [--counts] paxcli/layers docs …`.
"""

from __future__ import annotations

import ast
import dataclasses
import io
import pathlib
import re
import sys
import tokenize
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator

import pytest

ROOT = pathlib.Path(__file__).resolve().parents[2]

# Pattern of each phrase -> what to write. A space matches any white space, line ends too; `code` is masked as `x`.
_AFTER_QUANTIFIER = "".join(
    rf"(?<!\b{word} )" for word in ("one", "all", "some", "most", "each", "any", "none", "part")
)
PHRASES = {
    # `X is no Y`. "There is no file" and "is no longer" are plain English.
    r"(?<!there )\b(is|are|was|were|be) no\b(?! (longer|more|less|fewer|larger|smaller|greater|higher|lower|better|"
    r"worse|faster|slower)\b)": "is not a …",
    r"\b(is|are) none (of|in|that)\b": "is not in …; there is no …",
    r"\bha(s|ve) not (the|a|an)\b": "does not have the …",
    # Places of arrays.
    r"\b(lies?|lying)\b": "is; sharded over; stored in",
    r"\blaid\b": "sharded over; applied on top of; arranged",
    r"(?<!-)\bstand(s|ing)?\b(?!-)": "is; represents; means",
    r"\bwhole\b(?=[.,;:)]|$| (on|in|at|over|where|and|or|by|when|if|to|again|for|there|here|as|is|beside)\b)"
    r"(?<!\ba whole)(?<!the whole)": "unsharded; replicated; in full",
    r"\bwhole (cop(y|ies)|arrays?|tensors?|parameters?|tables?|weights?|gradients?|matri(x|ces))\b": "full; unsharded",
    r"\b(stays?|mesh|kept|remains?) cuts?\b|\bcuts? over\b|\buncut\b"
    r"|\bcut into (stages|parts|shards|slices|microbatches)\b": "sharded; split; partitioned",
    r"\ba place (in|of) (memory|the host)\b": "memory space",
    # Verbs of everyday life for terms of the field.
    r"\btold\b": "inferred from; distinguished",
    r"\b(go|goes|going|went) on\b": "continues; resumes",
    r"\bmend(s|ed|ing)?\b": "fix",
    r"\b(hears?|heard)\b": "receives; is notified of",
    r"\blooks? on\b": "observes",
    r"\b(in|by|take|takes) turns?\b|\bturns? of (a|scan|layers)\b": "alternating; interleaved; iteration",
    r"\b(?<!dot )(?<!inner )(?<!outer )products\b|\b(matrix|every|each|custom|no) product\b"
    r"|\ba product (with|that|reads?|takes?|runs?)\b": "matmuls",
    r"\b(keeps?|kept)\b[^.:;]{0,40}\bbackward\b|\bbackward\b[^.:;]{0,20}\b(keeps?|kept)\b": "saves",
    r"\bas a rotation\b": "rotary position embedding (RoPE)",
    # Riddles.
    r"\b(what|as) (`x+`|[\w']+)( [\w']+){0,3} says?\b": "the value in …; according to …",
    r"\bsays? (so|what|how|where|which|whether|when|who|why|nothing)\b": "gives; states; logs; reports",
    r"\b[Ss]ay:? (`|-|it\b)": "pass; set",
    r"\bas (it|they) (is|are|was|were)\b(?=[.,;:)]|$| (and|or|in|on|here|there|without|with)\b)": "unchanged",
    _AFTER_QUANTIFIER + r"\bof which\b": "whose; two sentences",
    r"\balike\b": "the same; equally",
    r"\bwhat came\b": "targets; the input",
    r"\bpassed over\b": "ignored",
    r"\bfor want of\b": "because there is not enough",
    r"\banew\b": "again",
    r"\bto be had\b": "available",
    r"\bat hand\b": "available",
    r"\bunlooked\b|\bwhereof\b|\bthereof\b|\bnowhere yet\b": "plain words",
    r"\bwho (hears|waits|reads|looks|sees|runs|schedules?|coordinates|begins)\b": "name the reader or the process",
}
COMPILED = {re.compile(pattern.replace(" ", r"\s"), re.IGNORECASE): advice for pattern, advice in PHRASES.items()}

# A docstring names its thing first: "Path of …", "Contents of …", not "Where …", "What …". "What `f` returns" is plain.
RIDDLE = re.compile(r"\s*(What|Who|Whose|Where|Which|Of)\b(?! `)")
ARGUMENT_RIDDLE = re.compile(
    r"^\s+\w+: (Who|Whose|What (it|they|is|are|stands|comes|came|errors)|Where (it|they))\b", re.M
)

# Words of the dialect in identifiers.
NAMES = {
    "alike",
    "anew",
    "heard",
    "hears",
    "how",
    "laid",
    "lies",
    "mend",
    "said",
    "says",
    "shelf",
    "stands",
    "told",
    "who",
}

# Functions are verbs, or nouns for their result. Participles that do not end in `ed`:
IRREGULAR = (
    "laid told said given found made held kept known written taken seen shown drawn chosen built brought lent sent "
    "heard fed begun bound done gone spoken thrown stood spent"
).split()
NOT_PARTICIPLES = {"need", "seed", "embed", "feed", "speed", "shed", "exceed", "proceed", "breed", "shared", "unembed"}
PARTICLES = {"out", "off", "over", "in", "on", "up", "forward", "by", "with", "to", "from", "as", "of", "for"}
ADVERBS = {"warm", "out", "well"}

# One name, one meaning: classes that share their name, with the reason. Empty is best.
SAME_NAME: dict[str, str] = {}

# Terms that readers search for: each occurs in the package and in the documentation.
FIELD_TERMS = (
    "RoPE",
    "SwiGLU",
    "GQA",
    "grouped-query",
    "multi-query",
    "KV cache",
    "prefill",
    "throughput",
    "tensor parallel",
    "pipeline parallel",
    "expert parallel",
    "FSDP",
    "mixed precision",
    "activation checkpointing",
    "gradient accumulation",
    "mixture of experts",
    "log perplexity",
)
# Class of a layer -> names of it that the field uses, in its module or class docstring.
LAYER_TERMS = {
    "Rotary": ("RoPE", "Su et al"),
    "Attention": ("multi-head", "GQA"),
    "FeedForward": ("MLP", "SwiGLU"),
    "MoeFeedForward": ("mixture of experts", "MoE"),
    "RmsNorm": ("RMSNorm",),
    "LayerNorm": ("layer norm",),
    "PipelinedStack": ("pipeline parallel",),
    "Stack": ("scan",),
}


@dataclasses.dataclass(frozen=True)
class Text:
    """A piece of prose and where it starts. `kind` is docstring, comment, string or page."""

    path: pathlib.Path
    line: int
    kind: str
    text: str


@dataclasses.dataclass(frozen=True)
class Finding:
    path: pathlib.Path
    line: int
    found: str
    advice: str

    def __str__(self) -> str:
        return f"{shown(self.path)}:{self.line}: {self.found!r} -> {self.advice}"


def shown(path: pathlib.Path) -> str:
    return str(path.relative_to(ROOT)) if path.is_relative_to(ROOT) else str(path)


def masked(text: str) -> str:
    """The text without inline code, and with one white-space character between words, so that patterns stay simple."""
    text = re.sub(r"[ \t]*\n[ \t#>]*", "\n", text)
    text = re.sub(r"``?([^`\n]+)``?", lambda code: "`" + "x" * len(code[1]) + "`", text)
    return re.sub(r"[ \t]+", " ", text)


def python_texts(path: pathlib.Path) -> Iterator[Text]:
    """Docstrings, blocks of comments, and string literals of several words."""
    source = path.read_text()
    tree = ast.parse(source)
    documented = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    docstrings, formatted = set(), set()
    for node in ast.walk(tree):
        if isinstance(node, documented) and ast.get_docstring(node) is not None:
            docstrings.add(id(node.body[0].value))
        if isinstance(node, ast.JoinedStr):
            formatted |= {id(value) for value in ast.walk(node) if isinstance(value, ast.Constant)}
            text = "".join(str(v.value) if isinstance(v, ast.Constant) else "`x`" for v in node.values)
            yield Text(path, node.lineno, "string", text)
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in formatted:
            kind = "docstring" if id(node) in docstrings else "string"
            if kind == "docstring" or " " in node.value.strip():
                yield Text(path, node.lineno, kind, node.value)
    block: list[tokenize.TokenInfo] = []
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT:
            if block and token.start[0] != block[-1].start[0] + 1:
                yield Text(path, block[0].start[0], "comment", "\n".join(one.string.lstrip("#") for one in block))
                block = []
            block.append(token)
    if block:
        yield Text(path, block[0].start[0], "comment", "\n".join(one.string.lstrip("#") for one in block))


def page_texts(path: pathlib.Path) -> Iterator[Text]:
    """The prose of a page, without code blocks; of the changelog, what is not released yet."""
    text = path.read_text()
    text = re.sub(r"^```.*?^```", lambda block: "\n" * block[0].count("\n"), text, flags=re.MULTILINE | re.DOTALL)
    if path.name == "CHANGELOG.md":
        text = re.split(r"^## \[\d", text, maxsplit=1, flags=re.MULTILINE)[0]
    line = 1
    for paragraph in re.split(r"(\n\s*\n)", text):
        if paragraph.strip():
            yield Text(path, line, "page", paragraph)
        line += paragraph.count("\n")


def files(paths: Iterable[pathlib.Path]) -> list[pathlib.Path]:
    found: set[pathlib.Path] = set()
    for path in paths:
        found |= {*path.rglob("*.py"), *path.rglob("*.md")} if path.is_dir() else {path}
    return sorted(path.resolve() for path in found)


def phrases(text: Text) -> Iterator[Finding]:
    prose = masked(text.text)
    for pattern, advice in COMPILED.items():
        for match in pattern.finditer(prose):
            around = prose[max(0, match.start() - 25) : match.end() + 25].replace("\n", " ")
            line = text.line + prose.count("\n", 0, match.start())
            yield Finding(text.path, line, f"…{around}…", f"{match[0]!r}: {advice}")
    if text.kind == "docstring":
        if match := RIDDLE.match(text.text):
            first = text.text.strip().splitlines()[0][:60]
            yield Finding(text.path, text.line, first, f"a docstring names its thing first, not {match[1]!r}")
        for match in ARGUMENT_RIDDLE.finditer(text.text):
            line = text.line + text.text.count("\n", 0, match.start())
            yield Finding(text.path, line, match[0].strip(), "name the thing")


def is_participle(word: str) -> bool:
    return word in IRREGULAR or (word.endswith("ed") and word not in NOT_PARTICIPLES)


def is_participle_name(name: str) -> bool:
    """`with_derived_sizes`, `laid_out`, `warm_started`; but not `named_leaves`, `is_sharded`, `check_compiled`."""
    words = [word for word in name.strip("_").split("_") if word]
    if not words or name.startswith("__"):
        return False
    if is_participle(words[0]) and all(word in PARTICLES for word in words[1:]):
        return True
    return len(words) > 1 and is_participle(words[-1]) and words[0] in ADVERBS


def functions(path: pathlib.Path) -> Iterator[Finding]:
    """Functions whose names are participles. Properties are adjectives, and a decorator's inner `wrapped` is usual."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.FunctionDef) and is_participle_name(node.name) and node.name != "wrapped":
            if not any("property" in ast.unparse(decorator) for decorator in node.decorator_list):
                yield Finding(path, node.lineno, f"def {node.name}", "a verb, or a noun that says what comes back")


def identifiers(path: pathlib.Path) -> Iterator[Finding]:
    """Definitions, arguments and variables that contain a word of `NAMES`."""
    for node in ast.walk(ast.parse(path.read_text())):
        match node:
            case ast.ClassDef(name=name) | ast.FunctionDef(name=name) | ast.arg(arg=name):
                pass
            case ast.Name(id=name, ctx=ast.Store()):
                pass
            case _:
                continue
        if found := NAMES & {word.lower() for word in re.findall(r"[A-Z]?[a-z]+", name)}:
            yield Finding(path, node.lineno, name, f"{found.pop()!r}: name the thing")


def findings(path: pathlib.Path) -> list[Finding]:
    python = path.suffix == ".py"
    found = [one for text in (python_texts if python else page_texts)(path) for one in phrases(text)]
    if python:
        found += [*functions(path), *identifiers(path)]
    return sorted(found, key=lambda finding: finding.line)


def checked_files() -> list[pathlib.Path]:
    pages = ("docs", "README.md", "CONTRIBUTING.md", "CHANGELOG.md", "benchmarks/results/README.md")
    return files([*(ROOT / name for name in ("paxcli", "recipes", *pages)), *ROOT.glob("benchmarks/*.py")])


def public_classes() -> dict[str, list[str]]:
    """Name of each public class at the top of a module -> the files that define one."""
    found: dict[str, list[str]] = defaultdict(list)
    for path in files([ROOT / "paxcli"]):
        for node in ast.parse(path.read_text()).body:
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                found[node.name].append(shown(path))
    return found


@pytest.mark.parametrize("path", checked_files(), ids=shown)
def test_a_file_uses_the_words_of_the_field(path: pathlib.Path) -> None:
    found = findings(path)
    assert not found, "\n" + "\n".join(map(str, found))


def test_a_class_name_has_one_meaning() -> None:
    shared = {name: paths for name, paths in public_classes().items() if len(paths) > 1}
    assert {name: paths for name, paths in shared.items() if name not in SAME_NAME} == {}
    assert set(SAME_NAME) <= set(shared), "SAME_NAME lists a name that is unique by now"


@pytest.mark.parametrize("term", FIELD_TERMS)
def test_terms_that_readers_search_for_occur(term: str) -> None:
    pattern = re.compile(re.escape(term).replace(r"\ ", r"[\s-]+"), re.IGNORECASE)
    assert any(pattern.search(path.read_text()) for path in files([ROOT / "paxcli"])), f"{term!r} is not in paxcli/"
    assert any(pattern.search(path.read_text()) for path in files([ROOT / "docs"])), f"{term!r} is not in docs/"


@pytest.mark.parametrize("name", LAYER_TERMS)
def test_a_layer_is_called_by_its_common_name(name: str) -> None:
    for path in files([ROOT / "paxcli/layers"]):
        tree = ast.parse(path.read_text())
        for node in tree.body:
            if isinstance(node, ast.ClassDef) and node.name == name:
                text = f"{ast.get_docstring(tree)} {ast.get_docstring(node)}".lower()
                assert [term for term in LAYER_TERMS[name] if term.lower() not in text] == []
                return
    pytest.fail(f"paxcli/layers/ has no class {name}")


@pytest.mark.parametrize(
    "sentence",
    [
        "'p' is no project.",
        "Parameters lie on the mesh axis `fsdp`.",
        "The device holds it whole.",
        "The value that stands here.",
        "Told from the keys.",
        "The same command goes on.",
        "Mend the file.",
        "Who hears how a run goes.",
        "Layers in turn.",
        "What its docstring says is used.",
        "It is passed on as it is.",
        "A token, of which there is one.",
        "Written alike.",
        "The products run in FP8.",
        "What the policy keeps for the backward pass.",
        "A value, and\n    what the file says of it.",
    ],
)
def test_the_check_finds_the_dialect(sentence: str) -> None:
    assert list(phrases(Text(ROOT / "x.py", 1, "string", sentence)))


@pytest.mark.parametrize(
    "sentence",
    [
        "There is no checkpoint in this directory.",
        "It is no longer needed.",
        "A size is a whole number from 1 up; the whole directory is copied.",
        "One of which is used, as it is written.",
        "The message says that the disk is full.",
        "The dot products of queries and keys; a product of two sizes.",
        "A standalone program that turns text into ids.",
    ],
)
def test_the_check_accepts_plain_english(sentence: str) -> None:
    assert list(map(str, phrases(Text(ROOT / "x.py", 1, "string", sentence)))) == []


def test_participles_are_known() -> None:
    wanted = ["prepared", "_attended", "laid_out", "_fed_forward", "_warm_started", "given", "out_of_memory_explained"]
    fine = [
        "named_leaves",
        "is_sharded",
        "_check_compiled",
        "feed",
        "seed",
        "embed",
        "num_dropped",
        "start_distributed",
    ]
    assert [name for name in wanted if not is_participle_name(name)] == []
    assert [name for name in fine if is_participle_name(name)] == []


def main(arguments: list[str]) -> int:
    """Prints what the check finds in files or folders; with `--counts`, how much in each folder."""
    paths = files(map(pathlib.Path, [word for word in arguments if word != "--counts"])) or checked_files()
    found = [one for path in paths for one in findings(path)]
    if "--counts" in arguments:
        for folder, count in Counter(shown(one.path.parent) for one in found).most_common():
            print(f"{count:5}  {folder}")
    else:
        print(*found, sep="\n")
    print(f"{len(found)} findings in {len(paths)} files", file=sys.stderr)
    return bool(found)


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
