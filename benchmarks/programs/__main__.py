"""Programs of other people: does what trains under "ddp" train under "odc", and to the same weights?

``python -m benchmarks.programs`` gives each program an environment of its own, below ``--folder``: torch and Lightning
as in ``constraints.txt``, and whatever else the program asks for. There it trains the program's own module, data set
and ``collate_fn`` in one process, under ``"ddp"`` and under ``"odc"``. Some programs predict and save after training.
It prints a Markdown table. ``--write`` keeps the rows in ``docs/data/programs.json``, and puts the table of all that is
there into ``docs/data/programs.md``.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch

from benchmarks import command
from benchmarks.command import option
from benchmarks.programs.training import DDP, ODC, ONE, PREDICTED, RANKS, START
from benchmarks.tables import Column, Table, write_into
from lightning_odc.files import write_json

ROOT = Path(__file__).parents[2]
DATA = ROOT / "docs" / "data" / "programs.json"
PAGE = ROOT / "docs" / "data" / "programs.md"
SECONDS = 300
NOTHING = "nothing"
NOT_RUN = "not run"
ALIAS = "`import lightning_odc.pytorch_lightning` first"


@dataclass(frozen=True)
class Program:
    """A program of the table.

    Attributes:
        package: What pip installs; the first word is the program.
        trains: What is trained.
        write: What a user writes beside the strategy's name.
        torchrun: Whether its ranks start by ``torchrun``.
    """

    package: str
    trains: str
    write: str = NOTHING
    torchrun: bool = False


PROGRAMS = {
    "chemprop": Program("chemprop==2.3.*", "`MPNN`, one property of molecules"),
    "chemprop_tasks": Program("chemprop==2.3.*", "`MPNN`, three tasks, 40 % of their targets NaN"),
    "scvi": Program("scvi-tools==1.4.*", "`SCVI` without its noise"),
    "rectools": Program("rectools[torch]==0.19.*", "`SASRecModel`", ALIAS),
    "litgpt": Program("litgpt==0.5.*", "`GPT` in its `LLM` module, masked prompts"),
    "matgl": Program("matgl==4.1.*", "`TensorNet`, energies"),
    "matgl_forces": Program("matgl==4.1.*", "`TensorNet`, energies and forces"),
    "rl4co": Program("rl4co==0.7.*", "`AttentionModel`, greedy"),
    "forecasting": Program("pytorch-forecasting==1.8.*", "`TemporalFusionTransformer`"),
    "neuralforecast": Program("neuralforecast==3.3.*", "`NHITS` by its own `fit`", ALIAS),
    "tabular": Program("pytorch-tabular==1.2.* requests", "`FTTransformer` by its own `fit`", ALIAS),
    "pykeen": Program("pykeen==1.11.*", "`LCWALitModule`, DistMult", ALIAS),
    "pyg": Program("torch-geometric==2.8.*", "`GIN`, its own `DataLoader`"),
    "sentences": Program(
        "sentence-transformers[train]==6.2.*",
        "BERT, `CosineSimilarityLoss`, checkpoints",
        "`class T(ODCTrainerMixin, SentenceTransformerTrainer)`",
        torchrun=True,
    ),
    "lightly": Program("lightly==1.5.*", "DINO, its teacher in `training_step`"),
}
COLUMNS = (
    Column("program"),
    Column("trains"),
    Column('D of `"ddp"`'),
    Column('D of `"odc"`'),
    Column('predict and save: `"ddp"`, `"odc"`'),
    Column("batches"),
    Column("to write"),
)


@dataclass(frozen=True)
class ProgramOptions:
    """Which programs, and where."""

    only: tuple[str, ...] = option(tuple(PROGRAMS), "programs", letter="NAME", choices=tuple(PROGRAMS))
    folder: Path = option(Path("build/programs"), "for the environments and the logs", letter="DIR")
    write: bool = option(False, "the table into the documentation, too")

    def __post_init__(self) -> None:
        command.check_options(self)


@dataclass(frozen=True)
class Row:
    """What was found of a program; a distance is text, since it may be an error."""

    program: str
    trains: str
    ddp: str
    odc: str
    predicts: str
    batches: str
    write: str


def pins() -> list[str]:
    """The versions that every environment shares: torch and Lightning of ``constraints.txt``."""
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    return [line for line in lines if line.startswith(("torch==", "lightning=="))]


def environment(folder: Path, package: str) -> Path:
    """The Python of an environment that has the package."""
    python = folder / "bin" / "python"
    stamp = folder / "installed"
    if not stamp.exists():
        subprocess.run([sys.executable, "-m", "venv", str(folder)], check=True)
        pip = [str(python), "-m", "pip", "install", "--disable-pip-version-check", "--no-input", "--quiet"]
        subprocess.run([*pip, *pins(), *package.split()], check=True)
        stamp.touch()
    return python


def train(python: Path, name: str, strategy: str, folder: Path) -> str:
    """Train a program; what it prints, which is kept in a file, too."""
    words = ["-m", "benchmarks.programs.training", name, strategy, str(folder)]
    if PROGRAMS[name].torchrun and strategy != ONE:
        words = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(RANKS), *words]
    variables = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    with tempfile.TemporaryDirectory() as work:
        done = subprocess.run(
            ["timeout", str(SECONDS), str(python), *words],
            cwd=work,
            env=variables,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
    (folder / f"{name}.{strategy}.log").write_text(done.stdout)
    return done.stdout


def distance(name: str, strategy: str, folder: Path) -> str:
    """From one process, over what training moved in one process; Euclidean, over all floating-point entries."""
    paths = [folder / f"{name}.{which}.pt" for which in (START, ONE, strategy)]
    if not paths[2].exists():
        return "stops"
    start, one, other = (torch.load(path) for path in paths)
    assert one.keys() == other.keys()
    between = {key: (one[key] - other[key]).double().square().sum().item() for key in one}
    moved = {key: (one[key] - start[key]).double().square().sum().item() for key in one}
    far = sum(between.values()) / sum(moved.values())
    return f"{far**0.5:.0e}"


def predicts(name: str, strategy: str, folder: Path) -> str:
    """Whether the program predicts and saves after training."""
    if (folder / f"{name}.{strategy}.{PREDICTED}.pt").exists():
        return "work"
    return "stop"


def batches_of(output: str) -> str:
    """What ``"odc"`` said about batches."""
    if "Plan: policy" in output:
        return "balanced"
    if "your batches are left as they are" in output:
        return "whole"
    return "as they are"


def measure(name: str, folder: Path) -> Row:
    """Install and train a program."""
    program = PROGRAMS[name]
    place = program.package.split("=")[0].split(">")[0].split("[")[0]
    python = environment(folder / place, program.package)
    ask = f"from importlib.metadata import version; print(version({place!r}))"
    version = subprocess.check_output([str(python), "-c", ask], text=True).strip()
    outputs = {}
    for strategy in (ONE, DDP, ODC):
        for old in folder.glob(f"{name}.{strategy}.*pt"):
            old.unlink()
        outputs[strategy] = train(python, name, strategy, folder)
    assert (folder / f"{name}.{ONE}.pt").exists(), "one process does not train it: see the log"
    uses = NOT_RUN
    if predicts(name, ONE, folder) == "work":
        uses = f"{predicts(name, DDP, folder)}, {predicts(name, ODC, folder)}"
    return Row(
        f"{place} {version}",
        program.trains,
        distance(name, DDP, folder),
        distance(name, ODC, folder),
        uses,
        batches_of(outputs[ODC]),
        program.write,
    )


def work(options: ProgramOptions) -> int:
    """Measure, print, and write."""
    folder = options.folder.absolute()
    folder.mkdir(parents=True, exist_ok=True)
    found = {}
    for name in options.only:
        found[name] = asdict(measure(name, folder))
        print(found[name], flush=True)
    if options.write:
        if DATA.exists():
            found = json.loads(DATA.read_text()) | found
        write_json(DATA, found)
    ordered = [Row(**found[name]) for name in PROGRAMS if name in found]
    table = Table("programs", "Programs", COLUMNS, [list(asdict(row).values()) for row in ordered])
    print(table.markdown())
    if options.write:
        write_into([PAGE], [table])
    return 0


def main(arguments: Sequence[str] | None = None) -> int:
    """Entry point of ``python -m benchmarks.programs``."""
    return command.run("programs", __doc__, ProgramOptions, work, arguments)


if __name__ == "__main__":
    raise SystemExit(main())
