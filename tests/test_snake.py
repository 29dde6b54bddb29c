"""The Snake game: its rules, its shield, the published scores, and what is made of an answer."""

import json
import random
from collections import Counter, deque
from dataclasses import asdict
from io import BytesIO
from statistics import mean, median

import numpy as np
import pytest
from PIL import Image
from rich.console import Console

from lab.envs.snake import NAMES, Board, Snake, boards, cycle, play_greedy, play_random
from lab.envs.snake_prompts import PROMPTS, NoMove, decide, key, prompt
from lab.envs.snake_views import HEAD, Screen
from lab.errors import InputError


def at(game: Snake, *body, food=(0, 0)) -> Snake:
    game.body, game.food = deque(body), food
    return game


# ------------------------------------------------------------------------------------------------------------- rules


@pytest.mark.parametrize("width, height", [(24, 16), (6, 6), (4, 5), (5, 4), (7, 10), (10, 7), (64, 63)])
def test_the_cycle_visits_every_cell_once_and_closes(width, height):
    cells = cycle(width, height)
    assert len(set(cells)) == len(cells) == width * height
    for (x, y), (u, v) in zip(cells, (*cells[1:], cells[0]), strict=True):
        assert abs(x - u) + abs(y - v) == 1


def test_the_start():
    game = Snake()
    assert (game.width, game.height, game.index[game.head]) == (24, 16, 196)
    assert list(game.body) == [(12, 8), (11, 8), (10, 8), (9, 8), (8, 8), (7, 8)]


@pytest.mark.parametrize("seed, food", [(7, (20, 7)), (101, (20, 13)), (102, (18, 3)), (103, (0, 13)), (104, (10, 0))])
def test_the_first_food_is_the_published_one(seed, food):
    assert Snake(seed=seed).food == food


@pytest.mark.parametrize(
    "bad", [{"width": 3}, {"height": 3}, {"width": 5, "height": 5}, {"width": 100}, {"seed": -1}, {"seed": 1.5},
            {"length": 1}, {"width": 4, "height": 4, "length": 16}]
)  # fmt: skip
def test_boards_that_cannot_be_are_refused(bad):
    with pytest.raises(InputError):
        Snake(**bad)


def test_each_outcome_of_a_move():
    game = at(Snake(6, 6), (0, 1), (1, 1), (1, 0), (0, 0), food=(5, 5))
    assert [game.look(name).outcome for name in NAMES] == [
        "legal",
        "legal",
        "wall",
        "reverse",
    ]  # the tail leaves (0, 0)
    game = at(game, (1, 1), (1, 2), (2, 2), (2, 1), (2, 0), food=(5, 5))
    assert [game.look(name).outcome for name in NAMES] == ["legal", "reverse", "legal", "body"]


def test_the_tail_is_in_the_way_of_a_growing_snake():
    body = (0, 1), (1, 1), (1, 0), (0, 0)
    assert at(Snake(6, 6), *body, food=(5, 5)).look("UP").legal
    assert at(Snake(6, 6), *body, food=(0, 0)).look("UP").outcome == "body"


def test_a_step_moves_grows_kills_and_ends():
    game = at(Snake(6, 6), (2, 0), (1, 0), food=(3, 0))
    move = game.step("RIGHT")
    assert move.eats and list(game.body) == [(3, 0), (2, 0), (1, 0)]
    assert (game.score, game.tick, game.since_food) == (1, 1, 0) and game.food not in game.body
    game.food = (5, 5)
    game.step("RIGHT")
    assert list(game.body) == [(4, 0), (3, 0), (2, 0)] and game.since_food == 1
    game.step("UP")
    assert (game.dead, game.over, game.won, game.tick) == ("wall", True, False, 3)
    assert list(game.body) == [(4, 0), (3, 0), (2, 0)]
    with pytest.raises(InputError, match="over"):
        game.step("DOWN")
    with pytest.raises(InputError, match="NORTH"):
        Snake().step("NORTH")


def test_the_same_seed_plays_the_same_game():
    one, other = (play_greedy(Snake(seed=11), 200) for _ in range(2))
    assert one.board() == other.board()
    assert play_greedy(Snake(seed=12), 200).board() != one.board()


def test_a_board_goes_through_json_and_back():
    game = play_greedy(Snake(seed=3), 90)
    again = Board.of(json.loads(json.dumps(asdict(game.board()))))
    assert again == game.board()
    assert Snake.at(again).plan() == game.plan() and Snake.at(again).look("UP") == game.look("UP")


# ------------------------------------------------------------------------------------------------------------ shield


@pytest.mark.parametrize("seed", range(12))
def test_any_choice_among_safe_moves_fills_the_board(seed):
    game, rng = Snake(6, 6, seed=seed), random.Random(seed)
    while not game.over:
        game.step(rng.choice(game.plan().safe))  # fails where none is safe
        if not game.won:
            game.check()
    assert game.won and game.dead is None and game.food is None and len(game.body) == 36


@pytest.mark.parametrize("seed", range(12))
def test_the_shield_keeps_the_worst_model_alive_to_a_full_board(seed):
    """A model that always wants an unsafe move, or has nothing to say, dies without the shield and wins with it."""
    shielded, bare, rng = Snake(6, 6, seed=seed), Snake(6, 6, seed=seed), np.random.default_rng(seed)
    while not shielded.over:
        plan, answer = shielded.plan(), rng.dirichlet(np.ones(4))
        for i, move in enumerate(plan.moves):
            answer[i] += 0 if move.safe else 2
        shielded.step(decide(plan, answer / answer.sum(), 0.5, 0.5).executed)
        if not bare.over:
            bare.step(decide(plan := bare.plan(), [not m.legal for m in plan.moves], 0.5, 0.5, shield=False).executed)
    assert shielded.won and bare.dead


def test_check_notices_a_body_out_of_order():
    game = play_greedy(Snake(seed=5), 50)
    game.check()
    game.body = deque([*list(game.body)[::-1]])
    with pytest.raises(AssertionError, match="order"):
        game.check()
    game = Snake()
    game.since_food = 385
    with pytest.raises(AssertionError, match="food"):
        game.check()


# ------------------------------------------------------------------------------------------------- published figures


def test_planner_greedy_reaches_the_published_scores():
    assert [play_greedy(Snake(seed=seed), 600).score for seed in range(101, 105)] == [21, 26, 26, 20]


def test_twenty_seeds_reach_the_published_means():
    greedy = [play_greedy(Snake(seed=seed), 300).score for seed in range(2000, 2020)]
    assert (mean(greedy), median(greedy)) == (11.35, 12)
    at_random = [play_random(Snake(seed=seed), 300, seed).score for seed in range(2000, 2020)]
    assert (mean(at_random), median(at_random)) == (8.85, 9)


def test_random_safe_play_reaches_the_published_scores():
    assert [play_random(Snake(seed=seed), 600, seed).score for seed in range(101, 105)] == [19, 21, 22, 16]


def test_how_small_the_workload_is():
    games = [Snake.at(board) for board in boards(range(101, 105), 600)]
    plans = [game.plan() for game in games]
    inputs = Counter(map(key, plans))
    assert (len(games), len(inputs)) == (2400, 53)
    top = [count for _, count in inputs.most_common()]
    assert round(sum(top[:5]) / 2400, 2) == 0.72 and round(sum(top[:12]) / 2400, 2) == 0.89
    assert sum(len(plan.safe) == 1 for plan in plans) == 1899
    assert sum(not plan.reachable for plan in plans) / 2400 == 0.015
    asked = {kind: {prompt(game, plan, kind) for game, plan in zip(games, plans, strict=True)} for kind in PROMPTS}
    assert len(asked["compact"]) == 53  # the prompt says what its key says, no more and no less
    assert len(asked["verbose"]) > 350


# ----------------------------------------------------------------------------------------------------------- answers


def plan_of(safe=("LEFT", "RIGHT")):
    game = at(Snake(6, 6), (1, 0), (0, 0), food=(5, 5))
    moves = tuple(
        type(move)(move.direction, move.target, "legal", False, 1, move.direction in safe) for move in game.plan().moves
    )
    return type(game.plan())(moves, next(iter(safe), None), True, 30)


def test_a_safe_proposal_is_executed():
    found = decide(plan_of(), [0.1, 0.1, 0.5, 0.3], 0.9, 0.8)
    assert (found.proposed, found.executed, found.intervention) == ("LEFT", "LEFT", False)
    assert (found.risk, found.food) == (0.1, 0.8)


def test_an_unsafe_proposal_gives_way_to_the_likeliest_safe_one():
    found = decide(plan_of(), [0.6, 0.1, 0.1, 0.2], 0.9, 0.8)
    assert (found.proposed, found.executed, found.intervention) == ("UP", "RIGHT", True)
    np.testing.assert_allclose(found.probabilities, [0.6, 0.1, 0.1, 0.2])
    assert decide(plan_of(), [0.6, 0.1, 0.1, 0.2], 0.9, 0.8, shield=False).executed == "UP"


def test_ties_after_rounding_go_to_the_first():
    assert decide(plan_of(), [0.1, 0.1, 0.39996, 0.40004], 0.5, 0.5).proposed == "LEFT"


@pytest.mark.parametrize(
    "answer", [([np.nan, 0, 0, 1], 0.5, 0.5), ([0.5, 0.5, 0, 0], np.inf, 0.5), ([1.2, 0, 0, 0], 0.5, 0.5),
               ([0.5, 0.5, -0.1, 0.1], 0.5, 0.5), ([0.5, 0.5], 0.5, 0.5)]
)  # fmt: skip
def test_answers_that_are_no_probabilities_make_no_move(answer):
    with pytest.raises(NoMove):
        decide(plan_of(), *answer)


def test_no_safe_direction_makes_no_move():
    with pytest.raises(NoMove, match="safe"):
        decide(plan_of(safe=()), [0.25] * 4, 0.5, 0.5)
    assert decide(plan_of(safe=()), [0.1, 0.7, 0.1, 0.1], 0.5, 0.5, shield=False).executed == "DOWN"


def test_an_unknown_prompt_is_refused():
    with pytest.raises(InputError, match="terse"):
        prompt(Snake(), Snake().plan(), "terse")


# ---------------------------------------------------------------------------------------------------------- pictures


def test_it_draws_itself():
    game = play_greedy(Snake(seed=4), 120)
    frame = game.frame()
    assert frame.shape == (16 * 12, 24 * 12, 3) and frame.dtype == np.uint8
    x, y = game.head
    assert tuple(frame[12 * y + 5, 12 * x + 5]) == HEAD
    np.testing.assert_array_equal(np.asarray(Image.open(BytesIO(game._repr_png_()))), frame)
    console = Console(width=80, force_terminal=True, color_system="truecolor", record=True)
    with console.capture() as said:
        console.print(game)
    assert f"48;2;{';'.join(map(str, HEAD))}" in said.get()
    assert len(said.get().splitlines()) == 16


def test_a_screen_draws_to_memory_and_starts_anew_each_time():
    screen, game = Screen(), Snake()
    first = screen.draw(game, "score 0")
    game.step("RIGHT")
    assert "score 0" in first and screen.draw(game, "score 0") != first
    assert len(screen.draw(game)) < 2 * len(first)
