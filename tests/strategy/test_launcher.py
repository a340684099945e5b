"""The launcher of interactive sessions alone: results, errors, deaths, nothing left behind."""

from __future__ import annotations

import json
import multiprocessing
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import suppress
from multiprocessing.connection import Connection
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest
import torch
from lightning.fabric.plugins.environments import LightningEnvironment, TorchElasticEnvironment
from lightning.pytorch import Trainer
from lightning.pytorch.demos.boring_classes import BoringModel
from lightning.pytorch.strategies import FSDPStrategy
from torch.utils.data import DataLoader

import lightning_odc
from lightning_odc import host_memory
from lightning_odc.errors import PeerFailedError
from lightning_odc.strategy.setup import launcher
from lightning_odc.strategy.setup.launcher import ForkLauncher
from tests.support.fits import assert_same, doing, one_process
from tests.support.modules import TokenModule, loader, token_batches, trainer
from tests.support.ranks import forked, on_ranks, torchrun_environment
from tests.test_host_memory import count_kill, tree

ROOT = Path(__file__).parents[2]


def run(*arguments: Any, **options: Any) -> subprocess.CompletedProcess[str]:
    """A Python of its own."""
    options |= {"capture_output": True, "text": True, "timeout": 120}
    env = os.environ | {"PYTHONPATH": str(ROOT)}
    return subprocess.run([sys.executable, *arguments], env=env, **options)


def make(device: str = "cpu") -> ForkLauncher:
    root_device = torch.device(device)
    strategy = {"cluster_environment": LightningEnvironment(), "root_device": root_device}
    return ForkLauncher(SimpleNamespace(num_processes=2, **strategy))


def launch(function: Callable[..., Any], *args: Any) -> Any:
    """Run it on two ranks; none may be left."""
    forking = make()
    try:
        return forking.launch(function, *args)
    finally:
        assert len(forking._processes) == 2
        for process in forking._processes:
            assert process.exitcode is not None


def test_rank_0_returns_and_all_ranks_ran(tmp_path):
    def work(factor: int) -> Any:
        (tmp_path / os.environ["LOCAL_RANK"]).touch()
        tensor = torch.ones(3) * factor
        return {"pid": os.getpid(), "tensor": tensor}

    returned = launch(work, 7)
    assert returned["pid"] != os.getpid()
    assert returned["tensor"].tolist() == [7, 7, 7]
    assert {path.name for path in tmp_path.iterdir()} == {"0", "1"}
    assert "LOCAL_RANK" not in os.environ


def test_ranks_compute_in_parallel_after_this_process_did():
    def compute() -> int:
        torch.set_num_threads(4)
        inputs = torch.randn(600, 600, requires_grad=True)
        (inputs @ inputs).exp().sum().backward()
        return torch.get_num_threads()

    before = torch.get_num_threads()
    compute()
    try:
        assert launch(compute) == 4
    finally:
        torch.set_num_threads(before)


def test_the_first_error_is_told_not_one_that_followed_and_ranks_that_wait_are_ended(monkeypatch):
    monkeypatch.setattr(launcher, "GRACE", 0.5)

    def work(waits: bool) -> None:
        if os.environ["LOCAL_RANK"] == "1":
            raise KeyError("no such thing")
        if not waits:
            raise PeerFailedError("rank 1 has failed")
        signal.signal(signal.SIGTERM, signal.SIG_IGN)  # only SIGKILL ends it
        time.sleep(100)

    for waits in (True, False):
        with pytest.raises(PeerFailedError, match=r"Rank 1 failed(.|\n)*KeyError: 'no such thing'"):
            launch(work, waits)


def test_a_rank_that_dies_is_told_and_whether_the_kernel_ended_it_for_want_of_memory(tmp_path, monkeypatch):
    counter = tmp_path / "proc/vmstat"
    count_kill(counter, 2)
    monkeypatch.setattr(host_memory, "ROOT", tree(tmp_path))

    def work() -> None:
        if os.environ["LOCAL_RANK"] == "1":
            count_kill(counter, 3)
            os.kill(os.getpid(), signal.SIGKILL)
        raise PeerFailedError("rank 1 is gone")

    died = r"Rank 1 failed: process 1 terminated with signal SIGKILL.*has ended processes there"
    with pytest.raises(PeerFailedError, match=died):
        launch(work)


def test_cuda_in_use_is_one_sentence(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    with pytest.raises(RuntimeError, match="restart the kernel"):
        make("cuda").launch(print)


def _kernel(directory: str, told: Connection) -> None:
    """Starts ranks that say who they are and never end."""
    tempfile.tempdir = directory  # nobody can empty the folder of a kernel that is killed

    def work() -> None:
        told.send(os.getpid())
        time.sleep(100)

    make().launch(work)


def test_ranks_end_when_the_kernel_is_killed(tmp_path):
    heard, told = multiprocessing.Pipe(duplex=False)
    with heard, told, forked(_kernel, str(tmp_path), told) as kernel:
        ranks = [heard.recv() for _ in range(2)]
        kernel.kill()
    deadline = time.monotonic() + 20
    while (left := [rank for rank in ranks if _lives(rank)]) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not left


SESSION = """
import torch
from lightning.pytorch import Trainer
import lightning_odc
from lightning_odc import host_memory
from tests.support.modules import TokenModule, loader, token_batches

class Reads(TokenModule):
    def training_step(self, batch, batch_idx):
        self.log("reads", float(self.trainer.strategy.engine.traffic.reads))
        return super().training_step(batch, batch_idx)

model = Reads()
before = model.net.head.weight.detach().clone()
trainer = Trainer(strategy="odc_plain", accelerator="cpu", devices=2, max_epochs=1, logger=False,
                  enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
                  use_distributed_sampler=False)
trainer.fit(model, loader(token_batches([5, 5])))
"""

TYPED = """
print("STEPS", trainer.global_step, trainer.callback_metrics["reads"] > 0, torch.equal(before, model.net.head.weight))
from lightning.fabric import Fabric
from lightning_odc.fabric import ODCFabricStrategy
from tests.test_fabric import new_model, own, run_step
def train(fabric):
    model, optimizer = fabric.setup(*new_model())
    run_step(fabric, model, optimizer, own(fabric.global_rank, (5, 1), 0))
    return fabric.world_size, fabric.strategy.engine.traffic.reads

strategy = ODCFabricStrategy(sharding_strategy="FULL_SHARD")
print("RESULT", Fabric(strategy=strategy, accelerator="cpu", devices=2).launch(train))
"""


@pytest.mark.slow
def test_a_script_of_python_i_trains_and_leaves_a_session_in_which_fabric_trains_too(tmp_path):
    script = tmp_path / "script.py"
    script.write_text(SESSION)
    session = run("-i", script, input=TYPED, cwd=tmp_path, check=True)
    assert "STEPS 2 tensor(True) False" in session.stdout, session.stderr
    # Of 5 microbatches, 3 blocks and the root are read, forward and backward but the root's.
    assert "RESULT (2, 35)" in session.stdout, session.stderr


def _lives(pid: int) -> bool:
    with suppress(OSError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    return False


def test_interactive_sessions_fork_and_scripts_do_not(monkeypatch):
    def chosen(environment: Any) -> Any:
        strategy = lightning_odc.ODCStrategy(cluster_environment=environment)
        strategy.parallel_devices = [torch.device("cpu")] * 2
        strategy._configure_launcher()
        return strategy.launcher

    assert not isinstance(chosen(LightningEnvironment()), ForkLauncher | None)
    monkeypatch.setattr(sys, "ps1", ">>> ", raising=False)
    forking = chosen(LightningEnvironment())
    assert isinstance(forking, ForkLauncher)
    assert forking.is_interactive_compatible
    for name, value in torchrun_environment(0, 2, 29500).items():
        monkeypatch.setenv(name, value)
    assert chosen(TorchElasticEnvironment()) is None
    assert hasattr(FSDPStrategy, "_configure_launcher")


@on_ranks(2)
def test_cpu_ranks_share_the_cores(rank):
    os.environ.pop("OMP_NUM_THREADS", None)  # what the user says there is left as it is
    torch.set_num_threads(7)
    seen = []
    module = doing(TokenModule(), on_train_start=lambda _: seen.append(torch.get_num_threads()))
    trainer(2).fit(module, loader(token_batches([5])))
    cpus = os.sched_getaffinity(0)
    assert seen[0] == max(len(cpus) // 2, 1)
    assert torch.get_num_threads() == 7


STOPPING = """
import os, signal, sys
from datetime import timedelta
from lightning_odc import Minibatch
from tests.support.modules import TokenModule, loader, token_batches, trainer

class Stops(TokenModule):
    def training_step(self, batch, batch_idx):
        self.trainer.strategy.engine.protocol.waiter.timeout = 1.0  # from now on: ranks need long to start
        if self.trainer.global_rank == 1 and self.trainer.global_step == 1:
            print(f"stops: {os.getpid()}", flush=True)
            os.kill(os.getpid(), signal.SIGSTOP)
        return super().training_step(batch, batch_idx)

trainer(2, timeout=timedelta(seconds=60)).fit(Stops("items"), loader([Minibatch(token_batches([5, 3]))] * 3))
"""


@pytest.mark.slow
def test_a_stopped_rank_ends_with_the_job(tmp_path):
    script = tmp_path / "train.py"
    script.write_text(f"from lightning_odc.strategy.setup import launcher\nlauncher.GRACE = 0.5\n{STOPPING}")
    done = run(script, check=False)
    assert "stops: " in done.stdout, done.stderr
    stopped = int(done.stdout.partition("stops: ")[2].split()[0])
    assert done.returncode == 1
    assert "WaitTimeoutError: Gave up after 1 s" in done.stderr
    with pytest.raises(ProcessLookupError):
        os.kill(stopped, 0)


@pytest.mark.parametrize(("code", "ours"), [(1, 1), (-9, 1), (3, 3)])
def test_scripts_that_end_by_themselves_have_the_time_and_other_launchers_are_left_alone(capsys, code, ours):
    end = f"sys.exit({code})" if code > 0 else "os.kill(os.getpid(), 9)"
    child = subprocess.Popen([sys.executable, "-c", f"import os, sys, time; time.sleep(0.2); {end}"])
    with patch.object(os, "_exit") as ended:
        launcher.end_scripts([child], 60.0)
    assert child.returncode == code
    ended.assert_called_once_with(ours)
    told = f"Other ranks of this node ended with exit codes [{code}], so this process ends with {ours}."
    assert told in capsys.readouterr().err
    launcher.end_scripts_at_exit(SimpleNamespace(procs=[object()]), 1.0)
    launcher.end_scripts_at_exit(None, 1.0)


SETUP = """
import json, os, torch
from tests.support.fits import numbers
from tests.support.modules import TokenModule, trainer
from tests.strategy.test_launcher import data

torch.set_num_threads(4)
a = torch.randn(600, 600, requires_grad=True)
(a @ a).exp().sum().backward()  # this process has worker threads now

class Model(TokenModule):
    def training_step(self, batch, batch_idx):
        if self.lr == 0 and self.global_rank == 1 and batch_idx == 1:
            raise ValueError("a mistake in my cell")
        self.log("reads", float(self.trainer.strategy.engine.traffic.reads))
        return super().training_step(batch, batch_idx)

    def predict_step(self, batch, batch_idx):
        return self.net(batch).sum()

def show(**values):
    print("RESULT" + json.dumps(values))

def children():
    return [pid for task in os.listdir("/proc/self/task")
            for pid in open(f"/proc/self/task/{task}/children").read().split()]
"""

FIT = """
before = children()
model, t = Model(lr=0.01), trainer(2, strategy="odc_plain", max_epochs=2, enable_checkpointing=True)
t.fit(model, data(), data())
show(weights={name: value.tolist() for name, value in model.state_dict().items()}, status=t.state.status,
     metrics=numbers(t.callback_metrics), best=os.path.exists(t.checkpoint_callback.best_model_path))
"""

GO_ON = """
(validated,), predicted = t.validate(model, data(), verbose=False), t.predict(model, data())
t.fit_loop.max_epochs = 3
t.fit(model, data())
show(validated=validated["val_loss"], predicted=torch.stack(predicted).tolist(), steps=t.global_step)
"""

FAIL = "trainer(2, strategy='odc_plain').fit(Model(lr=0.0), data())"

AFTER = "show(left=len(children()) - len(before), distributed=torch.distributed.is_initialized())"

TOKENS = token_batches([5, 9, 4, 7, 6, 8])


def data() -> DataLoader[Any]:
    """Of which Lightning's sampler would give each rank a half; here both have all."""
    return DataLoader(TOKENS, batch_size=None)


def result(outputs: Any) -> dict[str, Any]:
    text = "".join(output.get("text", "") for output in outputs)
    (line,) = [line for line in text.splitlines() if line.startswith("RESULT")]
    return dict(json.loads(line.removeprefix("RESULT")))


@pytest.mark.slow
def test_cells_of_one_kernel_fit_evaluate_go_on_and_survive_an_exception(tmp_path, monkeypatch):
    nbclient = pytest.importorskip("nbclient")
    nbformat = pytest.importorskip("nbformat")
    sources = [SETUP, FIT, GO_ON, FAIL, AFTER]
    book = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(source) for source in sources])
    book.cells[sources.index(FAIL)].metadata["tags"] = ["raises-exception"]
    environment = os.environ | {"PYTHONPATH": str(ROOT), "IPYTHONDIR": str(tmp_path / "ipython")}
    environment.pop("OMP_NUM_THREADS", None)
    monkeypatch.setenv("JUPYTER_RUNTIME_DIR", str(tmp_path / "runtime"))
    options = {"kernel_name": "python3", "resources": {"metadata": {"path": str(tmp_path)}}}
    nbclient.NotebookClient(book, timeout=120, **options).execute(env=environment)
    _, first, further, failed, after = (cell.outputs for cell in book.cells)

    fitted = result(first)
    alone = TokenModule(lr=0.01)
    expected = one_process(alone, [[batch, batch] for _ in range(2) for batch in TOKENS])
    assert_same({name: torch.tensor(value) for name, value in fitted["weights"].items()}, expected)
    with torch.no_grad():
        loss = sum(float(alone.training_step(batch, 0)) for batch in TOKENS) / len(TOKENS)
        sums = [float(alone.net(batch).sum()) for batch in TOKENS]
    assert (fitted["status"], fitted["best"], fitted["metrics"]["reads"] > 0) == ("finished", True, True)
    assert fitted["metrics"]["val_loss"] == pytest.approx(loss, rel=1e-5)
    went_on = result(further)
    assert (went_on["validated"], went_on["steps"]) == (pytest.approx(loss, rel=1e-5), 18)
    assert went_on["predicted"] == pytest.approx(sums, rel=1e-4, abs=1e-4)

    (error,) = [output for output in failed if output.output_type == "error"]
    assert error.ename == "PeerFailedError"
    assert "Rank 1 failed" in error.evalue
    assert "ValueError: a mistake in my cell" in error.evalue
    assert result(after) == {"left": 0, "distributed": False}


def test_a_process_group_of_the_session_is_refused(monkeypatch):
    monkeypatch.setattr(sys, "ps1", ">>> ", raising=False)
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    try:
        with pytest.raises(RuntimeError, match=r"destroy_process_group\(\)"):
            Trainer(strategy="odc", accelerator="cpu", devices=2, logger=False).fit(BoringModel())
    finally:
        torch.distributed.destroy_process_group()


ENDING = """
import sys
import torch.distributed as dist
from tests.support.modules import TokenModule, loader, token_batches, trainer

trainer(2, sharding_strategy="auto").fit(TokenModule("items"), loader(token_batches([5, 3])))
tensors = [torch.ones(4096) for _ in range(30)]
works = [dist.all_reduce(tensor, async_op=True) for tensor in tensors]  # nobody waits for them
del tensors, works
sys.exit(3)
"""


@pytest.mark.slow
def test_a_script_ends_with_its_own_exit_code(tmp_path):
    """Operations of gloo are still under way when the interpreter ends."""
    script = tmp_path / "train.py"
    script.write_text(f"import torch\n{ENDING}")
    done = run(script, check=False)
    assert done.returncode == 3, done.stderr
    assert "terminate called" not in done.stderr


INTERRUPTED = """
import atexit, os, signal, time
from tests.support.modules import TokenModule, loader, token_batches, trainer

class Interrupts(TokenModule):
    def training_step(self, batch, batch_idx):
        if self.trainer.is_global_zero and batch_idx == 1:
            os.kill(os.getpid(), signal.SIGINT)
        return super().training_step(batch, batch_idx)

atexit.register(time.sleep, 6)  # Lightning looks every five seconds whether another rank has failed
signal.signal(signal.SIGINT, signal.default_int_handler)
trainer(2).fit(Interrupts(), loader(token_batches([5, 3, 4])))
"""


@pytest.mark.slow
def test_an_interrupt_is_told_as_one(tmp_path):
    script = tmp_path / "train.py"
    script.write_text(INTERRUPTED)
    done = run(script, check=False)
    assert done.returncode == 1
    assert done.stderr.splitlines()[-1] == "Interrupted", done.stderr
