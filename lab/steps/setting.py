"""How a step asks its model: by default as the checkpoint was taught, and what a caller sets otherwise."""

import warnings
from dataclasses import dataclass, fields
from operator import index

from lab.errors import InputError
from lab.models.vision import ATTENTIONS, READOUTS, DecisionModel
from lab.pixels import FILTERS, PATHS
from lab.tokens import LAYOUTS

_said: set[tuple] = set()  # overrides that were already put in words


@dataclass(frozen=True)
class Setting:
    """`option_attention` (causal, block), `pixels` (the path: device, processor), `filter` (of the device path; "processor"
    on the other), `layout` (see `lab.tokens`); `overrides` says in words what of it is not the checkpoint's own."""

    option_attention: str
    pixels: str
    filter: str
    layout: str
    overrides: tuple[str, ...] = ()

    @classmethod
    def of(
        cls,
        model: DecisionModel,
        option_attention: str | None = None,
        pixels: str | None = None,
        filter: str | None = None,
        layout: str | None = None,
    ) -> "Setting":
        """The checkpoint's settings, save for those given. Where a given one differs from a checkpoint's, a warning says
        so, once. Raises InputError for an unknown setting, a filter without the device path, and a model that no step
        can ask: one of another class, or one whose checkpoint splits images."""
        if not isinstance(model, DecisionModel):
            raise InputError(f"A step takes a model from lab.load_model, not {model!r:.60}.")
        config = model.config
        if config.image_split_edge:
            raise InputError(
                "This checkpoint splits images (image_split_edge is set); a step here sees one view per frame."
            )
        taught = {
            "option_attention": config.option_attention,
            "pixels": config.pixels,
            "filter": config.filter,
            "layout": config.layout,
        }
        given = {"option_attention": option_attention, "pixels": pixels, "filter": filter, "layout": layout}
        known = {
            "option_attention": ATTENTIONS[config.readout],
            "pixels": PATHS,
            "filter": FILTERS,
            "layout": LAYOUTS,
        }
        for name, value in given.items():
            if value is not None and value not in list(known[name]):
                raise InputError(f"{name} is {value!r}; choose one of {', '.join(known[name])}.")
        asked = taught | {name: value for name, value in given.items() if value is not None}
        if (asked["layout"] == "mask") != (config.readout == "mask"):
            raise InputError(
                f"This checkpoint reads out at {config.readout!r}; its layout is {' or '.join(READOUTS[config.readout])}, "
                f"not {asked['layout']!r}."
            )
        if asked["pixels"] == "processor":
            if filter is not None:
                raise InputError(f"filter={filter!r} is of the device path; leave it out, or give pixels='device'.")
            asked["filter"] = "processor"
        differ = [name for name, value in given.items() if value is not None and value != taught[name]]
        overrides = tuple(f"{name} {asked[name]} (the checkpoint's: {taught[name]})" for name in differ if model.folder)
        if overrides and (model.folder, overrides) not in _said:
            _said.add((model.folder, overrides))
            warnings.warn(f"{model.name} is asked otherwise than it was taught: {', '.join(overrides)}.", stacklevel=3)
        return cls(**asked, overrides=overrides)

    def describe(self) -> dict:
        """For a step's `describe`: every setting, and the overrides where there are any."""
        said = {field.name: getattr(self, field.name) for field in fields(self)[:-1]}
        return said | ({"overrides": "; ".join(self.overrides)} if self.overrides else {})


def check_rows(rows, batch: int) -> list[int]:
    """The rows of a batch that `reset` is told, as a list; InputError for what are none."""
    try:
        found = [index(row) for row in rows]
    except TypeError:
        raise InputError(f"rows are {rows!r:.60}; give the rows of the batch as whole numbers, from 0 on.") from None
    if outside := [row for row in found if not 0 <= row < batch]:
        raise InputError(f"There are no rows {outside} in a batch of {batch}; rows are counted from 0.")
    return found
