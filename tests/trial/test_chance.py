"""While a loss is tried, nothing that a step draws depends on chance, or on the other samples of a batch."""

from __future__ import annotations

import ast
import inspect
import textwrap
from typing import Any

import pytest
import torch
import torch.distributions as d
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn

from lightning_odc.trial.arithmetic import WithoutChance
from lightning_odc.trial.chance import CALM, CONSTANTS, DROPOUTS, RECURRENT
from lightning_odc.trial.run import try_loss
from tests.support.tiers import fast

KNOWN = {*CALM, *CONSTANTS, *DROPOUTS, *RECURRENT}
#: Functions that draw otherwise for a sample alone than among others. A step that calls them runs whole batches.
LEFT_OUT = {"poisson", "binomial", "cauchy_", "geometric_", "log_normal_", "rrelu", "rrelu_"}
LEFT_OUT |= {
    f"fractional_max_pool{dimensions}d{end}" for dimensions in (2, 3) for end in ("", "_with_indices")
}


def drawing_operators() -> set[str]:
    """The names of torch's operators that draw random numbers, by torch's own list."""
    found = set()
    for name in torch._C._dispatch_get_all_op_names():
        library, _, operator = name.partition("::")
        base, _, overload = operator.partition(".")
        if library == "aten" and hasattr(torch.ops.aten, base):
            packet = getattr(torch.ops.aten, base)
            tags = ()
            if overload in packet.overloads():
                tags = getattr(packet, overload or "default").tags
            if not overload:
                tags = packet.default.tags
            if torch.Tag.nondeterministic_seeded in tags:
                found.add(base)
    return found


@pytest.mark.slow
def test_every_function_of_torch_that_draws_is_known():
    """By torch's list of operators: their public functions and methods. Internal ones are called by these."""
    operators = drawing_operators()
    assert {"rand", "bernoulli_", "multinomial", "_standard_gamma", "rrelu"} <= operators
    public = {name for name in operators if not name.startswith("_")} | {
        "_standard_gamma",
        "_sample_dirichlet",
    }
    functions = {
        (place.__name__, name): getattr(place, name)
        for place in (torch, F, Tensor)
        for name in public
        if callable(getattr(place, name, None))
    }
    unknown = {name for name, function in functions.items() if function not in KNOWN}
    # Networks of other devices, which `torch.lstm` and its like call.
    assert {name for _, name in unknown} - LEFT_OUT == {"miopen_rnn"}


def code_of(function: Any) -> str:
    """The source of a function without its examples."""
    (tree,) = ast.parse(textwrap.dedent(inspect.getsource(function))).body
    if ast.get_docstring(tree):
        del tree.body[0]
    return ast.unparse(tree)


@pytest.mark.slow
def test_every_function_of_torch_that_is_written_in_python_and_draws_is_known():
    drawing = ("torch.rand", "torch.bernoulli", "torch.normal", ".exponential_(", ".uniform_(", ".normal_(")
    functions = [function for function in vars(F).values() if inspect.isfunction(function)]
    own = [function for function in functions if function.__module__ == "torch.nn.functional"]
    found = {function for function in own if any(word in code_of(function) for word in drawing)}
    assert F.gumbel_softmax in found
    assert {function.__name__ for function in found if function not in KNOWN} <= LEFT_OUT


def rows(n: int) -> Tensor:
    return torch.linspace(0.1, 0.9, n, dtype=torch.float64)


#: By name: what a step draws for a batch of some samples, which are rows.
DRAWS: dict[str, Any] = {
    "rand": lambda x: torch.rand(len(x)),
    "rand_like": lambda x: torch.rand_like(input=x),
    "randn": lambda x: torch.randn(size=(len(x), 3)),
    "randint": lambda x: torch.randint(low=2, high=9, size=(len(x),)),
    "randint, one bound": lambda x: torch.randint(9, (len(x),)),
    "randint_like": lambda x: torch.randint_like(x, 2, 9),
    "normal": lambda x: torch.normal(mean=x, std=1.0),
    "normal of numbers": lambda x: torch.normal(2.0, 3.0, (len(x),)),
    "bernoulli by keyword": lambda x: torch.bernoulli(input=x),
    "bernoulli, a number": lambda x: torch.bernoulli(x, p=0.7),
    "bernoulli, a method": lambda x: x.bernoulli(p=0.3),
    "bernoulli in place": lambda x: torch.empty_like(x).bernoulli_(p=0.7),
    "bernoulli in place, by row": lambda x: torch.empty_like(x).bernoulli_(x),
    "multinomial": lambda x: torch.multinomial(input=torch.stack([x, 1 - x], 1), num_samples=2),
    "multinomial, many": lambda x: torch.stack([x, 1 - x], 1).multinomial(5, replacement=True),
    "uniform_": lambda x: torch.empty_like(x).uniform_(2, 4),
    "uniform_ by keyword": lambda x: torch.empty_like(x).uniform_(to=4),
    "random_": lambda x: torch.empty_like(x).random_(2, 9),
    "random_ of anything": lambda x: torch.empty_like(x).random_(),
    "normal_": lambda x: torch.empty_like(x).normal_(mean=1.0, std=2.0),
    "exponential_": lambda x: torch.empty_like(x).exponential_(lambd=2.0),
    "dropout": lambda x: F.dropout(input=x, p=0.5),
    "dropout in place": lambda x: torch.dropout_(x.clone(), 0.5, True),
    "alpha dropout": lambda x: F.alpha_dropout(x, 0.5, training=True),
    "native dropout": lambda x: torch.native_dropout(x, 0.5, True)[0],
    "gumbel": lambda x: F.gumbel_softmax(torch.stack([x, 1 - x], 1), tau=0.5),
    "gumbel, hard": lambda x: F.gumbel_softmax(logits=torch.stack([x, 1 - x], 1), hard=True),
    "recurrent": lambda x: recurrent(x),
    "attention": lambda x: F.scaled_dot_product_attention(
        *[x[:, None, None].expand(-1, 2, 2)] * 3, dropout_p=0.5
    ),
    "Beta": lambda x: d.Beta(x + 1, 2.0).sample(),
    "Categorical": lambda x: d.Categorical(torch.stack([x, 1 - x], 1)).sample(),
    "Chi2": lambda x: d.Chi2(x).sample(),
    "ContinuousBernoulli": lambda x: d.ContinuousBernoulli(x).sample(),
    "Dirichlet": lambda x: d.Dirichlet(torch.stack([x, 1 - x], 1)).rsample(),
    "Exponential": lambda x: d.Exponential(x).sample(),
    "FisherSnedecor": lambda x: d.FisherSnedecor(x + 3, x + 4).sample(),
    "Gamma": lambda x: d.Gamma(x, 2.0).rsample(),
    "Geometric": lambda x: d.Geometric(x).sample(),
    "Gumbel": lambda x: d.Gumbel(x, 1.0).sample(),
    "HalfNormal": lambda x: d.HalfNormal(x).sample(),
    "InverseGamma": lambda x: d.InverseGamma(x + 2, 1.0).sample(),
    "Kumaraswamy": lambda x: d.Kumaraswamy(x, 2.0).sample(),
    "Laplace": lambda x: d.Laplace(x, 1.0).rsample(),
    "LogNormal": lambda x: d.LogNormal(x, 1.0).sample(),
    "MultivariateNormal": lambda x: d.MultivariateNormal(
        torch.stack([x, x], 1), torch.eye(2).double()
    ).sample(),
    "Normal": lambda x: d.Normal(x, 1.0).rsample(),
    "OneHotCategorical": lambda x: d.OneHotCategorical(torch.stack([x, 1 - x], 1)).sample(),
    "Pareto": lambda x: d.Pareto(x, 2.0).sample(),
    "RelaxedBernoulli": lambda x: d.RelaxedBernoulli(torch.tensor(0.5).double(), x).sample(),
    "StudentT": lambda x: d.StudentT(x + 3).sample(),
    "Uniform": lambda x: d.Uniform(x, x + 1).sample(),
    "Weibull": lambda x: d.Weibull(x, 2.0).sample(),
}


NETWORK = nn.LSTM(1, 2, num_layers=2, dropout=0.5, batch_first=True).double()


def recurrent(x: Tensor) -> Tensor:
    return NETWORK(x[:, None, None])[0]


@pytest.mark.parametrize("name", DRAWS)
@pytest.mark.parametrize("wide", fast([True, False], True))
def test_a_sample_draws_the_same_alone_and_among_others(name, wide):
    x = rows(4)
    torch.manual_seed(1)
    with WithoutChance(wide=wide):
        together = DRAWS[name](x)
        alone = [DRAWS[name](x[i : i + 1]) for i in range(len(x))]
    # Another draw differs in the first digits, and a product of matrices of other sizes in the last ones.
    torch.testing.assert_close(together, torch.cat(alone), rtol=1e-6, atol=1e-6)
    assert together.isfinite().all()
    assert together.shape == DRAWS[name](x).shape
    assert together.dtype == DRAWS[name](x).dtype


@pytest.mark.parametrize("name", ["randint", "bernoulli by keyword", "Beta", "gumbel", "recurrent"])
def test_without_the_trial_these_depend_on_chance(name):
    """Otherwise the test above would show nothing."""
    x = rows(4)
    torch.manual_seed(1)
    drawn = [DRAWS[name](x) for _ in range(8)]
    assert not all(torch.equal(drawn[0], other) for other in drawn)


def test_a_step_that_draws_otherwise_runs_whole_batches():
    def step(x: Tensor) -> Tensor:
        return (x + torch.poisson(10 * x)).mean()

    verdict = try_loss(step, lambda group: rows(9)[list(group)], [1] * 9, [], torch.device("cpu"))
    assert verdict.rule is None
    assert not verdict.has_failed


def test_reading_a_loss_that_has_a_graph_warns_of_nothing(recwarn):
    """A step that turns gradients on for good, as some do for forces."""
    weight = nn.Parameter(torch.ones(()))

    def step(x: Tensor) -> Tensor:
        torch.set_grad_enabled(True)
        return (weight * x).mean()

    before = torch.is_warn_always_enabled()
    torch.set_warn_always(True)  # by itself, torch warns once in a process
    try:
        verdict = try_loss(step, lambda group: rows(9)[list(group)], [1] * 9, [], torch.device("cpu"))
    finally:
        torch.set_warn_always(before)
    assert verdict.rule is not None
    assert [str(warning.message) for warning in recwarn] == []


def test_a_permutation_mixes_samples():
    with WithoutChance(wide=True):
        assert torch.randperm(4).tolist() == [3, 2, 1, 0]


def test_drawing_until_numbers_fit_ends():
    def draw() -> None:
        while torch.rand(()) < 0.9:
            pass

    with WithoutChance(wide=True), pytest.raises(RuntimeError, match="again and again"):
        draw()
