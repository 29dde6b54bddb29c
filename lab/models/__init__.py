from lab.models.checkpoints import PRESETS, load_model, weights_source
from lab.models.heads import Decisions
from lab.models.vision import DecisionModel

__all__ = ["PRESETS", "DecisionModel", "Decisions", "load_model", "weights_source"]
