"""What users type stays: names to import, modules that the documentation names, commands and their options.

A name that is missing here was renamed or removed: that breaks users. Keep it, or say it in the changelog.
"""

from __future__ import annotations

import argparse
import importlib
import importlib.util
import pkgutil
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from lightning_odc import cli

ROOT = Path(__file__).parent.parent

PACKAGES = {
    "lightning_odc": {"BalancedDataLoader", "Minibatch", "ODCStrategy", "__version__", "advise", "attach"},
    "lightning_odc.balance": {
        *("COLLECTIVE_SAFE", "POLICIES", "Collation", "Cost", "FunctionCost"),
        *("Plan", "Planner"),
        *("Policy", "PolynomialCost", "TransformerCost", "collective_cost", "epoch_order"),
        *("least_cost", "microbatch_costs", "on_demand_cost"),
        *("plan_minibatch", "quadratic", "regroup", "resolve_cost", "tokens"),
        *("transformer", "with_speeds"),
    },
    "lightning_odc.callbacks": {
        *("DeviceIdleMonitor", "RankTimeline", "Timeline", "TimelineRecorder"),
        *("draw_timelines", "load_timeline"),
    },
    "lightning_odc.rl": {
        *("Microbatch", "Rollout", "Rollouts", "claim_prompts", "exchange", "logprobs", "score"),
    },
}
MODULES = {
    "lightning_odc.samples.packing": {*("IGNORE_INDEX", "PackedBatch", "PackingCollator", "pack_samples")},
    "lightning_odc.errors": {
        *("DisagreementError", "ODCError", "PeerFailedError", "StaleShardError"),
        *("WaitTimeoutError", "WindowError"),
    },
    "lightning_odc.fabric": {"ODCFabricStrategy"},
    "lightning_odc.huggingface": {"ODCTrainerMixin"},
    "lightning_odc.metrics": {"idle_fraction", "imbalance"},
}
COMMANDS = {
    "doctor": set(),
    "advise": {
        *("--data", "--device", "--devices", "--minibatch-size", "--model", "--padded"),
        *("--quiet", "--tokenizer"),
    },
    "demo": {"--devices", "--max-length", "--minibatches", "--output", "--repetitions"},
}


def test_packages_and_modules_have_these_names() -> None:
    for package, names in PACKAGES.items():
        assert set(importlib.import_module(package).__all__) == names
    for module, names in MODULES.items():
        assert names <= vars(importlib.import_module(module)).keys()


@pytest.mark.slow
def test_modules_are_found_below_the_package_without_an_import_of_their_own() -> None:
    program = "import lightning_odc; " + "; ".join(f"print({name})" for name in [*PACKAGES, *MODULES])
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=120, check=True
    )
    assert done.stdout.count("<module") == len(PACKAGES) + len(MODULES)
    package = importlib.import_module("lightning_odc")
    assert not hasattr(package, "callback")
    assert not hasattr(package, "_nothing")


def test_the_command_line_has_these_commands_and_options() -> None:
    found = {}
    for name, (module, _) in cli.COMMANDS.items():
        parser = argparse.ArgumentParser(add_help=False)
        importlib.import_module(module).add_arguments(parser)
        found[name] = {option for action in parser._actions for option in action.option_strings}
    assert found == COMMANDS


TEXTS = [
    ROOT / "README.md",
    *sorted((ROOT / "docs").rglob("*.md")),
    *sorted((ROOT / "notebooks" / "src").glob("*.py")),
]
IMPORT = re.compile(r"from (lightning_odc[\w.]*) import (\([^)]*\)|[^\n(]*)")
NAMED = re.compile(r"\blightning_odc(?:\.[A-Za-z_]\w*)+")


def _named(text: str) -> Iterator[str]:
    """Dotted names of the package, those of its modules that are run by ``python -m`` among them."""
    for module, names in IMPORT.findall(text):
        for name in re.sub(r"#.*|[()]", "", names).replace("\n", " ").split(","):
            if name.strip():
                yield f"{module}.{name.split()[0]}"
    yield from (name for name in NAMED.findall(text) if not name.endswith((".py", ".md")))


def _exists(name: str) -> bool:
    """Whether a dotted name is a module or something in it; not known of one that needs what is not installed."""
    if name.startswith("lightning_odc.ray") and importlib.util.find_spec("ray") is None:
        return True
    if name == "lightning_odc.pytorch_lightning":
        return True  # it changes what other tests import: `test_pytorch_lightning.py` has programs of its own
    try:
        pkgutil.resolve_name(name)
    except (ModuleNotFoundError, AttributeError):
        return False
    return True


def test_what_documentation_and_notebooks_name_exists() -> None:
    named = {name: path.name for path in TEXTS for name in _named(path.read_text())}
    assert {"lightning_odc.callbacks.TimelineRecorder", "lightning_odc.metrics.idle_fraction"} <= named.keys()
    assert len(named) > 30
    assert [f"{name} in {page}" for name, page in named.items() if not _exists(name)] == []
