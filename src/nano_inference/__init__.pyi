"""Public names for type checkers: the same as in `__init__.py`, which tests/test_rooms.py verifies."""

from nano_inference.async_engine import AsyncEngine as AsyncEngine
from nano_inference.compat import Block as Block
from nano_inference.compat import CacheAllocation as CacheAllocation
from nano_inference.compat import KVCacheManager as KVCacheManager
from nano_inference.compat import PagedKVCache as PagedKVCache
from nano_inference.compat import RadixAttention as RadixAttention
from nano_inference.compat import RadixKVCache as RadixKVCache
from nano_inference.compat import SchedulerOutput as SchedulerOutput
from nano_inference.compat import Sequence as Sequence
from nano_inference.compat import SequenceStatus as SequenceStatus
from nano_inference.compat import compute_block_hash as compute_block_hash
from nano_inference.compat import model_forward as model_forward
from nano_inference.compat import sample_with_logprobs as sample_with_logprobs
from nano_inference.compat import schedule as schedule
from nano_inference.config import EngineConfig as EngineConfig
from nano_inference.config import SchedulerConfig as SchedulerConfig
from nano_inference.core.scheduler import SeqView as SeqView
from nano_inference.engine import InferenceEngine as InferenceEngine
from nano_inference.executors.step_input import ForwardInput as ForwardInput
from nano_inference.executors.step_input import Span as Span
from nano_inference.executors.torch.attention import FlexAttentionBackend as FlexAttentionBackend
from nano_inference.executors.torch.attention import create_attention_mask as create_attention_mask
from nano_inference.executors.torch.attention import (
    create_sliding_window_causal_mask as create_sliding_window_causal_mask,
)
from nano_inference.executors.torch.store import KVStore as KVStore
from nano_inference.llm import LLM as LLM
from nano_inference.llm import LoRARequest as LoRARequest
from nano_inference.rl.pool.local import LocalFleet as LocalFleet
from nano_inference.rl.pool.pool import RolloutPool as RolloutPool
from nano_inference.rl.pool.ray_workers import RayFleet as RayFleet
from nano_inference.rl.pool.urls import UrlFleet as UrlFleet
from nano_inference.rl.rollout import Rollout as Rollout
from nano_inference.rl.rollout import Segment as Segment
from nano_inference.rl.rollout import Turn as Turn
from nano_inference.rl.rollout import run_rollouts as run_rollouts
from nano_inference.rl.spmd import SpmdEngine as SpmdEngine
from nano_inference.types import AdapterInfo as AdapterInfo
from nano_inference.types import BadRequest as BadRequest
from nano_inference.types import CacheFull as CacheFull
from nano_inference.types import Delta as Delta
from nano_inference.types import EngineBusy as EngineBusy
from nano_inference.types import EngineDead as EngineDead
from nano_inference.types import EnginePaused as EnginePaused
from nano_inference.types import EngineRequest as EngineRequest
from nano_inference.types import ModelError as ModelError
from nano_inference.types import SamplingParams as SamplingParams
from nano_inference.types import TrainingSample as TrainingSample
from nano_inference.types import UpdateBusy as UpdateBusy
from nano_inference.types import UpdateCancelled as UpdateCancelled
from nano_inference.types import VersionSpan as VersionSpan
from nano_inference.types import WeightError as WeightError
from nano_inference.types import WeightInfo as WeightInfo
from nano_inference.weights.checksum import weights_checksum as weights_checksum
from nano_inference.weights.directory import save_weights as save_weights
from nano_inference.weights.directory import weights_in as weights_in
from nano_inference.weights.group import WeightGroup as WeightGroup
from nano_inference.weights.sync import WeightSyncManager as WeightSyncManager

__all__: list[str]
__version__: str
