import json

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

import lab
from lab.models.checkpoints import pocket_model
from lab.records import read_rows
from lab.training import Recipe, _touches, collect, lead, train
from lab.workloads import get_workload

SMALL = {"frames": 60, "led": 20, "rounds": 1, "vision_steps": 6, "language_steps": 6, "batch": 8}


@pytest.fixture(scope="module")
def taught(tmp_path_factory):
    recipe = Recipe(games=("breakout",), shares=(1,), **SMALL)
    return [train(recipe, tmp_path_factory.mktemp("pocket"), quiet=True) for _ in range(2)]


def test_a_recipe_gives_the_same_weights_twice(taught):
    for layout in ("terminator", "question_first"):
        one, two = (load_file(folders[layout] / "model.safetensors") for folders in taught)
        assert all(torch.equal(one[name], two[name]) for name in one)


def test_both_layouts_share_the_vision_tower_and_differ_in_the_text_model(taught):
    one, two = (load_file(taught[0][layout] / "model.safetensors") for layout in ("terminator", "question_first"))
    before = pocket_model(0).state_dict()
    tower = "encoder.vision_model.encoder.layers.0.mlp.fc1.weight"
    text = "encoder.text_model.layers.0.mlp.up_proj.weight"
    assert torch.equal(one[tower], two[tower]) and not torch.equal(one[tower].float(), before[tower].half().float())
    assert not torch.equal(one[text], two[text])


def test_a_trained_folder_loads_and_answers_in_its_layout(taught):
    frames = np.stack([frame for frame, _, _ in lead(get_workload("breakout"), 3, 9)])[:, None]
    question = get_workload("breakout").question
    for layout, folder in taught[0].items():
        model = lab.load_model(folder)
        assert model.config.layout == layout and model.config.option_attention == "block"
        step = lab.QuestionFirstStep(model, question, batch=3) if layout == "question_first" else None
        step = step or lab.EagerStep(model, question, option_attention="block")
        assert np.isfinite(step.decide(frames).logits).all()
        used = load_file(folder / "model.safetensors")["encoder.text_model.embed_tokens.weight.ids"]
        assert set(np.unique(model.row(question, 1, layout=layout).ids)) <= set(used.tolist())


def test_training_answers_as_the_steps_do(taught):
    """What the loss was taken of is what a step answers: the trainer's own forward pass cannot drift from the steps."""
    from lab.training import _Reader

    workload = get_workload("breakout")
    frames = np.stack([frame for frame, _, _ in lead(workload, 4, 11)])
    for layout, folder in taught[0].items():
        model = lab.load_model(folder)
        reader = _Reader(model, [workload], layout)
        kind = lab.QuestionFirstStep if layout == "question_first" else lab.StaticStep
        step = kind(model, workload.question, batch=4, option_attention="block")
        order = np.array([2, 0, 3, 1])
        other = kind(model, workload.question.reordered(order.tolist()), batch=4, option_attention="block")
        with torch.inference_mode():
            rows = model.images(lab.pixels.DevicePixels(128)(frames))
            for orders, asked in ((np.arange(4), step), (order, other)):
                logits, act = reader(0, rows, np.tile(orders, (4, 1)))
                answer = asked.decide(frames[:, None])
                assert np.allclose(logits.numpy(), answer.logits, atol=1e-5)
                assert np.allclose(act.softmax(-1)[:, 0].numpy(), answer.p_act, atol=1e-5)


def test_losses_are_kept_by_phase(taught):
    rows = read_rows(taught[0]["terminator"].parent / "training.rows.jsonl")
    assert dict(rows.groupby("phase").size()) == {"vision": 6, "terminator": 6, "question_first": 6}
    assert rows.loss.notna().all() and set(rows.game) == {"breakout"}
    told = json.loads((taught[0]["terminator"] / "training.json").read_text())
    assert told["recipe"]["seed"] == 0 and told["layout"] == "terminator"


def test_the_tower_learns_where_the_monster_is(tmp_path):
    recipe = Recipe(games=("doom_basic",), shares=(1,), layouts=("terminator",), frames=200, rounds=0, vision_steps=150,
                    language_steps=1, batch=24)  # fmt: skip
    train(recipe, tmp_path, quiet=True)
    rows = read_rows(tmp_path / "training.rows.jsonl")
    vision = rows[rows.phase == "vision"]
    assert vision.place[-15:].mean() < 0.5 * vision.place[:15].mean()
    assert vision.agreement[-15:].mean() > 0.5  # of three options


def test_examples_follow_the_leader_and_carry_the_experts_answer():
    workload = get_workload("breakout")
    model, noop = pocket_model(0), workload.question.names.index("NOOP")
    own = collect(workload, 40, 3, model, leader=lambda frame: noop, wander=0.0)
    assert own.pixels.shape == (40, 3, 128, 128) and own.touched.shape == (40, 64, 2)
    # nobody serves, and the expert says at every frame that one should
    assert set(own.options.tolist()) == {workload.question.names.index("FIRE")}
    assert not own.touched[..., 0].any() and own.touched[..., 1].any(dim=1).all()


def test_a_box_touches_the_patches_it_overlaps():
    touched = _touches((0, 0, 20, 21), (210, 160, 3), 8)  # patches of 26.25 x 20 pixels
    assert touched.nonzero()[0].tolist() == [0]
    assert _touches((19, 0, 21, 27), (210, 160, 3), 8).nonzero()[0].tolist() == [0, 1]
    assert _touches((19, 26, 21, 28), (210, 160, 3), 8).nonzero()[0].tolist() == [0, 1, 8, 9]
    assert not _touches(None, (210, 160, 3), 8).any()


@pytest.mark.parametrize(
    ("changes", "said"),
    [({"layouts": ("mask",)}, "layout"), ({"frames": 0}, "frames"), ({"batch": True}, "batch"),
     ({"games": ("boxing",), "shares": (1,)}, "expert"), ({"games": ("pong",)}, "shares")],
)  # fmt: skip
def test_recipes_that_cannot_be_are_refused(changes, said):
    with pytest.raises(lab.InputError, match=said):
        Recipe(**changes)
