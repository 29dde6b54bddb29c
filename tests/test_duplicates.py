import json
import tracemalloc

import numpy as np
import pandas as pd
import pytest

from lab.envs import make, play
from lab.errors import InputError
from lab.experiments import duplicates, players
from lab.experiments import frame_repeats as repeats
from lab.experiments import frame_scan as scanning
from lab.figures import change_curves, frame_pairs, recurrence_lines, repeat_dots
from lab.published import published
from lab.records import as_frame, read_rows
from lab.stats import share_interval

PUBLISHED = published("duplicates")


@pytest.mark.parametrize("line", list(PUBLISHED.itertuples()), ids=list(PUBLISHED.source))
def test_published_rates_to_the_last_digit(line):
    found = duplicates.one(line.source, line.decisions, line.seed, line.policy, published_resets=True)
    assert found["identical"] == line.identical and found["median_changed"] == line.median_changed
    assert found["steps"] == line.decisions


def test_published_table_is_what_it_should_be():
    assert PUBLISHED.set_index("source").identical.to_dict() == {
        **{"atari:Breakout": 0.0715, "atari:Pong": 0.0125, "atari:Boxing": 0.014, "atari:Freeway": 0.0},
        **{"atari:SpaceInvaders": 0.089, "doom:basic": 0.008, "doom:defend_the_center": 0.016},
        **{"doom:deadly_corridor": 0.008},
    }


@pytest.fixture(scope="module")
def smoke(tmp_path_factory) -> tuple[pd.DataFrame, pd.DataFrame]:
    """The smoke profile's rows as returned, and as read back from the file they were appended to."""
    path = tmp_path_factory.mktemp("rows") / "05.rows.jsonl"
    return duplicates.run("smoke", out=path), read_rows(path)


# --- the scan ---------------------------------------------------------------------------------------------------------


class Flicker:
    """Frames 0 0 1 1 2 2 ..., an episode of three; `last` says whether the last frame of one is shown."""

    actions = ["NOOP", "FIRE"]

    def __init__(self, last: bool):
        self.source = "atari:Flicker" if last else "doom:flicker"
        self.terminal_frame, self.count, self.closed = last, 0, False

    def picture(self, value: int) -> np.ndarray:
        return np.full((2, 2, 3), value, np.uint8)

    def reset(self, seed=None):
        return self.picture(200)

    def bare(self):
        def step(action):
            self.count += 1
            ended = self.count % 3 == 0
            return (None if ended and not self.terminal_frame else self.picture(self.count // 2)), ended

        return step

    def describe(self):
        return {"source": self.source}

    def close(self):
        self.closed = True


@pytest.mark.parametrize(
    ("last", "changed", "lag", "opens"),
    [
        # 200 | 0 1 1(end) 200 | 2 2 3(end) 200 | ...: an opening is no decision's doing
        (True, [-1, 4, 4, 0, 4, 4, 0, 4], [0, 0, 0, 1, 4, 0, 1, 0], [0, 4]),
        # 200 | 0 1 200 | 2 2 200 ...: the decision that ends an episode brings the next one's first frame
        (False, [-1, 4, 4, 4, 4, 0, 4], [0, 0, 0, 3, 0, 1, 3], [0, 3, 6]),
    ],
)
def test_scan_by_hand(monkeypatch, last, changed, lag, opens):
    made = []
    monkeypatch.setattr(scanning, "make", lambda source, seed: made.append(Flicker(last)) or made[-1])
    row = scanning.scan({"source": "atari:Flicker", "policy": "one_hot", "seed": 0, "steps": 6})
    assert row["changed"] == changed and row["lag"] == lag and row["opens"] == opens
    assert row["pixels"] == 4 and row["shows_last"] is last
    assert row["blocks"] and row["replayed"] is True and all(env.closed for env in made)
    places = repeats.counted(pd.Series({**row, "steps": 6}))
    assert places.tolist() == [i for i in range(1, len(changed)) if i not in opens]
    published_places = repeats.counted(pd.Series(row), published_resets=True)
    assert len(published_places) == (6 if last else 6) and (last or 3 in published_places)


def test_lags_against_a_plain_search():
    rng = np.random.default_rng(0)
    names = rng.integers(20, size=300)
    digests = b"".join(int(name).to_bytes(16, "big") for name in names)
    wanted = [next((ago for ago in range(1, i + 1) if names[i - ago] == names[i]), 0) for i in range(300)]
    assert scanning.lags(digests).tolist() == wanted
    assert scanning.lags(b"a" * 16).tolist() == [0]


def test_pixels_are_counted_whichever_channel_changes():
    rng = np.random.default_rng(0)
    for shape in ((210, 160, 3), (5, 7, 3), (1, 1, 3)):
        before = rng.integers(256, size=shape, dtype=np.uint8)
        count = scanning.Difference(before.size)
        for share in (0, 0.01, 0.5, 1):
            after = np.where(rng.random(shape) < share, rng.integers(256, size=shape), before).astype(np.uint8)
            assert count.pixels(before, after) == duplicates.changed_pixels(before, after).sum()


def test_memory_per_step_is_bounded_and_no_frame_is_kept():
    frames = np.random.default_rng(0).integers(256, size=(2, 210, 160, 3), dtype=np.uint8)

    def peak(steps: int) -> int:
        tracemalloc.start()
        seen = scanning._Seen(frames[0])
        for step in range(steps):
            seen.add(frames[step % 2], False)
        scanning.lags(seen.digests)
        used = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        return used

    peak(100)
    assert (peak(6000) - peak(2000)) / 4000 < 64


def test_what_the_scan_adds_is_small_against_the_emulator():
    """Processor time, which other work on the machine does not stretch as it does the clock on the wall."""
    import time

    with_scan, bare = [], []
    env = make("atari:Pong")
    try:
        step, act = scanning._Lean(env), players.player("one_hot", env)
        frames = play(step, act)
        seen = scanning._Seen(next(frames)[0])
        for _ in range(7):
            began = time.thread_time()
            for _ in range(100):
                seen.add(*next(frames))
            with_scan.append(time.thread_time() - began)
            began = time.thread_time()
            for _ in range(100):
                step.step(0)
            bare.append(time.thread_time() - began)
    finally:
        env.close()
    assert np.median(bare) / np.median(with_scan) > 0.7  # 0.85 and more on an idle machine; see notebook 05


# --- players ------------------------------------------------------------------------------------------------------------


def test_players_play_what_they_say():
    env = Flicker(True)
    no_op, repeat = players.player("no_op", env), players.player("repeat", env, 1)
    assert [no_op(None) for _ in range(3)] == [0, 0, 0]
    taken = [repeat(None) for _ in range(2000)]
    same = np.mean(np.array(taken[1:]) == np.array(taken[:-1]))
    assert 0.92 < same < 0.98  # 0.9, and half of the other draws of two actions
    assert taken == [again(None) for again in [players.player("repeat", env, 1)] for _ in range(2000)]
    assert players.player("no_op", Flicker(False))(None) == [0, 0]


def test_no_op_presses_nothing_where_a_game_has_no_such_action():
    env = Flicker(True)
    env.actions = ["FIRE", "UP"]
    assert players.player("no_op", env)(None) == 0


# --- rates --------------------------------------------------------------------------------------------------------------


def made_up(lag, changed, seed=0, opens=(0,), **row) -> dict:
    line = {"source": "atari:Pong", "policy": "one_hot", "seed": seed, "steps": len(lag) - 1, "pixels": 10}
    return line | {
        **{"lag": list(lag), "changed": list(changed), "opens": list(opens), "shows_last": True, "scan_s": 1.0},
        **{"blocks": [[100, 1.0, 0.9]] * 5},
        **row,
    }


def test_summary_by_hand():
    changed = [-1, 0, 2, 4, 0, 6]
    rows = as_frame([made_up([0, 1, 0, 0, 1, 5], changed, opens=[0, 3], source="doom:basic", shows_last=False)])
    ours, theirs = (repeats.summary(rows, rule).iloc[0] for rule in (False, True))
    assert (ours.compared, ours.resets, ours.identical, ours.any_lag) == (4, 1, 0.5, 0.75)
    assert ours.median_changed == pytest.approx(0.1) and ours.median_changed_otherwise == pytest.approx(0.4)
    assert (theirs.compared, theirs.identical, theirs.median_changed) == (5, 0.4, pytest.approx(0.2))
    assert np.isnan(ours.identical_low)  # one block is too few
    assert ours.pace == pytest.approx(0.9) and ours.emulator_steps_per_s == pytest.approx(500 / 4.5)


def test_a_cache_hits_what_is_among_its_last_frames():
    #  frames  a b a c d a e b
    lag = [0, 0, 2, 0, 0, 3, 0, 6]
    assert repeats.reuse_distance(lag).tolist() == [0, 0, 2, 0, 0, 3, 0, 5]
    assert repeats.reuse_distance(lag, most=3).tolist() == [0, 0, 2, 0, 0, 3, 0, 0]
    from lab.caches import FrameFeatures

    frames = np.array([0, 1, 0, 2, 3, 0, 4, 1], np.uint8)[:, None, None, None].repeat(3, -1)
    import torch

    for size in (1, 2, 4, 5, 8):  # as the cache itself counts
        cache = FrameFeatures(size)
        for frame in frames:
            cache.rows(frame[None], lambda missing: torch.zeros(len(missing), 1, 1))
        distance = repeats.reuse_distance(lag)
        assert cache.hits == np.count_nonzero((distance > 0) & (distance <= size))


def test_intervals_grow_with_what_seeds_differ_by():
    rng = np.random.default_rng(0)

    def table(shares):
        rows = []
        for seed, share in enumerate(shares):
            same = np.concatenate([[0], (rng.random(2000) < share).astype(int)])
            rows.append(made_up(same, np.where(same, 0, 3), seed))
        return repeats.summary(as_frame(rows)).iloc[0]

    alike, apart = table([0.3] * 5), table([0.1, 0.2, 0.3, 0.4, 0.5])
    for line in (alike, apart):
        assert line.identical_low < line.identical < line.identical_high and line.seeds == 5
    assert apart.identical_high - apart.identical_low > 3 * (alike.identical_high - alike.identical_low)
    exact = share_interval(3000, 10000)
    assert alike.identical_high - alike.identical_low == pytest.approx(exact.high - exact.low, rel=0.5)


def test_blocks_that_hang_together_widen_the_interval():
    together = np.concatenate([[0], np.repeat(np.arange(20) % 2, 100)])
    mixed = np.concatenate([[0], np.arange(2000) % 2])
    lines = [repeats.summary(as_frame([made_up(s, np.where(s, 0, 3))])).iloc[0] for s in (together, mixed)]
    widths = [line.identical_high - line.identical_low for line in lines]
    assert lines[0].identical == lines[1].identical == 0.5
    assert widths[0] > 0.3 and widths[1] < 0.02


@pytest.mark.parametrize("same", [0, 1])
def test_nothing_and_everything_take_the_exact_bound(same):
    line = repeats.summary(as_frame([made_up([0] + [same] * 2000, [-1] + [0 if same else 3] * 2000)])).iloc[0]
    exact = share_interval(2000 * same, 2000)
    assert (line.identical, line.identical_low, line.identical_high) == (same, exact.low, exact.high)
    assert np.isnan(line.median_changed_otherwise) == bool(same)


def test_recurrence_is_the_share_seen_at_most_so_long_ago():
    found = repeats.recurrence(as_frame([made_up([0, 1, 0, 2, 4], [-1, 0, 1, 1, 1])]), lags=(1, 2, 3, 4))
    assert found.share.tolist() == [0.25, 0.5, 0.5, 0.75]


# --- runs ---------------------------------------------------------------------------------------------------------------


def test_rows_return_as_they_were_written(smoke):
    rows, read = smoke
    pd.testing.assert_frame_equal(
        rows.sort_values(["source", "policy"], ignore_index=True)[sorted(rows)],
        read.sort_values(["source", "policy"], ignore_index=True)[sorted(rows)],
    )
    assert set(rows.source) == set(duplicates.SMOKE) and {"one_hot", "no_op", "repeat", "per_button"} <= set(
        rows.policy
    )
    breakout = rows[(rows.source == "atari:Breakout") & (rows.policy == "one_hot")].iloc[0]
    assert breakout.environment["frameskip"] == 4 and breakout.environment["repeat_probability"] == 0.25
    assert breakout.replayed and len(breakout.blocks) == 5


def test_reset_pairs_are_left_out_unless_asked_for(smoke):
    default, theirs = (repeats.summary(smoke[0], rule).set_index(["source", "policy"]) for rule in (False, True))
    doom = ("doom:basic", "per_button")
    assert default.loc[doom, "resets"] > 0
    assert default.loc[doom, "compared"] == 500 - default.loc[doom, "resets"]
    assert theirs.loc[doom, "compared"] == 500
    assert default.loc[("atari:Breakout", "one_hot"), "compared"] == 500


def test_every_game_and_scenario_is_planned():
    sources = duplicates.every_source()
    assert sum(source.startswith("atari:") for source in sources) == 108  # ROMs in ale-py
    assert {"atari:Combat", "atari:TicTacToe3D", "doom:cig", "doom:freedoom1", "doom:basic"} <= set(sources)
    cells = duplicates.plan("standard", seed=3)
    assert {cell["source"] for cell in cells} == set(sources)
    assert {c["seed"] for c in cells if c["source"] == "atari:Pong" and c["policy"] == "one_hot"} == set(range(3, 8))
    assert {c["seed"] for c in cells if c["source"] == "atari:Alien"} == {3}
    assert len({json.dumps(cell) for cell in cells}) == len(cells)
    assert not any(c["policy"] == "per_button" and c["source"].startswith("atari") for c in cells)


def test_what_cannot_be_played_is_skipped_with_its_reason(tmp_path):
    names = ["atari:Combat", "doom:cig", "doom:doom", "atari:Pong"]
    rows = duplicates.scan_all(duplicates.cells_of(names, ["one_hot"], [0], 10), workers=1)
    assert rows.source.tolist() == ["atari:Pong"]
    reasons = {line["source"]: line["reason"] for line in rows.attrs["about"]}
    assert "several players" in reasons["atari:Combat"] and "several players" in reasons["doom:cig"]
    assert "lacks a file, doom.wad" in reasons["doom:doom"]


def test_survey_of_several_games_says_what_it_left_out(tmp_path, monkeypatch):
    monkeypatch.setattr(duplicates, "every_source", lambda: ["atari:Pong", "atari:Joust"])
    monkeypatch.chdir(tmp_path)
    found = duplicates.survey(None, 20, [0], ["one_hot", "no_op"], workers=1)
    assert [game["policy"] for game in found.document["games"]] == ["no_op", "one_hot"]
    assert [skipped["source"] for skipped in found.document["skipped"]] == ["atari:Joust"] * 2
    assert len(found.table) == 2
    kept = read_rows("reports/duplicates.rows.jsonl")
    assert len(kept) == 2
    again = duplicates.survey(None, 20, [0], ["one_hot", "no_op"], workers=1)
    assert [g["steps_per_s"] for g in again.document["games"]] == [g["steps_per_s"] for g in found.document["games"]]


def test_comparison_says_only_what_it_can(smoke):
    assert duplicates.comparison(smoke[0]).empty  # other counts of decisions than the published ones
    full = made_up([0] * 2001, [-1] + [3] * 2000)
    table = duplicates.comparison(as_frame([full, made_up([0] * 2001, [-1] + [3] * 2000, seed=1)]))
    assert len(table) == 1 and table.published_identical[0] == 0.0125 and not table.same[0]


def test_figures_draw_every_game_and_pair(smoke):
    table = repeats.summary(smoke[0])
    table = table[table.policy.isin(["one_hot", "per_button"])]
    labels = [label.get_text() for axes in repeat_dots(table).axes for label in axes.get_yticklabels()]
    assert sorted(labels) == ["Breakout", "Doom basic", "Doom basic"]
    rows = smoke[0][smoke[0].policy == "one_hot"]
    left, right = recurrence_lines(repeats.recurrence(rows), repeats.summary(rows), ["atari:Breakout"]).axes
    assert len(left.lines) == len(right.lines) == 2
    assert [text.get_text() for text in left.texts] == ["Breakout"]
    assert any("Doom, 1 games" in text.get_text() for text in change_curves(repeats.changes(rows)).axes[0].texts)
    pairs = duplicates.example_pairs()
    assert [bool(pair["changed"].any()) for pair in pairs] == [False, True, True]
    assert pairs[1]["changed"].mean() < 0.01 and pairs[2]["changed"].mean() > 0.6
    assert len(frame_pairs(pairs).axes) == 9


@pytest.mark.parametrize(
    ("call", "says"),
    [
        (lambda: duplicates.one("atari:Pung", 10), "Did you mean Pong"),
        (lambda: duplicates.one("doom:basik", 10), "Did you mean basic"),
        (lambda: duplicates.one("atari:Pong", 1), "at least 2"),
        (lambda: duplicates.one("atari:Pong", 2.5), "at least 2"),
        (lambda: duplicates.one("atari:Pong", 10, policy="greedy"), "one_hot, per_button"),
        (lambda: duplicates.one("atari:Pong", 10, policy="per_button"), "one_hot"),
        (lambda: duplicates.one("atari:Pong", 10, seed=-1), "seed"),
        (lambda: duplicates.run("quick"), "smoke, standard, full"),
        (lambda: duplicates.run("smoke", seed=-1), "seed"),
        (lambda: duplicates.cells_of(["atari:Pong"], ["greedy"], [0], 10), "greedy"),
        (lambda: duplicates.survey("atari:Combat", 10, [0], ["one_hot"]), "several players"),
        (lambda: repeats.summary(pd.DataFrame({"arm": ["eager"], "ms": [1.0]})), "lack changed"),
    ],
)
def test_bad_input_is_named(call, says):
    with pytest.raises(InputError, match=says):
        call()
