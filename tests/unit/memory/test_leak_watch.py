"""The watch finds leaks of a known size and nothing else."""

import random

import pytest

from wandistiller.memory.leak_watch import LeakWatch

MIB = 2**20


def watch(memory, steps=4000, bucket=lambda step: None, **options):
    """Return the leaks found in ``memory(step)``."""
    observer = LeakWatch(warmup_steps=100, **options)
    for step in range(steps):
        observer.observe(step, "device", int(memory(step)), bucket(step))
    return observer.leaks()


@pytest.mark.parametrize("each", [2000, 50_000])
@pytest.mark.parametrize("noise", [0, 20 * MIB])
def test_a_leak_is_found_and_measured(each, noise):
    rng = random.Random(0)
    (leak,) = watch(lambda step: 10**9 + each * step + rng.random() * noise)
    # The least of a few hundred noisy observations lies within a percent of the noise.
    assert leak.bytes_per_step == pytest.approx(each, rel=0.02 if not noise else 0.25)
    assert f"grows by {'2.0 KiB' if each == 2000 and not noise else ''}" in str(leak)


@pytest.mark.parametrize("start", [2000, 3200])
def test_a_leak_that_begins_late_is_found_and_measured(start):
    (leak,) = watch(lambda step: 10**9 + 50_000 * max(step - start, 0))
    assert leak.bytes_per_step == pytest.approx(50_000, rel=0.01)
    assert leak.since_step >= start


@pytest.mark.parametrize("is_high_water", [False, True])
def test_noise_is_no_leak_however_often_one_asks(is_high_water):
    """What rises by chance is asked about every hundred steps, and memory of which an allocator keeps the most never falls."""
    for seed in range(20):
        rng, most, observer = random.Random(seed), 0.0, LeakWatch(warmup_steps=100)
        for step in range(0, 4000, 10):
            noise = rng.gauss(0, 30 * MIB)
            most = max(most, noise)
            observer.observe(step, "device", int(10**9 + (most if is_high_water else noise)))
            assert step % 100 or observer.leaks() == []


def test_a_sawtooth_that_rises_is_a_leak():
    """As a collector that frees most of it every hundred steps."""
    (leak,) = watch(lambda step: 10**9 + 3000 * step + 10 * MIB * (step % 100))
    assert leak.bytes_per_step == pytest.approx(3000, rel=0.05)


@pytest.mark.parametrize(
    "memory",
    [
        lambda step: 10**9,
        lambda step: 10**9 + 50 * MIB * random.Random(step).random(),
        lambda step: 10**9 + min(step, 90) * 10 * MIB,  # warm-up
        lambda step: 10**9 + 30 * MIB * (step % 7),  # a cycle
        lambda step: 10**9 - step * 1000,
        lambda step: 10**9 + 200 * MIB * (step > 2000),  # one jump is no trend of every step
        lambda step: 10**9 + step * 100,  # 0.4 MB in all: not worth a word
    ],
    ids=["flat", "noise", "warm-up", "cycle", "falling", "jump", "tiny"],
)
def test_what_is_no_leak_is_none(memory):
    assert watch(memory) == []


def test_buckets_of_different_size_are_no_leak():
    sizes = {0: 10**9, 1: 2 * 10**9, 2: 5 * 10**9}

    def bucket(step):
        return step % 3 if step > 1500 else 0  # larger ones come later

    assert watch(lambda step: sizes[bucket(step)], bucket=bucket) == []


def test_a_leak_under_buckets_is_found():
    sizes = {0: 10**9, 1: 2 * 10**9, 2: 5 * 10**9}

    def bucket(step):
        return step % 3 if step > 1500 else step % 2

    (leak,) = watch(lambda step: sizes[bucket(step)] + 4000 * step, bucket=bucket)
    assert leak.bytes_per_step == pytest.approx(4000, rel=0.1)


@pytest.mark.parametrize("num_buckets", [60, 10**6], ids=["many", "never twice"])
@pytest.mark.parametrize("each", [0, 2**20])
def test_buckets_that_are_seldom_seen_twice_hide_no_leak(num_buckets, each):
    """As with accumulated batches of several sizes, of which there are many combinations."""
    found = []
    for seed in range(20):
        rng = random.Random(seed)
        buckets = [rng.randrange(num_buckets) for _ in range(300)]
        sizes = {bucket: rng.randrange(200 * MIB) for bucket in buckets}
        observer = LeakWatch(warmup_steps=0)
        for index, bucket in enumerate(buckets):
            observer.observe(10 * index, "device", 10**9 + sizes[bucket] + each * 10 * index, bucket)
        found += observer.leaks()
    assert len(found) == (20 if each else 0)
    assert all(leak.bytes_per_step == pytest.approx(each, rel=0.2) for leak in found)


def test_kinds_are_told_apart():
    observer = LeakWatch(warmup_steps=0)
    for step in range(1000):
        observer.observe(step, "device", 10**9)
        observer.observe(step, "host", 10**9 + 8192 * step)
    (leak,) = observer.leaks()
    assert leak.kind == "host"
    assert leak.total == pytest.approx(8192 * 999, rel=0.01)


def test_few_observations_say_nothing():
    assert watch(lambda step: 10**9 + MIB * step, steps=120) == []


def test_it_does_not_leak_itself():
    observer = LeakWatch(warmup_steps=0, max_observations=256)
    for step in range(50_000):
        observer.observe(step, "device", 10**9 + 1000 * step, bucket=step // 2)
    assert max(len(observer._levels), len(observer._excess["device"]), len(observer._memory["device"])) <= 257
    assert observer.leaks()[0].bytes_per_step == pytest.approx(1000, rel=0.02)


def test_a_few_megabytes_of_the_host_are_no_leak():
    """Its allocator keeps what it was given; of device memory the same growth is one."""
    for kind, num_leaks in (("host", 0), ("device", 1)):
        observer = LeakWatch()
        for step in range(500, 1500, 10):
            observer.observe(step, kind, 10**9 + 3000 * step)
        assert len(observer.leaks()) == num_leaks
