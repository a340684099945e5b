"""Say, before training, what on-demand communication and balancing would gain for lengths, a model and devices.

`advise` answers from lengths alone, by way of `lightning_odc.data.gain`. What it needs is imported when it is called.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from lightning_odc.advisor.report import Advice

__all__ = ["advise"]


def advise(
    lengths: Any,
    *,
    model: Any,
    devices: int | None = None,
    device: Any = None,
    nodes: int | None = None,
    minibatch_size: int | None = None,
    max_tokens: int | None = None,
    trainer: Any = None,
    length_fn: Callable[[Any], Any] | None = None,
    max_length: int | None = None,
    seed: int = 0,
) -> Advice:
    """Plan with and without balancing, and say what it would bring and which ``Trainer`` to write. Nothing is trained.

    Args:
        lengths: Tokens of the samples, ``[n]``; or a ``DataLoader``; or the name of a distribution (``"longalign"``), a
            file (``.txt`` with one per line, ``.npy``, ``.json``, ``.jsonl``).
        model: A Hugging Face configuration, object, mapping or path; a module that has one; or a name such as ``"7b"``
            or ``"gpt2"``.
        devices: Devices of all nodes together; by default those of the trainer, else 8.
        device: ``"A100"``, ``"H100"``, ``"H200"``, ``"MI300X"`` or ``"cpu"`` (this machine), for its memory; by default
            that of the trainer, else ``"H100"``.
        nodes: The number of nodes.
        minibatch_size: Samples per device and optimizer step; by default those of the loader, else 4.
        max_tokens: Most tokens of a microbatch; by default those of the longest sample.
        trainer: A ``Trainer`` that says how many devices and nodes there are, and how many batches make up a step.
        length_fn: The length of a sample of the ``DataLoader``, where it is not known.
        max_length: The longest sample, where ``lengths`` is a name.
        seed: The seed of the order of samples.

    Returns:
        The advice; ``print`` it. ``advice.line`` is the ``Trainer`` to write, below the import that it needs.
        ``advice.helps``: whether on-demand communication gains anything. ``advice.as_dict()`` has all figures.

    Raises:
        ValueError: Invalid lengths, model, device or sizes. The message lists what is accepted.

    Example:
        >>> advice = advise([512, 4096, 800, 650] * 100, model="1.5b", devices=8, device="A100")
        >>> advice.helps
        True
    """
    from lightning_odc.advisor.inputs import parse_inputs
    from lightning_odc.advisor.options import AdviseOptions
    from lightning_odc.advisor.report import Advice
    from lightning_odc.console import OptionError

    try:
        options = AdviseOptions(
            lengths, model, device, devices, nodes, minibatch_size, max_tokens, max_length, seed
        )
        return Advice.on(parse_inputs(options, trainer, length_fn))
    except OptionError as error:  # it names options of the command line: "--max-length 0: use 1 or more"
        said = re.sub(r"--([a-z-]+)( ?)", lambda at: at[1].replace("-", "_") + "=" * len(at[2]), str(error))
        raise OptionError(said) from error
