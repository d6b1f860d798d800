"""Which worker a prompt goes to."""

from __future__ import annotations

import random

import pytest

from nano_inference.rl.pool.routing import PrefixRouter


def prompt(seed: int, size: int) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(1000) for _ in range(size)]


def test_equal_prompts_go_to_one_worker_and_others_to_the_lightest() -> None:
    router = PrefixRouter(4, imbalance=8)
    homes = [router.place(prompt(seed, 5), 10) for seed in range(4)]
    assert homes == [0, 1, 2, 3]
    assert [router.place(prompt(seed, 5), 10) for seed in range(4)] == homes
    assert router.place(prompt(0, 5), 5, avoid={0}) != 0
    with pytest.raises(ValueError, match="no workers"):
        router.place([1, 2], 5, avoid={0, 1, 2, 3})


def test_the_longest_known_prefix_decides() -> None:
    router = PrefixRouter(3, imbalance=100)
    common, first, second = prompt(1, 64), prompt(2, 64), prompt(3, 64)
    assert router.place(common + first, 1) == 0
    router.finish(0, 1)
    router.remove(0)
    assert router.place(common + second, 1) == 1
    router.add(0)
    assert router.place(common + second + [5], 1) == 1
    assert router.place(common + first + [5], 1) == 0
    texts = PrefixRouter(2, imbalance=100)  # routed by their bytes
    text = bytes(range(200)) * 2
    assert [texts.place(one, 1) for one in (text + b"a", b"another", text + b"b")] == [0, 1, 0]


def test_turns_of_a_session_stay_together() -> None:
    router = PrefixRouter(2)
    router.place(prompt(0, 40), 1)
    home = router.place(prompt(1, 40), 5, session="a")
    for seed in range(2, 9):
        router.finish(home, 5)
        assert router.place(prompt(seed, 40), 5, session="a") == home


def test_an_overloaded_home_is_left() -> None:
    router = PrefixRouter(2)
    homes = [router.place([1, 2, 3], 10) for _ in range(40)]
    assert set(homes) == {0, 1}
    assert max(router.loads.values()) <= 1.25 * min(router.loads.values()) + 20


def test_a_removed_worker_gets_nothing() -> None:
    router = PrefixRouter(2, imbalance=100)
    home = router.place([1, 2, 3], 1, session="s")
    router.remove(home)
    assert router.place([1, 2, 3], 1, session="s") == 1 - home
    router.finish(home, 1)
    router.remove(1 - home)
    with pytest.raises(ValueError, match="no workers"):
        router.place([1], 1)


def test_the_oldest_prefixes_are_forgotten() -> None:
    router = PrefixRouter(2, imbalance=1e6, max_entries=10)
    router.place([0, 1], 1)  # worker 0
    for seed in range(20):
        router.place([seed, 5, 5], 1)
    router.finish(0, 10**6)
    before = router.loads
    assert router.place([0, 1], 1) == min(before, key=before.__getitem__)


@pytest.mark.parametrize("options", [{"num_workers": 0}, {"block_size": 0}, {"imbalance": 0.5}, {"max_entries": 0}])
def test_arguments_out_of_range_are_refused(options: dict[str, int]) -> None:
    with pytest.raises(ValueError, match=next(iter(options))):
        PrefixRouter(**{"num_workers": 2, **options})  # type: ignore[arg-type]
