"""A question, frames and steps of the reader's own."""

import json
import re
import sys
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

import lab
from lab import cli, notebooks, runner
from lab.envs import frames_for, make
from lab.envs.own import check_workloads
from lab.errors import InputError
from lab.experiments import graphs, latency, question_first, token_layout
from lab.workloads import load_workloads

MINE = """title = "Conveyor"
source = "folder:pictures"
instructions = "Is there a part on the belt that must come off?"
options = { KEEP = "let it pass", TAKE = "take it off" }
"""
ROOT = Path(__file__).parent.parent


@pytest.fixture
def place(tmp_path, monkeypatch):
    """A folder with five pictures (one of another size, one grey, one equal to the one before), and mine.toml."""
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))  # the lock of its own: nothing here waits for a measurement
    rng = np.random.default_rng(0)
    (tmp_path / "pictures").mkdir()
    pictures = [rng.integers(0, 256, (40, 60, 3), dtype=np.uint8) for _ in range(3)]
    pictures = [*pictures[:2], pictures[1], rng.integers(0, 256, (80, 90), dtype=np.uint8), pictures[2]]
    for number, picture in enumerate(pictures):
        Image.fromarray(picture).save(tmp_path / "pictures" / f"{number}.png")
    (tmp_path / "pictures" / "notes.txt").write_text("no picture")
    (tmp_path / "frames.py").write_text(
        "import numpy as np\ndef frame(i): return np.full((30, 50), i % 256, np.uint8)\n"
        "def odd(i): return np.zeros((3, 3))\ndef fails(i): raise RuntimeError('lens cap')\n"
    )
    (tmp_path / "mine.toml").write_text(MINE)
    return tmp_path


def write(place, text, name="own.toml"):
    (place / name).write_text(text)
    return place / name


# --- where frames come from ---------------------------------------------------------------------------------------------


def test_pictures_of_a_folder_come_in_order_in_one_size_and_go_round(place, monkeypatch):
    monkeypatch.chdir("/")  # paths are relative to the file, not to where one stands
    (workload,) = load_workloads(place / "mine.toml").values()
    assert (workload.name, workload.title, workload.frames) == ("mine", "Conveyor", 1)
    frames = frames_for(workload, 7)
    assert frames.shape == (7, 1, 40, 60, 3) and frames.dtype == np.uint8
    for number in (0, 1, 2, 4):
        assert (frames[number, 0] == np.asarray(Image.open(place / "pictures" / f"{number}.png"))).all()
    assert (frames[3, 0, :, :, 0] == frames[3, 0, :, :, 2]).all(), "grey became colour"
    assert (frames[5:] == frames[:2]).all()


def test_several_frames_per_decision_do_not_reach_over_the_end(place):
    path = write(place, MINE + "frames = 2\n")
    (workload,) = load_workloads(path).values()
    frames = frames_for(workload, 6)
    assert (frames[1, 0] == frames[0, 1]).all()
    assert (frames[5, 0] == frames[5, 1]).all(), "the first picture again begins an episode"


def test_a_function_and_cameras(place):
    path = write(
        place,
        '[arm]\nsource = ["folder:pictures", "python:frames.py:frame"]\nframes = 2\n'
        'instructions = "Where to?"\noptions = ["left", "right"]\n',
    )
    (workload,) = load_workloads(path).values()
    assert workload.frames == 4
    frames = frames_for(workload, 3)
    assert frames.shape == (3, 4, 40, 60, 3)
    assert frames[2, 1].max() == 1 and frames[2, 3].max() == 2, "oldest first, cameras of one moment together"
    assert (frames[2, 0] == np.asarray(Image.open(place / "pictures" / "1.png"))).all()
    sys.path.insert(0, str(place))
    try:
        assert make("python:frames:frame").reset().shape == (30, 50, 3)
    finally:
        sys.path.remove(str(place))


def test_a_gymnasium_environment_shows_its_observation_or_what_it_draws():
    pytest.importorskip("ale_py")
    env = make("gym:ALE/Pong-v5", 3)
    game = make("atari:Pong", 3)
    assert (env.reset() == game.reset()).all() and env.actions == game.actions
    assert (env.step(2)[0] == game.step(2)[0]).all()
    env.close()
    import gymnasium

    class Dial(gymnasium.Env):
        """Its observation is a number; it draws a grey level, and its actions have no names or are not discrete."""

        metadata = {"render_modes": ["rgb_array"]}
        observation_space = gymnasium.spaces.Box(0, 1, (1,))

        def __init__(self, render_mode=None, wide=False):
            box, dial = gymnasium.spaces.Box(-1, 1, (2,)), gymnasium.spaces.Discrete(3, start=5)
            self.render_mode, self.action_space, self.level = render_mode, box if wide else dial, 0

        def reset(self, *, seed=None, options=None):
            self.level = 0
            return np.zeros(1, np.float32), {}

        def step(self, action):
            assert self.action_space.contains(action)
            self.level += 1
            return np.zeros(1, np.float32), 1.0, self.level == 3, False, {}

        def render(self):
            return np.full((20, 30, 3), self.level, np.uint8)

    gymnasium.register("Dial-v0", Dial)
    gymnasium.register("WideDial-v0", Dial, kwargs={"wide": True})
    for name, actions in (("Dial-v0", ["0", "1", "2"]), ("WideDial-v0", ["sample"])):
        env = make(f"gym:{name}")
        assert env.actions == actions and env.reset().max() == 0
        assert [env.step(0)[0].max() for _ in range(2)] == [1, 2] and env.step(0)[2] is True
        with pytest.raises(InputError, match="has no action 9"):
            env.step(9)


def test_a_video(place):
    av = pytest.importorskip("av")
    with av.open(str(place / "clip.mp4"), "w") as file:
        stream = file.add_stream("mpeg4", rate=5)
        stream.width, stream.height, stream.pix_fmt = 64, 48, "yuv420p"
        for level in (0, 120, 240):
            frame = av.VideoFrame.from_ndarray(np.full((48, 64, 3), level, np.uint8), format="rgb24")
            file.mux(stream.encode(frame))
        file.mux(stream.encode())
    (workload,) = load_workloads(write(place, MINE.replace("folder:pictures", "video:clip.mp4"))).values()
    frames = frames_for(workload, 4)
    assert frames.shape == (4, 1, 48, 64, 3)
    np.testing.assert_allclose(frames.mean((1, 2, 3, 4)), [0, 120, 240, 0], atol=12)


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        (("folder:pictures", "folder:nowhere"), "There is no folder"),
        (("folder:pictures", "folder:empty"), "holds no picture"),
        (("folder:pictures", "folder:torn"), "cannot be read as a picture"),
        (("folder:pictures", "gym:Nowhere-v0"), "does not start"),
        (("folder:pictures", "python:frames.py:nothing"), "cannot be loaded (AttributeError"),
        (("folder:pictures", "python:missing.py:frame"), "cannot be loaded (FileNotFoundError"),
        (("folder:pictures", "python:frames.py:odd"), "is float64 [3, 3]; a frame is uint8"),
        (("folder:pictures", "python:frames.py:fails"), "failed at frame 0 (RuntimeError: lens cap)"),
        (("folder:pictures", "python:frames.py:np"), "is no function"),
        (("folder:pictures", "video:clip.mp4"), "video"),
        (("folder:pictures", "camera:0"), "Unknown frame source 'camera:0'"),
        (('"folder:pictures"', "[]"), "source is []"),
        (('"folder:pictures"', '["folder:pictures", "folder:nowhere"]'), "There is no folder"),
        (("options = {", "frames = 9\noptions = {"), "frames is 9; give a number from 1 to 8"),
        (('"folder:pictures"', "[" + '"folder:pictures",' * 9 + "]"), "frames is 9"),
        (("must come off?", "must come off?" + "x" * 20 + '"\nlayout = "mask'), "unknown key 'layout'"),
        (("[", "["), None),
    ],
)
def test_a_workload_that_cannot_be_measured_is_refused_in_one_sentence(place, change, sentence, capsys):
    (place / "empty").mkdir()
    (place / "torn").mkdir()
    (place / "torn" / "a.png").write_bytes(b"no picture")
    path = write(place, MINE.replace(*change))
    if sentence is None:
        assert list(check_workloads(path)) == ["own"]
        return
    with pytest.raises(SystemExit) as stop:
        cli.main(["run", "--profile", "smoke", "--workload", str(path), "--out", str(place / "out")])
    said = capsys.readouterr().err.strip()
    assert stop.value.code == 2 and sentence in said and len(said.splitlines()) == 1, said
    assert not (place / "out").exists()


def test_a_shipped_workloads_name_is_refused_for_another_question(place):
    with pytest.raises(InputError, match="'pong' is the name of a shipped workload"):
        check_workloads(write(place, MINE, "pong.toml"))


# --- measured ---------------------------------------------------------------------------------------------------------


def test_every_experiment_measures_the_files_workloads(place):
    path = write(place, MINE.replace('"folder:pictures"', '["folder:pictures", "python:frames.py:frame"]'))
    (workload,) = load_workloads(path).values()
    table = token_layout.table(path)
    assert [line["workload"] for line in table] == ["own"] and table[0]["image"] == 2 * 67
    assert set(token_layout.flop_shares(table, "tiny", path)) == {"own"}
    (again,) = token_layout.repeats(place / "mine.toml", 9).to_dict("records")
    assert again["pairs"] == 8 and again["identical"] == 2 / 8, "of ten pictures in a row one begins anew"
    for experiment in (latency, graphs, question_first):
        rows = experiment.run("smoke", workload=path, weights="random")
        assert set(rows["workload"]) == {"own"} and set(rows["question"]) == {workload.digest}
        assert {said["frames"] for said in rows["describe"]} == {2}
        if experiment is latency:
            assert latency.answer(rows).startswith("own: a decision takes")


def test_a_run_takes_the_notebooks_that_take_a_workload(place, make_notebook, monkeypatch):
    monkeypatch.chdir(place)
    save = """
from lab import records, load_workloads
run = records.Run("02_takes", dict(profile=profile, workload=workload))
path = run.save({"answer": f"{len(load_workloads(workload))} workload: {list(load_workloads(workload))[0]}."}, "none")
"""
    folder = make_notebook("02_takes", save, save=False, parameters='profile = ""\nworkload = ""').parent
    make_notebook("03_other")
    said: list[str] = []
    arguments = {"profile": "smoke", "out": place / "out", "folder": folder, "say": said.append}
    assert runner.run(**arguments, workload=Path("mine.toml")) == 0, said
    assert "not run, since they ask nothing of your frames: 03_other" in said
    saved = json.loads((place / "out" / "02_takes.json").read_text())
    assert saved["results"]["answer"] == "1 workload: mine."
    assert saved["parameters"]["workload"] == str(place / "mine.toml")
    with pytest.raises(InputError, match="no chosen notebook has a parameter 'workload'"):
        runner.run(**arguments, only="03", workload=Path("mine.toml"))


def test_real_notebooks_take_a_workload():
    taking = {
        path.stem for path in notebooks.select(ROOT / "notebooks") if "workload" in notebooks.read_parameters(path)
    }
    assert taking >= {"01_token_layout", "02_latency_breakdown", "03_question_first", "04_cuda_graph"}


# --- a step of one's own -----------------------------------------------------------------------------------------------


def test_the_readmes_own_step_runs_as_it_stands(place):
    blocks = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    (code,) = [block for block in blocks if "class EveryOther" in block]
    assert len(code[: code.index("rows = ")].strip().splitlines()) <= 12
    (workload,) = load_workloads(place / "mine.toml").values()
    step = lab.EagerStep(lab.load_model("tiny", weights="random"), workload.question)
    known = {"lab": lab, "step": step, "frames": frames_for(workload, 1)}
    exec(code, known)
    table = lab.stats.summary(known["rows"])
    total = table[table["stage"] == "total"].set_index("arm")["median"]
    assert total["every other frame"] < total["eager"] and {"eager again"} <= set(total.index)
