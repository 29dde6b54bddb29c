"""Training the pocket model: imitation of scripted experts, minutes on a CPU.

A pocket model is the decision model at a small size, taught to answer the shipped questions as an expert does that reads
the game's state. First the vision tower learns alone. A dense loss asks of every patch which things touch it, without
which a ball of eight pixels is found only after a very long time. Linear layers on the mean of the image rows, one per
game, say where in the picture each thing is, and imitate the expert directly; the mean, since attention reads image rows
as a weighted mean too, and what only the rows side by side tell is beyond a small text model. Half-trained, that imitation
leads games of its own, whose frames the expert labels too, so that the model has seen its own mistakes (Ross et al., "A
Reduction of Imitation Learning and Structured Prediction to No-Regret Online Learning", 2011). These helpers are then
thrown away, the image rows of all examples computed once, and the text model and heads learn to read the answer off them
at the options, which stand in a random order half of the time. Every layout is taught from the same vision tower on the
same examples.
"""

import json
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from copy import deepcopy
from dataclasses import asdict, dataclass, fields, replace
from importlib.metadata import version
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import save
from torch import Tensor, nn
from torch.nn.functional import binary_cross_entropy_with_logits, cross_entropy, smooth_l1_loss
from tqdm import tqdm

from lab.envs import make
from lab.envs.experts import EXPERTS, Box, expert
from lab.errors import InputError
from lab.models.checkpoints import pocket_model
from lab.models.vision import DecisionModel, type_id, whole_mask
from lab.pixels import DevicePixels
from lab.records import RowWriter, check_folder
from lab.tokens import Row
from lab.workloads import Workload, get_workload

TIMES = 8  # how often, at most, a random action is held


@dataclass(frozen=True)
class Recipe:
    """What decides a training run, all of it kept beside the weights.

    `frames` are those led by the expert, per game; each of `rounds` adds `led` that the half-trained model leads. A step of
    the optimiser takes `batch` examples, `vision_steps` for the vision tower and `language_steps` for the text model of
    each layout; of a batch for the tower each game gets its part of `shares` (Doom's large monster is learned at a glance).
    `wander` is the share of decisions at which a stretch of random play begins, `shuffled` that of
    examples whose options stand in a random order.
    """

    games: tuple[str, ...] = ("doom_basic", "breakout", "pong")
    shares: tuple[int, ...] = (1, 3, 3)
    layouts: tuple[str, ...] = ("terminator", "question_first")
    seed: int = 0
    frames: int = 6000
    led: int = 2000
    rounds: int = 2
    vision_steps: int = 4000
    language_steps: int = 1200
    batch: int = 63
    rate: float = 2e-3
    wander: float = 0.08
    shuffled: float = 0.5

    def __post_init__(self):
        for layout in self.layouts:
            if layout not in ("terminator", "question_first"):
                raise InputError(f"layout is {layout!r}; a pocket model is trained in terminator or question_first.")
        for name in ("frames", "led", "vision_steps", "language_steps", "batch", "rounds", "seed"):
            least = 0 if name in ("rounds", "seed") else 1
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or value < least:
                raise InputError(f"{name} is {value!r}; give a whole number of {least} or more.")
        if len(self.shares) != len(self.games):
            raise InputError(f"shares has {len(self.shares)} numbers for {len(self.games)} games; give one each.")
        for game in self.games:
            if get_workload(game).source not in EXPERTS:
                raise InputError(f"There is no scripted expert for {game}; there are some for {', '.join(EXPERTS)}.")


@dataclass
class Examples:
    """Labelled frames of one game: pixels uint8 [n, 3, size, size], the expert's option int64 [n], touched bool
    [n, patches, things], and middles fp32 [n, things, 2], across and down as shares of the picture, NaN where a thing is
    not in it."""

    pixels: Tensor
    options: Tensor
    touched: Tensor
    middles: Tensor

    def __len__(self) -> int:
        return len(self.options)

    def __add__(self, other: "Examples") -> "Examples":
        return Examples(*(torch.cat([getattr(self, f.name), getattr(other, f.name)]) for f in fields(self)))


def lead(
    workload: Workload, n: int, seed: int, leader: Callable[[np.ndarray], int] | None = None, wander: float = 0.08
) -> Iterator[tuple[np.ndarray, int, dict[str, Box]]]:
    """`n` frames uint8 [H, W, 3] of seeded play, each with the expert's option and where the expert sees things.

    `leader` gives the option to play on a frame; None lets the expert lead. At each decision a stretch of one random
    action, held up to eight times, begins with probability `wander`.
    """
    rng, names = np.random.default_rng(seed), workload.question.names
    options = {"labels": True} if workload.source.startswith("doom:") else {}
    with closing(make(workload.source, seed, **options)) as env:
        guide, frame, held, action = expert(env), env.reset(), 0, 0
        for _ in range(n):
            wanted = guide.action()
            yield frame, names.index(env.actions[wanted]), guide.boxes()
            held -= 1
            if held < 0 and rng.random() < wander:
                held, action = int(rng.integers(1, TIMES)), int(rng.integers(len(env.actions)))
            if held < 0:
                action = wanted if leader is None else env.actions.index(names[leader(frame)])
            frame, _, ended = env.step(action)
            if ended:
                frame, held = env.reset(), 0


def collect(workload: Workload, n: int, seed: int, model: DecisionModel, leader=None, wander: float = 0.08) -> Examples:
    """The frames of `lead` as examples for `model`, at its picture size and patch."""
    size, things = model.config.image_size, EXPERTS[workload.source].things
    grid, to_pixels = size // model.encoder.config.vision_config.patch_size, DevicePixels(size)
    examples = Examples(
        torch.empty((n, 3, size, size), dtype=torch.uint8),
        torch.empty(n, dtype=torch.int64),
        torch.empty((n, grid * grid, len(things)), dtype=torch.bool),
        torch.full((n, len(things), 2), torch.nan),
    )
    for i, (frame, option, boxes) in enumerate(lead(workload, n, seed, leader, wander)):
        examples.pixels[i] = to_pixels.uint8(frame[None])[0]
        examples.options[i] = option
        for j, thing in enumerate(things):
            examples.touched[i, :, j] = torch.from_numpy(_touches(boxes.get(thing), frame.shape, grid))
            if thing in boxes:
                left, top, right, bottom = boxes[thing]
                middle = (left + right) / 2 / frame.shape[1], (top + bottom) / 2 / frame.shape[0]
                examples.middles[i, j] = torch.tensor(middle)
    return examples


def _touches(box: Box | None, shape: tuple[int, ...], grid: int) -> np.ndarray:
    """Which patches, bool [grid * grid] row by row, a box in pixels of a frame of `shape` touches."""
    found = np.zeros((grid, grid), bool)
    if box is not None:
        left, right = (int(x * grid / shape[1]) for x in (box[0], box[2] - 1))
        top, bottom = (int(y * grid / shape[0]) for y in (box[1], box[3] - 1))
        found[max(top, 0) : bottom + 1, max(left, 0) : right + 1] = True
    return found.reshape(-1)


def train(recipe: Recipe, out: Path, quiet: bool = False) -> dict[str, Path]:
    """Train one pocket model per layout of the recipe and write each as a checkpoint folder `out`/<layout>.

    Progress goes to stderr; the losses, a line per step of the optimiser, to `out`/training.rows.jsonl as they come.
    Returns the folders by layout. The same recipe, torch version and kind of CPU give the same weights: everything runs
    on one thread, since sums over several come out in another order. Raises InputError where `out` cannot be written.
    """
    check_folder(out)
    with RowWriter(out / "training.rows.jsonl") as log, _one_thread(), torch.random.fork_rng(devices=[]):
        torch.manual_seed(recipe.seed)
        log.about("recipe", **asdict(recipe))
        model = _begin(recipe)
        examples = _teach_vision(recipe, model, log, quiet)
        folders = {}
        for layout in recipe.layouts:
            pupil = deepcopy(model)
            pupil.config = replace(model.config, layout=layout)
            used = _teach_language(recipe, pupil, layout, examples, log, quiet)
            folders[layout] = save_pocket(pupil, out / layout, used, recipe, layout)
    return folders


@contextmanager
def _one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def _begin(recipe: Recipe) -> DecisionModel:
    """An untrained model whose linear layers pass signals on at their full size, and whose patches know where they are: the
    usual deviation of 0.02 suits a width of 768, and at a width of 64 makes layers so faint that nothing is learned for
    thousands of steps."""
    model = pocket_model(recipe.seed).requires_grad_(True)
    for part in model.modules():
        if isinstance(part, nn.Linear):
            nn.init.xavier_uniform_(part.weight)
    nn.init.normal_(model.encoder.vision_model.embeddings.position_embedding.weight, std=0.5)
    return model


def _steps(
    recipe: Recipe, parameters: list[nn.Parameter], steps: int, title: str, quiet: bool
) -> Iterator[tuple[int, Callable]]:
    """Yield (step, update) for `steps` steps of the optimiser; `update(loss)` takes one down the loss."""
    optimiser = torch.optim.AdamW(parameters, recipe.rate, weight_decay=0.01)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimiser, recipe.rate, total_steps=steps, pct_start=0.05)

    def update(loss: Tensor) -> None:
        optimiser.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(parameters, 1.0)
        optimiser.step()
        schedule.step()

    for step in tqdm(range(steps), desc=title, disable=quiet, mininterval=5):
        yield step, update


# ---------------------------------------------------------------------------------------------------- vision


def _teach_vision(recipe: Recipe, model: DecisionModel, log: RowWriter, quiet: bool) -> list[Examples]:
    """Teach tower and connector; return each game's examples, their pixels replaced by image rows [n, tokens, width]."""
    workloads = [get_workload(game) for game in recipe.games]
    size, vision = model.config.image_size, model.encoder.config.vision_config
    grid = size // vision.patch_size
    rng, width = np.random.default_rng(recipe.seed), model.encoder.config.text_config.hidden_size
    examples = [
        collect(workload, recipe.frames, recipe.seed, model, wander=recipe.wander)
        for workload in tqdm(workloads, desc="expert's games", disable=quiet)
    ]
    things = [len(EXPERTS[workload.source].things) for workload in workloads]
    patches = nn.ModuleList(nn.Linear(vision.hidden_size, count) for count in things)
    places = nn.ModuleList(nn.Linear(width, 2 * count) for count in things)
    direct = nn.ModuleList(nn.Linear(width, len(w.question.options)) for w in workloads)

    def see(pixels: Tensor) -> tuple[Tensor, Tensor]:
        hidden = model.encoder.vision_model(pixel_values=pixels.float().sub(127.5).div(127.5)).last_hidden_state
        return hidden, model.encoder.connector(hidden)

    def leader(game: int) -> Callable[[np.ndarray], int]:
        to_pixels = DevicePixels(size)
        return torch.inference_mode()(
            lambda frame: int(direct[game](see(to_pixels.uint8(frame[None]))[1].mean(1)).argmax())
        )

    parameters = [*model.encoder.vision_model.parameters(), *model.encoder.connector.parameters()]
    parameters += [p for helper in (patches, places, direct) for p in helper.parameters()]
    rounds = {recipe.vision_steps * (r + 1) // (recipe.rounds + 1): r + 1 for r in range(recipe.rounds)}
    # of every game at once: taken in turn, games pull the tower about
    counts = [max(1, recipe.batch * share // sum(recipe.shares)) for share in recipe.shares]
    ends = np.cumsum(counts)
    for step, update in _steps(recipe, parameters, recipe.vision_steps, "vision", quiet):
        if step in rounds:
            for game, workload in enumerate(workloads):
                seed = recipe.seed + 1000 * rounds[step]  # another game than the expert's
                examples[game] += collect(workload, recipe.led, seed, model, leader(game), recipe.wander)
        picks = [torch.from_numpy(rng.integers(len(own), size=n)) for own, n in zip(examples, counts, strict=True)]
        hidden, image_rows = see(torch.cat([own.pixels[pick] for own, pick in zip(examples, picks, strict=True)]))
        whole = torch.zeros(())
        for game, (own, pick) in enumerate(zip(examples, picks, strict=True)):
            here = slice(ends[game] - counts[game], ends[game])
            seen, wanted, middles = image_rows[here].mean(1), own.options[pick], own.middles[pick]
            # a thing touches one patch or two of 64: without the weight, "nothing anywhere" is a good answer for long
            dense = binary_cross_entropy_with_logits(
                patches[game](hidden[here]), own.touched[pick].float(), pos_weight=torch.tensor(5.0)
            )
            there = middles.isfinite()
            # in patches, so that a mistake of one weighs as much as the other losses
            place = smooth_l1_loss(places[game](seen).view_as(middles)[there], middles[there] * grid)
            options = direct[game](seen)
            loss = cross_entropy(options, wanted)
            whole = whole + dense + place + loss
            right = (options.argmax(1) == wanted).float().mean()
            log.append(
                {"phase": "vision", "step": step, "game": recipe.games[game], "loss": loss.item(), "dense": dense.item(),
                 "place": place.item(), "agreement": right.item()}
            )  # fmt: skip
        update(whole)
    with torch.inference_mode():
        for i, own in enumerate(examples):
            seen = [see(part)[1] for part in own.pixels.split(256)]
            examples[i] = replace(own, pixels=torch.cat(seen))
    return examples


# ---------------------------------------------------------------------------------------------------- language


def _teach_language(
    recipe: Recipe, model: DecisionModel, layout: str, examples: list[Examples], log: RowWriter, quiet: bool
) -> np.ndarray:
    """Teach text model and heads to answer from image rows; return the ids of the embedding rows that were used.

    P(act) learns whether the answer at hand is the expert's.
    """
    reader = _Reader(model, [get_workload(game) for game in recipe.games], layout)
    rng = np.random.default_rng(recipe.seed + 1)
    share = max(1, recipe.batch // len(examples))
    for step, update in _steps(recipe, reader.parameters(), recipe.language_steps, layout, quiet):
        whole = torch.zeros(())
        for game, own in enumerate(examples):
            pick = torch.from_numpy(rng.integers(len(own), size=share))
            given = np.arange(len(reader.workloads[game].question.options))
            orders = np.stack([rng.permutation(given) if rng.random() < recipe.shuffled else given for _ in pick])
            logits, act = reader(game, own.pixels[pick], orders)
            wanted = torch.from_numpy(np.argsort(orders, axis=1)).gather(1, own.options[pick][:, None])[:, 0]
            right, loss = logits.argmax(1) == wanted, cross_entropy(logits, wanted)
            whole = whole + loss + 0.1 * cross_entropy(act, 1 - right.long())  # entry 0 is "act"
            log.append(
                {"phase": layout, "step": step, "game": recipe.games[game], "loss": loss.item(),
                 "agreement": right.float().mean().item()}
            )  # fmt: skip
        update(whole)
    reader.put_back()
    return reader.used


class _Reader:
    """Text model and heads over given image rows, with only those embedding rows that the questions use."""

    def __init__(self, model: DecisionModel, workloads: list[Workload], layout: str):
        self.model, self.workloads, self.layout = model, workloads, layout
        self._rows: dict[tuple, Row] = {}
        given = [self._row(game, tuple(range(len(w.question.options)))) for game, w in enumerate(workloads)]
        self.masks = [whole_mask(row, "block", torch.float32, "cpu") for row in given]
        self.kept = [
            row.kept if layout == "question_first" else 0 for row in given
        ]  # as QuestionFirstStep's heads see it
        self.positions = [torch.from_numpy(row.image_positions) for row in given]
        self.used = np.unique(np.concatenate([row.ids for row in given]))
        table = model.encoder.text_model.embed_tokens.weight.data
        self.embedding = nn.Embedding.from_pretrained(table[self.used].clone(), freeze=False)

    def parameters(self) -> list[nn.Parameter]:
        vision = ("encoder.vision_model", "encoder.connector")
        own = [
            p for name, p in self.model.named_parameters() if not name.startswith(vision) and "embed_tokens" not in name
        ]
        return [*own, *self.embedding.parameters()]

    def __call__(self, game: int, image_rows: Tensor, orders: np.ndarray) -> tuple[Tensor, Tensor]:
        """Logits [batch, options] and act logits [batch, 2] of image rows [batch, tokens, width], each with its options in
        its own order, int64 [batch, options]."""
        rows, kept = [self._row(game, tuple(order)) for order in orders.tolist()], self.kept[game]
        ids = torch.from_numpy(np.searchsorted(self.used, np.stack([row.ids for row in rows])))
        readouts = torch.from_numpy(np.stack([row.readouts for row in rows])) - kept
        embeds = self.embedding(ids).index_copy(1, self.positions[game], image_rows)
        hidden = self.model.language(embeds, self.masks[game])[:, kept:]
        present = torch.ones(hidden.shape[:2], dtype=torch.bool)
        last = torch.full((len(ids),), hidden.shape[1] - 1)
        return self.model.score(hidden, type_id(self.workloads[game].question), readouts, last, present)

    def _row(self, game: int, order: tuple[int, ...]) -> Row:
        if (game, order) not in self._rows:
            question = self.workloads[game].question.reordered(order)
            self._rows[game, order] = self.model.row(question, 1, layout=self.layout)
        return self._rows[game, order]

    def put_back(self) -> None:
        """Put the trained rows into the model's own embedding table."""
        self.model.encoder.text_model.embed_tokens.weight.data[self.used] = self.embedding.weight.data


def save_pocket(model: DecisionModel, folder: Path, used: np.ndarray, recipe: Recipe, layout: str) -> Path:
    """Write a checkpoint folder in the published naming, as fp16, with the embedding rows `used` only; return it.

    The other rows are loaded as they were before training, from seed 0, which the folder's loader takes too.
    """
    folder = check_folder(folder)
    check_folder(folder / "backbone")
    state = {name: value.half().contiguous() for name, value in model.state_dict().items()}
    table = state.pop(name := "encoder.text_model.embed_tokens.weight")
    state[f"{name}.ids"], state[f"{name}.rows"] = torch.from_numpy(used).int(), table[used]
    (folder / "model.safetensors").write_bytes(save(state))
    model.encoder.config.to_json_file(folder / "backbone" / "config.json")
    told = {
        "recipe": asdict(recipe),
        "layout": layout,
        "torch": version("torch"),
        "transformers": version("transformers"),
    }
    (folder / "training.json").write_text(json.dumps(told, indent=1) + "\n")
    (folder / "vlm_agent_config.json").write_text(json.dumps(asdict(model.config), indent=1) + "\n")
    return folder
