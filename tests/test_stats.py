import math

import numpy as np
import pandas as pd
import pytest

from lab import stats
from lab.errors import InputError
from lab.records import join_rows
from lab.stats import (
    Estimate,
    difference_shown,
    median_interval,
    paired_difference,
    paired_ratio,
    sentence,
    share_interval,
    unpaired_ratio,
)


def rows_of(times: dict[str, np.ndarray], run="r", title="", pace="back_to_back", stage="total") -> pd.DataFrame:
    """Timed rows: for every arm one time in ms per block."""
    parts = [
        pd.DataFrame(
            {
                "run": run,
                "title": title,
                "arm": arm,
                "block": range(len(ms)),
                "phase": "timed",
                "pace": pace,
                "stage": stage,
                "ms": ms,
                "again": arm.endswith(" again"),
                "describe": [{"arm": arm.removesuffix(" in loop")}] * len(ms),
            }
        )
        for arm, ms in times.items()
    ]
    return pd.concat(parts, ignore_index=True)


def noisy(rng, n=40, level=20.0, drift=True):
    """Times of blocks on a machine that slows down as it goes: what pairing takes out."""
    return level * (1 + (0.3 * np.arange(n) / n if drift else 0)) * rng.lognormal(0, 0.02, n)


def three_arms(rng, factor: float, n=40) -> pd.DataFrame:
    weather = noisy(rng, n)
    jitter = lambda: rng.lognormal(0, 0.02, n)  # noqa: E731
    return rows_of({"base": weather * jitter(), "base again": weather * jitter(), "other": weather * jitter() * factor})


# --- the one rule -----------------------------------------------------------------------------------------------------


def test_a_slowed_arm_is_shown_and_the_sentence_says_by_how_much():
    rows = three_arms(np.random.default_rng(0), factor=1.10)
    ratio, again = paired_ratio(rows, "other", "base"), paired_ratio(rows, "base again", "base")
    assert difference_shown(ratio, again)
    assert 1.05 < ratio.low < 1.10 < ratio.high < 1.15
    assert sentence("other", ratio, again, "base") == f"other took {ratio:.2f} times the time of base."
    line = stats.summary(rows).set_index("arm").loc["other"]
    assert line["shown"]
    assert line["ratio"] == ratio.value


def test_a_faster_arm_is_shown_too():
    rows = three_arms(np.random.default_rng(0), factor=0.87)
    ratio = paired_ratio(rows, "other", "base")
    assert ratio.high < 0.9
    assert difference_shown(ratio, paired_ratio(rows, "base again", "base"))


def test_an_equal_arm_is_not_shown():
    shown = 0
    for seed in range(150):
        rows = three_arms(np.random.default_rng(seed), factor=1.0, n=12)
        shown += difference_shown(paired_ratio(rows, "other", "base"), paired_ratio(rows, "base again", "base"))
    assert shown <= 3  # the interval alone errs in 5 %; the A/A arm's interval must be left behind as well
    rows = three_arms(np.random.default_rng(1), factor=1.0)
    ratio, again = paired_ratio(rows, "other", "base"), paired_ratio(rows, "base again", "base")
    assert "no difference shown" in sentence("other", ratio, again)


def test_a_difference_inside_the_again_arms_interval_is_not_shown():
    ratio = Estimate(1.03, 1.01, 1.05, 20)
    assert difference_shown(ratio, Estimate(1.0, 0.995, 1.005, 20))
    assert not difference_shown(ratio, Estimate(1.0, 0.96, 1.04, 20))
    assert not difference_shown(Estimate(0.97, 0.95, 0.99, 20), Estimate(1.0, 0.96, 1.04, 20))
    assert not difference_shown(Estimate(1.0, 0.99, 1.01, 20), Estimate(1.1, 1.05, 1.15, 20))  # includes 1


def test_without_an_again_arm_or_an_interval_nothing_is_shown():
    ratio = Estimate(1.5, 1.4, 1.6, 20)
    assert not difference_shown(ratio, None)
    assert not difference_shown(Estimate(1.5, math.nan, math.nan, 3), Estimate(1.0, 0.99, 1.01, 3))
    assert not difference_shown(ratio, Estimate(1.0, math.nan, math.nan, 3))
    assert "no A/A arm" in sentence("other", ratio, None)
    rows = rows_of({"base": np.full(9, 10.0), "other": np.full(9, 20.0)})
    assert not stats.summary(rows).shown.any()


# --- intervals --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("n", [5, 12, 30])
def test_the_median_interval_holds_the_true_median_as_often_as_it_says(n):
    rng = np.random.default_rng(n)
    truth = math.exp(3)  # of a lognormal: skewed, as times are
    inside = 0
    for _ in range(400):
        interval = median_interval(rng.lognormal(3, 0.4, n))
        inside += interval.low <= truth <= interval.high
    assert 0.91 <= inside / 400 <= 0.985


def test_the_paired_ratio_holds_the_true_ratio_although_the_machine_drifts():
    inside, paired_width, unpaired_width = 0, 0.0, 0.0
    for seed in range(200):
        rows = three_arms(np.random.default_rng(seed), factor=1.2, n=20)
        ratio = paired_ratio(rows, "other", "base")
        inside += ratio.low <= 1.2 <= ratio.high
        if seed < 20:
            wide = unpaired_ratio(rows, "other", rows, "base")
            paired_width += ratio.high - ratio.low
            unpaired_width += wide.high - wide.low
    assert 0.89 <= inside / 200 <= 0.99
    assert paired_width < unpaired_width / 3


def test_too_few_values_get_no_interval():
    few = median_interval([1.0, 2.0, 9.0])
    assert (few.value, few.n) == (2.0, 3)
    assert math.isnan(few.low)
    assert str(few) == "2 [no interval from 3]"
    with pytest.raises(InputError):
        median_interval([])


def test_intervals_are_the_same_each_time():
    values = np.random.default_rng(0).lognormal(size=30)
    assert median_interval(values) == median_interval(values)


def test_share_interval_is_clopper_pearson():
    none = share_interval(0, 20)  # in closed form: 1 - 0.025 ** (1 / n)
    assert (none.value, none.low) == (0, 0)
    assert none.high == pytest.approx(1 - 0.025 ** (1 / 20))
    both = share_interval(143, 2000)
    assert both.low < 0.0715 < both.high
    assert (both.low, both.high) == (pytest.approx(0.0606, abs=2e-4), pytest.approx(0.0837, abs=2e-4))
    for count, n in ((3, 2), (-1, 2), (0, 0)):
        with pytest.raises(InputError):
            share_interval(count, n)


def test_estimates_print_with_their_interval():
    estimate = Estimate(0.8712, 0.8503, 0.8991, 20)
    assert f"{estimate:.2f}" == "0.87 [0.85, 0.90]"
    assert str(estimate) == "0.871 [0.85, 0.899]"


# --- pairing ----------------------------------------------------------------------------------------------------------


def test_ratios_are_taken_within_blocks_not_between_medians():
    base = np.array([10.0, 20.0, 30.0, 40.0, 50.0])
    rows = rows_of({"base": base, "other": base[[0, 1, 2, 3, 4]] * [2.0, 2.0, 2.0, 0.1, 0.1]})
    assert paired_ratio(rows, "other", "base").value == 2.0  # the ratio of the medians is 20 / 30


def test_a_difference_between_arms_or_stages_is_in_ms_and_paired():
    whole = rows_of({"whole": np.arange(10.0, 20.0), "prefix": np.arange(7.0, 17.0)})
    saving = paired_difference(whole, ("whole", "total"), ("prefix", "total"))
    assert (saving.value, saving.low, saving.high, saving.n) == (3.0, 3.0, 3.0, 10)


def test_rows_of_other_runs_and_titles_are_not_paired_with_each_other():
    rng = np.random.default_rng(0)
    parts = [
        rows_of({"base": noisy(rng, 6, level), "other": noisy(rng, 6, level) * 2}, run=run, title=title)
        for level, run, title in ((1, "r1", "pong"), (100, "r1", "doom"), (10_000, "r2", "pong"))
    ]
    ratio = paired_ratio(pd.concat(parts), "other", "base")
    assert ratio.n == 18
    assert ratio.value == pytest.approx(2, rel=0.1)
    assert list(stats.summary(pd.concat(parts)).title) == ["pong"] * 2 + ["doom"] * 2
    with pytest.raises(InputError, match="several"):
        paired_ratio(pd.concat([parts[0], parts[0]]), "other", "base")


def test_unknown_arms_and_stages_are_named():
    rows = rows_of({"base": np.ones(5)})
    with pytest.raises(InputError, match="nobody.*base"):
        paired_ratio(rows, "nobody", "base")
    with pytest.raises(InputError, match="vision.*total"):
        paired_ratio(rows, "base", "base", stage="vision")
    with pytest.raises(InputError, match="only warm-up"):
        stats.summary(rows.assign(phase="warmup"))
    with pytest.raises(InputError, match="phase"):
        stats.summary(pd.DataFrame({"ms": [1.0]}))


def test_a_block_cut_short_does_not_count():
    rows = rows_of({"base": np.full(6, 10.0), "other": np.full(6, 20.0)})
    cut = rows.drop(rows[(rows.arm == "other") & (rows.block == 5)].index)
    assert set(stats.summary(cut).n) == {5}


# --- unpaired -----------------------------------------------------------------------------------------------------------


def test_fewer_than_three_runs_a_side_are_called_single_runs():
    rng = np.random.default_rng(0)
    a = pd.concat([rows_of({"step": noisy(rng, 20, 30)}, run=f"a{i}") for i in range(2)])
    b = pd.concat([rows_of({"step": noisy(rng, 20, 20)}, run=f"b{i}") for i in range(3)])
    ratio = unpaired_ratio(a, "step", b, "step")
    assert ratio.note == "single runs"
    assert ratio.value == pytest.approx(1.5, rel=0.05)
    assert ratio.low < 1.5 < ratio.high
    assert "single runs" in sentence("a", ratio, None, "b")
    assert "no difference" not in sentence("a", ratio, None, "b")


def test_with_three_runs_a_side_the_run_is_the_unit():
    """Runs differ by 10 % for reasons of their own: the interval must know, although each run's rows are tight."""
    inside = 0
    for seed in range(200):
        rng = np.random.default_rng(seed)
        side = lambda level, name, rng=rng: pd.concat(  # noqa: E731
            [
                rows_of({"step": level * rng.lognormal(0, 0.1) * rng.lognormal(0, 0.005, 7)}, run=f"{name}{i}")
                for i in range(4)
            ]
        )
        ratio = unpaired_ratio(side(30, "a"), "step", side(20, "b"), "step")
        assert (ratio.n, ratio.note) == (4, "")
        inside += ratio.low <= 1.5 <= ratio.high
    assert 0.91 <= inside / 200 <= 0.99


# --- tables -------------------------------------------------------------------------------------------------------------


def staged(parts: dict[str, float], total: float, n=6) -> pd.DataFrame:
    frames = [rows_of({"eager": np.full(n, ms)}, stage=stage) for stage, ms in {**parts, "total": total}.items()]
    return pd.concat(frames, ignore_index=True)


def test_summary_has_one_line_per_arm_and_stage_with_the_total_last():
    table = stats.summary(staged({"vision": 6.0, "language": 3.5}, 10.0))
    assert list(table.stage) == ["vision", "language", "total"]
    assert list(table.columns) == [
        "arm", "pace", "stage", "n", "median", "low", "high", "ratio", "ratio_low", "ratio_high", "shown",
    ]  # fmt: skip
    assert "..." not in repr(table)


def test_summary_takes_another_base_when_asked():
    rows = three_arms(np.random.default_rng(0), factor=2.0)
    ratios = stats.summary(rows, base="other").set_index("arm").ratio
    assert ratios["base"] == pytest.approx(0.5, rel=0.05)
    assert math.isnan(ratios["other"])
    with pytest.raises(InputError, match="nobody"):
        stats.summary(rows, base="nobody")


def test_unattributed_time_is_named_and_warned_of_over_five_percent():
    small = stats.attribution(staged({"vision": 6.0, "language": 3.6}, 10.0)).iloc[0]
    assert small["unattributed"] == pytest.approx(0.04)
    assert small["stage_sum"] == pytest.approx(9.6)
    assert small["warning"] == ""
    large = stats.attribution(staged({"vision": 6.0, "language": 3.0}, 10.0)).iloc[0]
    assert large["unattributed_ms"] == pytest.approx(1.0)
    assert "10%" in large["warning"]
    too_much = stats.attribution(staged({"vision": 8.0, "language": 3.0}, 10.0)).iloc[0]
    assert too_much["warning"]
    total_only = stats.attribution(staged({}, 10.0)).iloc[0]
    assert math.isnan(total_only["unattributed"])
    assert total_only["warning"] == ""


def test_paces_pairs_the_same_configuration_both_ways():
    rows = pd.concat(
        [rows_of({"eager": np.full(6, 10.0)}), rows_of({"eager in loop": np.full(6, 13.0)}, pace="in_loop")],
        ignore_index=True,
    )
    table = stats.paces(rows)
    assert table.to_dict("records") == [
        {"arm": "eager", "back_to_back": 10.0, "in_loop": 13.0, "ratio": 1.3, "ratio_low": 1.3, "ratio_high": 1.3}
    ]
    assert stats.paces(rows[rows.arm == "eager"]).empty


def test_joined_rows_keep_what_is_said_about_them():
    a, b = rows_of({"x": np.ones(5)}, run="a"), rows_of({"x": np.ones(5)}, run="b")
    a.attrs["about"] = [{"kind": "note", "text": "cut"}]
    joined = join_rows([a, b])
    assert len(joined) == 10
    assert stats.notes(joined) == ["cut"]
    assert stats.notes(a) == ["cut"]
