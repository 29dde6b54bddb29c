import numpy as np
import pandas as pd
import pytest

from lab.errors import InputError
from lab.experiments import duplicates
from lab.figures import duplicate_dots, frame_pairs
from lab.published import published
from lab.records import read_rows

PUBLISHED = published("duplicates")


@pytest.mark.parametrize("line", list(PUBLISHED.itertuples()), ids=list(PUBLISHED.source))
def test_published_rates_to_the_last_digit(line):
    found = duplicates.one(line.source, line.decisions, line.seed, line.policy, published_resets=True)
    assert found == {"identical": line.identical, "median_changed": line.median_changed}


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


def test_rows_return_as_they_were_written(smoke):
    rows, read = smoke
    pd.testing.assert_frame_equal(rows, read)
    assert rows.groupby("source").decision.max().to_dict() == {"atari:Breakout": 300, "doom:basic": 200}
    settings = {about["source"]: about for about in rows.attrs["about"]}
    assert settings["atari:Breakout"]["frameskip"] == 4
    assert settings["atari:Breakout"]["repeat_probability"] == 0.25


def test_reset_pairs_are_left_out_unless_asked_for(smoke):
    default, as_published = (duplicates.summary(smoke[0], counted).set_index("source") for counted in (False, True))
    assert default.loc["doom:basic", "resets"] > 0
    assert default.loc["doom:basic", "compared"] == 200 - default.loc["doom:basic", "resets"]
    assert as_published.loc["doom:basic", "compared"] == 200
    assert default.loc["atari:Breakout", "compared"] == as_published.loc["atari:Breakout", "compared"] == 300
    assert (default.low <= default.identical).all() and (default.identical <= default.high).all()


def test_summary_counts_by_hand():
    rows = pd.DataFrame(
        {
            "source": "doom:basic",
            "policy": "one_hot",
            "seed": 0,
            "opens": [False, False, True, False, False],
            "identical": [True, False, True, False, False],
            "changed": [0.0, 0.2, 0.0, 0.4, 0.6],
        }
    )
    default, as_published = (duplicates.summary(rows, counted).iloc[0] for counted in (False, True))
    assert (default.compared, default.identical, default.resets) == (4, 0.25, 1)
    assert default.median_changed == pytest.approx(0.3) and default.median_changed_otherwise == pytest.approx(0.4)
    assert (as_published.compared, as_published.identical) == (5, 0.4)
    assert as_published.median_changed == pytest.approx(0.2)


def test_an_atari_reset_is_no_pair(monkeypatch):
    class Flicker:
        source, actions, terminal_frame = "atari:Flicker", ["NOOP"], True
        count = 0

        def reset(self, seed=None):
            return np.full((2, 2, 3), 200 + self.count, np.uint8)

        def step(self, action):
            self.count += 1
            return np.full((2, 2, 3), self.count // 2, np.uint8), 0.0, self.count % 3 == 0

        def describe(self):
            return {"source": self.source}

        def close(self):
            pass

    monkeypatch.setattr(duplicates, "make", lambda source, seed: Flicker())
    lines = list(duplicates._lines("atari:Flicker", 6, 0, "one_hot"))[1:]
    # frames 200 | 0 1 1(end) | reset 203 | 2 2 3(end): pairs 200-0, 0-1, 1-1, 203-2, 2-2, 2-3
    assert [line["identical"] for line in lines] == [False, False, True, False, True, False]
    assert [line["decision"] for line in lines] == [1, 2, 3, 4, 5, 6]
    assert not any(line["opens"] for line in lines)


def test_comparison_says_only_what_it_can(smoke):
    table = duplicates.comparison(smoke[0])
    assert list(table.same) == [None, None]  # other counts of decisions than the published ones
    assert "Nothing is published" in duplicates.answer(table)
    full = smoke[0].iloc[[0]].loc[np.repeat(0, 2000)].assign(source="atari:Pong", identical=False, changed=0.1)
    table = duplicates.comparison(full.reset_index(drop=True))
    assert list(table.same) == [False]
    assert "0 of 1 published rates" in duplicates.answer(table)


def test_readable_table_keeps_the_published_figures():
    line = {"source": "atari:Pong", "policy": "one_hot", "seed": 0, "opens": False}
    rows = pd.DataFrame([{**line, "identical": i < 25, "changed": 0.1} for i in range(2000)])
    shown = duplicates.readable(duplicates.comparison(rows)).iloc[0]
    assert shown["equal to the one before (%)"].to_dict() == {
        **{"here": "1.25", "interval": "0.8-1.8", "published": "1.25", "no resets": "1.25"}
    }
    assert shown["changed pixels (%)"].to_dict() == {"here": "10.000", "published": "0.286"}
    assert shown["", "same"] == "no"


def test_results_hold_the_answer_and_intervals(smoke):
    found = duplicates.results(duplicates.comparison(smoke[0]))
    assert found["answer"]
    breakout = found["rates"][0]
    assert breakout["source"] == "atari:Breakout" and breakout["identical"].n == 300
    assert breakout["identical"].low < breakout["identical"].value < breakout["identical"].high


def test_changed_pixels_looks_at_every_channel():
    before = np.zeros((2, 2, 3), np.uint8)
    after = before.copy()
    after[0, 1, 2] = 1
    assert duplicates.changed_pixels(before, after).tolist() == [[False, True], [False, False]]


def test_figures_draw_every_source_and_pair(smoke):
    left, right = duplicate_dots(duplicates.comparison(smoke[0])).axes
    assert [tick.get_text() for tick in left.get_yticklabels()] == ["Atari Breakout", "Doom basic"]
    assert right.get_xscale() == "log"
    pairs = duplicates.example_pairs()
    assert [pair["changed"].any() for pair in pairs] == [False, True, False, True]
    assert len(frame_pairs(pairs).axes) == 3 * len(pairs)


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
        (lambda: duplicates.summary(pd.DataFrame({"arm": ["eager"], "ms": [1.0]})), "lack changed"),
    ],
)
def test_bad_input_is_named(call, says):
    with pytest.raises(InputError, match=says):
        call()
