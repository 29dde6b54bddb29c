"""Answering prompts with pictures, turn by turn: restore what is kept, encode what is not, run the rest, choose tokens.

Two openings give the same tokens. `known`: the resume point is looked up before anything else, as a paged cache can, and
images are encoded from it; a restore that then fails has them all to encode. `restored`: the state is restored first
and the images are encoded from where it really ends.
"""

from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from lab.caches import KeptStates
from lab.clocks import stage
from lab.errors import InputError, NotFinite
from lab.models.families import Family, Request
from lab.models.states import TokenState
from lab.resume import Plan, Prompt, chunks, plan

OPENINGS = ("restored", "known")
NGRAM = 2  # at most so many tokens must have stood together before for what followed them to be a draft


@dataclass(frozen=True)
class Sampling:
    """How tokens are chosen: the likeliest one at temperature 0, else drawn by Gumbel noise of (seed, position).

    A position's noise does not depend on how many tokens were run together, so drafting chooses the same tokens.
    """

    temperature: float = 0.0
    seed: int = 0

    def choose(self, logits: Tensor, position: int) -> int:
        """The token after `position` tokens, from logits [vocabulary]; NotFinite where these are no numbers."""
        logits = logits.float().cpu()
        if not logits.max().isfinite():  # a token that may not come has -inf
            raise NotFinite("The logits of the next token are NaN or infinite, so no token can be chosen.")
        if self.temperature > 0:
            generator = torch.Generator().manual_seed(self.seed * 1_000_003 + position)
            uniform = torch.rand(logits.shape, generator=generator).clamp_(1e-20, 1 - 1e-7)
            logits = logits / self.temperature - torch.log(-torch.log(uniform))
        return int(logits.argmax())


GREEDY = Sampling()


@dataclass(frozen=True)
class Reply:
    """What a turn brought. `cached_tokens` were restored; `plan` says what was encoded for the pass behind them and
    `tower_calls` counts what the vision tower really did. `spliced` [rows, width] and `positions` are the image rows of
    that pass, `logits` [vocabulary] those of the first token; `drafted` and `accepted` count prompt-lookup drafts."""

    tokens: tuple[int, ...]
    cached_tokens: int
    plan: Plan
    tower_calls: int
    positions: np.ndarray
    spliced: Tensor
    logits: Tensor
    drafted: int = 0
    accepted: int = 0

    @property
    def encoded(self) -> int:
        return len(self.plan.encoded)


def prompt_lookup(ids: Sequence[int], count: int, stop_at: int) -> list[int]:
    """Up to `count` tokens that followed the last earlier place of the last two tokens, or else of the last one; they
    end before the token `stop_at`, which stands for image rows."""
    ids = tuple(ids)
    for size in range(NGRAM, 0, -1):
        for start in range(len(ids) - size - 1, -1, -1):
            if count > 0 and ids[start : start + size] == ids[-size:]:
                found = ids[start + size : start + size + count]
                return list(found[: found.index(stop_at)] if stop_at in found else found)
    return []


class Server:
    """Answers requests on one model. `kept` holds states from turn to turn (None: every prompt is a cold pass); with
    `skip` off every image is encoded whatever was restored, as before the change. `chunk` cuts the pass over a prompt
    into parts of so many tokens. Raises InputError for an unknown opening, or a store of another model."""

    def __init__(
        self, family: Family, kept: KeptStates | None = None, skip: bool = True, opening: str = "restored",
        chunk: int | None = None,
    ):  # fmt: skip
        if opening not in OPENINGS:
            raise InputError(f"opening is {opening!r}; choose one of {', '.join(OPENINGS)}.")
        self.family, self.kept, self.skip, self.opening, self.chunk = family, kept, skip, opening, chunk
        if kept is not None:
            kept.claim(family)

    def reply(
        self, request: Request, tokens: int = 8, sampling: Sampling = GREEDY, draft: int = 0, keep: bool = True
    ) -> Reply:
        """Answer with `tokens` tokens, drafting up to `draft` at a time, and keep the state at the turn's end.

        Raises MalformedPrompt before any token is chosen; what was restored is then given back.
        """
        if tokens < 1:
            raise InputError(f"{tokens} tokens were asked for; give 1 or more.")
        prompt = request.prompt
        before = self.family.tower_calls
        with torch.inference_mode(), ExitStack() as turn:
            state, planned, rows = self._open(request, turn)
            tables = self.family.tables(prompt)
            with stage("language"):
                logits = self.run(prompt, planned, rows, state, tables)
            with stage("readback"):
                ids = [*prompt.ids, sampling.choose(logits, len(prompt))]
            counts = [0, 0]
            while len(ids) - len(prompt) < tokens:
                room = min(draft, tokens - (len(ids) - len(prompt)) - 1)
                guess = prompt_lookup(ids, room, self.family.placeholder)
                state, found = self.verify(ids, guess, state, tables, sampling)
                counts = [counts[0] + len(guess), counts[1] + len(found) - 1]
                ids += found
            if keep and self.kept is not None:
                self.kept.keep(Prompt(tuple(ids), prompt.pictures, prompt.placeholder), state)
        places = [place for splice in planned.splices for place in range(splice.start, splice.stop)]
        spliced = torch.cat(rows) if rows else logits.new_zeros(0)
        answer, calls = tuple(ids[len(prompt) :]), self.family.tower_calls - before
        return Reply(answer, planned.resume, planned, calls, np.array(places), spliced, logits, *counts)

    def prefill(self, request: Request, length: int) -> None:
        """Run the first `length` tokens of a prompt from its start and keep their state, wherever it ends.

        A prefix cache that works in pages keeps such states: it knows nothing of where images begin and end.
        """
        prompt = request.prompt
        part = Prompt(prompt.ids[:length], prompt.pictures, prompt.placeholder)
        with torch.inference_mode():
            planned = plan(prompt, 0, self.family.patch_budget)
            rows = self._rows(request, planned, {})
            state = self.family.empty()
            self.run(part, planned, rows, state, self.family.tables(prompt))
            self.kept.keep(part, state)

    # --- opening a turn

    def _open(self, request: Request, turn: ExitStack) -> tuple[TokenState, Plan, list[Tensor]]:
        """State, plan and the rows of its splices; what is lent is given back when `turn` ends, however it ends."""
        prompt, family = request.prompt, self.family
        state, resume, encoded = family.empty(), 0, {}
        if self.kept is not None:
            if self.opening == "known":
                point = self.kept.point(prompt, family.whole_images)
                self._rows(request, self._plan(prompt, point), encoded)
            with stage("restore"):
                loan = turn.enter_context(self.kept.lend(prompt, family.empty, family.whole_images))
            state, resume = loan.state, loan.tokens
        planned = self._plan(prompt, resume)  # refuses a malformed prompt: nothing was said yet
        return state, planned, self._rows(request, planned, encoded)

    def _plan(self, prompt: Prompt, resume: int) -> Plan:
        return plan(prompt, resume, self.family.patch_budget, self.skip)

    def _rows(self, request: Request, planned: Plan, encoded: dict[int, Tensor]) -> list[Tensor]:
        """Rows of each splice of the plan; tower calls whose pictures are not yet in `encoded` are made, and added."""
        for call in planned.calls:
            if not set(call) <= set(encoded):
                found = self.family.rows([request.frames[number] for number in call])
                encoded.update(zip(call, found, strict=True))
        return [encoded[s.picture][s.first : s.first + s.stop - s.start] for s in planned.splices]

    # --- running

    def run(self, prompt: Prompt, planned: Plan, rows: list[Tensor], state: TokenState, tables: dict) -> Tensor:
        """Run `[state.length, n)` and return the last token's logits [vocabulary]."""
        family = self.family
        ids = torch.as_tensor(prompt.array, device=family.device)[None]
        for start, stop in chunks(prompt, state.length, self.chunk, not family.chunks_cut_images):
            part = ids[:, start:stop]
            embeds = family.embed(part)
            for splice, found in zip(planned.splices, rows, strict=True):
                first, last = max(splice.start, start), min(splice.stop, stop)
                if first < last:
                    embeds[0, first - start : last - start] = found[first - splice.start : last - splice.start].to(
                        embeds.dtype
                    )
            hidden = family.hidden(part, embeds, state, tables)
        return family.logits(hidden[-1])

    def verify(
        self, ids: list[int], guess: list[int], state: TokenState, tables: dict, sampling: Sampling
    ) -> tuple[TokenState, list[int]]:
        """Run the last token and a draft behind it in one pass: the state as it is then, and the tokens chosen, as many
        as the draft agrees with and one more.

        What was drafted wrongly is cut from the state again; where that cannot be, the pass ran on a copy, and the right
        part is run once more on the state itself.
        """
        family, length = self.family, state.length + 1 + len(guess)
        aside = state.copy() if guess and not state.croppable(length) else state
        feed = torch.tensor([[ids[-1], *guess]], device=family.device)
        logits = family.logits(family.hidden(feed, family.embed(feed), aside, tables))
        found: list[int] = []
        for place, row in enumerate(logits):
            found.append(sampling.choose(row, len(ids) + place))
            if place == len(guess) or guess[place] != found[-1]:
                break
        right = len(ids) - 1 + len(found)
        if right == length:
            return aside, found
        if aside is state:
            state.crop(right)
        else:
            feed = feed[:, : len(found)]
            family.hidden(feed, family.embed(feed), state, tables)
        return state, found
