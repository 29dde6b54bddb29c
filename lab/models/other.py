"""Any other vision-language model of transformers, asked the same question: where its tokens are, and what its stages take.

Nothing is assumed of its prompt. Which tokens change is found by comparing what the text model is given for two frames;
stages are the model's own modules, timed inside its own forward. It answers by the next token's logits of one label per
option. Three families come at tiny random sizes, for tests: Idefics3 with its processor, Qwen2.5-VL and Gemma 3 with their
image processors and the rule by which each fills an image's place.
"""

from collections.abc import Callable, Sequence
from contextlib import suppress

import numpy as np
import torch
from torch import Tensor, nn

from lab.errors import InputError
from lab.measure import stage
from lab.models.checkpoints import check_device
from lab.models.families.base import spread
from lab.models.heads import Decisions
from lab.models.vision import DTYPES
from lab.pixels import check_frames
from lab.tokens import (
    FAKE,
    GLOBAL,
    IMAGE,
    SMOLVLM_TOKENS,
    TEXT_VOCABULARY,
    Row,
    Segment,
    check_distinct,
    cleaned,
    encode,
    load_tokenizer,
    option_labels,
)
from lab.workloads import Question

VOCABULARY = TEXT_VOCABULARY + len(SMOLVLM_TOKENS)
TOWERS = ("vision_model", "vision_tower", "visual")
CONNECTORS = ("connector", "multi_modal_projector")
TEXT_MODELS = ("text_model", "language_model")


class _Reached(Exception):
    """The text model was reached; it need not run."""


class OtherModel:
    """A model with a head over its vocabulary, and `prepare(frames, text)`, which makes the arguments of its forward from
    frames uint8 [H, W, 3] and a text, for one decision. InputError where it has no vision tower or text model."""

    def __init__(self, name: str, model: nn.Module, prepare: Callable[[Sequence, str], dict], tokenizer, weights: str):
        self.name, self.weights, self.prepare, self.tokenizer = name, weights, prepare, tokenizer
        self.model = model.eval().requires_grad_(False)
        self.tower, self.text_model = (_part(model, names, name) for names in (TOWERS, TEXT_MODELS))
        self._mark(self.tower, "vision")
        self._mark(self.text_model, "language")
        with suppress(InputError):  # not every model has one apart from its tower
            self._mark(_part(model, CONNECTORS, name), "vision")
        if head := model.get_output_embeddings():
            self._mark(head, "heads")

    @staticmethod
    def _mark(module: nn.Module, name: str) -> None:
        """Time each call of `module` as a stage, where somebody measures."""
        running: list = []

        def begins(*_):
            running.append(stage(name))
            running[-1].__enter__()

        def ends(*_):
            running.pop().__exit__(None, None, None)

        module.register_forward_pre_hook(begins)
        module.register_forward_hook(ends)

    @property
    def device(self) -> torch.device:
        return next(self.model.parameters()).device

    def inputs(self, frames: Sequence[np.ndarray], text: str) -> dict[str, Tensor]:
        """The forward's arguments on the model's device; pictures in its dtype."""
        dtype = next(self.model.parameters()).dtype
        made = {key: value for key, value in self.prepare(frames, text).items() if isinstance(value, Tensor)}
        return {k: v.to(self.device, dtype if v.is_floating_point() else None) for k, v in made.items()}

    @torch.inference_mode()
    def given(self, frames: Sequence[np.ndarray], text: str) -> tuple[np.ndarray, Tensor]:
        """Token ids int64 [length], and what the text model is given for them, [length, width]."""
        inputs, seen = self.inputs(frames, text), []

        def look(_, args, kwargs):
            seen.append(kwargs.get("inputs_embeds", args[0] if args else None))
            raise _Reached

        # ahead of the mark of the stage, which would stay open
        hook = self.text_model.register_forward_pre_hook(look, with_kwargs=True, prepend=True)
        try:
            self.model(**inputs)
        except _Reached:
            pass
        finally:
            hook.remove()
        if not seen or seen[0] is None or seen[0].shape[1] != inputs["input_ids"].shape[1]:
            raise InputError(f"What the text model of {self.name} is given cannot be seen; its layout stays unknown.")
        return inputs["input_ids"][0].cpu().numpy(), seen[0][0]

    @torch.inference_mode()
    def last_logits(self, frames: Sequence[np.ndarray], text: str) -> Tensor:
        """Logits [vocabulary] of the token after the prompt."""
        with stage("build_inputs"):
            inputs = self.inputs(frames, text)
        return self.model(**inputs, logits_to_keep=1).logits[0, -1]


def _part(model: nn.Module, names: Sequence[str], said: str) -> nn.Module:
    found = [module for path, module in model.named_modules() if path.rpartition(".")[2] in names]
    if not found:
        raise InputError(f"{said} has no part called {' or '.join(names)}; it is no vision-language model known here.")
    return found[0]


def ask(question: Question, tokenizer) -> str:
    """The question as text, a label before each option (A, B, ...), as `lab.tokens.option_labels` counts them. What the
    question says is cleaned of the tokenizer's added tokens; InputError for options that are read alike."""
    labels = [tokenizer.decode([label]).strip() for label in option_labels(tokenizer, len(question.options))]
    texts = [cleaned(tokenizer, text) for text in question.rendered]
    check_distinct(question, [encode(tokenizer, text) for text in texts])
    options = [f"{label}. {text}" for label, text in zip(labels, texts, strict=True)]
    asked = f"{question.type} question: {cleaned(tokenizer, question.instructions)}"
    return "\n".join([asked, "Options:", *options, "Answer:"])


def find_segments(model: OtherModel, question: Question, before: np.ndarray, after: np.ndarray) -> Row:
    """The token row of a decision, its segments found by comparing two inputs, frames uint8 [frames, H, W, 3] each.

    `prefix` stands before the first token that changed in the ids or in what the text model is given for it, `image` goes
    to the last one, `question` is the rest. `image_positions` are the tokens that changed. Raises InputError where nothing
    changes (equal frames, or a model that does not see them), and where the number of tokens depends on the frame.
    """
    (ids, one), (others, two) = (
        model.given(list(frames), ask(question, model.tokenizer)) for frames in (before, after)
    )
    if len(ids) != len(others):
        raise InputError(
            f"{model.name} reads {len(ids)} tokens of one frame and {len(others)} of the other; give frames of one size."
        )
    changed = np.flatnonzero((ids != others) | (one != two).any(-1).cpu().numpy())
    if not len(changed):
        raise InputError(f"Nothing that {model.name} reads differs between the two frames; give two different ones.")
    ends = {"prefix": (0, changed[0]), "image": (changed[0], changed[-1] + 1), "question": (changed[-1] + 1, len(ids))}
    segments = [Segment(name, int(a), int(b), name != "image") for name, (a, b) in ends.items() if b > a]
    last = len(ids) - 1
    return Row(ids, tuple(segments), changed, np.array([last]), (last, last + 1))


class OtherStep:
    """A decision of an `OtherModel`: the options' labels, read out of the next token's logits. A step like any other."""

    def __init__(self, model: OtherModel, question: Question, frames: int = 1, name: str | None = None):
        self.model, self.question, self.frames, self.name = model, question, frames, name or model.name
        self.device, self.text = model.device, ask(question, model.tokenizer)
        self.labels = torch.tensor(option_labels(model.tokenizer, len(question.options)), device=model.device)

    def decide(self, frames) -> Decisions:
        """Answer on frames uint8 [batch, frames, height, width, 3], one input after the other."""
        frames = check_frames(frames)
        if frames.shape[1] != self.frames:
            raise InputError(f"{frames.shape[1]} frames per decision were given, this step takes {self.frames}.")
        found = [self.model.last_logits(list(one), self.text)[self.labels].float() for one in frames]
        with stage("readback"):
            logits = torch.stack(found)
            chosen = logits.softmax(-1)
            return Decisions(
                self.question, logits.cpu().numpy(), chosen.cpu().numpy(), np.ones(len(frames), np.float32)
            )

    def reset(self, rows=None) -> None:
        """Nothing is kept between decisions."""

    def describe(self) -> dict:
        dtype = str(next(self.model.model.parameters()).dtype).removeprefix("torch.")
        said = {"step": "OtherStep", "model": self.model.name, "weights": self.model.weights, "dtype": dtype}
        return said | {"device": self.device.type, "frames": self.frames}

    def start_cost(self) -> dict:
        return {}


# ------------------------------------------------------------------------------------------------ where they come from


def load_other(name: str, device: str = "cpu", dtype: str = "fp32", seed: int = 0) -> OtherModel:
    """A tiny random one (`tiny-idefics3`, `tiny-qwen2_5_vl`, `tiny-gemma3`), or a folder's or hub name's checkpoint with
    its own processor. Raises InputError for an unknown name, device or dtype, and where the hub does not give it."""
    check_device(device)
    if dtype not in DTYPES:
        raise InputError(f"dtype is {dtype!r}; choose one of {', '.join(DTYPES)}.")
    if name in TINY:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            model, prepare = TINY[name]()
            spread(model, seed)
        return OtherModel(name, model.to(device, DTYPES[dtype]), prepare, load_tokenizer(), f"random, seed {seed}")
    from transformers import AutoConfig, AutoModelForImageTextToText, AutoProcessor

    try:
        AutoConfig.from_pretrained(name)  # a single file, so that a name that is nowhere is refused soon
        processor = AutoProcessor.from_pretrained(name)
        model = AutoModelForImageTextToText.from_pretrained(name, dtype=DTYPES[dtype])
    except (OSError, ValueError, KeyError) as error:
        reason = (str(error).splitlines() or [""])[0]
        raise InputError(
            f"The model {name!r} is none of {', '.join(TINY)}, and neither a folder nor the hub gave it ({reason})."
        ) from None

    def prepare(frames: Sequence[np.ndarray], text: str) -> dict:
        content = [*({"type": "image"} for _ in frames), {"type": "text", "text": text}]
        if getattr(processor, "chat_template", None):
            talk = [{"role": "user", "content": content}]
            prompt = processor.apply_chat_template(talk, add_generation_prompt=True, tokenize=False)
        else:
            prompt = getattr(processor, "image_token", IMAGE) * len(frames) + text
        return processor(text=[prompt], images=[list(frames)], return_tensors="pt")

    return OtherModel(name, model.to(device), prepare, processor.tokenizer.backend_tokenizer, f"checkpoint {name}")


# The special tokens that a tiny model's pictures stand between, and the one that fills their place: reserved ones of our
# tokenizer, since these families' own vocabularies are not here.
OPEN, FILL, CLOSE = (f"<|reserved_special_token_{number}|>" for number in (10, 11, 12))
TEXT = {"vocab_size": VOCABULARY, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2}
TEXT |= {"num_attention_heads": 2, "num_key_value_heads": 1, "pad_token_id": 2}
TOWER = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2, "patch_size": 16}


def _special(token: str) -> int:
    return encode(load_tokenizer(), token)[0]


def _filled(image_processor, places: Callable[[dict], list[int]], kinds: str) -> Callable[[Sequence, str], dict]:
    """`prepare` by an image processor and a rule: `places` says how many tokens fill each picture's place. `kinds` is the
    argument that tells image tokens from text."""
    tokenizer = load_tokenizer()
    start, opening, fill, closing = (encode(tokenizer, text) for text in ("User:", OPEN, FILL, CLOSE))

    def prepare(frames: Sequence[np.ndarray], text: str) -> dict:
        pictures = dict(image_processor(list(frames), return_tensors="pt"))
        ids = list(start)
        for count in places(pictures):
            ids += opening + fill * count + closing
        ids = torch.tensor([ids + encode(tokenizer, f"{text}")])
        pictures.pop("num_crops", None)
        return {"input_ids": ids, kinds: (ids == fill[0]).int(), **pictures}

    return prepare


def _idefics3():
    from transformers import Idefics3Config, Idefics3ForConditionalGeneration, PreTrainedTokenizerFast
    from transformers.models.idefics3.image_processing_pil_idefics3 import Idefics3ImageProcessorPil
    from transformers.models.idefics3.processing_idefics3 import Idefics3Processor

    pictures = Idefics3ImageProcessorPil(
        size={"longest_edge": 128}, max_image_size={"longest_edge": 128}, do_image_splitting=False
    )
    special = {"additional_special_tokens": [FAKE, IMAGE, GLOBAL], "pad_token": "<|im_end|>"}
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=load_tokenizer(), **special)
    processor = Idefics3Processor(pictures, tokenizer, image_seq_len=4)
    text = {**TEXT, "model_type": "llama"}
    config = Idefics3Config(
        text_config=text, vision_config={**TOWER, "image_size": 128}, scale_factor=4, image_token_id=_special(IMAGE),
        pad_token_id=2, tie_word_embeddings=False,
    )  # fmt: skip

    def prepare(frames: Sequence[np.ndarray], text: str) -> dict:
        return processor(text=f"User:{IMAGE * len(frames)}{text}", images=[list(frames)], return_tensors="pt")

    prepare.processor = processor
    return Idefics3ForConditionalGeneration(config), prepare


def _qwen2_5_vl():
    from transformers import Qwen2_5_VLConfig, Qwen2_5_VLForConditionalGeneration
    from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

    patch, merge = 8, 2
    sizes = {"patch_size": patch, "temporal_patch_size": 2, "min_pixels": 64 * 64, "max_pixels": 64 * 64}
    pictures = Qwen2VLImageProcessorPil(merge_size=merge, **sizes)
    rope = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [2, 3, 3]}
    vision = {"depth": 2, "hidden_size": 32, "intermediate_size": 64, "num_heads": 2, "out_hidden_size": 32}
    vision |= {"patch_size": patch, "spatial_merge_size": merge, "window_size": 32, "fullatt_block_indexes": [1]}
    config = Qwen2_5_VLConfig(
        text_config={**TEXT, "rope_parameters": rope, "bos_token_id": 1, "eos_token_id": 2}, vision_config=vision,
        image_token_id=_special(FILL), vision_start_token_id=_special(OPEN), vision_end_token_id=_special(CLOSE),
        video_token_id=_special("<|reserved_special_token_13|>"), tie_word_embeddings=False,
    )  # fmt: skip

    def places(made: dict) -> list[int]:
        return (made["image_grid_thw"].prod(-1) // merge**2).tolist()

    return Qwen2_5_VLForConditionalGeneration(config), _filled(pictures, places, "mm_token_type_ids")


def _gemma3():
    from transformers import Gemma3Config, Gemma3ForConditionalGeneration
    from transformers.models.gemma3.image_processing_pil_gemma3 import Gemma3ImageProcessorPil

    text = {**TEXT, "head_dim": 16, "layer_types": ["sliding_attention", "full_attention"], "sliding_window": 64}
    config = Gemma3Config(
        text_config=text, vision_config={**TOWER, "image_size": 64}, mm_tokens_per_image=4,
        image_token_index=_special(FILL), boi_token_index=_special(OPEN), eoi_token_index=_special(CLOSE),
        tie_word_embeddings=False,
    )  # fmt: skip
    pictures = Gemma3ImageProcessorPil(size={"height": 64, "width": 64})
    count = config.mm_tokens_per_image
    rule = _filled(pictures, lambda made: [count] * len(made["pixel_values"]), "token_type_ids")
    return Gemma3ForConditionalGeneration(config), rule


TINY: dict[str, Callable] = {"tiny-idefics3": _idefics3, "tiny-qwen2_5_vl": _qwen2_5_vl, "tiny-gemma3": _gemma3}
