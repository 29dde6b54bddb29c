"""Acting in an environment with a step: several episodes in lockstep, as the published play loop does it."""

from collections import deque
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass

import numpy as np

from lab.envs import Env, make
from lab.errors import InputError, whole
from lab.models.heads import Decisions
from lab.steps.padded import PaddedStep

MAX_DECISIONS = 4500  # the published cap of an episode
GATE = 0.5  # the published P(act) below which the last action is repeated
CHOOSE = ("greedy", "sampled")


@dataclass(frozen=True)
class Episode:
    """One episode as it was played; n is the number of its decisions.

    `actions` int64 [n], places in `Play.names`; `repeated` bool [n], where the gate repeated the action before; `rewards`
    fp64 [n], with those of a button pressed by auto-fire added to the decision before it; `start_reward`, those of
    auto-fire before the first decision. `decisions` holds the answers [n]. `ended` is False where the cap cut the
    episode. `fires` counts auto-fires, which are no decisions. `frames` uint8 [n, frames, height, width, 3] is what the
    step saw at each decision, None unless recorded.
    """

    seed: int
    actions: np.ndarray
    repeated: np.ndarray
    rewards: np.ndarray
    start_reward: float
    decisions: Decisions
    ended: bool
    fires: int
    frames: np.ndarray | None

    @property
    def score(self) -> float:
        return self.start_reward + float(self.rewards.sum())

    def __len__(self) -> int:
        return len(self.actions)


@dataclass(frozen=True)
class Play:
    """What `play` returns: the episodes, the actions' names in the environment's order, the environment's `describe()`,
    and `batches`, the number of episodes that each call of the step decided."""

    episodes: list[Episode]
    names: list[str]
    environment: dict
    batches: list[int]

    @property
    def actions(self) -> list[np.ndarray]:
        return [episode.actions for episode in self.episodes]

    @property
    def scores(self) -> list[float]:
        return [episode.score for episode in self.episodes]

    @property
    def lengths(self) -> list[int]:
        return [len(episode) for episode in self.episodes]


def play(
    step,
    source: str | Callable[[int], Env],
    episodes: int = 1,
    max_decisions: int | Sequence[int] = MAX_DECISIONS,
    seed: int = 0,
    choose: str = "greedy",
    auto_fire: bool = True,
    gate: bool = False,
    record: bool = False,
) -> Play:
    """Play `episodes` episodes in lockstep: one call of the step decides for all that still run.

    `step` is a step for any batch size, or a function `make(batch)` that builds fixed-batch steps, which is put into a
    `PaddedStep`. `source` names the environment ("atari:Pong"), or is a function from a seed to one. Episode i has its
    own environment and random numbers, both drawn from (`seed`, i) whatever the number of episodes. `max_decisions` caps
    all episodes, or each by its own number.

    `choose`: `greedy` takes the most probable option, `sampled` draws from the probabilities. With `auto_fire` the button
    FIRE, where there is one, is pressed after a reset and after a lost life (where the environment counts `lives`), which
    is no decision. The frames before the current one are copies of it at the start and after an auto-fire. With `gate`,
    an action is repeated where P(act) is below 0.5 and the episode has an earlier one. These rules, and the cap of 4500
    decisions, are the published ones.
    `record` keeps the frames: 100 kB per frame of Atari, 230 kB of Doom.

    Where the batch shrinks, the step is told to forget (`reset`) the rows which another episode moves into. Raises
    InputError, before anything is played, where the question's options are not the environment's actions by name (in
    any order), for a fixed-batch step where the batch would shrink, and for settings that cannot be.
    """
    whole("episodes", episodes, 1)
    whole("seed", seed, 0)
    caps = list(max_decisions) if hasattr(max_decisions, "__len__") else [max_decisions] * episodes
    if len(caps) != episodes:
        raise InputError(f"max_decisions has {len(caps)} numbers for {episodes} episodes; give one each.")
    for cap in caps:
        whole("max_decisions", cap, 1)
    check_choose(choose)
    if not hasattr(step, "decide"):
        if not callable(step):
            raise InputError(f"{step!r} is no step; give one, or a function batch -> step.")
        step = PaddedStep(step, sizes=[2**i for i in range((episodes - 1).bit_length() + 1)])
    batch = getattr(step, "batch", None)
    if batch is not None and (episodes, batch) != (1, 1):
        raise InputError(
            f"The step takes a batch of {batch} and nothing else, but the batch shrinks as episodes end; give play a "
            "function batch -> step, or a PaddedStep."
        )
    step.reset()
    with ExitStack() as opened:
        running = []
        for number, cap in enumerate(caps):
            env_seed, generator = episode_seeds(seed, number, choose)
            env = make(source, env_seed) if isinstance(source, str) else source(env_seed)
            opened.callback(env.close)
            check_actions(step.question.names, env)
            running.append(Running(env, env_seed, cap, generator, step, auto_fire, gate, record))
        everyone, environment, names = list(running), running[0].env.describe(), running[0].env.actions
        for one in running:
            one.begin(one.seed)
        batches: list[int] = []
        running = _still(running, step)
        while running:
            answer = step.decide(np.stack([np.stack(one.window) for one in running]))
            batches.append(len(running))
            for row, one in enumerate(running):
                one.take(answer.logits[row], answer.probabilities[row], answer.p_act[row])
            running = _still(running, step)
        return Play([one.episode() for one in everyone], names, environment, batches)


def check_choose(choose: str) -> None:
    if choose not in CHOOSE:
        raise InputError(f"choose is {choose!r}; it is one of {', '.join(CHOOSE)}.")


def check_actions(options: list[str], env: Env) -> None:
    """Raise InputError where a question's options are not the environment's actions by name, in any order."""
    if set(options) != set(env.actions):
        raise InputError(
            f"The question's options ({', '.join(options)}) are not the actions of {env.source} "
            f"({', '.join(env.actions)}); name the options as the actions."
        )


def episode_seeds(seed: int, number: int, choose: str) -> tuple[int, np.random.Generator | None]:
    """The environment's seed (31 bits) of episode `number`, and the generator that `sampled` draws from."""
    for_env, for_draws = np.random.SeedSequence([seed, number]).spawn(2)
    generator = np.random.default_rng(for_draws) if choose == "sampled" else None
    return int(for_env.generate_state(1)[0] >> 1), generator


def _still(running: list["Running"], step) -> list["Running"]:
    """Those not over yet, the step told which of the remaining rows another episode moved into."""
    left = [one for one in running if not one.over]
    moved = [row for row, one in enumerate(left) if one is not running[row]]
    if moved:
        step.reset(moved)
    return left


class Running:
    """One episode while it runs: the rules by which answers become actions.

    `begin` opens it, `window` is what the step must be shown next, `take` acts on the answer, until it is `over`.
    """

    def __init__(self, env: Env, seed: int, cap: int, generator, step, auto_fire: bool, gate: bool, record: bool):
        self.env, self.seed, self.cap, self.generator, self.gate, self.record = env, seed, cap, generator, gate, record
        self.asks(step.question)
        self.fire = env.actions.index("FIRE") if auto_fire and "FIRE" in env.actions else None
        self.window: deque[np.ndarray] = deque(maxlen=getattr(step, "frames", 1))
        self.actions: list[int] = []
        self.repeated: list[bool] = []
        self.rewards = [0.0]  # the first is auto-fire's before any decision
        self.answers: list[np.ndarray] = []
        self.frames: list[np.ndarray] = []
        self.ended, self.fires = False, 0

    @property
    def over(self) -> bool:
        return self.ended or len(self.actions) >= self.cap

    @property
    def score(self) -> float:
        return float(sum(self.rewards))

    def asks(self, question) -> None:
        """The question whose answers `take` gets from now on; its options are the environment's actions, in any order."""
        self.question, self.places = question, [self.env.actions.index(name) for name in question.names]

    def begin(self, seed: int) -> None:
        """Reset the environment to `seed`, whatever was played in it before, and press FIRE where that is due."""
        self._fill(self.env.reset(seed))
        self._auto_fire()

    def take(self, logits: np.ndarray, probabilities: np.ndarray, p_act: float) -> None:
        """Act on one answer."""
        self.answers.append(np.concatenate([logits, probabilities, [p_act]]))
        if self.record:
            self.frames.append(np.stack(self.window))
        option = int(probabilities.argmax())
        if self.generator is not None:  # drawn at every decision, so that the gate does not shift later draws
            share = probabilities.astype(np.float64)
            option = int(self.generator.choice(len(share), p=share / share.sum()))
        repeat = self.gate and p_act < GATE and bool(self.actions)
        action = self.actions[-1] if repeat else self.places[option]
        self.actions.append(action)
        self.repeated.append(repeat)
        lives = getattr(self.env, "lives", 0)
        frame, reward, self.ended = self.env.step(action)
        self.rewards.append(reward)
        self.window.append(np.array(frame))  # a copy: an environment may draw into one array over and over
        if getattr(self.env, "lives", 0) < lives:
            self._auto_fire()

    def _auto_fire(self) -> None:
        if self.fire is None or self.over:
            return
        frame, reward, self.ended = self.env.step(self.fire)
        self.rewards[-1] += reward
        self.fires += 1
        self._fill(frame)

    def _fill(self, frame: np.ndarray) -> None:
        self.window.extend([np.array(frame)] * self.window.maxlen)

    def episode(self) -> Episode:
        count = len(self.places)
        answers = np.array(self.answers, np.float32).reshape(-1, 2 * count + 1)  # none where auto-fire ended it all
        logits, probabilities, p_act = answers[:, :count], answers[:, count : 2 * count], answers[:, 2 * count :]
        return Episode(
            seed=self.seed,
            actions=np.array(self.actions, np.int64),
            repeated=np.array(self.repeated, bool),
            rewards=np.array(self.rewards[1:]),
            start_reward=self.rewards[0],
            decisions=Decisions(self.question, logits, probabilities, p_act.reshape(-1)),
            ended=self.ended,
            fires=self.fires,
            frames=np.array(self.frames, np.uint8) if self.record else None,
        )
