"""Snake on a board with a Hamiltonian cycle: the rules, the shield, and what the planner knows of a move.

The workload of the published Snake loop, from its rules. A cell is (x, y), y grows downward. Directions come in the order
UP, DOWN, LEFT, RIGHT, which also breaks ties. The cycle visits every cell once; a move that the shield calls safe never
overtakes the tail along it, never passes the food and always goes forward, so any choice among safe moves fills the board.
"""

import random
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import lru_cache

from lab.errors import InputError, whole

Cell = tuple[int, int]
DIRECTIONS: dict[str, Cell] = {"UP": (0, -1), "DOWN": (0, 1), "LEFT": (-1, 0), "RIGHT": (1, 0)}
NAMES = tuple(DIRECTIONS)
WIDTH, HEIGHT, LENGTH = 24, 16, 6
LEAST = 4  # cells a side
MOST = 64


@lru_cache(maxsize=16)
def cycle(width: int, height: int) -> tuple[Cell, ...]:
    """Every cell of the board once, each a neighbour of the next, the last of the first.

    With an even height: from the corner row by row over the columns right of the first, to and fro, then up the first
    column. With an odd height, which needs an even width, the same with x and y exchanged.
    """
    if height % 2:
        return tuple((x, y) for y, x in cycle(height, width))
    across = [(x, y) for y in range(height) for x in (range(1, width) if y % 2 == 0 else range(width - 1, 0, -1))]
    return ((0, 0), *across, *((0, y) for y in range(height - 1, 0, -1)))


@dataclass(frozen=True)
class Move:
    """What one direction would lead to.

    `outcome` is wall, reverse, body or legal; `eats` whether the food is there; `advance` how far the head would go along
    the cycle (0 where it leaves the board); `safe` whether the shield lets it pass.
    """

    direction: str
    target: Cell
    outcome: str
    eats: bool
    advance: int
    safe: bool

    @property
    def legal(self) -> bool:
        return self.outcome == "legal"


@dataclass(frozen=True)
class Plan:
    """What the planner knows before a model is asked.

    `moves` in the order UP, DOWN, LEFT, RIGHT; `preferred` is the safe direction that goes farthest along the cycle (the
    first on a tie), None where none is safe; `reachable` whether a way over empty cells leads from the head to the food,
    `open_cells` how many cells such ways reach, the head's own included.
    """

    moves: tuple[Move, ...]
    preferred: str | None
    reachable: bool
    open_cells: int

    @property
    def safe(self) -> tuple[str, ...]:
        return tuple(move.direction for move in self.moves if move.safe)


@dataclass(frozen=True)
class Board:
    """A position, all that a decision depends on, as text and numbers that JSON holds."""

    width: int
    height: int
    body: tuple[Cell, ...] = field(repr=False)  # the head first
    food: Cell | None
    tick: int = 0
    score: int = 0
    since_food: int = 0

    @classmethod
    def of(cls, line: dict) -> "Board":
        """Back from JSON."""
        cells = tuple(map(tuple, line["body"]))
        return cls(**line | {"body": cells, "food": line["food"] and tuple(line["food"])})


class Snake:
    """One game. `body` is a deque of cells, the head first; `food` is None once the board is full.

    All randomness is one `random.Random(seed)`, from which each piece of food is drawn among the empty cells in the order
    of the cycle; so the food's places depend on the way taken too. Raises InputError for a board that has no cycle (both
    sides odd, or a side below 4), for a length that does not fit, and for a seed that is no whole number.
    """

    def __init__(self, width: int = WIDTH, height: int = HEIGHT, seed: int = 7, length: int = LENGTH):
        for name, side in (("width", width), ("height", height)):
            whole(f"the board's {name}", side, LEAST)
            if side > MOST:
                raise InputError(f"the board's {name} is {side}; boards go up to {MOST} cells a side.")
        if width % 2 and height % 2:
            raise InputError(f"A board of {width}x{height} cells has no cycle; make one side even.")
        whole("the seed", seed, 0)
        whole("the snake's length", length, 2)
        if length >= width * height:
            raise InputError(f"A snake of {length} does not fit a board of {width * height} cells with room for food.")
        self.width, self.height, self.seed = width, height, seed
        self.cells = cycle(width, height)
        self.index = {cell: i for i, cell in enumerate(self.cells)}
        start = self.index[width // 2, height // 2]
        self.body: deque[Cell] = deque(self.cells[start - i] for i in range(length))
        self._rng = random.Random(seed)
        self.tick = self.score = self.since_food = 0
        self.dead: str | None = None
        self.won = False
        self.food: Cell | None = self._draw_food()

    @classmethod
    def at(cls, board: Board, seed: int = 0) -> "Snake":
        """A game that goes on from `board`; its next food comes from a generator of its own, seeded `seed`."""
        game = cls(board.width, board.height, seed)
        game.body, game.food = deque(board.body), board.food
        game.tick, game.score, game.since_food = board.tick, board.score, board.since_food
        return game

    def board(self) -> Board:
        return Board(self.width, self.height, tuple(self.body), self.food, self.tick, self.score, self.since_food)

    @property
    def over(self) -> bool:
        return self.won or self.dead is not None

    @property
    def head(self) -> Cell:
        return self.body[0]

    def _draw_food(self) -> Cell | None:
        taken = set(self.body)
        empty = [cell for cell in self.cells if cell not in taken]
        return self._rng.choice(empty) if empty else None

    # ---------------------------------------------------------------------------------------------- a move's outcome

    def ahead(self, cell: Cell) -> int:
        """How many steps along the cycle lead from the head to `cell`."""
        return (self.index[cell] - self.index[self.head]) % len(self.cells)

    def look(self, direction: str) -> Move:
        """What `direction` would lead to; see `Move`. On a move that does not eat, the tail's cell counts as free."""
        if direction not in DIRECTIONS:
            raise InputError(f"There is no direction {direction!r}; they are {', '.join(NAMES)}.")
        dx, dy = DIRECTIONS[direction]
        target = self.head[0] + dx, self.head[1] + dy
        eats = target == self.food
        if target not in self.index:
            return Move(direction, target, "wall", False, 0, False)
        advance = self.ahead(target)
        if target == self.body[1]:
            outcome = "reverse"
        elif target in self.body and (eats or target != self.body[-1]):
            outcome = "body"
        else:
            outcome = "legal"
        return Move(direction, target, outcome, eats, advance, outcome == "legal" and self._passes(advance, eats))

    def _passes(self, advance: int, eats: bool) -> bool:
        """The shield: never past the tail (nor onto it when growing), never past the food, always forward."""
        if self.food is None:
            return False
        tail = self.ahead(self.body[-1])
        return 0 < advance <= self.ahead(self.food) and (advance < tail if eats else advance <= tail)

    def plan(self) -> Plan:
        """What the planner knows of the position; see `Plan`."""
        moves = tuple(self.look(direction) for direction in NAMES)
        safe = [move for move in moves if move.safe]
        preferred = max(safe, key=lambda move: move.advance).direction if safe else None  # max keeps the first of a tie
        return Plan(moves, preferred, *self._reach())

    def _reach(self) -> tuple[bool, int]:
        """Whether empty cells connect the head to the food, and how many cells are reached; the tail counts as blocked."""
        blocked, seen, edge = set(self.body), {self.head}, [self.head]
        while edge:
            found = []
            for x, y in edge:
                for dx, dy in DIRECTIONS.values():
                    cell = x + dx, y + dy
                    if cell in self.index and cell not in blocked and cell not in seen:
                        seen.add(cell)
                        found.append(cell)
            edge = found
        return self.food in seen, len(seen)

    # ---------------------------------------------------------------------------------------------- playing

    def step(self, direction: str) -> Move:
        """Take one step and return what it led to. An illegal move kills; a full board wins.

        Raises InputError for an unknown direction and for a game that is over.
        """
        if self.over:
            raise InputError("This game is over; start another one.")
        move = self.look(direction)
        self.tick += 1
        self.since_food += 1
        if not move.legal:
            self.dead = move.outcome
            return move
        if not move.eats:
            self.body.pop()
        self.body.appendleft(move.target)
        if move.eats:
            self.score += 1
            self.since_food = 0
            self.food = self._draw_food()
            self.won = self.food is None
        return move

    def check(self) -> None:
        """Raise AssertionError where the shield's promise is broken: the body out of the cycle's order, or food not
        reached within as many ticks as the board has cells."""
        ahead = [self.ahead(cell) for cell in self.body]
        gaps = [(before - after) % len(self.cells) for before, after in zip(ahead, ahead[1:], strict=False)]
        assert sum(gaps) < len(self.cells), "the body is not in the order of the cycle"
        assert self.since_food <= len(self.cells), "no food for as many ticks as the board has cells"

    # ---------------------------------------------------------------------------------------------- pictures

    def frame(self, scale: int = 12):
        """The board as a picture, uint8 [height * scale, width * scale, 3]."""
        from lab.envs.snake_views import picture

        return picture(self, scale)

    def _repr_png_(self) -> bytes:
        from lab.moments import encode

        return encode(self.frame(), "png")

    def __rich__(self):
        from lab.envs.snake_views import rich_board

        return rich_board(self)


def play_greedy(game: Snake, moves: int) -> Snake:
    """Play up to `moves` moves, each the planner's preferred one; return the game."""
    for _ in range(moves):
        if game.over:
            break
        game.step(game.plan().preferred)
    return game


def play_random(game: Snake, moves: int, seed: int) -> Snake:
    """Play up to `moves` moves drawn uniformly from the safe ones by `random.Random(seed)`; return the game."""
    rng = random.Random(seed)
    for _ in range(moves):
        if game.over:
            break
        game.step(rng.choice(game.plan().safe))
    return game


def boards(seeds: Iterable[int], moves: int) -> list[Board]:
    """The positions that planner-greedy play meets, `moves` from each seed on the default board."""
    found = []
    for seed in seeds:
        game = Snake(seed=seed)
        for _ in range(moves):
            if game.over:
                break
            found.append(game.board())
            game.step(game.plan().preferred)
    return found
