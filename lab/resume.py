"""Which images of a resumed prompt must be encoded: planning over token spans, with no model in it.

A prompt of `n` tokens resumes at `r` when the keys and values (or recurrent state) of its first `r` tokens are restored
and only `[r, n)` are run. Each picture fills a span of placeholder tokens with its rows from the vision tower. Two rules:

- per image (one tower call each): those whose rows end past `r` are encoded, and `r` never cuts an image;
- runs (a tower call takes whole images, as many as its patch budget holds): runs are formed over every image exactly as
  in a cold pass, and one is skipped only if it ends at or before `r`. Its members and patch count stay what they are in
  a cold pass, so its matrix products keep their shapes and its bits are the same.

Two prompts share a prefix as far as their token ids *and* the content of their pictures are equal.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from lab.errors import InputError


class MalformedPrompt(InputError):
    """The placeholder tokens of a prompt do not fit the rows of its pictures."""


class InsideImage(InputError):
    """A resume point cuts an image whose family is encoded and read whole."""


@dataclass(frozen=True)
class Picture:
    """One picture of a prompt: the `key` of its content, its rows in the prompt, its patches in the vision tower, and
    where the model places rows by it, its grid of patches (time, height, width)."""

    key: tuple
    rows: int
    patches: int
    grid: tuple[int, int, int] | None = None


@dataclass(frozen=True)
class Prompt:
    """Token ids with their pictures in order; `placeholder` is the id that stands for a picture's rows."""

    ids: tuple[int, ...]
    pictures: tuple[Picture, ...] = ()
    placeholder: int = -1

    def __len__(self) -> int:
        return len(self.ids)

    @cached_property
    def array(self) -> np.ndarray:
        return np.array(self.ids, dtype=np.int64)

    @cached_property
    def gaps(self) -> tuple[tuple[int, int], ...]:
        """(start, stop) of every unbroken run of placeholder tokens, whatever it is meant to hold."""
        inside = np.concatenate([[0], self.array == self.placeholder, [0]]).astype(np.int8)
        starts, stops = (np.flatnonzero(np.diff(inside) == step) for step in (1, -1))
        return tuple(zip(starts.tolist(), stops.tolist(), strict=True))

    @cached_property
    def spans(self) -> tuple[tuple[int, int], ...]:
        """(start, stop) of each picture's rows; MalformedPrompt where placeholders and pictures do not fit."""
        if len(self.gaps) != len(self.pictures):
            raise MalformedPrompt(
                f"The prompt has {len(self.gaps)} runs of placeholder tokens for {len(self.pictures)} picture(s); "
                "give one unbroken run per picture."
            )
        for number, ((start, stop), picture) in enumerate(zip(self.gaps, self.pictures, strict=True)):
            if stop - start != picture.rows:
                raise MalformedPrompt(
                    f"Picture {number} has {picture.rows} rows, but the prompt holds {stop - start} placeholder tokens "
                    f"for it from position {start} on; give as many as there are rows."
                )
        return self.gaps

    def then(self, ids: Sequence[int], pictures: Sequence[Picture] = ()) -> "Prompt":
        """This prompt with more tokens, and more pictures, at its end."""
        return Prompt(self.ids + tuple(ids), self.pictures + tuple(pictures), self.placeholder)


@dataclass(frozen=True)
class Splice:
    """Rows `[first, first + stop - start)` of a picture stand at the prompt's positions `[start, stop)`."""

    picture: int
    first: int
    start: int
    stop: int


@dataclass(frozen=True)
class Plan:
    """What a pass from `resume` on encodes: `calls` are the vision tower's calls, each with its pictures' numbers.

    `splices` are the rows that the pass `[resume, n)` needs; a run may bring rows that none of them takes.
    """

    resume: int
    calls: tuple[tuple[int, ...], ...]
    splices: tuple[Splice, ...]

    @property
    def encoded(self) -> tuple[int, ...]:
        """Numbers of the pictures that are encoded."""
        return tuple(number for call in self.calls for number in call)


def common_prefix(one: Prompt, other: Prompt) -> int:
    """How many tokens two prompts share from their start: equal ids, and equal pictures where they stand.

    From the first row of the first differing picture on nothing is shared, however alike the text.
    """
    least = min(len(one), len(other))
    differ = np.flatnonzero(one.array[:least] != other.array[:least])
    common = int(differ[0]) if len(differ) else least
    for number, (start, _) in enumerate(one.gaps):
        if start >= common:
            break
        pair = [prompt.pictures[number] if number < len(prompt.pictures) else None for prompt in (one, other)]
        if None in pair or pair[0] != pair[1]:
            return start
    return common


def before_image(prompt: Prompt, point: int) -> int:
    """The last point at or before `point` that cuts no image of the prompt."""
    return next((start for start, stop in prompt.gaps if start < point < stop), point)


def form_runs(patches: Sequence[int], budget: int) -> tuple[tuple[int, ...], ...]:
    """Whole images in order, as many to a run as `budget` patches hold; one larger than the budget is a run by itself."""
    if budget < 1:
        raise InputError(f"The patch budget of a tower call is {budget}; give 1 or more.")
    runs: list[list[int]] = []
    room = 0
    for number, count in enumerate(patches):
        if not runs or count > room:
            runs.append([])
            room = budget
        runs[-1].append(number)
        room -= count
    return tuple(map(tuple, runs))


def plan(prompt: Prompt, resume: int = 0, patch_budget: int | None = None, skip: bool = True) -> Plan:
    """Plan a pass that resumes at `resume`: per image, or in runs where `patch_budget` is given.

    `skip=False` is the old behaviour, which runs the tower over every image whatever was restored. Raises
    MalformedPrompt, InsideImage (per image only), and InputError for a point outside the prompt.
    """
    spans = prompt.spans
    if not 0 <= resume < len(prompt):
        raise InputError(f"The resume point {resume} is outside the prompt of {len(prompt)} tokens; its last is run.")
    if patch_budget is None:
        calls = tuple((number,) for number in range(len(spans)))
        if (start := before_image(prompt, resume)) != resume:
            raise InsideImage(f"The resume point {resume} cuts the image that starts at {start}; resume there at most.")
    else:
        calls = form_runs([picture.patches for picture in prompt.pictures], patch_budget)
    if skip:
        calls = tuple(call for call in calls if spans[call[-1]][1] > resume)
    splices = tuple(
        Splice(number, max(resume - start, 0), max(start, resume), stop)
        for number, (start, stop) in enumerate(spans)
        if stop > resume
    )
    return Plan(resume, calls, splices)


def chunks(prompt: Prompt, resume: int, size: int | None, whole_images: bool = True) -> list[tuple[int, int]]:
    """Cut the pass `[resume, n)` into (start, stop) of at most `size` tokens; with `whole_images` none ends inside an
    image, which may make one longer. None for `size`: one chunk."""
    if size is not None and size < 1:
        raise InputError(f"A chunk of {size} tokens was asked for; give 1 or more, or None for the whole prompt.")
    found, start = [], resume
    while start < len(prompt):
        stop = len(prompt) if size is None else min(start + size, len(prompt))
        if whole_images and before_image(prompt, stop) != stop:
            stop = before_image(prompt, stop)
            if stop <= start:  # the image begins this chunk and is longer than it
                stop = next(end for begin, end in prompt.gaps if begin <= start < end)
        found.append((start, stop))
        start = stop
    return found
