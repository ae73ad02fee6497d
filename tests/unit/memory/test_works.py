"""Works that are foreseen: what their tables add up to, where memory is counted, and how long updates on the host take."""

import json
from dataclasses import replace

import pytest
import torch

from wandistiller.memory.durations import POLICY_LAUNCHES, TRAINED_LAUNCHES, Seconds, step_seconds, updated_on_host
from wandistiller.memory.encoder_phases import Decoding
from wandistiller.memory.estimates import HOST_SHARE, PROCESS, Estimate, Item, Phase
from wandistiller.memory.hardware import described
from wandistiller.memory.host_adamw import UPDATE_TRAFFIC
from wandistiller.memory.placement import Subject
from wandistiller.memory.scene import Scene
from wandistiller.memory.stage import Placing
from wandistiller.memory.subjects import choose_placement
from wandistiller.memory.uses import Adapters, PixelDecoder, Use
from wandistiller.memory.works import Drawing, Passes, Training, foreseen_placing
from wandistiller.models.sizes import SIZES, TINY_VAE
from wandistiller.models.vae_tiles import TILE, _cut
from wandistiller.units import Bytes

CARD = described(card="rtx4090", host_memory=Bytes(2**36))
CONFIG = {**SIZES["tiny"].transformer, "num_layers": 8}
USE = Use(name="student", config=CONFIG, latent_shape=(8, 2, 16, 16), text_tokens=8, dtype=torch.float32)
TRAINED = USE.changed(trains="everything")
ADAPTED = USE.changed(trains="adapters", adapters=Adapters(2, ("to_q",)))
WEIGHTS = sum(each.nbytes for each in USE.model.parameters())
COUNT = sum(each.numel() for each in USE.model.parameters())
BLOCKS = sum(each.numel() for each in USE.model.get_submodule("blocks").parameters())


def sizes(phase, where="device"):
    return {(item.role, item.kind): item.size for item in phase.items if item.where == where}


@pytest.mark.parametrize(
    "work",
    [
        Training(student=TRAINED, averages=True),
        Training(student=TRAINED.changed(dtype=torch.bfloat16), accumulation=2),
        Training(student=ADAPTED, placing=Placing(name="offload")),
        Training(student=TRAINED, teacher=USE.changed(name="teacher"), matches_features=True),
        Training(student=TRAINED, recordings=1.5),
        Passes(use=USE, held=(64,)),
    ],
    ids=["full", "masters", "adapters", "distilled", "recorded", "passes"],
)
def test_what_is_there_at_the_worst_moment_adds_up(work):
    phase = work.phase(CARD)
    device = [item for item in phase.items if item.where == "device"]
    assert sum(item.at_peak for item in device) == phase.peak <= phase.reserved
    assert all(0 <= item.at_peak <= item.size for item in device)


def test_a_second_batch_finds_the_gradients_of_the_first_there():
    student = TRAINED.changed(batch_size=8)
    alone = Scene().play(student.tape.with_added_gradients(), student.repeats).peak
    phase = Training(student=student, accumulation=2).phase(CARD)
    held = sum(sizes(phase)[label] for label in (("", "libraries"), ("", "batch"), ("student", "optimiser")))
    gradients = sizes(phase)[("student", "added gradients")]
    assert gradients == pytest.approx(WEIGHTS, rel=0.01)
    assert phase.peak == held + sizes(phase)[("student", "weights")] + gradients + alone


def test_all_batches_of_a_step_are_there_from_its_beginning():
    one, three = (sizes(Training(student=TRAINED, accumulation=count).phase(CARD))[("", "batch")] for count in (1, 3))
    assert three == 3 * one
    values = 2 * 8 * 2 * 16 * 16 + 8 * CONFIG["text_dim"] + 1  # latents and noise, text, sigma
    assert 4 * values <= one < 4 * values + 4 * 512


def test_gradients_of_masters_take_the_place_of_short_ones():
    student = TRAINED.changed(dtype=torch.bfloat16, config={**CONFIG, "ffn_dim": 2**15})
    phase = Training(student=student).phase(CARD)
    beside = sizes(phase)[("", "libraries")] + sizes(phase)[("", "batch")]
    count = sum(each.numel() for each in student.trained)
    # Weights of 2 bytes, masters, two moments and gradients of 4.
    assert phase.peak - beside == pytest.approx((2 + 4 + 8 + 4) * count, rel=0.02)


def test_layers_of_a_device_map_visit_the_card_one_at_a_time():
    some = Placing(name="sequential", max_memory={0: WEIGHTS // 2, "cpu": 2**30})
    found = sizes(Passes(use=USE, placing=some).phase(CARD))
    layers = [sum(each.nbytes for each in module.parameters(recurse=False)) for module in USE.model.modules()]
    assert max(layers) <= found[("student", "slots")] < max(layers) + 512, "rounded up"
    assert 0 < found[("student", "weights")] <= WEIGHTS // 2


def test_a_recording_takes_what_a_step_makes_and_its_trial_gives_back():
    alone = Scene()
    alone.hold("", "libraries", [CARD.card.workspace])
    played = alone.play(TRAINED.tape, TRAINED.repeats)
    trial = CARD.card.workspace + played.kept + sum(played.left.values()) - alone.reserved
    once, twice = (Training(student=TRAINED, recordings=count).phase(CARD) for count in (1.0, 2.0))
    assert sizes(once)[("student", "recorded step")] == alone.reserved
    plain = sizes(Training(student=TRAINED).phase(CARD))
    beside = sum(plain[label] for label in (("", "libraries"), ("", "batch"), ("student", "weights"), ("student", "optimiser")))
    assert once.peak == pytest.approx(beside + WEIGHTS + alone.reserved, rel=0.01), "and gradients: not a second time"
    assert 0 < trial < sizes(once)[("student", "optimiser")], "so the first shape's trial is over before the worst moment"
    # A second shape is tried beside the first and what the optimiser keeps by then; the gradients of the trial are still there.
    assert twice.peak - once.peak == pytest.approx(alone.reserved + trial, abs=512)


def test_adapters_that_the_cpu_trains_are_in_host_memory():
    on_card, on_host = (Training(student=ADAPTED, placing=Placing(name=name)).phase(CARD) for name in ("gpu", "cpu"))
    assert sizes(on_host).keys() == {("", "libraries"), ("", "batch")}
    assert on_host.total("host") + on_host.peak > on_card.peak


def test_a_teacher_on_the_cpu_works_in_host_memory():
    found = sizes(Passes(use=USE, placing=Placing(name="cpu")).phase(CARD), "host")
    assert found[("student", "weights")] == pytest.approx(WEIGHTS, rel=0.1) and found[("student", "working memory")] > 0


@pytest.mark.parametrize(("clips", "update", "expected"), [(True, 5, 8), (False, 6, 6), (True, 1, 5), (False, 1, 5)])
def test_updates_on_the_host_run_beside_the_next_forward_or_all_the_step(clips, update, expected):
    assert updated_on_host(Seconds(2.0, 3.0), update, clips=clips) == expected


def test_ranks_that_compute_on_the_host_each_take_of_it():
    estimate = Estimate(phases=(Phase(name="training", peak=Bytes(10), reserved=Bytes(10)),), ranks=4)
    needed = 4 * (10 + PROCESS)
    small, large = (described(num_cards=0, host_memory=Bytes(int(needed / 0.9) + more)) for more in (-10, 10))
    assert f"needs {Bytes(needed)} of host memory" in estimate.lacks(small)[0] and not estimate.lacks(large)


@pytest.mark.parametrize(
    ("changes", "passed"),
    [({}, 28 + 12), ({"clips": False}, 28), ({"averages": True}, 28 + 12 + 12)],
    ids=["clipped", "plain", "averaged"],
)
def test_an_update_takes_what_it_reads_and_writes(changes, passed):
    """By hand, in bytes a weight: weight, gradient and two moments; the norm and the clipping; the average."""
    work, nothing = Training(student=TRAINED, **changes), Training(student=USE, **changes)
    slow = replace(CARD, card=replace(CARD.card, bandwidth=1.0, matmul=dict.fromkeys(CARD.card.matmul, 1e30)))
    tape = step_seconds(TRAINED.tape, TRAINED.repeats, slow).total
    assert nothing.seconds(CARD) == pytest.approx(step_seconds(USE.tape, USE.repeats, CARD).total)
    assert work.seconds(slow) - tape == pytest.approx(passed * WEIGHTS / 4, rel=1e-3)


def test_gradients_that_are_added_up_on_the_host_are_in_float32():
    student, found = TRAINED.changed(dtype=torch.bfloat16), []
    for accumulation in (1, 2):
        phase = Training(student=student, placing=Placing(name="offload"), accumulation=accumulation).phase(CARD)
        found.append([sizes(phase, where).get(("student", "gradients"), 0) for where in ("host", "page-locked")])
    assert found[0] == [0, sum(student.block_bytes)], "they stay where they arrive"
    assert found[1] == [4 * BLOCKS, 2 * max(student.block_bytes)]


def test_a_machine_has_what_its_ranks_do_not_share_several_times():
    items = tuple(Item("x", kind, "host", Bytes(10), is_shared=kind == "shared") for kind in ("shared", "own"))
    estimate = Estimate(phases=(Phase(name="x", items=items),), ranks=4)
    assert estimate.host == 10 + 4 * (10 + PROCESS)


@pytest.mark.parametrize(
    ("use", "placing", "is_shared"),
    [
        (USE, Placing(name="offload"), True),
        (USE, Placing(name="cpu"), True),
        (USE.changed(dtype=torch.bfloat16), Placing(name="offload", eight_bit=True), True),
        (ADAPTED, Placing(name="offload"), False),
    ],
)
def test_ranks_share_weights_that_nobody_changes(use, placing, is_shared):
    work = Passes(use=use, placing=placing) if use.trains == "nothing" else Training(student=use, placing=placing)
    items = [item for item in work.phase(CARD).items if item.where != "device" and item.kind == "weights"]
    assert items and all(item.is_shared is is_shared for item in items)


@pytest.mark.parametrize("eight_bit", [False, True])
def test_blocks_that_stay_on_the_card_are_those_that_were_asked_for(eight_bit):
    use, asked = USE.changed(dtype=torch.bfloat16), {"resident": 3, "eight_bit": eight_bit}
    found = sizes(Passes(use=use, placing=Placing(name="offload", **asked)).phase(CARD))
    placed = choose_placement("offload", **asked)
    subject = Subject(model=use.model, blocks=list(use.model.get_submodule("blocks").children()))
    taken = placed.predict(subject, torch.device("cuda")).device  # of tensors; PyTorch gives each 512 bytes or more
    assert found["student", "weights"] + found["student", "slots"] == pytest.approx(taken, rel=0.02)
    assert placed.resident == 3 and choose_placement("offload", **{**asked, "resident": "auto"}).resident in (0, "auto")


def test_a_loss_in_pixels_keeps_what_the_decoder_makes():
    plain, whole, recomputed = (
        Training(student=TRAINED.changed(pixels=pixels)).phase(CARD)
        for pixels in (None, PixelDecoder(TINY_VAE), PixelDecoder(TINY_VAE, is_checkpointed=True))
    )
    label = ("student", "kept activations")
    assert sizes(plain)[label] < sizes(recomputed)[label] < sizes(whole)[label]
    # At least the pixels themselves, whose difference is looked at: 3 channels, 5 frames, eight pixels a latent.
    assert sizes(whole)[label] - sizes(plain)[label] > 4 * 3 * 5 * 128 * 128
    assert sizes(whole)[("vae", "weights")] > 0 and whole.seconds > plain.seconds


def test_what_each_block_is_compared_with_is_there_from_the_teachers_pass_on():
    teacher = USE.changed(name="teacher", dtype=torch.bfloat16)
    plain, matched = (Training(student=TRAINED, teacher=teacher, matches_features=value).phase(CARD) for value in (False, True))
    tokens, width = 2 * 8 * 8, CONFIG["num_attention_heads"] * CONFIG["attention_head_dim"]
    assert sizes(matched)[("teacher", "matched features")] == tokens * width * 8 * 2
    # How far the student is from each block stays for backward, and what the head keeps is not gone when that begins.
    kept = [sizes(each)[("student", "kept activations")] for each in (plain, matched)]
    assert 8 <= (kept[1] - kept[0]) / (4 * tokens * width) < 11
    assert matched.seconds > plain.seconds


def test_a_teacher_is_asked_about_a_second_batch_beside_the_gradients_of_the_first():
    wide = USE.changed(name="teacher", config={**CONFIG, "ffn_dim": 64 * CONFIG["ffn_dim"]}, latent_shape=(8, 9, 32, 32))
    student = wide.changed(name="student", config=CONFIG, latent_shape=(8, 1, 2, 2), trains="everything")
    once, twice = (Training(student=student, teacher=wide, accumulation=count).phase(CARD) for count in (1, 2))
    gradients = sum(each.nbytes for each in student.trained)
    # All else is as it was, but for a second batch's latents, text and sigmas.
    assert twice.peak - once.peak == pytest.approx(gradients, rel=0.01)
    assert sizes(twice)[("student", "added gradients")] == pytest.approx(gradients, rel=0.01)


def test_pictures_drawn_while_training_need_a_vae_beside_the_optimiser():
    decoding = Decoding(config=TINY_VAE, latent_shape=(8, 2, 64, 64), dtype=torch.float32)
    drawing = Drawing(student=USE, decoding=decoding)
    without, drawn = (Training(student=TRAINED, averages=True, drawing=each).phase(CARD) for each in (None, drawing))
    alone = decoding.phase(CARD)
    held = sum(sizes(drawn)[("student", kind)] for kind in ("weights", "optimiser", "average"))
    assert drawn.peak >= alone.peak + held and drawn.reserved > without.reserved


def test_what_is_put_aside_for_pictures_is_where_it_was():
    """Averages of offloaded weights take the place of those in host memory."""
    decoding = Decoding(config=TINY_VAE, latent_shape=(8, 2, 64, 64), dtype=torch.float32)
    work = Training(student=TRAINED, placing=Placing(name="offload"), averages=True)
    drawn = replace(work, drawing=Drawing(student=USE.changed(is_streamed=True), decoding=decoding)).phase(CARD)
    assert sizes(drawn)[("student", "weights put aside")] == pytest.approx(WEIGHTS - 4 * BLOCKS, rel=0.01)


@pytest.mark.parametrize("side", [20, 24, 25, 49, 73, 80, 100, 121])
def test_tiles_that_are_played_are_as_large_as_the_largest(side):
    decoding = Decoding(config=TINY_VAE, latent_shape=(8, 9, side, 24), dtype=torch.float32, is_tiled=True)
    largest = [
        max(tile.rows.stop - tile.rows.start for tile in _cut(length, 24, TILE)) for length in (side, decoding._kept_shape[2])
    ]
    assert largest[0] == largest[1] and decoding._kept_shape[2] <= side


@pytest.mark.parametrize("name", ["balanced", "sequential"])
def test_cards_that_have_a_model_between_them(name):
    two = replace(CARD, cards_each=2)
    found = sizes(Passes(use=USE, placing=Placing(name=name)).phase(two))[("student", "weights")]
    # Balanced, the fuller card has half, and a block and a quarter at most; in sequence the first has room for all.
    block = max(USE.block_bytes)
    assert found == pytest.approx(WEIGHTS, rel=0.05) if name == "sequential" else found < WEIGHTS / 2 + 1.5 * block


def test_a_rank_spreads_its_teacher_over_its_own_card():
    two = described(card="rtx4090", num_cards=2, host_memory=Bytes(2**36))
    found = sizes(Passes(use=USE, placing=Placing(name="balanced")).phase(two))
    assert found[("student", "weights")] == pytest.approx(WEIGHTS, rel=0.05)


def test_a_rank_may_have_other_cards_than_the_first():
    placing = Placing(name="balanced", max_memory={2: WEIGHTS, 3: WEIGHTS, "cpu": 2**33})
    assert placing.spread(USE, replace(CARD, num_cards=2, cards_each=2)).keys() == {"cuda:2", "cuda:3"}


@pytest.mark.parametrize("name", ["balanced", "custom"])
def test_what_is_on_no_card_computes_on_the_host(name, tmp_path):
    """As accelerate has it: a map without a card lets all of it compute where it is."""
    file = tmp_path / "map.json"
    file.write_text('{"": "cpu"}')
    where = {"device_map": file} if name == "custom" else {"max_memory": {0: 2**10, "cpu": 2**33}}
    found = Passes(use=USE, placing=Placing(name=name, **where)).phase(CARD)
    expected = Passes(use=USE, placing=Placing(name="cpu")).phase(CARD)
    assert found.seconds == expected.seconds != Passes(use=USE).phase(CARD).seconds
    assert sizes(found) == sizes(expected)


def test_what_a_map_has_on_disk_comes_from_there(tmp_path):
    """By hand: of what the map names first the last half, at the disk's rate, and nothing of it in host memory."""
    file = tmp_path / "map.json"
    file.write_text(json.dumps({"": 0, **{f"blocks.{number}": "disk" for number in range(4, 8)}}))
    placing, slow = Placing(name="custom", device_map=file), replace(CARD, disk_rate=1e6)
    work = Passes(use=USE, placing=placing)
    read = sum(each.nbytes for number in range(4, 8) for each in USE.model.get_submodule(f"blocks.{number}").parameters())
    assert sum(placing.spread(USE, slow)["disk"]) == read
    assert work.seconds(slow) - work.seconds(replace(slow, disk_rate=1e30)) == pytest.approx(read / 1e6)
    assert not sizes(work.phase(slow), "page-locked") and not sizes(work.phase(slow), "host")
    converted = Passes(use=USE.changed(stored_dtype=torch.bfloat16), placing=placing).phase(slow)
    assert sum(sizes(converted, "page-locked").values()) == read, "which is read once and kept"


@pytest.mark.parametrize(("stored", "share"), [(None, 1), (torch.float32, 1), (torch.bfloat16, 0.5), (torch.float64, 2)])
def test_what_is_streamed_from_disk_is_as_large_as_it_is_stored(stored, share):
    slow = replace(CARD, disk_rate=1e6)
    work = Passes(use=USE.changed(stored_dtype=stored), placing=Placing(name="disk"))
    assert work.seconds(slow) == pytest.approx(share * work.placing.plan(USE).moved_bytes / 1e6)


def test_a_map_that_leaves_the_student_its_card_counts_the_fuller_one(tmp_path):
    file = tmp_path / "map.json"
    file.write_text('{"": 1}')
    two = replace(CARD, cards_each=2)
    placing = Placing(name="custom", device_map=file)
    small, large = (TRAINED, TRAINED.changed(name="teacher", trains="nothing", precision="no"))
    work = Training(student=small, teacher=large, teacher_placing=placing)
    alone = Training(student=small).phase(two)
    assert ("teacher", "weights") not in sizes(work.phase(two))
    weights = sum(each.nbytes for each in large.model.parameters())
    assert work.phase(two).reserved == pytest.approx(max(alone.reserved, weights), rel=0.2)


def test_a_teacher_on_several_cards_takes_its_share_of_the_students():
    teacher, block = USE.changed(name="teacher"), max(USE.block_bytes)
    small, large = {0: 3 * block}, {1: 2 * WEIGHTS}
    shares = []
    for limits in (small | large, large | small):  # its card is the first named
        work = Training(student=TRAINED, teacher=teacher, teacher_placing=Placing(name="sequential", max_memory=limits))
        shares.append(sizes(work.phase(replace(CARD, cards_each=2)))[("teacher", "weights")])
    assert block < shares[0] <= 3 * block, "and not what the fuller card has"
    assert sum(shares) == sizes(Passes(use=USE).phase(CARD))[("student", "weights")]


@pytest.mark.parametrize(("slices", "rate"), [(1, None), (4, 2e6), (8, 1e6)], ids=["whole", "in a machine", "in two"])
def test_a_pass_of_a_sharded_teacher_waits_for_its_weights(slices, rate):
    """By hand: a rank has its slice, and gets the others over the links of a machine, or over the network."""
    machines = described(card="rtx4090", num_cards=4, num_nodes=2, host_memory=Bytes(2**36), network_rate=1e6)
    machines = replace(machines, card=replace(machines.card, link_rate=2e6))
    gathered = WEIGHTS * (slices - 1) / slices / rate if rate else 0.0
    asked = Passes(use=USE, passes=2, slices=slices).phase(machines)
    assert asked.exchange == pytest.approx(2 * gathered)
    teacher = {"teacher": USE.changed(name="teacher"), "teacher_passes": 3, "teacher_slices": slices}
    alone = Training(student=TRAINED, accumulation=2)
    work = replace(alone, **teacher)
    together, student = work.phase(machines), alone.phase(machines)
    assert together.exchange - student.exchange == pytest.approx(6 * gathered)
    if rate:
        assert asked.seconds == pytest.approx(2 * gathered), "far longer than it computes"
        assert together.seconds - student.seconds == pytest.approx(6 * gathered)


def test_slices_of_one_rank_are_all_of_it():
    student = TRAINED.changed(precision="bf16", policy="full")
    plain, sliced = (Training(student=student, parallel=name).phase(CARD) for name in ("ddp", "fsdp"))
    found = sizes(sliced)
    assert found["student", "weights"] == sizes(plain)["student", "weights"]
    assert found["student", "optimiser"] == sizes(plain)["student", "optimiser"]
    assert found["student", "exchanged gradients"] == pytest.approx(4 * COUNT, rel=0.01)
    assert found["student", "gathered blocks"] == pytest.approx(2 * 2 * BLOCKS / CONFIG["num_layers"], rel=0.01), (
        "two, in 16 bits"
    )


def test_what_ranks_bring_together_is_cast_already():
    """Autocast makes a second copy of float32 weights for as long as they are used; ranks send them so."""
    student = TRAINED.changed(precision="bf16", policy="full")
    cast = student.changed(comes_cast=True)
    assert {each.dtype for each in cast.model.parameters()} == {torch.float32, torch.bfloat16}
    first = [each.tape.parts[1].events for each in (student, cast)]
    made = [sum(size for _, size in events if size > 0) for events in first]
    layers = [layer for layer in student.model.get_submodule("blocks.0").modules() if isinstance(layer, torch.nn.Linear)]
    assert made[0] - made[1] == sum(2 * each.numel() for layer in layers for each in layer.parameters())


def test_a_sharded_teacher_is_in_slices_and_two_blocks():
    teacher = USE.changed(name="teacher")
    found = sizes(Training(student=TRAINED, teacher=teacher, teacher_slices=4).phase(CARD))
    assert found[("teacher", "weights")] == pytest.approx(WEIGHTS / 4, rel=0.1)
    assert found[("teacher", "gathered blocks")] == pytest.approx(2 * max(USE.block_bytes), rel=0.1)


def test_what_auto_will_choose_fits():
    """On the card while the weights, all else and a margin fit; below that streamed, with blocks that stay."""
    work = Training(student=ADAPTED.changed(latent_shape=(8, 9, 64, 64)))
    phase = work.phase(CARD)
    needed = phase.reserved + 300 * 2**20 + CARD.card.context
    names = []
    for memory in (needed, needed - 2**16):
        hardware = described(card="rtx4090", gpu=Bytes(memory), host_memory=Bytes(2**36))
        names.append(foreseen_placing(work.student, phase, hardware).name)
    assert names == ["gpu", "offload"]


def test_auto_leaves_the_host_what_the_process_itself_takes():
    """Streamed from the host as long as the verdict is that it fits there with the process, else from the disk."""
    work = Passes(use=Use(name="student", config=SIZES["wan2.1-1.3b"].transformer, latent_shape=(16, 1, 60, 104)))
    phase = work.phase(CARD)
    plenty = described(card="rtx4090", gpu=Bytes(2 * 2**30), host_memory=Bytes(2**36))
    on_host = foreseen_placing(work.use, phase, plenty).footprint(work.use).page_locked
    names = []
    for process in (PROCESS, PROCESS // 2):
        hardware = replace(plenty, host_memory=Bytes(int((on_host + process) / HOST_SHARE) + 2**20))
        chosen = foreseen_placing(work.use, phase, hardware)
        names.append(chosen.name)
        assert not Estimate(phases=(replace(work, placing=chosen).phase(hardware),)).lacks(hardware)
    assert names == ["offload", "disk"]


@pytest.mark.parametrize(("in_use", "may_run"), [(9, True), (12, False)])
def test_what_does_not_fit_for_fragments_alone_is_said_to_be_so(in_use, may_run):
    phase = Phase(name="x", items=(), peak=Bytes(in_use * 2**30), reserved=Bytes(13 * 2**30))
    (lack,) = Estimate(phases=(phase,)).lacks(described(card="rtx4090", gpu=Bytes(12 * 2**30), host_memory=Bytes(2**36)))
    assert lack.startswith("needs 13.0 GiB and a margin of 399.4 MiB on a card that has")
    assert ("9.0 GiB are in use at the worst moment, so it may run" in lack) is may_run


@pytest.mark.parametrize("clips", [True, False])
@pytest.mark.parametrize("accumulation", [1, 3])
def test_gradients_are_added_up_on_the_host(clips, accumulation):
    """By hand, where the host is slow: a backward of several waits for ten bytes a weight; an update is beside a pass."""
    slow = replace(CARD, host_rate=1e3)
    student = TRAINED.changed(dtype=torch.bfloat16)
    work = Training(student=student, placing=Placing(name="offload"), accumulation=accumulation, clips=clips)
    passed = UPDATE_TRAFFIC + (10 * accumulation if accumulation > 1 else 0)
    assert work.seconds(slow) == pytest.approx(passed * BLOCKS / 1e3, rel=1e-2)


@pytest.mark.parametrize("clips", [True, False])
def test_an_average_of_offloaded_weights_is_taken_where_they_are_updated(clips):
    """By hand, where the host is slow: averages are read and written beside what an update reads and writes."""
    student = TRAINED.changed(dtype=torch.bfloat16)
    work = Training(student=student, placing=Placing(name="offload"), averages=True, clips=clips)
    assert work.seconds(replace(CARD, host_rate=1e3)) == pytest.approx((UPDATE_TRAFFIC + 8) * BLOCKS / 1e3, rel=1e-2)
    found, on_card = (sizes(work.phase(CARD), where) for where in ("host", "device"))
    # Each tensor on the card is rounded up to what its allocator gives out.
    assert found[("student", "average")] + on_card[("student", "average")] == pytest.approx(4 * COUNT, rel=1e-3)
    assert found[("student", "average")] == 4 * sum(each.numel() for each in student.model.blocks.parameters())


def test_a_policy_has_something_to_do_for_each_block():
    student = TRAINED.changed(policy="full")
    slow = replace(CARD, card=replace(CARD.card, launch_seconds=1.0))
    tape = step_seconds(student.tape, student.repeats, slow).total
    found = Training(student=student, clips=False).seconds(slow) - tape
    assert found == pytest.approx(TRAINED_LAUNCHES * POLICY_LAUNCHES * student.num_blocks, abs=1e-3)
