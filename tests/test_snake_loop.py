"""The Snake loop: equal actions whatever the options, rows that replay, tables and sentences, and what is drawn."""

import json

import numpy as np
import pandas as pd
import pytest
import torch

from lab import figures
from lab.envs import make
from lab.envs.snake import Board, Snake, play_greedy
from lab.envs.snake_prompts import NoMove
from lab.envs.snake_views import Screen, moving_picture
from lab.errors import InputError
from lab.experiments import snake, snake_checks, snake_results
from lab.measure import time_call
from lab.models.text import load_text_model
from lab.records import read_rows
from lab.snake_loop import STAGES, Pilot, replay
from lab.snake_training import Recipe, positions, train
from lab.steps import TextStep
from lab.steps.compiled import compiler


@pytest.fixture(scope="module", autouse=True)
def one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def trained():
    return load_text_model("snake")


@pytest.fixture(scope="module")
def rows(tmp_path_factory):
    """A whole run at its smallest, read back from disk, where compiling is left out."""
    path = tmp_path_factory.mktemp("snake") / "snake.rows.jsonl"
    patch = pytest.MonkeyPatch()
    patch.setattr(torch, "compile", lambda work, **_: work)
    try:
        snake.run("smoke", out=path)
    finally:
        patch.undo()
    return read_rows(path)


# -------------------------------------------------------------------------------------------------------------- loop


def test_the_stages_of_a_move_account_for_its_time(trained):
    pilot, game = Pilot(TextStep(trained), screen=Screen()), Snake(seed=101)
    pilot.look(game)
    times = [time_call(pilot.look, game) for _ in range(9)]
    assert all(set(one) == {*STAGES, "total"} for one in times)
    rest = np.median([1 - sum(one[name] for name in STAGES) / one["total"] for one in times])
    assert 0 <= rest < 0.1


def test_looking_leaves_the_game_as_it_is_and_moving_does_not(trained):
    pilot, game = Pilot(TextStep(trained)), Snake(seed=101)
    before = game.board()
    turn = pilot.look(game)
    assert game.board() == before == turn.board and 0 <= turn.margin <= 1
    assert pilot.move(game).decision.executed == turn.decision.executed and game.tick == 1


def test_an_answer_that_is_not_finite_makes_no_move():
    model = load_text_model("snake")
    model.scorer[3].bias.fill_(float("inf"))
    game = Snake(seed=101)
    before = game.board()
    with pytest.raises(RuntimeError):
        Pilot(TextStep(model)).move(game)
    assert game.board() == before


def test_a_model_whose_numbers_are_no_probabilities_makes_no_move(trained, monkeypatch):
    step, game = TextStep(trained), Snake(seed=101)
    answers = step.decide
    monkeypatch.setattr(step, "decide", lambda prompt: [_spoiled(one) for one in answers(prompt)])
    with pytest.raises(NoMove):
        Pilot(step).move(game)
    assert game.tick == 0


def _spoiled(answer):
    return type(answer)(answer.question, answer.logits, answer.probabilities + 1, answer.p_act)


def test_all_candidates_act_alike_on_one_stream(trained, monkeypatch):
    """Compiled candidates run uncompiled here, on many shapes; the next test compiles them."""
    monkeypatch.setattr(torch, "compile", lambda work, **_: work)
    steps = snake.build(trained)
    found = snake_checks.actions(trained, steps, {"stream": 200, "one_length": None})
    assert found["moves"] == 200 and 10 < found["distinct_inputs"] <= 53 and found["min_margin"] > 0
    for candidate in found["candidates"].values():
        assert candidate["executed"] == candidate["proposed"] == 200 and candidate["max_logit"] < 2e-4
    kept = found["prefix_cache"]
    assert kept["misses"] == kept["kept"] <= 2 + 53 and kept["hits"] + kept["misses"] == 600


@pytest.mark.skipif(not compiler(), reason="no C++ compiler here")
def test_compiled_candidates_are_compiled_and_act_as_eager(trained):
    """As users run them, C++ included; of one length, so that each candidate meets one shape."""
    steps = snake.build(trained)
    found = snake_checks.actions(trained, steps, {"stream": 20, "one_length": 63})
    for name, step in steps.items():
        cost = step.start_cost()
        assert (cost["compile_s"] > 0, cost["shapes"]) == ((True, 1) if step.compile else (False, 0)), name
        assert found["candidates"].get(name, {"executed": 20})["executed"] == 20
        assert found["candidates"].get(name, {"max_logit": 0})["max_logit"] < 2e-4
    made = [step for step in steps.values() if step.compile]
    assert len(made) == 5 and sum(step.counts["graphs"] + step.counts["disk_hits"] for step in made) > 0


def test_the_candidates_are_the_published_seven(trained):
    from lab.published import published

    table = published("snake_ablation")
    assert list(table["candidate"]) == list(snake.CANDIDATES)
    ratio = table["multilingual_p50_ms"] / table["multilingual_p50_ms"].iloc[0]
    assert round(1 / ratio.min(), 3) == 1.065
    loops = snake_results.loop_beside_published([], published("snake_loop")).set_index("loop")
    mean = loops.loc["published, mean of four"]
    assert mean[["times faster", "low", "high"]].tolist() == pytest.approx([1.070, 0.913, 1.255], abs=1e-3)
    assert mean["pooled"] == pytest.approx(1.0647, abs=5e-5)


def test_boards_of_one_length_have_one_length(trained):
    step = TextStep(trained)
    for length in (63, 64):
        settings = {"stream": 40, "one_length": length}
        assert {step.prepare(one).ids.shape[1] for one in snake_checks.asked(settings)} == {length}


def test_memory_does_not_grow_with_calls(trained):
    steps = {name: TextStep(trained, cache_prompts=kept) for name, kept in ((snake.EAGER, False), (snake.ALL, True))}
    found = snake_checks.memory(trained, steps, {"seed": 0, "calls": 200, "stream": 100, "one_length": None})
    for candidate in found["candidates"].values():
        assert candidate["shapes"] > 1 and len(candidate["samples"]) > 90
        assert candidate["rss"]["slope"] < 20_000  # a leaked batch of logits and states would be more
    samples = found["candidates"][snake.EAGER]["samples"]
    assert samples[0][1] > 1e8 and (samples[0][2] is None or samples[0][2] > 1e6)


@pytest.mark.skipif(snake_checks.allocated(torch.device("cpu")) is None, reason="this C library does not tell")
def test_a_leak_is_seen():
    """By the allocator: resident memory need not rise while a leak fills pages that earlier work has freed."""
    kept = []
    found = snake_checks._slopes([0] * 200, lambda _: kept.append(b"x" * 1_000_000), torch.device("cpu"))
    assert 950_000 < found["allocator"]["low"] < found["allocator"]["high"] < 1_100_000


# -------------------------------------------------------------------------------------------------------------- rows


def test_rows_hold_what_replays_the_loop(rows):
    part = rows[(rows["title"] == "loop, snake") & (rows["stage"] == "total") & (rows["phase"] == "timed")]
    eager, both = (part[part["arm"] == name].sort_values("block")["counts"] for name in (snake.EAGER, snake.ALL))
    assert len(eager) == 8
    for one, other in zip(eager, both, strict=True):
        board = Board.of(one["board"])
        assert board.tick == one["tick"] and one["executed"] == other["executed"] and one["seed"] == 101
        assert Snake.at(board).look(one["executed"]).safe
        assert play_greedy(Snake(seed=101), board.tick).board() == board


def test_recorded_games_play_again_to_the_recorded_score(rows):
    seed, directions = snake_results.replay_seed(rows)
    boards = replay(seed, directions)
    best = max(line["score"] for line in snake_results.lines(rows, "game") if line["policy"] == "snake")
    final = Snake.at(boards[-1])
    assert len(boards) == 40 and boards[-1].score + final.look(directions[-1]).eats == best
    with pytest.raises(InputError, match="another game"):
        replay(seed, ["UP"] * 40)
    shown = snake_results.replayed(seed, directions)._repr_mimebundle_()
    assert "data:image/gif;base64," in shown["text/html"] and f"seed {seed}" in shown["text/plain"]


def test_tables_and_sentences(rows):
    table = snake_results.ablation(rows, "snake")
    assert list(table["candidate"]) == list(snake.CANDIDATES) and (table["n"] == 8).all()
    assert (table["low"] <= table["ms"]).all() and (table["ms"] <= table["high"]).all()
    assert table["ratio"].iloc[0] == 1 and not table["shown"].iloc[0]
    found = snake_results.loop(rows, "snake")
    assert found.speedup.low <= found.speedup.value <= found.speedup.high and found.speedup.n == 8
    assert ("a difference is shown" in found.sentence) == found.shown and "A/A" in found.sentence
    assert ("no difference shown" in found.sentence) != found.shown
    stages = snake_results.stages(rows, "snake")
    assert (stages[list(STAGES)].sum(axis=1) > 0.5 * stages["total"]).all()
    kinds = snake_results.prompt_kinds(rows, "snake").set_index("prompt")
    assert kinds.loc["verbose", "tokens"] > 1.4 * kinds.loc["compact", "tokens"]
    said = ["published tokens", "published ms", "published ratio"]
    assert kinds.loc["verbose", said].tolist() == ["242 to 246", 11.8, pytest.approx(1.270, abs=1e-3)]
    beside = snake_results.scores_beside_published(rows).set_index(["where", "policy"])
    assert beside.loc[("here", "snake"), ["games", "moves"]].tolist() == [5, 200]
    assert beside.loc[("here", "snake"), "p50_ms"] == table["ms"].iloc[0] < beside.loc[("here", "snake"), "p95_ms"]
    assert beside.loc[("published", "multilingual"), ["survived", "p95_ms"]].tolist() == [20, 14.38]
    scores = snake_results.scores(rows).set_index("policy")
    assert (scores["survived"] == 5).all() and scores.loc["planner-greedy", "interventions"] == 0
    assert found.sentence in snake_results.answer(rows)
    assert len(snake_results.memory(rows)) == 4 and len(snake_results.start(rows)) == 7
    assert "snake, ours" in snake_results.beside_published(rows)
    with pytest.raises(InputError, match="07_snake_loop"):
        snake_results.lines(pd.DataFrame(), "start")


def test_a_speedup_is_shown_only_outside_the_noise(rows):
    part = rows[rows["title"] == "loop, snake"].copy()
    part.attrs = rows.attrs
    rng = np.random.default_rng(0)
    for name, ms in ((snake.EAGER, 10.0), (f"{snake.EAGER} again", 10.0), (snake.ALL, 5.0)):
        own = part["arm"] == name
        part.loc[own, "ms"] = ms + rng.uniform(0, 0.1, own.sum())
    found = snake_results.loop(part, "snake")
    assert found.shown and [found.speedup.value, found.pooled] == pytest.approx([2, 2], abs=0.1)
    part.loc[part["arm"] == snake.ALL, "ms"] = 10 + rng.uniform(0, 0.1, (part["arm"] == snake.ALL).sum())
    assert not snake_results.loop(part, "snake").shown


def test_a_benchs_document(rows):
    said = json.loads(json.dumps(snake_results.Bench(rows).to_json()))
    assert [line["candidate"] for line in said["ablation"]] == list(snake.CANDIDATES)
    assert all({"ms", "low", "high"} <= set(line) for line in said["ablation"])
    assert {"ratio", "low", "high", "aa_ratio"} <= set(said["loop"])
    assert said["actions_equal"] is True and said["distinct_inputs"] >= 1
    assert set(said["prefix_cache"]) == {"hits", "misses", "evictions"}
    assert isinstance(said["memory_slope_bytes_per_call"], float)
    assert "compiled" in snake_results.Bench(rows).table()


def test_figures_are_drawn(rows):
    tables = {"snake": snake_results.ablation(rows, "snake")}
    memory, games = snake_results.lines(rows, "memory")[0], snake_results.lines(rows, "game")
    for figure in (
        figures.candidate_dots(tables, {"snake": snake_results.again(rows, "snake")}),
        figures.loop_stages({"snake": snake_results.stages(rows, "snake")}),
        figures.policy_dots(games, snake_results.scores(rows)),
        figures.memory_lines(memory),
    ):
        figure.canvas.draw()
    picture = moving_picture([Snake().board()], "one")
    assert picture.text == "one: 1 moves, score 0"


def test_unknown_profiles_presets_are_refused():
    with pytest.raises(InputError, match="profile"):
        snake.run("huge")
    with pytest.raises(InputError, match="Unknown text model"):
        snake.run("smoke", preset="huge")


def test_the_environment_is_one_of_the_others():
    env = make("snake:8x6", seed=3)
    frame = env.reset()
    assert frame.shape == (72, 96, 3) and env.actions == ["UP", "DOWN", "LEFT", "RIGHT"]
    again, reward, over = env.step(env.actions.index(env.game.plan().preferred))
    assert again.shape == frame.shape and (reward, over) == (float(env.game.score), False)
    while not over:
        _, reward, over = env.step(0)
    assert env.game.dead and env.describe()["width"] == 8
    for bad in ("snake:", "snake:big", "snake:3x3", "snake:5x5"):
        with pytest.raises(InputError):
            make(bad)


# ---------------------------------------------------------------------------------------------------------- training


def test_training_repeats_and_loads(tmp_path):
    recipe = Recipe(steps=3, positions=20, batch=4)
    for name in ("a", "b"):
        folders = train(recipe, tmp_path / name, quiet=True)
    for which, folder in folders.items():
        one, other = ((tmp_path / name / which / "model.safetensors").read_bytes() for name in ("a", "b"))
        assert one == other and len(one) < 3_000_000
        load_text_model(str(folder))
    told = json.loads((folders["tenth"] / "training.json").read_text())
    assert told["recipe"]["positions"] == 2
    assert (tmp_path / "a" / "training.rows.jsonl").read_text().count('"agreement"') == 6


def test_positions_of_training_are_none_of_the_benches():
    plans = [plan for _, plan in positions(1500, 0)]
    assert len(plans) == 1500 and any(not plan.safe for plan in plans) and any(not plan.reachable for plan in plans)


def test_the_shipped_checkpoint_beats_random_safe_moves():
    settings = {"seeds": 20, "horizon": 300}
    games = snake_checks.games(settings, "cpu")
    table = pd.DataFrame(games).pivot(index="seed", columns="policy", values="score")
    assert (table["planner-greedy"].mean(), table["random-safe"].mean()) == (11.35, 8.85)
    gain = table["snake"] - table["random-safe"]
    half = 2.09 * gain.std() / np.sqrt(len(gain))
    assert gain.mean() - half > 0
    assert pd.DataFrame(games)["survived"].all()
