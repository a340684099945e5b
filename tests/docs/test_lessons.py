"""What the notebooks use besides the package does what they say it does."""

import io
import json
import shutil
import subprocess

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from matplotlib.colors import to_hex

from lightning_odc.callbacks.timeline.palette import BLACK, DARK, IDLE, ORANGE, WHITE
from notebooks.support import pictures, sliders
from notebooks.support.dealing import deal_minibatches
from notebooks.support.interleavings import PROTOCOL, WITH_LOCKS, explore, microbatches, swapped, without
from notebooks.support.replay import duration, idle_fraction, layered, replay

TIMES = layered([[8, 1, 1], [1, 1, 8]], layers=4)
LAYERS_DIFFER = [[[3.0, 1.0]], [[1.0, 3.0]]]
COUNTS_DIFFER = [[[1.0]], [[1.0], [1.0], [1.0]]]


def test_a_replay_takes_what_the_formulas_say():
    for times, barrier, seconds in (
        (TIMES, "layer", 8 + 1 + 8),
        (TIMES, "microbatch", 8 + 1 + 8),
        (TIMES, "minibatch", 10),
        (LAYERS_DIFFER, "layer", 3 + 3),
        (LAYERS_DIFFER, "microbatch", 4),
        (COUNTS_DIFFER, "minibatch", 3),
    ):
        pieces = replay(times, barrier)
        busy = sum(layer for rank in times for microbatch in rank for layer in microbatch)
        assert duration(pieces) == pytest.approx(seconds)
        assert idle_fraction(pieces) == pytest.approx(1 - busy / (2 * seconds))
    with pytest.raises(ValueError, match="wait forever"):
        replay(COUNTS_DIFFER, "layer")


def test_a_picture_has_a_dark_twin_in_the_same_roles():
    figure = pictures.rows_figure([3, 2, 3], [[3, 2], [3]])
    figure.savefig(io.BytesIO(), format="png")

    def colours():
        [axes, _] = figure.axes
        bars = {to_hex(bar.get_facecolor()) for bar in axes.patches}
        ink = to_hex(axes.get_yaxis().label.get_color())
        return to_hex(figure.get_facecolor()), ink, bars

    paper, ink, light = colours()
    assert (paper, ink) == (WHITE, BLACK)
    assert ORANGE in light, "padding"
    assert IDLE not in light, "grey is waiting, never padding"
    pictures.darken(figure)
    paper, ink, dark = colours()
    assert (paper, ink) == (DARK[WHITE], DARK[BLACK])
    assert dark == {DARK.get(colour, colour) for colour in light}


@pytest.mark.skipif(shutil.which("node") is None, reason="no Node here to run the JavaScript of the sliders")
def test_the_sliders_compute_what_the_replay_computes(tmp_path):
    program = tmp_path / "sliders.js"
    program.write_text(sliders.script())
    assert [word for word in ('"label"', "aria-label", '"status"') if word not in program.read_text()] == []
    for sigma, ranks in ((0.0, 2), (0.9, 4), (1.6, 16)):
        asked = (
            f"const m = require({json.dumps(str(program))}), times = m.lengths({sigma}, {ranks});"
            f"const runs = [true, false].map((all) => m.totals(m.replay(times, all), {ranks}));"
            "console.log(JSON.stringify({ times, runs }))"
        )
        said = subprocess.run(["node", "-e", asked], capture_output=True, text=True, check=True)
        found = json.loads(said.stdout)
        lengths = [length for rank in found["times"] for length in rank]
        assert [len(rank) for rank in found["times"]] == [4] * ranks
        assert sum(lengths) / len(lengths) == pytest.approx(1)
        assert (max(lengths) - min(lengths) > 1) == (sigma > 0)
        for run, barrier in zip(found["runs"], ("layer", "minibatch"), strict=True):
            pieces = replay(layered(found["times"], layers=4), barrier)
            waiting = sum(piece.end - piece.begin for piece in pieces if piece.idle) / ranks
            assert run["time"] == pytest.approx(duration(pieces))
            assert run["idle"] == pytest.approx(waiting, abs=1e-9)
            assert run["fraction"] == pytest.approx(idle_fraction(pieces), abs=1e-9)


def test_the_protocol_holds_in_every_order_also_with_locks_and_two_units():
    for counts in ((1, 1), (2, 0), (0, 0), (3, 1)):
        outcome = explore(*(microbatches(count) for count in counts))
        assert not outcome.violation
        assert outcome.states > 100
    for counts in ((1, 1), (2, 1), (0, 2), (1, 0, 1), (0, 2, 0)):
        outcome = explore(*(microbatches(count, WITH_LOCKS) for count in counts), steps=2, units=2)
        assert not outcome.violation
        assert outcome.states > 400


BROKEN = [
    (without(PROTOCOL, "wait for done"), "takes the sum of version 1 with 1 of 2 gradients"),
    (without(PROTOCOL, "wait for version"), "has read what was never written"),
    (without(PROTOCOL, "zero sum"), "finds in it one of version 1"),
    (without(PROTOCOL, "wait for done", "take sum"), "works on version 1 and has read version 2"),
    (without(PROTOCOL, "say done"), "the ranks wait for each other"),
    (swapped(PROTOCOL, "write first half", "announce version"), "has read what was never written"),
    (swapped(PROTOCOL, "write second half", "announce version"), "has read what was never written"),
    (swapped(PROTOCOL, "say done", "wait for done"), "the ranks wait for each other"),
    ((*PROTOCOL[:3], "zero sum", *PROTOCOL[3:-1]), "with 1 of 2 gradients"),  # published, then zeroed
    (without(WITH_LOCKS, "take lock", "give lock"), "with 1 of 2 gradients"),
    (without(WITH_LOCKS, "give lock"), "the ranks wait for each other"),
]


@pytest.mark.parametrize("units", [1, 2])
def test_broken_protocols_are_found(units):
    for program, violation in BROKEN:
        outcome = explore(program, units=units)
        assert violation in outcome.violation
        assert outcome.trace
        assert outcome.violation in str(outcome)
    assert "never written" in explore(PROTOCOL, first_version=0).violation
    with pytest.raises(ValueError, match="'pray' is not an action"):
        explore((*PROTOCOL, "pray"))


@settings(max_examples=50, deadline=None)
@given(
    lengths=st.lists(st.integers(1, 99), min_size=12, max_size=40),
    ranks=st.integers(1, 4),
    samples_per_rank=st.integers(1, 3),
    minibatches=st.integers(1, 5),
    seed=st.integers(0, 3),
)
def test_plans_deal_every_sample_once_and_sort_each_share(
    lengths, ranks, samples_per_rank, minibatches, seed
):
    size = {"ranks": ranks, "samples_per_rank": samples_per_rank, "minibatches": minibatches}
    plan = deal_minibatches(lengths, **size, seed=seed)
    counts = [[len(share) for share in minibatch] for minibatch in plan]
    assert counts == [ranks * [samples_per_rank]] * minibatches
    first_epoch = len(lengths) // (ranks * samples_per_rank)
    dealt = [index for minibatch in plan[:first_epoch] for share in minibatch for index in share]
    assert len(set(dealt)) == len(dealt)
    for minibatch in plan:
        for share in minibatch:
            assert [lengths[index] for index in share] == sorted((lengths[i] for i in share), reverse=True)
