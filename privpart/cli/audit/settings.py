"""Settings: keys of the file that ``privpart audit leakage --settings`` names."""

from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError
from pydantic_core import to_json

from accounting.checks import ConfigError, parsed_toml, text_of
from privpart.cli.idle import OF_FOLDER, OF_IMAGES, OF_SGD, Idle, beside, where, without
from privpart.settings.faults import sentence_of

_OF_TOKENS = without("tokens", "a plan has its own")
_LOCAL = where("local_steps", 0, "sends a gradient")


class Keys(BaseModel):
    """What ``--settings`` may hold; docs/how-to/audit-leakage.md says of each key what it sets."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)

    data_dir: Annotated[Path | None, *OF_IMAGES, OF_FOLDER] = None
    mode: Annotated[Literal["train", "eval"], *OF_IMAGES] = "train"
    local_steps: Annotated[int, Field(ge=0)] = 0
    learning_rate: Annotated[float | list[float], _LOCAL] = 0.1
    optimizer: Annotated[Literal["sgd", "adam", "adamw"], _LOCAL] = "sgd"
    weight_decay: Annotated[float, _LOCAL] = 0.0
    local_batch: Annotated[int | None, Field(ge=1), _LOCAL] = None
    momentum: Annotated[float, _LOCAL, OF_SGD] = 0.0
    label_smoothing: Annotated[float, Field(ge=0, lt=1), *OF_IMAGES] = 0.0
    hide_labels: bool = False
    send_buffers: Annotated[
        bool,
        *OF_IMAGES,
        where("mode", "eval", "statistics are not those of the batch"),
        beside("gradient", "has its buffers, or has not"),
    ] = False
    delta: Annotated[
        float,
        Field(gt=0, lt=1),
        Idle("noise_multiplier", lambda values: not any(values["noises"]), "has no epsilon"),
    ] = 1e-5
    length: Annotated[
        int | None,
        Field(ge=2),
        without("plan", "sentences are as long as they are"),
        beside("tokens", "are as long as they are"),
    ] = None
    pad: Annotated[int | None, Field(ge=0), _OF_TOKENS] = None
    words: Annotated[Path | None, _OF_TOKENS] = None
    before: Annotated[
        Path | None,
        without("gradient", "the weights after the round are missing"),
        where("local_steps", 0, "sends no change of the weights; say how the client trained"),
    ] = None
    seed: Annotated[int, Field(ge=0)] = 0

    @classmethod
    def read(cls, path: Path) -> "Keys":
        """Return the settings in a TOML file.

        Raises:
            ConfigError: it cannot be read, or has a key that is unknown or of another type.
        """
        tables = parsed_toml(text_of(path, f"settings={path}"), f"settings={path}")
        try:
            # Strict JSON, unlike strict Python values, takes a string for a path.
            return cls.model_validate_json(to_json(tables))
        except ValidationError as error:
            faults = " ".join(sentence_of(fault, cls) for fault in error.errors())
            raise ConfigError(f"settings={path}: {faults}") from None

    def refuse_idle(self, options: dict[str, Any]) -> None:
        """Raise a ConfigError for a key without effect; of typed options ``Command`` does."""
        values = options | dict(self)
        for name in self.model_fields_set:
            for rule in type(self).model_fields[name].metadata:
                if isinstance(rule, Idle) and rule.where(values):
                    state = f"{rule.owner} = {values[rule.owner]}"
                    raise ConfigError(f"settings: {state}: {rule.why}; leave out {name}.")
