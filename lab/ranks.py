"""Two tensor-parallel ranks, for real on `torch.distributed`: why they encode every image of a resumed prompt.

Rank 0 has the vision tower. It sends image rows to rank 1, a follower with the same decoder, which takes rows only while
its sequence is unfed; a restore marks it fed. So rank 0 encodes and sends all rows before the restore, although most of
them are not needed: with the state restored first, the rows that are needed would be refused, and the ranks would be out
of step. Here both run the whole decoder, not a half of it each: what is shown is the order, not the split.
"""

from contextlib import ExitStack

import torch
import torch.distributed as dist
from torch import Tensor

from lab.caches import KeptStates
from lab.conversations import GREEDY, Server
from lab.errors import InputError
from lab.models.families import Family, Request
from lab.resume import Plan, Prompt, plan

ORDERS = ("rows first", "restore first")


class OutOfStep(RuntimeError):
    """A rank was told to do what its sequence does not allow now, or chose another token than its leader."""


class Rank:
    """One rank's sequence: rows come in, the state is restored, the rest is run, tokens follow."""

    def __init__(self, family: Family, max_bytes: int = 1 << 28):
        self.server = Server(family, KeptStates(max_bytes))
        self.turn = ExitStack()

    def begin(self, prompt: Prompt) -> None:
        """A new sequence: nothing is restored, nothing fed."""
        self.turn.close()
        self.prompt, self.rows, self.fed = prompt, {}, False

    def take(self, rows: dict[int, Tensor]) -> None:
        """Take the rows of pictures, by their numbers; OutOfStep once the sequence is fed."""
        if self.fed:
            raise OutOfStep("Image rows came to a sequence that is fed already; rows come before the restore.")
        self.rows.update(rows)

    def restore(self) -> int:
        """Restore the longest kept prefix and return its tokens; the sequence is fed from here on."""
        family = self.server.family
        loan = self.turn.enter_context(self.server.kept.lend(self.prompt, family.empty, family.whole_images))
        self.state, self.fed = loan.state, True
        return loan.tokens

    def run(self) -> int:
        """Run the prompt from where the state ends, and return the first token."""
        family = self.server.family
        planned: Plan = plan(self.prompt, self.state.length, family.patch_budget)
        if missing := [s.picture for s in planned.splices if s.picture not in self.rows]:
            raise OutOfStep(f"The rows of picture(s) {missing} never came.")
        rows = [self.rows[s.picture][s.first : s.first + s.stop - s.start] for s in planned.splices]
        self.tables = family.tables(self.prompt)
        logits = self.server.run(self.prompt, planned, rows, self.state, self.tables)
        self.ids = [*self.prompt.ids, GREEDY.choose(logits, len(self.prompt))]
        return self.ids[-1]

    def step(self) -> int:
        """Run the last token and return the next."""
        self.state, found = self.server.verify(self.ids, [], self.state, self.tables, GREEDY)
        self.ids += found
        return self.ids[-1]

    def end(self) -> None:
        """Keep the state for the next turn, and give back what was lent."""
        prompt = Prompt(tuple(self.ids), self.prompt.pictures, self.prompt.placeholder)
        self.server.kept.keep(prompt, self.state)
        self.turn.close()


def follow(family: Family) -> None:
    """Rank 1: do what rank 0 says until it says stop, and answer each time with a token, a count, or a refusal."""
    rank = Rank(family)
    while (order := _broadcast(None, 0))[0] != "stop":
        try:
            with torch.inference_mode():
                said = ("done", getattr(rank, order[0])(*order[1:]))
        except OutOfStep as error:
            rank.turn.close()
            said = ("refused", str(error))
        _broadcast(said, 1)


class Leader:
    """Rank 0: its own sequence, the vision tower, and the word that rank 1 follows."""

    def __init__(self, family: Family):
        self.family, self.rank = family, Rank(family)

    def reply(self, request: Request, tokens: int, order: str = "rows first") -> tuple[list[int], int, int]:
        """Answer: (tokens, cached tokens, images encoded). OutOfStep where rank 1 refuses; InputError for another order."""
        if order not in ORDERS:
            raise InputError(f"The order is {order!r}; choose one of {', '.join(ORDERS)}.")
        with torch.inference_mode(), ExitStack() as turn:
            turn.callback(lambda: self.rank.turn.close())
            self._both("begin", request.prompt)
            cached = self._both("restore") if order == "restore first" else 0
            calls = plan(request.prompt, cached, self.family.patch_budget).calls
            for call in calls:
                rows = self.family.rows([request.frames[number] for number in call])
                self._both("take", dict(zip(call, rows, strict=True)))
            if order == "rows first":
                cached = self._both("restore")
            said = [self._both("run")]
            said += [self._both("step") for _ in range(tokens - 1)]
            self._both("end")
        return said, cached, sum(map(len, calls))

    def stop(self) -> None:
        _broadcast(("stop",), 0)

    def _both(self, name: str, *values):
        """Both ranks do it; the follower's answer must be the leader's."""
        _broadcast((name, *values), 0)
        try:
            # the leader made these rows itself: its own sequence may have them whenever they come
            mine = self.rank.rows.update(*values) if name == "take" else getattr(self.rank, name)(*values)
        finally:
            kind, theirs = _broadcast(None, 1)
        if kind == "refused":
            raise OutOfStep(f"Rank 1 refused {name!r}: {theirs}")
        if theirs != mine:
            raise OutOfStep(f"After {name!r} rank 1 answers {theirs}, rank 0 {mine}.")
        return mine


def _broadcast(value, source: int):
    box = [value]
    dist.broadcast_object_list(box, src=source)
    return box[0]
