"""Training the two small Snake checkpoints: imitation of the planner, minutes on a CPU.

The planner tells the model the answer in words, as it does in the published loop; what must be learned is to read it. The
positions come from games in which half of the moves are random, so that all descriptions occur, and from unshielded games,
in which now and then no route is safe. The task is so small that sixty positions are enough for it. Both checkpoints
follow one recipe for the same number of steps; the second sees the first tenth of the positions, over and over, and some
descriptions never.
"""

import json
import random
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from importlib.metadata import version
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from tqdm import tqdm

from lab.envs.snake import NAMES, Plan, Snake
from lab.envs.snake_prompts import PROMPTS, prompt
from lab.errors import whole
from lab.live import threads
from lab.models.text import CONFIG, TextModel, text_preset
from lab.question_tokens import TextPrompt
from lab.records import RowWriter, check_folder
from lab.steps.text import Prepared, TextStep

FIRST_SEED = 500_000  # games of training; those of the benches are below 10,000
NOTHING = -100  # a row without a right answer: the move where none is safe
HAND_ON, UNSHIELDED = 0.5, 0.2


@dataclass(frozen=True)
class Recipe:
    """What decides a training run, all of it kept beside the weights: `positions` to learn from, `steps` of the optimiser
    with `batch` positions each, half of them asked compactly and half verbosely."""

    seed: int = 0
    positions: int = 60
    steps: int = 200
    batch: int = 16
    rate: float = 3e-3
    tenth: float = 0.1

    def __post_init__(self):
        for name, least in (("seed", 0), ("positions", 1), ("steps", 1), ("batch", 1)):
            whole(name, getattr(self, name), least)


def positions(count: int, seed: int) -> Iterator[tuple[Snake, Plan]]:
    """`count` positions of seeded games on the default board, one of 200 moves after the other."""
    rng, number = random.Random(seed), 0
    while True:
        game, shielded = Snake(seed=FIRST_SEED + number), rng.random() >= UNSHIELDED
        for _ in range(200):
            plan = game.plan()
            yield game, plan
            count -= 1
            if count == 0:
                return
            legal = [move.direction for move in plan.moves if move.legal]
            if game.over or not (plan.safe if shielded else legal):
                break
            choice = rng.choice(plan.safe if shielded else legal)
            game.step(plan.preferred if plan.preferred and rng.random() < HAND_ON else choice)
            if game.over:
                break
        number += 1


def labels(plan: Plan) -> tuple[int, int, int]:
    """The right options of the three questions: the preferred direction, a safe route, the food reachable."""
    move = NOTHING if plan.preferred is None else NAMES.index(plan.preferred)
    return move, int(bool(plan.safe)), int(plan.reachable)


def train(recipe: Recipe, out: Path, quiet: bool = False) -> dict[str, Path]:
    """Train both checkpoints and write them as folders `out`/whole and `out`/tenth, in the published naming.

    Losses go to `out`/training.rows.jsonl as they come. The same recipe, torch version and kind of CPU give the same
    weights: everything runs on one thread. Raises InputError where `out` cannot be written.
    """
    check_folder(out)
    data = list(_examples(recipe))
    folders = {}
    with RowWriter(out / "training.rows.jsonl") as log, threads(1), torch.random.fork_rng(devices=[]):
        log.about("recipe", **asdict(recipe))
        for name, share in (("whole", 1.0), ("tenth", recipe.tenth)):
            part = replace(recipe, positions=max(1, round(recipe.positions * share)))
            folders[name] = _train_one(part, data[: part.positions], out / name, log, quiet)
    return folders


def _examples(recipe: Recipe) -> Iterator[tuple[tuple[TextPrompt, ...], tuple[int, int, int]]]:
    """Each position's prompts, one a kind, and its labels."""
    for game, plan in positions(recipe.positions, recipe.seed):
        yield tuple(prompt(game, plan, kind) for kind in PROMPTS), labels(plan)


def _train_one(recipe: Recipe, data: list, folder: Path, log: RowWriter, quiet: bool) -> Path:
    torch.manual_seed(recipe.seed)
    model = _begin(recipe.seed)
    reader, rng = _Reader(model, data), np.random.default_rng(recipe.seed)
    optimiser = torch.optim.AdamW(reader.parameters(), recipe.rate, weight_decay=0.01)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimiser, recipe.rate, total_steps=recipe.steps, pct_start=0.1)
    for step in tqdm(range(recipe.steps), desc=folder.name, disable=quiet, mininterval=5):
        kind = step % len(PROMPTS)  # rows of the two kinds differ in length
        picks = rng.integers(len(data), size=recipe.batch)
        logits, act = reader([data[i][0][kind] for i in picks])
        wanted = torch.tensor([label for i in picks for label in data[i][1]])
        known, right = wanted != NOTHING, logits.argmax(1) == wanted
        loss = cross_entropy(logits, wanted, ignore_index=NOTHING)
        # entry 0 is "act": whether the answer at hand is the right one
        whole_loss = loss + 0.1 * cross_entropy(act[known], 1 - right[known].long())
        optimiser.zero_grad()
        whole_loss.backward()
        nn.utils.clip_grad_norm_(reader.parameters(), 1.0)
        optimiser.step()
        schedule.step()
        moves = known.view(-1, 3)[:, 0]
        log.append(
            {"phase": folder.name, "step": step, "prompt": PROMPTS[kind], "loss": loss.item(),
             "agreement": right.view(-1, 3)[moves, 0].float().mean().item()}
        )  # fmt: skip
    return _save(model, folder, reader.put_back(), recipe)


def _begin(seed: int) -> TextModel:
    """Linear layers that pass signals on at their full size: the usual deviation of 0.02 suits a width of 768, and at a
    width of 64 nothing is learned for thousands of steps."""
    model = text_preset("snake", seed).requires_grad_(True).train()
    for part in model.modules():
        if isinstance(part, nn.Linear):
            nn.init.xavier_uniform_(part.weight)
        if isinstance(part, nn.Dropout):
            part.p = 0.0
    return model


class _Reader:
    """The model over prompts, with only those embedding rows that they use."""

    def __init__(self, model: TextModel, data: list):
        self.model, self.step = model, TextStep(model, cache_prompts=True)
        table = model.encoder.embeddings.tok_embeddings.weight
        table.requires_grad_(False)
        seen = {prompt for prompts, _ in data for prompt in prompts}
        self.used = np.unique(np.concatenate([np.unique(self.step.prepare(prompt).ids) for prompt in seen]))
        self.embedding = nn.Embedding.from_pretrained(table.data[self.used].clone(), freeze=False)

    def parameters(self) -> list[nn.Parameter]:
        return [p for p in self.model.parameters() if p.requires_grad] + list(self.embedding.parameters())

    def __call__(self, prompts: list[TextPrompt]) -> tuple[Tensor, Tensor]:
        """Logits [3 * prompts, 4] and act logits [3 * prompts, 2]."""
        rows = _together([self.step.prepare(prompt) for prompt in prompts])
        ids, *rest = (torch.from_numpy(array) for array in rows)
        embeds = self.embedding(torch.from_numpy(np.searchsorted(self.used, ids.numpy())))
        return self.model.answer(embeds, *rest)

    def put_back(self) -> np.ndarray:
        """Put the trained rows into the model's own table; return their ids."""
        self.model.encoder.embeddings.tok_embeddings.weight.data[self.used] = self.embedding.weight.data
        return self.used


def _together(prepared: list[Prepared]) -> list[np.ndarray]:
    """The arrays of several prompts as one batch, padded to the longest."""
    length = max(one.ids.shape[1] for one in prepared)
    pad = prepared[0].ids.dtype.type(2)
    ids, mask = (
        [
            np.pad(getattr(one, name), ((0, 0), (0, length - one.ids.shape[1])), constant_values=value)
            for one in prepared
        ]
        for name, value in (("ids", pad), ("mask", False))
    )
    rest = [[getattr(one, name) for one in prepared] for name in ("types", "readouts", "present")]
    return [np.concatenate(arrays) for arrays in (ids, mask, *rest)]


def _save(model: TextModel, folder: Path, used: np.ndarray, recipe: Recipe) -> Path:
    """Write a checkpoint folder as fp16 with the embedding rows `used` only; the others come from seed 0 again."""
    check_folder(folder / "encoder")
    state = {name: value.detach().half().contiguous() for name, value in model.state_dict().items()}
    table = state.pop(name := "encoder.embeddings.tok_embeddings.weight")
    state[f"{name}.ids"], state[f"{name}.rows"] = torch.from_numpy(used).int(), table[used]
    save_file(state, folder / "model.safetensors")
    model.encoder.config.to_json_file(folder / "encoder" / "config.json")
    told = {"recipe": asdict(recipe), "torch": version("torch"), "transformers": version("transformers")}
    (folder / "training.json").write_text(json.dumps(told, indent=1) + "\n")
    # the published loader asks for its encoder's name, and counts act logits by their costs
    published = {"encoder": "encoder", "act_costs": {"escalate": 1.0}}
    (folder / CONFIG).write_text(json.dumps(asdict(model.config) | published, indent=1) + "\n")
    return folder
