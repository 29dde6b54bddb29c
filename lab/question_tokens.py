"""Rows of a text model: a question's tokens, kept by content, and the state's behind them.

    CLS  question  SEP  (MASK option) ...  SEP  state  SEP

The question part, up to the second SEP, does not depend on the state: `QuestionTokens` keeps it. An option is read at
its MASK. Pieces are tokenised apart and concatenated. Layout and budgets are the published text model's.
"""

from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from threading import RLock

from tokenizers import Tokenizer

from lab.errors import InputError, whole
from lab.tokens import CLS, MASK, SEP, check_distinct, cleaned, encode, fit, load_tokenizer, read_tokenizer, state_text
from lab.workloads import Question

PAD = 2  # SmolLM2's
CAPACITY = 128


@dataclass(frozen=True)
class TextPrompt:
    """A state and the questions that are asked of it in one call. A list of turns is a conversation."""

    state: str | Mapping | Sequence
    questions: tuple[Question, ...]


@dataclass(frozen=True)
class TextTokens:
    """A tokenizer with the ids that a text row is made with; its added tokens, and `mask_text`, become spaces in a text."""

    tokenizer: Tokenizer = field(repr=False)
    cls: int
    sep: int
    mask: int
    pad: int
    mask_text: str

    @classmethod
    def own(cls) -> "TextTokens":
        """SmolLM2's vocabulary with reserved tokens for what it lacks; see `lab.tokens.load_tokenizer`."""
        tokenizer = load_tokenizer()
        return cls(tokenizer, *(tokenizer.token_to_id(name) for name in (CLS, SEP, MASK)), PAD, MASK)

    @classmethod
    def of(cls, folder: Path) -> "TextTokens":
        """A checkpoint's own vocabulary, with the special tokens that it names; see `lab.tokens.read_tokenizer`."""
        tokenizer, named = read_tokenizer(folder, ("cls", "sep", "mask", "pad"))
        return cls(tokenizer, *map(tokenizer.token_to_id, named.values()), mask_text=named["mask"])

    def encode(self, text: str) -> list[int]:
        return encode(self.tokenizer, cleaned(self.tokenizer, text.replace(self.mask_text, " ")))


@dataclass(frozen=True)
class QuestionPart:
    """The tokens of a row ahead of its state, and the places of the options' masks in them."""

    ids: tuple[int, ...]
    readouts: tuple[int, ...]


def question_part(tokens: TextTokens, question: Question, head_max_len: int) -> QuestionPart:
    """Tokenise a question and its options within `head_max_len`, see `lab.tokens.fit`; InputError for options read alike."""
    asked = tokens.encode(f"{question.type} question: {question.instructions}")
    asked, texts = fit(asked, [tokens.encode(f" {text}") for text in question.rendered], head_max_len)
    check_distinct(question, texts)
    ids, readouts = [tokens.cls, *asked, tokens.sep], []
    for text in texts:
        readouts.append(len(ids))
        ids += [tokens.mask, *text]
    return QuestionPart((*ids, tokens.sep), tuple(readouts))


def state_ids(tokens: TextTokens, state: str | Mapping | Sequence) -> list[int]:
    """A state's tokens: a text as it is, a table or a list as JSON; see `lab.tokens.state_text`."""
    return tokens.encode(state_text(state))


def text_row(
    tokens: TextTokens, part: QuestionPart, state: Sequence[int], max_len: int, keep_end: bool = False
) -> tuple[list[int], tuple[int, ...]]:
    """A row's ids and readouts: `part`, as much of `state` as `max_len` has room for, SEP.

    A state keeps its start, with `keep_end` (a conversation) its end. Raises InputError where an option's mask lies
    beyond `max_len`.
    """
    room = max(0, max_len - len(part.ids) - 1)
    cut = list(state[-room:] if keep_end and room else state[:room])
    kept = tuple(place for place in part.readouts if place < max_len)
    if len(kept) < len(part.readouts):
        raise InputError(
            f"Only {len(kept)} of {len(part.readouts)} options fit the {max_len} tokens that the model reads; use fewer "
            "or shorter options."
        )
    return [*part.ids, *cut, tokens.sep][:max_len], kept


class QuestionTokens:
    """Question parts of the `capacity` questions that were needed last.

    The key holds all that decides a part: the tokenizer itself, the ids of CLS, SEP and MASK, the mask's text, the budget,
    the question's type, its instructions as given and its options as rendered, in order. Nothing of a state, an encoder
    or an answer is kept. A question met again becomes the newest. `hits`, `misses` and `evictions` count; several threads
    may share one. Raises InputError for a capacity below 1.
    """

    def __init__(self, capacity: int = CAPACITY):
        whole("the capacity", capacity, 1)
        self.capacity = capacity
        self.hits = self.misses = self.evictions = 0
        self._kept: OrderedDict[tuple, QuestionPart] = OrderedDict()  # oldest use first
        self._lock = RLock()

    def part(self, tokens: TextTokens, question: Question, head_max_len: int) -> QuestionPart:
        """The question's part, kept or made now; equal to `question_part` of the same arguments."""
        key = self._key(tokens, question, head_max_len)
        with self._lock:
            found = self._kept.get(key)
            if found is not None:
                self.hits += 1
                self._kept.move_to_end(key)
                return found
            self.misses += 1
            found = self._kept[key] = question_part(tokens, question, head_max_len)
            if len(self._kept) > self.capacity:
                self._kept.popitem(last=False)
                self.evictions += 1
            return found

    @staticmethod
    def _key(tokens: TextTokens, question: Question, head_max_len: int) -> tuple:
        specials = tokens.tokenizer, tokens.cls, tokens.sep, tokens.mask, tokens.mask_text
        return *specials, head_max_len, question.type, question.instructions, tuple(question.rendered)

    def holds(self, tokens: TextTokens, question: Question, head_max_len: int) -> bool:
        """Whether the part is kept; counts nothing, moves nothing."""
        return self._key(tokens, question, head_max_len) in self._kept

    def clear(self) -> None:
        """Forget all parts and set the counters to 0."""
        with self._lock:
            self._kept.clear()
            self.hits = self.misses = self.evictions = 0

    def counts(self) -> dict[str, int]:
        return {"hits": self.hits, "misses": self.misses, "evictions": self.evictions, "kept": len(self._kept)}

    def __len__(self) -> int:
        return len(self._kept)
