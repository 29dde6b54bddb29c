"""A step used by two threads at once raises, and never answers wrongly; texts that hold tokens place none."""

from concurrent.futures import ThreadPoolExecutor
from threading import Barrier, Event

import numpy as np
import pytest

import lab
from lab.envs.snake import Snake
from lab.envs.snake_prompts import prompt
from lab.errors import InputError
from lab.models.text import load_text_model
from lab.steps import LastAnswerStep, PaddedStep, QuestionFirstStep, SplitStep, StaticStep, TextStep, TunedStep

QUESTION = lab.Question("choice", "Which way?", {"LEFT": "go left", "RIGHT": "go right", "STAY": ""})
PICTURES = np.random.default_rng(0).integers(0, 256, (8, 1, 1, 12, 10, 3), dtype=np.uint8)
STEPS = {
    "eager": lambda model: lab.EagerStep(model, QUESTION),
    "static": lambda model: StaticStep(model, QUESTION),
    "tuned": lambda model: TunedStep(model, QUESTION),
    "split": lambda model: SplitStep(model, QUESTION),
    "question first": lambda model: QuestionFirstStep(model, QUESTION),
    "padded": lambda model: PaddedStep(lambda size: StaticStep(model, QUESTION, batch=size), sizes=(1,)),
    "last answer": lambda model: LastAnswerStep(StaticStep(model, QUESTION)),
}


def hammered(decide, inputs, workers=4, times=25):
    """How often `decide` refused, and its answers by input, from several threads at once."""
    barrier = Barrier(workers)

    def work(number):
        barrier.wait()
        found, refused = [], 0
        for i in range(times):
            place = (number + i) % len(inputs)
            try:
                found.append((place, decide(inputs[place])))
            except InputError as error:
                assert "in use by another thread" in str(error)
                refused += 1
        return found, refused

    with ThreadPoolExecutor(workers) as pool:
        done = list(pool.map(work, range(workers)))
    return [one for found, _ in done for one in found], sum(refused for _, refused in done)


@pytest.mark.parametrize("name", STEPS)
def test_a_step_of_several_threads_refuses_and_never_answers_wrongly(mini, name):
    step = STEPS[name](mini)
    expected = [step.decide(one).logits for one in PICTURES]
    answers, refused = hammered(step.decide, PICTURES)
    assert len(answers) + refused == 100 and answers
    for place, answer in answers:
        np.testing.assert_allclose(answer.logits, expected[place], atol=1e-5, rtol=0)
    np.testing.assert_array_equal(step.decide(PICTURES[3]).logits, expected[3])  # free again


def test_a_text_step_too():
    step, game = TextStep(load_text_model("snake")), Snake(seed=101)
    prompts = []
    for _ in range(6):
        plan = game.plan()
        prompts.append(prompt(game, plan))
        game.step(plan.preferred)
    expected = [step.decide(one)[0].logits for one in prompts]
    answers, _ = hammered(step.decide, prompts)
    for place, answer in answers:
        np.testing.assert_allclose(answer[0].logits, expected[place], atol=1e-5, rtol=0)


def test_a_reset_while_a_decision_runs_is_refused_and_named(mini):
    step, begun, go_on = StaticStep(mini, QUESTION, name="mine"), Event(), Event()
    work = step.all_frames.work
    step.all_frames.work = lambda: (begun.set(), go_on.wait(10), work())[2]
    with ThreadPoolExecutor(1) as pool:
        running = pool.submit(step.decide, PICTURES[0])
        assert begun.wait(10)
        for call in (step.reset, lambda: step.decide(PICTURES[1])):
            with pytest.raises(InputError, match="'mine' is in use by another thread"):
                call()
        go_on.set()
        assert len(running.result(10)) == 1
    step.reset()


def test_a_decision_that_failed_leaves_the_step_free(mini):
    step = StaticStep(mini, QUESTION)
    with pytest.raises(InputError, match="uint8"):
        step.decide(PICTURES[0].astype(np.float32))
    with ThreadPoolExecutor(1) as pool:
        assert len(pool.submit(step.decide, PICTURES[0]).result(10)) == 1
