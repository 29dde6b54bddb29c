import math
import time
from types import SimpleNamespace

import numpy as np
import pandas as pd
import pytest
import torch

import lab
from lab import roofline
from lab.errors import InputError
from lab.measure import compare, stage
from lab.roofline import Ceilings, Cost, ceilings, count, floor, share_of_floor, stage_costs

FRAMES = np.zeros((1, 1, 210, 160, 3), np.uint8)


@pytest.fixture(scope="module")
def real_shape():
    return lab.load_model("smolvlm-256m", weights="random")


@pytest.fixture(scope="module")
def tiny():
    return lab.load_model("tiny")


@pytest.fixture(scope="module")
def question():
    return lab.load_workloads()["pong"].question


# --- counting -----------------------------------------------------------------------------------------------------------


def test_an_image_and_a_text_token_cost_what_the_shapes_say(real_shape):
    pixels = torch.empty(1, 3, 512, 512)
    width, patches, layers = 768, 1024, 12
    tower = layers * (2 * patches * (4 * width**2 + 2 * width * 3072) + 4 * patches**2 * width)
    tower += 2 * patches * width * 3 * 16**2
    connector = 2 * 64 * (16 * width) * 576
    assert tower / 1e9 == pytest.approx(213.8, abs=0.01)
    with torch.inference_mode():
        assert count(lambda: real_shape.encoder.vision_model(pixel_values=pixels)) == tower
        assert count(real_shape.images, pixels) == tower + connector
        one_token = count(real_shape.language, torch.empty(1, 1, 576))
    assert one_token / 1e9 == pytest.approx(0.2124, abs=1e-4)


def test_attention_is_counted_although_the_fused_kernel_is_not_known():
    q = torch.randn(2, 3, 50, 16)
    attend = torch.nn.functional.scaled_dot_product_attention
    assert count(attend, q, q, q) == 4 * 2 * 3 * 50 * 50 * 16


def test_nothing_is_calculated_unless_a_number_must_be_looked_at():
    a, seen = torch.ones(2, 3), []

    def call():
        seen.append(a @ a.T)

    assert count(call) == 2 * 2 * 3 * 2
    assert type(seen[0]) is not torch.Tensor  # fake: a shape without numbers

    def looking():
        call()
        return a @ a.T @ a if seen[-1].max().item() == 3 else None

    assert count(looking) == 3 * (2 * 2 * 3 * 2)  # each of the three products
    assert seen[-1].tolist() == [[3, 3], [3, 3]]


def test_stage_costs_are_the_weights_and_inputs_of_each_stage(tiny, question):
    step = lab.EagerStep(tiny, question)
    costs = stage_costs(step, FRAMES)
    assert list(costs) == ["build_inputs", "resize", "vision", "language", "heads", "readback", "total"]
    assert costs["total"].flops == sum(cost.flops for name, cost in costs.items() if name != "total")
    weights = lambda module: sum(p.numel() * 4 for p in module.parameters())  # noqa: E731
    encoder, size = tiny.encoder, 128
    images = weights(encoder.vision_model) + weights(encoder.connector) + 3 * size * size * 4
    assert costs["vision"].bytes == pytest.approx(images, rel=1e-3)
    text = weights(encoder.text_model) - weights(encoder.text_model.embed_tokens)
    length = len(step.row)
    embedded = length * 192 * 4  # only the rows taken from the table
    assert costs["language"].bytes == pytest.approx(text + embedded + length**2 * 4, rel=0.02)
    assert costs["resize"].flops == 2 * 3 * (
        128 * 210 * 160 + 128 * 160 * 128
    )  # the operators themselves are made once
    assert (length, 192, 256) in costs["language"].shapes
    assert costs["readback"].flops == 0


def test_two_frames_see_the_vision_tower_twice(tiny, question):
    one = stage_costs(lab.EagerStep(tiny, question), FRAMES)["vision"]
    two = stage_costs(lab.EagerStep(tiny, question, frames=2), FRAMES.repeat(2, axis=1))["vision"]
    assert two.flops == 2 * one.flops
    assert one.bytes < two.bytes < 1.5 * one.bytes  # weights are read once


def test_counting_leaves_the_step_as_it_was(tiny, question):
    step = lab.SplitStep(tiny, question)
    frames = np.random.default_rng(0).integers(0, 256, FRAMES.shape, dtype=np.uint8)
    before = step.decide(frames).logits
    costs = stage_costs(step, frames)
    assert {"language_prefix", "language_question", "restore"} <= set(costs)
    assert np.array_equal(step.decide(frames).logits, before)


def test_a_stage_met_twice_is_summed_and_its_weights_read_once():
    weight, other = torch.randn(8, 8), torch.randn(8, 8)

    def decide(x):
        with stage("language"):
            x = x @ weight
        with stage("heads"):
            x = x @ other
        with stage("language"):
            return x @ weight

    costs = stage_costs(SimpleNamespace(name="mine", decide=decide), torch.randn(4, 8))
    assert costs["language"].flops == 2 * 2 * 4 * 8 * 8
    assert costs["language"].shapes == {(4, 8, 8): 2 * 2 * 4 * 8 * 8}
    assert costs["language"].bytes == (8 * 8 + 4 * 8 + 4 * 8) * 4  # the weight once; x, and what the heads made
    assert costs["total"].bytes == (2 * 8 * 8 + 4 * 8) * 4


def test_a_step_whose_work_cannot_be_seen_is_refused():
    silent = SimpleNamespace(name="captured", decide=lambda x: None)
    with pytest.raises(InputError, match="captured.*eager twin"):
        stage_costs(silent, FRAMES)

    def broken(x):
        raise ZeroDivisionError("by nothing")

    with pytest.raises(InputError, match="broken.*by nothing.*eager twin"):
        stage_costs(SimpleNamespace(name="broken", decide=broken), FRAMES)


def test_real_work_is_counted_like_fake_work(tiny, question, monkeypatch):
    """A step that looks at numbers is counted on one real decision: operations and bytes are the same."""
    step = lab.EagerStep(tiny, question)
    fake = stage_costs(step, FRAMES)
    monkeypatch.setattr(roofline, "_without_numbers", lambda prepare: prepare()())
    real = stage_costs(step, FRAMES)
    assert {name: cost.flops for name, cost in real.items()} == {name: cost.flops for name, cost in fake.items()}
    for name in ("vision", "language", "heads", "total"):
        assert real[name].bytes == pytest.approx(fake[name].bytes, rel=0.05)


# --- ceilings -----------------------------------------------------------------------------------------------------------


@pytest.fixture
def small(monkeypatch, tmp_path):
    """A smaller square and copy, and a lock of its own, so that this takes no time."""
    monkeypatch.setattr(roofline, "_LARGEST", {"cpu": 1024})
    monkeypatch.setattr(roofline, "_COPY_BYTES", {"cpu": 2**24})
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))


def test_ceilings_are_what_the_machine_reaches(small):
    found = ceilings("cpu", "fp32", shapes=[(64, 256, 512), (8, 8, 8)], most=1)
    assert list(found.by_shape) == [(64, 256, 512)]
    assert found.gflops == max(found.square, *found.by_shape.values())
    assert found.side == 1024
    a = torch.randn(1024, 1024)
    times = []
    for _ in range(5):
        begin = time.perf_counter()
        a @ a
        times.append(time.perf_counter() - begin)
    here = 2 * 1024**3 / min(times) / 1e9
    assert here / 3 < found.square < here * 3
    assert 0.5 < found.gbps < 5000


def test_ceilings_take_known_dtypes_and_devices_only(small):
    with pytest.raises(InputError, match="fp8"):
        ceilings("cpu", "fp8")
    with pytest.raises(InputError, match="abacus"):
        ceilings("abacus")


def test_short_calls_are_timed_together():
    calls = []
    seconds = roofline._best_seconds(lambda: (calls.append(1), time.sleep(2e-4)), None)
    assert 2e-4 < seconds < 2e-3
    assert len(calls) > 20


# --- floors -------------------------------------------------------------------------------------------------------------

MACHINE = Ceilings("cpu", "fp32", gflops=100.0, gbps=10.0, square=90.0, side=2048, by_shape={})


def test_the_floor_is_the_larger_of_two_times():
    costs = {
        "vision": Cost(flops=200 * 10**9, bytes=400 * 10**6),
        "language": Cost(flops=10**9, bytes=400 * 10**6),
        "readback": Cost(),
    }
    costs["total"] = Cost(sum(c.flops for c in costs.values()), sum(c.bytes for c in costs.values()))
    table = floor(costs, MACHINE).set_index("stage")
    assert list(table.index) == ["vision", "language", "readback", "total"]
    assert table.loc["vision", ["compute_ms", "memory_ms", "floor_ms", "bound"]].tolist() == [2000, 40, 2000, "compute"]
    assert table.loc["language", ["compute_ms", "memory_ms", "floor_ms", "bound"]].tolist() == [10, 40, 40, "memory"]
    assert table.loc["readback", ["floor_ms", "bound"]].tolist() == [0, ""]
    assert table.loc["total", "floor_ms"] == 2040
    assert floor({"total": costs["language"]}, MACHINE)["floor_ms"].tolist() == [40]


def test_shares_over_one_are_shown_not_clipped():
    floors = floor({"vision": Cost(flops=10**9), "heads": Cost(flops=10**9), "total": Cost(flops=2 * 10**9)}, MACHINE)
    stages = {"vision": 5.0, "total": 25.0}
    rows = pd.DataFrame(
        [
            {"arm": "eager", "block": block, "phase": phase, "stage": name, "ms": ms if phase == "timed" else 1e6}
            for name, ms in stages.items()
            for block in range(6)
            for phase in ("warmup", "timed")
        ]
    )
    table = share_of_floor(floors, rows, "eager").set_index("stage")
    assert table.loc["vision", "share"] == 2.0
    assert table.loc["total", "share"] == 0.8
    assert table.loc["vision", ["measured_ms", "low", "high"]].tolist() == [5.0, 5.0, 5.0]
    assert math.isnan(table.loc["heads", "share"])


def test_a_measured_step_stands_beside_its_floor(tiny, question, small):
    step = lab.EagerStep(tiny, question)
    rows = compare({"eager": step}, [FRAMES], blocks=5, warmup=1)
    costs = stage_costs(step, FRAMES)
    table = share_of_floor(floor(costs, ceilings(shapes=costs["total"].shapes)), rows, "eager").set_index("stage")
    assert (table.loc[["vision", "language", "heads", "total"], "share"] > 0).all()
    assert table.loc["total", "share"] < 1.5
