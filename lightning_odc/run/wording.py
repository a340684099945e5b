"""What a way to train is called in messages, and what its users write."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Wording:
    """The words of a way to train. ``option`` and ``loader_option`` have places for a name and a value."""

    name: str  # "ODCStrategy"
    option: str  # 'ODCStrategy(%s="%s")'
    loader_option: str  # the same, of an option of the loader
    step: str  # what computes a loss: "training_step"
    equal_counts: str  # what collectives ask of users
    num_items: str = ""  # how a step says what its loss is a mean over
    log: str = ""  # how values of all ranks are logged without a collective in the step
    make_room: str = (
        "Make room: activation checkpointing, parameters in host memory or in bf16, shorter samples"
    )

    def write(self, name: str, value: str) -> str:
        """The line that gives an option this value."""
        return self.option % (name, value)

    def write_to_loader(self, name: str, value: str) -> str:
        """The line that gives an option of the loader this value."""
        return self.loader_option % (name, value)

    def without_on_demand(self, reason: object) -> str:
        """Why collectives do the work, and what to write."""
        text = str(reason).replace("ODCStrategy(", self.option.partition("%s")[0])
        return (
            f"{self.name} trains with collectives, since on-demand communication cannot run here. "
            f"{self.equal_counts}\n{text}\n{self.write('communication', 'on_demand')} makes this an error, and "
            f"{self.write('communication', 'collective')} does without this warning."
        )
