"""Questions and workloads: what is asked, of which frames.

A question is fixed for a loop; a workload pairs it with a frame source and a number of frames per decision. The shipped
workloads are in `data/workloads.toml`, one table each:

    [name]
    title        = "shown in tables"
    source       = "atari:Pong", "doom:basic", or one of your own (see lab/envs/own.py): "folder:pictures", "gym:ID",
                   "python:frames.py:function", "video:clip.mp4"; a list of them are cameras that see the same moments
    type         = "choice" (the default), "score" or "noul"
    instructions = "the question's text"
    options      = { NAME = "description", ... } or ["NAME", ...]
    frames       = 1            # 2 = previous and current; frames times cameras is at most 8
    like         = "another workload of this file, whose keys are taken where this one has none"

A file with one workload may leave the table's name out: the file's name is taken. Paths are relative to the file.
"""

import hashlib
import tomllib
from collections.abc import Mapping, Sequence
from copy import copy
from dataclasses import dataclass, field
from difflib import get_close_matches
from pathlib import Path

from lab.errors import InputError

DATA = Path(__file__).resolve().parent.parent / "data"
QUESTION_TYPES = ("choice", "score", "noul")
MAX_OPTIONS = 255
MAX_FRAMES = 8
CAMERAS = " + "  # between the sources of several cameras
# What the published prompt says of a noul's options where the question says nothing.
NOUL_TEXTS = {"false": "no, the statement does not hold", "true": "yes, the statement holds"}


@dataclass(frozen=True)
class Question:
    """A question type, its instructions and its ordered options, as (name, description) pairs.

    `options` is given as a mapping from name to description (which may be empty or None) or as a list of names. A
    `choice` picks one option; a `score` rates along ordered levels 0, 1, ...; a `noul` is yes or no, its options are
    always `false` and `true` and may be left out. Raises InputError for an unknown type, empty instructions, fewer than
    two or more than 255 options, and repeated names.
    """

    type: str
    instructions: str
    options: tuple[tuple[str, str], ...] = ()
    _rendered: tuple[str, ...] = field(init=False, repr=False)
    levels: tuple[int, ...] = field(init=False, repr=False)  # each option's place before any reordering

    def __init__(self, type: str, instructions: str, options: Mapping[str, str | None] | Sequence[str] = ()):
        if not isinstance(type, str) or type not in QUESTION_TYPES:
            raise InputError(f"Unknown question type {type!r}; it is one of {', '.join(QUESTION_TYPES)}.")
        if not isinstance(instructions, str) or not instructions.strip():
            raise InputError("A question needs instructions: a text that is not empty.")
        if isinstance(options, str | bytes):
            raise InputError(f"Options are a list or a table of names, not the single text {options!r}.")
        if not isinstance(options, Mapping | Sequence):
            raise InputError(f"Options are a list or a table of names, not {options!r}.")
        texts = list(options) + [text for text in getattr(options, "values", list)() if text is not None]
        if odd := [text for text in texts if not isinstance(text, str | int)]:
            raise InputError(f"An option's name and its description are texts, not {odd[0]!r}.")
        pairs = options.items() if isinstance(options, Mapping) else ((name, "") for name in options)
        pairs = tuple((str(name), "" if text is None else str(text)) for name, text in pairs)
        if type == "noul":
            given = dict(pairs)
            if len(given) < len(pairs):
                raise InputError("A noul question has the options false and true, each once.")
            if set(given) - {"false", "true"}:
                raise InputError(f"A noul question has the options false and true, not {', '.join(given)}.")
            pairs = (("false", given.get("false", "")), ("true", given.get("true", "")))
        if len(pairs) < 2:
            raise InputError(f"A question needs two or more options, this one has {len(pairs)}: add an alternative.")
        if len(pairs) > MAX_OPTIONS:
            raise InputError(f"{len(pairs)} options are more than the {MAX_OPTIONS} the decision heads count to.")
        names = [name for name, _ in pairs]
        if not all(name.strip() for name in names):
            raise InputError("An option has an empty name; give every option its own name.")
        if len(set(names)) < len(names):
            twice = next(name for name in names if names.count(name) > 1)
            raise InputError(f"The option {twice!r} appears twice; give every option its own name.")
        object.__setattr__(self, "type", type)
        object.__setattr__(self, "instructions", instructions)
        object.__setattr__(self, "options", pairs)
        said = ((name, text or (NOUL_TEXTS[name] if type == "noul" else "")) for name, text in pairs)
        texts = tuple(f"{name}: {text}" if text else name for name, text in said)
        if type == "score":
            texts = tuple(f"level {i}: {text}" for i, text in enumerate(texts))
        object.__setattr__(self, "_rendered", texts)
        object.__setattr__(self, "levels", tuple(range(len(pairs))))

    @property
    def names(self) -> list[str]:
        return [name for name, _ in self.options]

    @property
    def rendered(self) -> list[str]:
        """Each option's text as the model reads it: `NAME: description`; for a score `level i: ...`. A noul's options
        without a description have the published ones."""
        return list(self._rendered)

    def reordered(self, order: Sequence[int]) -> "Question":
        """The same question with its options in another order; `order[i]` is the old place of the new option i. Each is
        still read as before: a score's level keeps its number."""
        if sorted(order) != list(range(len(self.options))):
            raise InputError(f"{list(order)} is no order of {len(self.options)} options; name each place once.")
        other = copy(self)
        for name in ("options", "_rendered", "levels"):
            object.__setattr__(other, name, tuple(getattr(self, name)[i] for i in order))
        return other


@dataclass(frozen=True)
class Workload:
    """A question, a frame source (`atari:Pong`, `doom:basic`, or see `lab.envs.own`) and the number of frames per decision
    (oldest first; of several cameras those of one moment together)."""

    name: str
    title: str
    question: Question
    source: str
    frames: int = 1

    def __post_init__(self):
        if not isinstance(self.source, str):
            raise InputError(f"Workload {self.name!r}: source is {self.source!r}; give a text such as 'atari:Pong'.")
        if type(self.frames) is not int or not 1 <= self.frames <= MAX_FRAMES:
            raise InputError(
                f"Workload {self.name!r}: frames is {self.frames!r}; give a number from 1 to {MAX_FRAMES}."
            )

    @property
    def digest(self) -> str:
        """Eight hexadecimal digits of the question and the number of frames: what makes two runs comparable, whatever
        the workload is called and wherever its frames lie."""
        return hashlib.sha256(repr((self.question, self.frames)).encode()).hexdigest()[:8]


def load_workloads(path: str | Path | None = None) -> dict[str, Workload]:
    """Read workloads by name from a TOML file (the shipped one by default).

    Raises InputError for a missing or malformed file, an unknown key, or a question that cannot be asked.
    """
    path = Path(path or DATA / "workloads.toml")
    try:
        tables = tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise InputError(f"The workload file {path} cannot be read: {error}.") from None
    if "instructions" in tables and not isinstance(tables["instructions"], dict):
        tables = {path.stem: tables}
    if not tables:
        raise InputError(f"The workload file {path} holds no workload; give it a source, instructions and options.")
    return {name: _workload(name, table, tables, path) for name, table in tables.items()}


def listed(text: str) -> list[str]:
    """The names in a comma list, each once, in their order."""
    return list(dict.fromkeys(name.strip() for name in text.split(",") if name.strip()))


def chosen(names: Sequence[str], path: str | Path | None = None) -> list[Workload]:
    """The workloads that an experiment measures: those of the file `path`, or of the shipped ones those called `names`."""
    return list(load_workloads(path).values()) if path else [get_workload(name) for name in names]


def get_workload(name: str, path: str | Path | None = None) -> Workload:
    """One workload by name; an unknown name raises InputError that lists the known ones."""
    known = load_workloads(path)
    if name not in known:
        near = get_close_matches(str(name), known, n=1)
        hint = f" Did you mean {near[0]!r}?" if near else ""
        raise InputError(f"Unknown workload {name!r}; known are {', '.join(known)}.{hint}")
    return known[name]


def _workload(name: str, table: dict, tables: dict, path: Path) -> Workload:
    known = {"title", "source", "type", "instructions", "options", "frames", "like"}
    if not isinstance(table, dict):
        raise InputError(f"{path}: {name!r} stands outside a table; write the workload's name in brackets above it.")
    if unknown := set(table) - known:
        raise InputError(f"{path}: workload {name!r} has the unknown key {min(unknown)!r}; known are {sorted(known)}.")
    if "like" in table:
        if table["like"] not in list(tables):
            raise InputError(f"{path}: workload {name!r} is like {table['like']!r}, which the file does not hold.")
        table = tables[table["like"]] | table
    for key in ("source", "instructions"):
        if key not in table:
            raise InputError(f"{path}: workload {name!r} lacks {key!r}.")
    try:
        question = Question(table.get("type", "choice"), table["instructions"], table.get("options", ()))
    except InputError as error:
        raise InputError(f"{path}: workload {name!r}: {error}") from None
    sources = table["source"] if isinstance(table["source"], list) else [table["source"]]
    if not sources or not all(isinstance(source, str) for source in sources):
        raise InputError(f"{path}: workload {name!r}: source is {table['source']!r}; give a text, or a list of them.")
    source = CAMERAS.join(_beside(part, path.parent) for text in sources for part in text.split(CAMERAS))
    frames = table.get("frames", 1)
    if type(frames) is int and 1 <= frames <= MAX_FRAMES:  # else Workload refuses it
        frames *= source.count(CAMERAS) + 1
    try:
        return Workload(name, table.get("title", name), question, source, frames)
    except InputError as error:
        raise InputError(f"{path}: {error}") from None


def _beside(source: str, folder: Path) -> str:
    """A source whose path is relative to the workload's file, with the path as it is from anywhere."""
    kind, _, rest = source.partition(":")
    if rest and kind in ("folder", "video") or (kind == "python" and rest.rpartition(":")[0].endswith(".py")):
        return f"{kind}:{(folder / rest).resolve()}"
    return source
