import numpy as np
import pytest

from lab.errors import InputError
from lab.resume import (
    InsideImage,
    MalformedPrompt,
    Picture,
    Prompt,
    Splice,
    before_image,
    chunks,
    common_prefix,
    form_runs,
    plan,
)

IMAGE = 99


def prompt(*parts) -> Prompt:
    """Parts: a text of so many tokens, or (name, rows) for a picture between two border tokens; 16 patches each."""
    found = Prompt((), (), IMAGE)
    for part in parts:
        if isinstance(part, int):
            found = found.then(range(part))
        else:
            found = found.then([51, *[IMAGE] * part[1], 52], [Picture((part[0],), part[1], 16)])
    return found


THREE = prompt(4, ("a", 3), 2, ("b", 5), ("c", 2), 3)  # spans (5, 8) (12, 17) (19, 21), 25 tokens


def test_spans_are_the_pictures_places():
    assert THREE.spans == ((5, 8), (12, 17), (19, 21)) and len(THREE) == 25


@pytest.mark.parametrize(
    ("ids", "rows", "says"),
    [
        ([1, IMAGE, IMAGE, 2], [3], "Picture 0 has 3 rows, but the prompt holds 2"),
        ([1, IMAGE, IMAGE, 2], [1], "Picture 0 has 1 rows"),
        ([1, IMAGE, 2], [1, 1], "1 runs of placeholder tokens for 2 picture"),
        ([1, IMAGE, 2, IMAGE], [1], "2 runs of placeholder tokens for 1 picture"),
        ([IMAGE, IMAGE], [1, 1], "1 runs of placeholder tokens for 2"),
        ([1, 2], [1], "0 runs"),
    ],
)
def test_a_malformed_placeholder_is_refused(ids, rows, says):
    odd = Prompt(tuple(ids), tuple(Picture((i,), n, 16) for i, n in enumerate(rows)), IMAGE)
    with pytest.raises(MalformedPrompt, match=says):
        plan(odd)


PER_IMAGE = [(0, (0, 1, 2)), (5, (0, 1, 2)), (8, (1, 2)), (12, (1, 2)), (17, (2,)), (18, (2,)), (21, ()), (24, ())]
IN_RUNS = [(8, ((0, 1), (2,))), (10, ((0, 1), (2,))), (14, ((0, 1), (2,))), (17, ((2,),)), (20, ((2,),)), (21, ())]


@pytest.mark.parametrize(("resume", "encoded"), PER_IMAGE)
def test_per_image_only_those_that_end_past_the_resume_point_are_encoded(resume, encoded):
    found = plan(THREE, resume)
    assert found.encoded == encoded and found.calls == tuple((i,) for i in encoded)


@pytest.mark.parametrize(("resume", "calls"), IN_RUNS)
def test_a_run_is_skipped_only_if_it_ends_at_or_before_the_resume_point(resume, calls):
    assert plan(THREE, resume, patch_budget=32).calls == calls


def test_the_old_behaviour_encodes_everything_and_needs_the_same_rows():
    for budget, cases in ((None, PER_IMAGE), (32, IN_RUNS)):
        for resume, _ in cases:
            old, new = (plan(THREE, resume, budget, skip) for skip in (False, True))
            assert old.encoded == (0, 1, 2) and old.splices == new.splices
            assert (old.calls == new.calls) == (new.encoded == (0, 1, 2))


def test_runs_are_those_of_the_cold_pass_wherever_it_resumes():
    cold = plan(THREE, 0, patch_budget=32).calls
    for resume in range(len(THREE)):
        assert plan(THREE, resume, patch_budget=32).calls in (cold, cold[1:], ())


def test_runs_take_whole_images_as_many_as_fit():
    assert form_runs([16, 16, 16], 48) == ((0, 1, 2),)
    assert form_runs([16, 16, 16], 47) == ((0, 1), (2,))
    assert form_runs([40, 90, 8, 8], 48) == ((0,), (1,), (2, 3)), "one larger than the budget stands alone"
    assert form_runs([8, 90], 48) == ((0,), (1,))
    assert form_runs([], 48) == ()
    with pytest.raises(InputError, match="patch budget"):
        form_runs([1], 0)


@pytest.mark.parametrize("resume", [6, 7, 13, 16, 20])
def test_a_point_inside_an_image_is_refused_per_image_and_kept_in_runs(resume):
    with pytest.raises(InsideImage, match="cuts the image"):
        plan(THREE, resume)
    assert plan(THREE, resume, patch_budget=100).calls == ((0, 1, 2),)
    start = before_image(THREE, resume)
    assert start in (5, 12, 19) and plan(THREE, start).encoded


@pytest.mark.parametrize("resume", [-1, 25, 26])
def test_a_point_outside_the_prompt_is_refused(resume):
    with pytest.raises(InputError, match="outside the prompt of 25 tokens"):
        plan(THREE, resume)


def test_splices_hold_every_placeholder_behind_the_resume_point_once():
    for resume in range(len(THREE)):
        places = []
        for splice in plan(THREE, resume, patch_budget=32).splices:
            start, stop = THREE.spans[splice.picture]
            assert splice.start - splice.first == start and splice.stop == stop
            places += range(splice.start, splice.stop)
        assert places == [i for i in range(resume, len(THREE)) if THREE.ids[i] == IMAGE]
    assert plan(THREE, 14, patch_budget=32).splices[0] == Splice(picture=1, first=2, start=14, stop=17)


def test_a_prefix_is_token_ids_and_pictures():
    other = prompt(4, ("a", 3), 2, ("B", 5), ("c", 2), 3)
    assert other.ids == THREE.ids, "the same text"
    assert common_prefix(THREE, other) == common_prefix(other, THREE) == 12, "nothing from the other picture on"
    assert common_prefix(THREE, THREE.then([7])) == 25
    assert common_prefix(THREE, Prompt(THREE.ids[:14], THREE.pictures, IMAGE)) == 14
    assert common_prefix(THREE, prompt(3)) == 3 and common_prefix(THREE, Prompt((9,), (), IMAGE)) == 0
    more = prompt(4, ("a", 4), 2)
    assert common_prefix(THREE, more) == 5, "another size is another picture"
    assert common_prefix(THREE, Prompt(THREE.ids, THREE.pictures[:1], IMAGE)) == 12, "a picture that is missing"


@pytest.mark.parametrize("size", [None, 1, 2, 4, 7, 100])
@pytest.mark.parametrize("resume", [0, 5, 12, 21, 24])
def test_chunks_cover_the_rest_and_cut_no_image(size, resume):
    found = chunks(THREE, resume, size)
    assert [start for start, _ in found] == [resume, *[stop for _, stop in found[:-1]]] and found[-1][1] == 25
    assert all(before_image(THREE, stop) == stop for _, stop in found)
    free = chunks(THREE, resume, size, whole_images=False)
    assert all(stop - start <= (size or 25) for start, stop in free) and free[-1][1] == 25
    if size in (2, 4):
        assert any(before_image(THREE, stop) != stop for _, stop in chunks(THREE, 0, size, False))


def test_a_chunk_needs_a_size():
    with pytest.raises(InputError, match="0 tokens"):
        chunks(THREE, 0, 0)


def test_planning_loads_no_torch():
    import subprocess
    import sys

    code = "import sys, lab.resume; print('torch' in sys.modules)"
    assert subprocess.check_output([sys.executable, "-c", code], text=True).strip() == "False"
    assert isinstance(THREE.array, np.ndarray)
