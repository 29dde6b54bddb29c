"""Frame sources of a reader's own: pictures in a folder, a gymnasium environment, a Python function, a video.

| source | frames |
|---|---|
| `folder:PATH` | the pictures of a folder, in the order of their names, over and over, as a viewer shows them |
| `gym:ID` | what a gymnasium environment shows, under a random policy: the observation if that is a picture, or `render()` |
| `python:MODULE:FUNCTION`, `python:FILE.py:FUNCTION` | `function(i)`, the frame of moment i = 0, 1, ..., uint8 [H, W, 3] |
| `video:FILE` | the frames of a video, over and over (needs the extra `video`) |

Several, joined with " + ", are cameras that see the same moment: a decision takes one frame of each. Pictures of another
size than the first are brought to that size. Each frame is an array of its own, so that a source may refill one; and
whatever another's code raises, `sys.exit()` too, is told in one sentence (InputError).
"""

from collections.abc import Callable
from contextlib import ExitStack
from importlib import import_module
from importlib.util import find_spec, module_from_spec, spec_from_file_location
from pathlib import Path
from typing import Any

import numpy as np

from lab.envs import frames_for
from lab.envs.pictures import read_picture
from lab.errors import InputError, foreign
from lab.workloads import CAMERAS, Workload, load_workloads

MOST_VIDEO_FRAMES = 2000


class Sequence:
    """Frames that come in an order of their own, whatever is chosen: the one action is to wait for the next.

    `read(i)` gives the frame of moment i; where `length` is known, moment `length` begins a new episode with frame 0.
    """

    actions = ["next"]
    terminal_frame = True

    def __init__(self, source: str, read: Callable[[int], Any], length: int | None = None):
        self.source, self._read, self.length = source, read, length
        self._place, self._shape = 0, None

    def reset(self, seed: int | None = None) -> np.ndarray:
        """The first frame; a seed changes nothing."""
        self._place = 0
        return self._frame()

    def step(self, action: int) -> tuple[np.ndarray, float, bool]:
        """The next frame, no reward, and whether it is the last one."""
        self._place = self._place + 1 if self.length is None else (self._place + 1) % self.length
        return self._frame(), 0.0, self.length is not None and self._place == self.length - 1

    def _frame(self) -> np.ndarray:
        frame = as_frame(self._read(self._place), f"{self.source}, frame {self._place}")
        self._shape = self._shape or frame.shape
        return frame if frame.shape == self._shape else _resize(frame, self._shape[:2])

    def describe(self) -> dict[str, Any]:
        return {"source": self.source, "frames": self.length}

    def close(self) -> None:
        pass


class Gym:
    """A gymnasium environment by its id. `actions` are its discrete ones, by name where it names them; of any other
    action space the one action is "sample", a random draw from it."""

    terminal_frame = True

    def __init__(self, name: str, seed: int = 0):
        if find_spec("gymnasium") is None:
            raise InputError(f"gym:{name} needs gymnasium; install it with `pip install gymnasium`.")
        import gymnasium

        if name.startswith("ALE/") and find_spec("ale_py"):
            import ale_py

            gymnasium.register_envs(ale_py)
        self.source, self._seed, self.actions = f"gym:{name}", seed, ["sample"]
        with foreign(f"The gymnasium environment {name!r} does not start"):
            self._env = gymnasium.make(name, render_mode="rgb_array", disable_env_checker=True)
            space = self._env.action_space
            self._discrete = isinstance(space, gymnasium.spaces.Discrete)
            space.seed(seed)
            if self._discrete:
                named = getattr(self._env.unwrapped, "get_action_meanings", lambda: ())()
                self.actions = list(named) or [str(i) for i in range(int(space.n))]
        self._offset = int(getattr(space, "start", 0))

    def reset(self, seed: int | None = None) -> np.ndarray:
        seed, self._seed = self._seed if seed is None else seed, None
        with foreign(f"{self.source} failed to reset"):
            seen = self._env.reset(seed=seed)[0]
        return self._frame(seen)

    def step(self, action: int) -> tuple[np.ndarray, float, bool]:
        if not 0 <= action < len(self.actions):
            raise InputError(f"{self.source} has no action {action!r}; it has 0 to {len(self.actions) - 1}.")
        with foreign(f"{self.source} failed at a step"):
            chosen = action + self._offset if self._discrete else self._env.action_space.sample()
            seen, reward, terminated, truncated, _ = self._env.step(chosen)
            reward, ended = float(reward), bool(terminated or truncated)
        return self._frame(seen), reward, ended

    def _frame(self, seen: Any) -> np.ndarray:
        picture = (
            isinstance(seen, np.ndarray) and seen.dtype == np.uint8 and seen.ndim == 3 and seen.shape[-1] in (1, 3)
        )
        if not picture:
            with foreign(f"{self.source} shows no picture, install what it draws with"):
                seen = self._env.render()
        return as_frame(seen, self.source)

    def describe(self) -> dict[str, Any]:
        return {"source": self.source, "actions": self.actions}

    def close(self) -> None:
        with foreign(f"{self.source} failed to close"):
            self._env.close()


class Cameras:
    """Several sources that are looked at in the same moments: a frame is uint8 [cameras, H, W, 3]."""

    terminal_frame = True

    def __init__(self, envs: list):
        self.envs, self.source = envs, CAMERAS.join(env.source for env in envs)
        self.actions = max((env.actions for env in envs), key=len)

    def reset(self, seed: int | None = None) -> np.ndarray:
        return self._together([env.reset(seed) for env in self.envs])

    def step(self, action: int) -> tuple[np.ndarray, float, bool]:
        seen = [env.step(action % len(env.actions)) for env in self.envs]
        return (
            self._together([frame for frame, _, _ in seen]),
            sum(r for _, r, _ in seen),
            any(end for _, _, end in seen),
        )

    @staticmethod
    def _together(frames: list[np.ndarray]) -> np.ndarray:
        shape = frames[0].shape
        return np.stack([frame if frame.shape == shape else _resize(frame, shape[:2]) for frame in frames])

    def describe(self) -> dict[str, Any]:
        return {"source": self.source, "cameras": len(self.envs)}

    def close(self) -> None:
        with ExitStack() as stack:
            for env in self.envs:
                stack.callback(env.close)


def as_frame(seen: Any, what: str) -> np.ndarray:
    """A copy of a picture as uint8 [height, width, 3], grey repeated; InputError that names `what` for anything else."""
    with foreign(f"{what} is no picture"):
        frame = np.asarray(seen)
    if frame.dtype == np.uint8 and frame.ndim == 2:
        frame = frame[..., None]
    if frame.dtype != np.uint8 or frame.ndim != 3 or frame.shape[-1] not in (1, 3) or not frame.size:
        raise InputError(f"{what} is {frame.dtype} {list(frame.shape)}; a frame is uint8 [height, width, 3].")
    return np.array(np.broadcast_to(frame, (*frame.shape[:2], 3)), order="C")


def folder(path: str, seed: int = 0) -> Sequence:
    """The pictures of a folder in the order of their names, each read by `lab.envs.pictures.read_picture`. InputError
    where there is none, and for what that refuses."""
    from PIL import Image

    place, known = Path(path), Image.registered_extensions()
    if not place.is_dir():
        raise InputError(f"There is no folder {path}; source = 'folder:PATH' takes one with pictures.")
    files = sorted(p for p in place.iterdir() if p.suffix.lower() in known and not p.name.startswith("."))
    if not files:
        raise InputError(f"The folder {path} holds no picture; put some there, such as .png or .jpg files.")
    return Sequence(f"folder:{path}", lambda number: read_picture(files[number]), len(files))


def video(path: str, seed: int = 0) -> Sequence:
    """The frames of a video, the first 2,000 at most, turned by the quarters that the file says. InputError without the
    extra or where it cannot be decoded."""
    if find_spec("av") is None:
        raise InputError(f"video:{path} needs PyAV; install it with `pip install 'refrain-lab[video]'`.")
    import av

    if not Path(path).is_file():
        raise InputError(f"There is no video {path}.")
    with foreign(f"{path} cannot be read as a video"), av.open(path) as file:
        decoded = zip(range(MOST_VIDEO_FRAMES), file.decode(video=0), strict=False)
        frames = [np.rot90(frame.to_ndarray(format="rgb24"), _quarters(frame)) for _, frame in decoded]
    if not frames:
        raise InputError(f"The video {path} holds no frame.")
    return Sequence(f"video:{path}", frames.__getitem__, len(frames))


def _quarters(frame: Any) -> int:
    """How many quarters a decoded frame is to be turned counterclockwise; 0 where PyAV does not tell."""
    return round(getattr(frame, "rotation", 0) / 90)


def python(path: str, seed: int = 0) -> Sequence:
    """What a Python function returns for 0, 1, 2, ...: MODULE:FUNCTION or FILE.py:FUNCTION. InputError where there is
    none, or where it fails or leaves."""
    where, _, name = path.rpartition(":")
    with foreign(f"python:{path} cannot be loaded"):
        if where.endswith(".py"):
            spec = spec_from_file_location(f"own_frames_{Path(where).stem}", where)
            module = module_from_spec(spec)
            spec.loader.exec_module(module)
        else:
            module = import_module(where)
        function = getattr(module, name)
    if not callable(function):
        raise InputError(f"python:{path} is no function; it is called with 0, 1, 2, ... and returns a frame.")

    def read(number: int) -> Any:
        with foreign(f"python:{path} failed at frame {number}"):
            return function(number)

    return Sequence(f"python:{path}", read)


KINDS: dict[str, Callable] = {"folder": folder, "gym": Gym, "python": python, "video": video}


def cameras(source: str, seed: int, make: Callable) -> Cameras:
    """The sources that `source` joins, each made with `make(source, seed)`; what was opened is closed where one fails."""
    envs: list = []
    try:
        for part in source.split(CAMERAS):
            envs.append(make(part.strip(), seed))
    except BaseException:
        for env in envs:
            env.close()
        raise
    return Cameras(envs)


def check_workloads(path: str | Path) -> dict[str, Workload]:
    """The workloads of a reader's own file, checked as far as that goes without a model: each source gives a frame, each
    question fits a row. Raises InputError, also where a shipped workload's name stands for another question, since
    published figures would then stand beside the wrong one."""
    from lab.tokens import build_row, load_tokenizer

    found, shipped, tokenizer = load_workloads(path), load_workloads(), load_tokenizer()
    for name, workload in found.items():
        if name in shipped and workload.question != shipped[name].question:
            raise InputError(f"{path}: {name!r} is the name of a shipped workload; give yours another name.")
        try:
            build_row(tokenizer, workload.question, workload.frames)
            frames_for(workload, 1)
        except InputError as error:
            raise InputError(f"{path}: workload {name!r}: {error}") from None
    return found


def _resize(frame: np.ndarray, size: tuple[int, int]) -> np.ndarray:
    from PIL import Image

    return np.array(Image.fromarray(frame).resize((size[1], size[0]), Image.Resampling.BILINEAR))
