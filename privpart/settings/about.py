"""About: what only people know of a run, as the plan's table ``[about]`` states it.

It shapes nothing, so no hash of a plan has it. The ledger keeps it as it was when the run began,
and a report repeats it as the words of whoever began the run.
"""

from collections.abc import Mapping
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from accounting.checks import ConfigError

_Text = Annotated[str, Field(max_length=1_000)]


class About(BaseModel):
    """Table ``[about]``: what reports tell whoever decides about the model; all of it is public."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)

    model: _Text = Field(default="", description="what was trained")
    purpose: _Text = Field(default="", description="what it is for")
    organisation: _Text = Field(default="", description="who trains and publishes it")
    controller: _Text = Field(default="", description="who is responsible for the data")
    data: _Text = Field(default="", description="what the data are, and where they come from")
    people: _Text = Field(default="", description="whose data they are")
    contact: _Text = Field(default="", description="whom to ask")

    def stated(self) -> dict[str, str]:
        """Return the texts that are not empty."""
        return {name: text for name, text in self if text.strip()}


def about_of(facts: Mapping[str, Any]) -> About:
    """Return what a ledger's facts state.

    Raises:
        ConfigError: the fact "about" is not such a table.
    """
    try:
        return About.model_validate(facts.get("about", {}))
    except ValidationError as error:
        fault = error.errors()[0]
        where = ".".join(map(str, ("about", *fault["loc"])))
        raise ConfigError(
            f"{where}: {fault['msg']}; must be texts of at most 1,000 characters by the names "
            f"{', '.join(About.model_fields)}."
        ) from None
