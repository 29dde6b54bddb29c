"""The two-rank order, for real: two processes on torch.distributed with gloo."""

import json
import multiprocessing
import os
from pathlib import Path

import numpy as np
import pytest

FAMILY = "qwen2_5_vl"


def requests(family):
    """Turn 1 with two pictures; and what makes turn 2 of it, which adds one."""
    rng = np.random.default_rng(0)
    picture = lambda: rng.integers(0, 256, (32, 48, 3), dtype=np.uint8)  # noqa: E731
    words = lambda n: rng.integers(3, 240, n).tolist()  # noqa: E731
    first = family.request([words(4), picture(), words(2), picture(), words(3)])
    parts = [words(2), picture(), words(3)]
    return first, lambda reply: family.request(parts, first, reply)


def one_rank(rank: int, folder: str) -> None:
    """What each process runs; rank 0 writes what it saw."""
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    import torch.distributed as dist

    from lab.models.families import load_family
    from lab.ranks import Leader, OutOfStep, follow

    dist.init_process_group("gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=2)
    family = load_family(FAMILY)
    if rank == 1:
        follow(family)
        Path(folder, "follower.json").write_text(json.dumps({"tower_calls": family.tower_calls}))
    else:
        first, second = requests(family)
        leader = Leader(family)
        seen = {"first": leader.reply(first, 5)}
        request = second(seen["first"][0])
        try:
            leader.reply(request, 5, "restore first")
        except OutOfStep as error:
            seen["restore first"] = str(error)
        seen["second"] = leader.reply(request, 5, "rows first")
        leader.stop()
        Path(folder, "leader.json").write_text(json.dumps(seen))
    dist.destroy_process_group()


@pytest.fixture(scope="module")
def seen(tmp_path_factory):
    """What both ranks saw, and what one rank alone answers."""
    from lab.caches import KeptStates
    from lab.conversations import Server
    from lab.models.families import load_family

    folder = tmp_path_factory.mktemp("ranks")
    spawn = multiprocessing.get_context("spawn")
    ranks = [spawn.Process(target=one_rank, args=(rank, str(folder))) for rank in (0, 1)]
    for process in ranks:
        process.start()
    family = load_family(FAMILY)
    first, second = requests(family)
    alone = Server(family, KeptStates(1 << 24))
    replies = [alone.reply(first, 5)]
    replies.append(alone.reply(second(replies[0].tokens), 5))
    for process in ranks:
        process.join(100)
        if process.is_alive():
            process.kill()
    assert [process.exitcode for process in ranks] == [0, 0]
    said = {name: json.loads((folder / f"{name}.json").read_text()) for name in ("leader", "follower")}
    return said["leader"] | said["follower"] | {"alone": replies}


def test_two_ranks_answer_as_one_does(seen):
    for (tokens, cached, _), alone in zip((seen["first"], seen["second"]), seen["alone"], strict=True):
        assert (tuple(tokens), cached) == (alone.tokens, alone.cached_tokens)
    assert seen["second"][1] > 0


def test_with_two_ranks_every_image_is_encoded_before_the_restore(seen):
    assert [seen[turn][2] for turn in ("first", "second")] == [2, 3]
    assert seen["alone"][1].encoded == 1, "one rank alone encodes the new image only"
    assert seen["tower_calls"] == 0, "the follower has no use for a tower"


def test_restoring_first_puts_the_ranks_out_of_step(seen):
    assert "Rank 1 refused 'take'" in seen["restore first"] and "fed already" in seen["restore first"]


def test_an_unknown_order_is_refused_before_anything_is_sent():
    from lab.errors import InputError
    from lab.models.families import load_family
    from lab.ranks import Leader, OutOfStep, Rank

    family = load_family(FAMILY)
    with pytest.raises(InputError, match="order is 'any'"):
        Leader(family).reply(requests(family)[0], 1, "any")
    rank = Rank(family)
    rank.begin(requests(family)[0].prompt)
    rank.restore()
    with pytest.raises(OutOfStep, match="never came"):
        rank.run()
