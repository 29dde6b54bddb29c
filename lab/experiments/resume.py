"""Notebook 06: which images of a resumed prompt must be encoded again, and what it saves to encode no others.

A conversation of three turns, each adding pictures. Per turn two arms answer the same prompt from the same kept state:
`skip` encodes the images that the state does not hold, `encode all` every image, as before. Both run the same tokens.
What is timed is the time to first token: from the new turn's words and frames to a chosen token on the host. It holds
the content keys of the new frames, resizing, the restore, the tower, the text model and the readback.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import pandas as pd

from lab import stats
from lab.envs import recorded_frames
from lab.errors import InputError
from lab.measure import Arm, compare, stage
from lab.published import published
from lab.records import beside_rows, clean, join_rows
from lab.workloads import get_workload

PROFILES = {
    "smoke": {
        "preset": "tiny", "dtypes": ["fp32"], "growth": [1, 8], "blocks": 6, "warmup": 2, "budget_s": 20,
        "chosen": [("greedy", 0)], "cold": "turns", "families": "few",
    },
    "standard": {  # the cold passes that answers are compared with come before the clock, and are the warm-up
        "preset": "smolvlm-256m", "dtypes": ["fp32"], "growth": [], "blocks": 5, "warmup": 0, "budget_s": 120,
        "chosen": [("greedy", 0)], "cold": "turns", "families": "all",
    },
    "full": {
        "preset": "smolvlm-256m", "dtypes": ["bf16", "fp32"], "growth": [1, 2, 3, 4, 5, 6, 7, 8], "blocks": 20,
        "warmup": 3, "budget_s": 20, "chosen": [("greedy", 0), ("greedy", 3), ("seeded", 0), ("seeded", 3)],
        "cold": "all", "families": "all",
    },
}  # fmt: skip
PICTURES = (2, 1, 1)  # that each turn adds
BASE, OLD = "skip", "encode all"
REPLY = 5  # tokens of a turn's answer
ROOM = 1 << 31  # bytes of kept states
_AGAINST = {"cold pass": "a cold pass", OLD: "the pass that encodes every image"}


def run(
    profile: str = "standard",
    *,
    out: Path | str | None = None,
    seed: int = 0,
    device: str = "cpu",
    dtype: str | None = None,
    preset: str | None = None,
    weights: str = "default",
    growth: Sequence[int] | None = None,
) -> pd.DataFrame:
    """Measure every turn and, with more images, the last turn of longer prompts (`growth`, images in each; by default the
    profile's): one comparison (title) each.

    Beside the rows stand, as lines about them, where each prompt's images are and what was restored and encoded
    (`prompt`), whether answers equal a cold pass's (`same`), and the same for the four families at tiny random
    sizes (`family`). Raises InputError for an unknown profile, device, dtype or preset.
    """
    from lab.models.families import load_family

    if profile not in PROFILES:
        raise InputError(f"Unknown profile {profile!r}; choose one of {', '.join(PROFILES)}.")
    settings = {**PROFILES[profile], "seed": seed, "out": out}
    settings["preset"] = preset or settings["preset"]
    settings["growth"] = settings["growth"] if growth is None else growth
    tables = []
    for kind in [dtype] if dtype else settings["dtypes"]:
        family = load_family("smolvlm", device, kind, seed, preset=settings["preset"], weights=weights)
        tables += _conversation(family, settings)
    tables.append(beside_rows(family_lines(device, seed, settings["families"] == "all"), out))
    return join_rows(tables)


def _conversation(family, settings: dict) -> list[pd.DataFrame]:
    from lab.caches import KeptStates
    from lab.conversations import Server

    frames, question = _frames(settings["seed"]), get_workload("pong").question.instructions
    kept = KeptStates(ROOM)
    servers = {BASE: Server(family, kept), OLD: Server(family, kept, skip=False)}
    opens = family.text("<|im_start|>User:")
    asks = family.text(f"\n{question}<end_of_utterance>\nAssistant:")
    again = family.text("<end_of_utterance>\nUser:")
    tables, before, reply, shown = [], None, (), 0
    for turn, count in enumerate(PICTURES, start=1):
        new = frames[shown : shown + count]
        parts = [again if before else opens, *new, asks]
        shown += count
        measured, before, reply = _measure(f"turn {turn}", family, servers, parts, before, reply, settings)
        tables += measured
    talk, alone = (before, reply, shown), (None, (), 0)
    for images in sorted(settings["growth"]):
        before, reply, shown = talk if images > talk[2] else alone
        start = [again if before else opens, *frames[shown : images - 1], asks]  # all but the last are kept
        before = family.request(start, before, reply)
        reply = servers[BASE].reply(before, REPLY).tokens
        parts = [again, frames[images - 1], asks]
        measured, _, _ = _measure(
            f"{images} image{'s' * (images > 1)}", family, servers, parts, before, reply, settings
        )
        tables += measured
    return tables


def _measure(title: str, family, servers: dict, parts: list, before, reply, settings: dict):
    """One turn: what it should answer, how long the first token takes, and the turn itself, whose state is kept.

    A turn of the conversation is compared with cold passes. A longer prompt, where the profile has no time for one, is
    compared with the pass that encodes every image.
    """
    from lab.conversations import OPENINGS, Sampling, Server

    request = family.request(parts, before, reply)
    dtype = family.model.dtype_name
    tags = {"preset": settings["preset"], "dtype": dtype, "images": len(request.frames)}
    name, title = title, f"{title}, {dtype}"
    whole = settings["cold"] == "all" or name.startswith("turn")
    how = {"greedy": Sampling(), "seeded": Sampling(0.7, settings["seed"])}
    right = {word: Server(family).reply(request, REPLY, how[word]) for word, _ in settings["chosen"] if whole}
    last: dict = {}
    rows = compare(
        [_arm(name, family, server, parts, before, reply, tags, last) for name, server in servers.items()],
        blocks=settings["blocks"],
        warmup=settings["warmup"],
        budget_s=settings["budget_s"],
        seed=settings["seed"],
        out=settings["out"],
        again=BASE,
        device=str(family.device),
        title=title,
        tags=tags,
        keep_partial=False,
    )
    same = [last[BASE].tokens == last[OLD].tokens]
    for opening in OPENINGS:
        for word, draft in settings["chosen"] if settings["cold"] == "all" else []:
            server = Server(family, servers[BASE].kept, opening=opening)
            answered = server.reply(request, REPLY, how[word], draft, keep=False)
            same.append(answered.tokens == right[word].tokens and answered.plan == last[BASE].plan)
    answered = servers[BASE].reply(request, REPLY)
    same += [answered.tokens == right["greedy"].tokens] if whole else []
    about = {"title": title, **tags, "tokens": len(request.prompt), "cached_tokens": last[BASE].cached_tokens}
    about |= {"spans": request.prompt.spans, "encoded": last[BASE].plan.encoded}
    checked = {"against": "cold pass" if whole else OLD, "replies": len(same), "equal": sum(same)}
    said = [{"kind": "prompt", **about}, {"kind": "same", "title": title, **tags, **checked}]
    return [rows, beside_rows(said, settings["out"])], request, answered.tokens


def _arm(name: str, family, server, parts: list, before, reply, tags: dict, last: dict) -> Arm:
    def first_token():
        with stage("build_inputs"):
            request = family.request(parts, before, reply)
        last[name] = server.reply(request, 1, keep=False)
        return last[name]

    def counts() -> dict:
        return {"tower_calls": last[name].tower_calls, "cached_tokens": last[name].cached_tokens}

    about = {"skip": server.skip, "weights": family.weights, **tags}
    return Arm(name, first_token, describe=about, counts=counts, device=str(family.device))


def _frames(seed: int) -> list:
    """Different recorded pictures, in an order by `seed`; no emulator is needed."""
    import numpy as np

    from lab.caches import content_key

    frames = [*recorded_frames("doom:deadly_corridor"), *recorded_frames("doom:basic")]
    different = list({content_key(frame): frame for frame in frames}.values())
    return [different[place] for place in np.random.default_rng(seed).permutation(len(different))]


def family_lines(device: str = "cpu", seed: int = 0, every: bool = True) -> list[dict]:
    """Each family's three turns at tiny random sizes: one dict per family and turn, kind `family`.

    A reply is compared with a cold pass's by its tokens: greedy and seeded, drafted and not, with the resume point known
    before encoding or the state restored first (`every` off: greedy, both openings). `tower_calls` and `cold_calls` are
    what the real vision tower counted.
    """
    import numpy as np

    from lab.caches import KeptStates
    from lab.conversations import GREEDY, OPENINGS, Sampling, Server
    from lab.models.families import FAMILIES, load_family

    lines = []
    for name in FAMILIES:
        family, rng = load_family(name, device, seed=seed), np.random.default_rng(seed)
        ways = [(sampling, draft) for sampling in (GREEDY, Sampling(0.7, seed)) for draft in (0, 3)]
        servers = {opening: Server(family, KeptStates(ROOM), opening=opening) for opening in OPENINGS}
        request, reply = None, ()
        for turn, count in enumerate(PICTURES, start=1):
            pictures = [rng.integers(0, 256, (32, 48, 3), dtype=np.uint8) for _ in range(count)]
            parts = [rng.integers(3, 240, 4).tolist()]
            for picture in pictures:
                parts += [picture, rng.integers(3, 240, 3).tolist()]
            request = family.request(parts, request, reply)
            cold = {sampling: Server(family).reply(request, REPLY, sampling) for sampling in (GREEDY, ways[-1][0])}
            same, answered = [], None
            for server in servers.values():
                for sampling, draft in ways if every else ways[:1]:
                    answered = server.reply(request, REPLY, sampling, draft, keep=False)
                    same.append(answered.tokens == cold[sampling].tokens)
                reply = server.reply(request, REPLY).tokens
            lines.append(
                {
                    "kind": "family",
                    "family": name,
                    "turn": turn,
                    "images": len(request.frames),
                    "encoded": answered.encoded,
                    "tower_calls": answered.tower_calls,
                    "cold_calls": cold[GREEDY].tower_calls,
                    "tokens": len(request.prompt),
                    "cached_tokens": answered.cached_tokens,
                    "replies": len(same),
                    "equal": sum(same),
                }
            )
    return lines


# ------------------------------------------------------------------------------------------------ rows -> results


def lines(rows: pd.DataFrame, kind: str) -> pd.DataFrame:
    """What stands beside the rows, of one kind: `prompt`, `same` or `family`, as a table."""
    found = [{k: v for k, v in line.items() if k != "kind"} for line in rows.attrs["about"] if line["kind"] == kind]
    if not found:
        raise InputError(f"These rows say nothing of kind {kind!r}; give rows that 06_resumed_images has written.")
    return pd.DataFrame(found)


def times(rows: pd.DataFrame) -> pd.DataFrame:
    """One line per turn or longer prompt: images, how many the timed calls encoded with and without the skip (counted on
    the tower), tokens restored, the time to first token with and without (median ms), their paired ratio with its
    interval and whether it is `shown` by the one rule (the A/A arm is `skip` timed twice), and whether every reply
    was the one it is compared with (`against`: a cold pass's, or that of encoding every image)."""
    prompts, same = lines(rows, "prompt").set_index("title"), lines(rows, "same").set_index("title")
    found = []
    for title, part in rows.groupby("title", sort=False):
        part.attrs = {}
        ratio = stats.paired_ratio(part, BASE, OLD)
        again = stats.paired_ratio(part, BASE + stats.AGAIN, BASE)
        prompt = prompts.loc[title]
        found.append(
            {
                "case": title.rpartition(", ")[0],
                "dtype": prompt["dtype"],
                "images": int(prompt["images"]),
                "encoded": _calls(part, BASE),
                "encoded_without": _calls(part, OLD),
                "tokens": int(prompt["tokens"]),
                "cached_tokens": int(prompt["cached_tokens"]),
                "ttft_ms": stats.median_interval(stats.series(part, BASE)).value,
                "ttft_ms_without": stats.median_interval(stats.series(part, OLD)).value,
                "ratio": ratio.value,
                "low": ratio.low,
                "high": ratio.high,
                "again_low": again.low,
                "again_high": again.high,
                "shown": stats.difference_shown(ratio, again),
                "against": same.loc[title, "against"],
                "replies": int(same.loc[title, "replies"]),
                "tokens_equal": bool(same.loc[title, "replies"] == same.loc[title, "equal"]),
            }
        )
    return pd.DataFrame(found)


def _calls(part: pd.DataFrame, arm: str) -> int:
    """Tower calls of each timed call of an arm, which are as many as images in this family."""
    counted = {count["tower_calls"] for count in part.loc[(part["arm"] == arm) & (part["stage"] == "total"), "counts"]}
    (calls,) = counted  # every block does the same work
    return int(calls)


def turns(table: pd.DataFrame) -> pd.DataFrame:
    """The lines of `times` that are turns of the conversation."""
    return table[table["case"].str.startswith("turn")]


def growth(table: pd.DataFrame) -> pd.DataFrame:
    """The lines of `times` of prompts that encode one image with the skip, by the images they hold."""
    return table[table["encoded"] == 1].sort_values(["dtype", "images"], kind="stable")


def beside_published(table: pd.DataFrame) -> pd.DataFrame:
    """How many times the time it takes where images are kept, in turns that hold kept ones, and as published of a store
    across calls, which says neither how many images its requests held nor how many it found."""
    own = turns(table)
    own = own[own["encoded"] < own["images"]]
    kept = (own["images"] - own["encoded"]).astype(str) + " of " + own["images"].astype(str)
    here = own[["case", "dtype", "ratio", "low", "high"]].assign(kept=kept)
    said = published("image_store")
    ratio = said["images_kept_ms"] / said["nothing_kept_ms"]
    case = "published, " + said["workload"] + ", " + said["hardware"]
    return stats.Table(pd.concat([here, pd.DataFrame({"case": case, "ratio": ratio})], ignore_index=True))


def answer(table: pd.DataFrame, families: pd.DataFrame) -> str:
    """The notebook's answer, computed from `times` and the families' lines."""
    said, several = [], table["dtype"].nunique() > 1
    longest = growth(table).groupby("dtype", sort=False).tail(1)
    for line in pd.concat([turns(table), longest]).drop_duplicates(["case", "dtype"]).itertuples():
        text = f"{line.case}{f', {line.dtype}' if several else ''} ({line.encoded} of {line.images} images encoded) "
        text += stats.spell(line.ratio, line.low, line.high)
        said.append(text + ("" if line.shown else ", no difference shown"))
    replies = [
        f"{part['tokens_equal'].sum()} of {len(part)} prompts answer as {_AGAINST[against]} does"
        for against, part in table.groupby("against", sort=False)
    ]
    equal, of = families["equal"].sum(), families["replies"].sum()
    return (
        "An image must be encoded again only if the kept state does not hold all of its rows. Time to first token over "
        f"that of encoding every image: {'; '.join(said)}. {' and '.join(replies)}; in four families at tiny sizes "
        f"{equal} of {of} resumed replies are a cold pass's."
    )


@dataclass(frozen=True)
class Bench:
    """What `lab bench resume` found."""

    rows: pd.DataFrame

    def table(self) -> str:
        return f"{stats.Table(times(self.rows))!r}\n\n{stats.Table(lines(self.rows, 'family'))!r}"

    @property
    def verdict(self) -> str:
        return answer(times(self.rows), lines(self.rows, "family"))

    def to_json(self) -> dict:
        table = times(self.rows)
        return clean(
            {
                "turns": turns(table),
                "growth": growth(table),
                "families": lines(self.rows, "family"),
                "notes": stats.notes(self.rows),
                "verdict": self.verdict,
            }
        )


def bench(
    preset: str | None = None,
    device: str = "cpu",
    dtype: str | None = None,
    out: Path | str | None = None,
    seed: int = 0,
    weights: str = "default",
) -> Bench:
    """All cases of the profile `full` on CUDA; elsewhere those of `standard`, and a prompt of eight images; see `run`."""
    profile, growth = ("standard", [8]) if device == "cpu" else ("full", None)
    common = {"out": out, "seed": seed, "device": device, "dtype": dtype, "preset": preset, "weights": weights}
    return Bench(run(profile, growth=growth, **common))
