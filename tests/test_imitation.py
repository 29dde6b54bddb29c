import json

import numpy as np
import pandas as pd
import pytest

import lab
from lab.experiments import imitation
from lab.experiments.imitation import ByExpert, Fixed, agreement_table, gains, score_table
from lab.records import read_rows
from lab.workloads import get_workload


def games(**scores):
    return pd.DataFrame(
        {"kind": "game", "workload": "breakout", "player": player, "seed": seed, "score": float(score)}
        for player, own in scores.items()
        for seed, score in enumerate(own)
    ).replace({"player": {"black": "m, black frames", "left": "always LEFT", "right": "always RIGHT"}})


ROWS = games(
    m=[10, 12, 9, 11, 10, 13], black=[1, 2, 0, 1, 2, 1], random=[2, 0, 1, 2, 1, 0], left=[0, 0, 1, 0, 0, 0],
    right=[3, 2, 3, 4, 2, 3], expert=[20, 22, 19, 21, 20, 23],
)  # fmt: skip


def test_gains_are_paired_and_name_the_best_constant():
    table = gains(ROWS, "m").set_index("rival")
    assert list(table.index) == ["random", "best constant (RIGHT)", "black frames"]
    assert table.loc["random"].gain.value == pytest.approx(np.mean([8, 12, 8, 9, 9, 13]))
    assert table.shown.all()
    share = table.loc["random"].of_expert
    assert share.value == pytest.approx(59 / 119) and share.low < share.value < share.high


def test_no_gain_is_shown_where_there_is_none():
    rows = games(m=[1, 2, 3, 4, 5, 6], black=[2, 1, 4, 3, 6, 5], random=[6, 5, 4, 3, 2, 1], left=[1, 2, 3, 4, 5, 6],
                 expert=[9] * 6)  # fmt: skip
    assert not gains(rows, "m").shown.any()


def test_a_second_model_is_a_rival_on_the_same_seeds():
    rows = pd.concat(
        [ROWS, games(other=[9, 11, 8, 10, 9, 12]), games(other=[0] * 6).assign(player="other, black frames")]
    )
    line = gains(rows, "other").set_index("rival").loc["m"]
    assert line.gain.value == pytest.approx(-1) and line.shown


def test_agreement_counts_the_given_order_and_the_others_apart():
    lines = [
        {"kind": "agreement", "workload": "w", "player": "m", "layout": "terminator", "order": order, "frame": frame,
         "expert": 1, "option": option}
        for order, options in enumerate([[1, 1, 1, 0], [1, 0, 1, 0], [0, 0, 1, 0]])
        for frame, option in enumerate(options)
    ]  # fmt: skip
    line = agreement_table(pd.DataFrame(lines)).iloc[0]
    assert line.given.value == 0.75 and line.shuffled.value == 0.375 and line.flips == 3 / 8


def test_an_expert_plays_whatever_it_is_told():
    question = get_workload("doom_basic").question
    played = lab.play(Fixed(question, 0), lambda seed: ByExpert("doom:basic", seed), episodes=3, seed=1)
    alone = lab.play(Fixed(question, 0), "doom:basic", episodes=3, seed=1)
    assert np.mean(played.scores) > np.mean(alone.scores) + 100


def test_a_fixed_player_always_answers_alike_and_a_random_one_does_not():
    question, frames = get_workload("pong").question, np.zeros((300, 1, 8, 8, 3), np.uint8)
    assert set(Fixed(question, 2).decide(frames).value) == {"RIGHT"}
    one, two = (Fixed(question, seed=seed).decide(frames).choice for seed in (0, 0))
    assert np.array_equal(one, two) and np.bincount(one).min() > 25


def test_unknown_profiles_games_and_foreign_rows_are_refused(tmp_path):
    with pytest.raises(lab.InputError, match="profile"):
        imitation.run("huge")
    with pytest.raises(lab.InputError, match="no scripted expert"):
        list(imitation.games(workloads=("boxing",)))
    with pytest.raises(lab.InputError, match="no answers of trained models"):
        imitation.read(_rows(tmp_path, [{"arm": "whole", "ms": 1.0}]))


def test_rows_of_both_kinds_share_a_file_and_are_read_apart(tmp_path):
    path = _rows(
        tmp_path, [{"arm": "whole", "ms": 1.0, "block": 3}, {"kind": "game", "player": "pocket", "score": 2.0}]
    )
    assert imitation.read(path).player.tolist() == ["pocket"]
    timed = read_rows(path, "whole")
    assert len(timed) == 1 and timed.block.dtype.kind == "i" and "player" not in timed


def _rows(folder, lines):
    path = folder / "some.rows.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


# ---------------------------------------------------------------------------------------------- the shipped checkpoints


@pytest.fixture(scope="module")
def played():
    """Fewer and shorter games than the notebook's; the claims are the same."""
    asked = {"doom_basic": (20, 75), "breakout": (8, 700), "pong": (8, 200)}
    return pd.DataFrame(
        row
        for workload, (episodes, decisions) in asked.items()
        for row in imitation.games(("pocket",), (workload,), episodes, decisions, quiet=True)
    )


@pytest.mark.parametrize("workload", imitation.GAMES)
def test_pocket_beats_all_that_know_nothing(played, workload):
    table = gains(played[played.workload == workload], "pocket")
    assert len(table) == 3 and all(gain.low > 0 for gain in table.gain), table


def test_pocket_reaches_most_of_the_experts_gain_on_doom(played):
    line = gains(played[played.workload == "doom_basic"], "pocket").iloc[0]
    assert line.of_expert.value >= 0.8 and line.of_expert.n == 20


def test_both_layouts_answer_mostly_as_the_expert_does_in_any_order():
    rows = pd.DataFrame(imitation.agreement(workloads=("doom_basic", "breakout"), frames=100, orders=5, quiet=True))
    table = agreement_table(rows)
    assert set(table.layout) == {"terminator", "question_first"} and len(table) == 4
    for line in table.itertuples():
        assert line.given.low > 0.5 and line.shuffled.low > 0.5, table


def test_scores_are_means_with_intervals():
    table = score_table(ROWS).set_index("player")
    assert table.loc["m"].score.value == pytest.approx(65 / 6) and table.loc["m"].score.low < 65 / 6
