import pytest

from lab.errors import InputError
from lab.published import published
from lab.workloads import DATA, load_workloads

NAMES = sorted(path.stem for path in (DATA / "published").glob("*.csv"))


@pytest.mark.parametrize("name", NAMES)
def test_every_table_names_its_source(name):
    table = published(name)
    assert len(table) and not table.columns.duplicated().any()
    assert table.attrs["source"].startswith("source: ")
    assert "http" not in table.attrs["source"]
    if "workload" in table and name != "static_step":
        assert set(table.workload) <= set(load_workloads())


def test_tokens_add_up():
    tokens = published("tokens").set_index("workload")
    assert tokens.total.to_dict() == {
        **{"breakout": 152, "pong": 176, "boxing": 303},
        **{"doom_basic": 152, "doom_deadly_corridor": 181, "pong_two_frames": 243},
    }
    assert (tokens.prefix + tokens.image + tokens.question + tokens.options == tokens.total).all()
    share = 100 * tokens.question_and_options / tokens.total
    assert (share.round() == tokens.fixed_share_percent).all()


def test_stages_sum_as_published():
    stages = published("stages")
    parts = stages[["resize", "vision", "language", "heads"]].sum(axis=1)
    assert (parts - stages.sum_of_parts).abs().max() < 0.0021
    assert len(stages) == 18 and stages.section.nunique() == 4


def test_static_step_speedups_follow_from_the_times():
    rows = published("static_step")
    assert len(rows) == 32
    assert (rows.action_probs_ms / rows.static_ms - rows.speedup).abs().max() < 0.0051


def test_unknown_table_lists_the_known():
    with pytest.raises(InputError, match="grey_levels"):
        published("nothing")
