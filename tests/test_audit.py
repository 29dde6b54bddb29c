"""The audit passes steps that can be captured and names what breaks the others, fault by fault."""

import numpy as np
import pytest
import torch

import lab
from lab import clocks
from lab.audit import META, NO_STAGE, REAL, audit
from lab.caches import FrameFeatures
from lab.errors import InputError
from lab.steps import EagerStep, PaddedStep, QuestionFirstStep, SplitStep, StaticSplitStep, StaticStep, StockStep
from lab.steps.compiled import CompiledStep, compiler

QUESTIONS = {
    "choice": lab.Question("choice", "Which button?", {"LEFT": "go left", "RIGHT": "go right", "FIRE": "shoot"}),
    "score": lab.Question("score", "How near is the enemy?", ["far", "near", "here"]),
    "noul": lab.Question("noul", "Is the door open?", {"false": "it is shut", "true": "it is open"}),
}
CHOICE = QUESTIONS["choice"]
BOTH = f"{REAL}, {META}"


@pytest.fixture(scope="module")
def golden():
    return lab.load_model("tests/golden")  # Idefics3 classes


@pytest.fixture(scope="module")
def tiny():
    return lab.load_model("tiny")  # SmolVLM classes


def pictures(frames=1, batch=1, seed=0):
    return np.random.default_rng(seed).integers(0, 256, (batch, frames, 60, 80, 3), dtype=np.uint8)


def seen(result):
    return [(finding.stage, finding.operation, finding.how_seen) for finding in result.findings]


# ------------------------------------------------------------------------------------------------- what passes


@pytest.mark.parametrize("pixels", ["device", "processor"])
@pytest.mark.parametrize("option_attention", ["causal", "block"])
@pytest.mark.parametrize("frames", [1, 2])
def test_the_static_step_can_be_captured(golden, frames, option_attention, pixels):
    result = audit(StaticStep(golden, CHOICE, frames, 1, option_attention, pixels), pictures(frames))
    assert result.findings == [] and result.capturable
    assert list(result.operations) == ["resize", "vision", "language", "heads"]
    assert result.operations["language"] > 100  # it was followed
    assert result.table()["finding"].tolist() == ["ok"] * 4
    assert result.sentence.startswith("static can be captured")


def test_so_can_one_that_reuses_frames_and_both_of_its_graphs_are_followed(golden):
    plain = audit(StaticStep(golden, CHOICE, 2), pictures(2))
    reusing = audit(StaticStep(golden, CHOICE, 2, reuse=True), pictures(2))
    assert reusing.capturable
    assert reusing.operations["language"] == 2 * plain.operations["language"]


@pytest.mark.parametrize("type", QUESTIONS)
def test_so_can_batches_of_all_question_types_on_the_other_classes(tiny, type):
    assert audit(StaticStep(tiny, QUESTIONS[type], 1, batch=2), pictures(batch=2)).findings == []


def test_so_can_bf16(tiny):
    assert audit(StaticStep(lab.load_model("tiny", dtype="bf16"), CHOICE), pictures()).findings == []


@pytest.mark.parametrize("kind", [StaticSplitStep, QuestionFirstStep])
def test_so_can_steps_with_kept_keys_and_values(golden, kind):
    step = kind(golden, CHOICE)
    before = step.decide(pictures()).logits
    assert audit(step, pictures()).findings == []
    np.testing.assert_array_equal(step.decide(pictures()).logits, before)


def test_of_steps_for_several_batch_sizes_those_the_batch_needs_are_audited(golden):
    step = PaddedStep(lambda size: StaticStep(golden, CHOICE, 2, size, reuse=True))
    result = audit(step, pictures(2, batch=2))  # the one for a batch of 1 is there and has no buffers yet
    assert result.capturable and result.operations["language"] > 100


@pytest.mark.skipif(compiler() is None, reason="needs a C++ compiler")
def test_compiled_work_is_audited_without_compiling_it(golden):
    step = CompiledStep(golden, CHOICE)
    assert audit(step, pictures()).capturable
    assert step.counts == {"graphs": 0, "graph_breaks": 0, "recompiles": 0}


class Planted(StaticStep):
    """StaticStep with something more done to the hidden states, in the stage `planted`."""

    def __init__(self, model, plant, *args, **kwargs):
        super().__init__(model, CHOICE, *args, **kwargs)
        self.plant = plant

    def _language(self):
        hidden = super()._language()
        with clocks.stage("planted"):
            self.plant(hidden)
        return hidden


def assign_number(hidden):
    hidden.clone()[0] = 5.0


def index_by_device_places(hidden):
    hidden[:, torch.arange(3, device=hidden.device)]


HARMLESS = {
    "a number assigned to a part": assign_number,
    "places made on the device": index_by_device_places,
    "a choice between two values": lambda hidden: torch.where(hidden > 0, hidden, 0.0),
    "a masked fill": lambda hidden: hidden.masked_fill(hidden > 0, 1.0),
    "a cast": lambda hidden: hidden.to(torch.float64),
    "a tensor taken as a tensor": lambda hidden: torch.as_tensor(hidden, device=hidden.device) + 1,
    "to where it is": lambda hidden: hidden.to(hidden.device),
    "a repeat of known size": lambda hidden: hidden.repeat_interleave(2, dim=1),
    "a number from the host": lambda hidden: hidden + torch.zeros(()),
}


@pytest.mark.parametrize("name", HARMLESS)
def test_what_a_graph_can_hold_is_no_finding(golden, name):
    result = audit(Planted(golden, HARMLESS[name]), pictures())
    assert result.findings == []
    assert result.operations.get("planted", 0) > 0 or name == "to where it is"


# ------------------------------------------------------------------------------------------------- planted faults


def assign_by_mask(hidden):
    hidden.clone()[hidden > 0] = 0.0


def branch(hidden):
    if hidden.sum() > 0:
        hidden.neg()


FAULTS = {  # what is done: the operation named, the passes that see it
    "item": (lambda h: h.sum().item(), "Tensor.item > aten._local_scalar_dense.default", BOTH),
    "branch": (branch, "Tensor.__bool__ > aten._local_scalar_dense.default", BOTH),
    "float": (lambda h: float(h[0, 0, 0]), "Tensor.__float__ > aten._local_scalar_dense.default", BOTH),
    "tolist": (lambda h: h[0, 0].tolist(), "Tensor.tolist", BOTH),
    "numpy": (lambda h: h.numpy(), "Tensor.numpy", BOTH),
    "asarray": (lambda h: np.asarray(h), "Tensor.__array__", BOTH),
    "equal": (lambda h: torch.equal(h, h), "torch.equal > aten.equal.default", BOTH),
    "nonzero": (lambda h: h.nonzero(), "Tensor.nonzero > aten.nonzero.default", BOTH),
    "where": (lambda h: torch.where(h > 0), "torch.where > aten.nonzero.default", BOTH),
    "masked_select": (lambda h: h.masked_select(h > 0), "Tensor.masked_select > aten.masked_select.default", BOTH),
    "unique": (lambda h: torch.unique(h), "torch.functional.unique > aten._unique2.default", BOTH),
    "boolean index": (lambda h: h[h > 0], "Tensor.__getitem__ > aten.index.Tensor", BOTH),
    "boolean assignment": (assign_by_mask, "Tensor.__setitem__ > aten.index_put_.default", BOTH),
    "cpu": (lambda h: h.cpu(), "Tensor.cpu", BOTH),
    "to the host": (lambda h: h.to("cpu"), "Tensor.to > aten._to_copy.default", META),
    "from the host": (lambda h: torch.zeros(h.shape).to(h.device), "Tensor.to > aten._to_copy.default", META),
    "copied in": (lambda h: h.clone().copy_(torch.zeros(h.shape)), "Tensor.copy_ > aten.copy_.default", META),
    "host tensor used": (lambda h: h + torch.zeros(h.shape), "Tensor.add > aten.add.Tensor", META),
    "places on the host": (lambda h: h[:, torch.arange(3)], "Tensor.__getitem__ > aten.index.Tensor", META),
    "tensor": (lambda h: torch.tensor([1.0, 2.0]), "torch.tensor", BOTH),
    "tensor on the device": (
        lambda h: torch.tensor([1.0, 2.0], device=h.device),
        "torch.tensor",
        BOTH,
    ),
    "as_tensor": (lambda h: torch.as_tensor([1, 2]), "torch.as_tensor", BOTH),
    "new_tensor": (lambda h: h.new_tensor([1.0]), "Tensor.new_tensor", BOTH),
    "from_numpy": (lambda h: torch.from_numpy(np.ones(3)), "aten.lift_fresh.default", BOTH),
    "list of places": (lambda h: h[:, [0, 1]], "Tensor.__getitem__ > aten.lift_fresh.default", REAL),
}


@pytest.mark.parametrize("name", FAULTS)
def test_a_planted_fault_is_named(golden, name):
    plant, operation, how_seen = FAULTS[name]
    result = audit(Planted(golden, plant), pictures())
    assert not result.capturable
    assert seen(result) == [("planted", operation, how_seen)]
    assert operation in result.sentence and "stage planted" in result.sentence
    assert "test_audit:" in result.findings[0].where
    table = result.table().set_index("stage")
    assert table.loc["planted", "operation"] == operation and table.loc["language", "finding"] == "ok"


def test_faults_after_the_first_are_seen_on_real_tensors(golden):
    def twice(hidden):
        hidden.sum().item()
        hidden.nonzero()

    result = audit(Planted(golden, twice), pictures())
    assert [how for _, _, how in seen(result)] == [BOTH, REAL]
    assert result.sentence.endswith("1 more finding.")


def test_a_fault_in_a_loop_is_one_finding(golden):
    result = audit(Planted(golden, lambda hidden: [row.max().item() for row in hidden[0]]), pictures())
    assert len(result.findings) == 1


class PlantedInReuse(StaticStep):
    def _decide(self, count):
        if count < self.frames:
            self.image_rows.sum().item()
        return super()._decide(count)


def test_a_fault_only_in_the_graph_of_the_newest_frame_is_found(golden):
    result = audit(PlantedInReuse(golden, CHOICE, 2, reuse=True), pictures(2))
    assert seen(result) == [(NO_STAGE, "Tensor.item > aten._local_scalar_dense.default", BOTH)]


class ReadbackInTheGraph(StaticStep):
    def _decide(self, count):
        output = super()._decide(count)
        with clocks.stage("readback"):
            return output.cpu()


def test_a_copy_inside_the_graph_is_not_excused_by_the_name_of_its_stage(golden):
    assert seen(audit(ReadbackInTheGraph(golden, CHOICE), pictures())) == [("readback", "Tensor.cpu", BOTH)]


class PlainStep:
    """No graph: copies the frames in, works on them, copies out; then whatever is planted."""

    name = "plain"

    def __init__(self, plant=lambda values: values):
        self.device, self.weight, self.plant = torch.device("cpu"), torch.ones(3), plant

    def decide(self, frames):
        with clocks.stage("copy_in"):
            values = torch.from_numpy(frames).to(self.device)
        with clocks.stage("work"):
            values = self.plant(values * self.weight)
        with clocks.stage("readback"):
            return values.sum().cpu().numpy().tolist()

    def reset(self, rows=None):
        self.was_reset = True


def test_any_step_may_copy_in_and_out_in_the_stages_for_it():
    step = PlainStep()
    result = audit(step, pictures())
    assert result.findings == [] and list(result.operations) == ["work"] and step.was_reset


def test_but_not_elsewhere():
    result = audit(PlainStep(lambda values: torch.from_numpy(values.numpy())), pictures())
    assert seen(result) == [("work", "Tensor.numpy", BOTH), ("work", "aten.lift_fresh.default", REAL)]


def test_what_is_closed_over_counts_as_the_step_s_own():
    table = torch.arange(3.0)
    assert audit(PlainStep(lambda values: values + table), pictures()).capturable
    assert table.device.type == "cpu"


def test_masked_scatter_is_noted_but_can_be_captured(golden):
    result = audit(Planted(golden, lambda hidden: hidden.masked_scatter(hidden > 0, hidden)), pictures())
    assert result.capturable and [finding.breaks for finding in result.findings] == [False]
    planted = result.table().query("stage == 'planted'")
    assert planted["finding"].str.startswith("note:").tolist() == [True, False]


def test_a_run_that_ends_on_meta_tensors_for_a_reason_of_its_own_is_a_finding(golden):
    def needs_values(hidden):
        if hidden.neg().is_meta:
            raise ValueError("no values here")

    (finding,) = audit(Planted(golden, needs_values), pictures()).findings
    assert (finding.stage, finding.operation, finding.how_seen) == ("planted", "Tensor.neg > aten.neg.default", META)
    assert "no values here" in finding.what and "needs_values" in finding.where


# ------------------------------------------------------------------------------------------------- steps that fail


@pytest.mark.parametrize("frames", [1, 2])
@pytest.mark.parametrize("model", ["golden", "tiny"])
def test_the_plain_forward_fails_by_name(model, frames, request):
    result = audit(StockStep(request.getfixturevalue(model), CHOICE, frames), pictures(frames))
    found = {(finding.operation, finding.where.split(".")[-1]): finding for finding in result.findings}
    assert {finding.stage for finding in found.values()} == {"forward"}
    assert found["Tensor.__getitem__ > aten.index.Tensor", "get_image_features"].how_seen == BOTH
    reads = {finding.how_seen for finding in result.findings if finding.what == "reads values to the host"}
    assert reads == {REAL}  # they come after what ends the other pass
    assert not result.capturable


def test_the_eager_step_fails_where_it_builds_its_inputs(golden):
    result = audit(EagerStep(golden, CHOICE), pictures())
    assert not result.capturable
    assert ("build_inputs", "aten.lift_fresh.default", BOTH) in seen(result)
    assert ("build_inputs", "Tensor.to > aten._to_copy.default", META) in seen(result)
    reads = [finding for finding in result.findings if finding.what == "reads values to the host"]
    assert reads and reads[0].where.startswith("transformers.masking_utils:")  # seen in inference mode too
    assert "readback" not in result.operations


def test_so_do_the_split_step_and_one_that_keeps_frame_features(golden):
    assert not audit(SplitStep(golden, CHOICE), pictures()).capturable
    keeping = audit(EagerStep(golden, CHOICE, features=FrameFeatures(4)), pictures())
    assert not keeping.capturable
    assert not any("changed since" in finding.what for finding in keeping.findings)  # exchanged weights are no finding


# ------------------------------------------------------------------------------------------------- around it


def test_the_step_is_left_as_it_was(golden):
    """Also where its work sets attributes, and after a pass that ended early."""

    class Keeps(Planted):
        def _decide(self, count):
            self.kept = super()._decide(count)
            return self.kept

    step = Keeps(golden, lambda hidden: hidden.nonzero(), 2, reuse=True)
    frames, weights = pictures(2), list(golden.parameters())
    before = step.decide(frames)
    assert not audit(step, frames).capturable
    assert step.seen is None  # reset
    assert all(now is then for now, then in zip(golden.parameters(), weights, strict=True))
    assert step.kept.device.type == step.pixels.device.type == step.image_rows.device.type == "cpu"
    assert clocks._recorder is None and clocks.stage("any") is clocks._NOBODY
    np.testing.assert_array_equal(step.decide(frames).logits, before.logits)


def test_bad_frames_and_measured_calls_are_refused(golden):
    step = StaticStep(golden, CHOICE)
    with pytest.raises(InputError, match="uint8"):
        audit(step, pictures().astype(np.float32))
    with pytest.raises(InputError, match="measured"):
        clocks.time_call(audit, step, pictures(), clock=clocks.HostClock())
    assert audit(step, pictures()).capturable


@pytest.mark.parametrize("option_attention", ["causal", "block"])
def test_the_stock_step_answers_as_the_eager_one(golden, option_attention):
    frames = pictures(2, batch=2)
    stock = StockStep(golden, CHOICE, 2, 2, option_attention).decide(frames)
    eager = EagerStep(golden, CHOICE, 2, option_attention).decide(frames)
    np.testing.assert_allclose(stock.logits, eager.logits, atol=2e-5, rtol=0)
    other = StockStep(golden, CHOICE, 2, 2, option_attention).decide(pictures(2, batch=2, seed=1))
    assert np.abs(other.logits - stock.logits).max() > 1e-3  # the frames are looked at


def test_the_stock_step_with_the_processor_s_pixels_and_its_refusals(golden):
    step = StockStep(golden, CHOICE, pixels="processor")
    eager = EagerStep(golden, CHOICE, pixels="processor")
    np.testing.assert_allclose(step.decide(pictures()).logits, eager.decide(pictures()).logits, atol=2e-5, rtol=0)
    assert step.describe()["step"] == "StockStep" and step.start_cost()["build_s"] > 0
    with pytest.raises(InputError, match="1 of 1"):
        step.decide(pictures(batch=2))
