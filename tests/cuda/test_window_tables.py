"""The block tables of a window's slots, of which only what changed is written."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

from nano_inference import SamplingParams
from nano_inference.core.step import Row
from nano_inference.executors.cuda.decode import DecodeStep, StepKey
from nano_inference.executors.cuda.windows import Windows
from nano_inference.executors.protocol import CacheSize
from tests.cuda.engines import executor_of
from tests.cuda.models import config_of, write_model
from tests.rows import make_row

PARAMS = SamplingParams(max_tokens=500, ignore_eos=True)


class Idle:
    """A stepper that computes nothing."""

    def replay(self, key: StepKey) -> None:
        pass

    def warm_up(self, keys: list[StepKey], progress: Callable[[int, int], None]) -> None:
        pass


@pytest.fixture(scope="module")
def step(tmp_path_factory: pytest.TempPathFactory) -> Iterator[DecodeStep]:
    path = tmp_path_factory.mktemp("tables")
    write_model("qwen2-ratio7", path)
    executor = executor_of(path, config_of(path))
    executor.cache.allocate(CacheSize(num_blocks=40, block_size=16))
    yield executor.memory.decode_step(executor.store)


def row(number: int, *blocks: int) -> Row:
    place = {"prev_token": 1, "start": 16 * len(blocks) - 8, "blocks": blocks}
    return make_row(number, num_sampled=1, params=PARAMS, logprobs_mode="processed", seed=number, **place)


@pytest.mark.parametrize("later", [(1, 2, 3, 4), (1, 2), (1, 2, 7), (5, 6, 3), (1, 2, 3)])
def test_a_table_that_grew_shrank_or_was_replaced_is_the_rows_own(step: DecodeStep, later: tuple[int, ...]) -> None:
    windows = Windows(step, Idle())
    for blocks in ((1, 2, 3), later, (9, *later), (1, 2, 3)):
        windows.run([row(4, *blocks)])
        assert step.slots.table_SB[0, : len(blocks)].tolist() == list(blocks)


def test_a_row_that_moves_to_another_slot_takes_its_table_along(step: DecodeStep) -> None:
    windows = Windows(step, Idle())
    windows.run([row(1, 1, 2), row(2, 3, 4, 5)])
    windows.run([row(2, 3, 4, 5)])
    assert step.slots.table_SB[0, :3].tolist() == [3, 4, 5]
    windows.run([row(2, 3, 4, 5), row(1, 6)])
    assert step.slots.table_SB[:2, 0].tolist() == [3, 6]
