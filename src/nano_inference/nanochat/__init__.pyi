"""The public names of the package for type checkers, as in `__init__.py`."""

from nano_inference.nanochat.checkpoint_manager import load_model as load_model
from nano_inference.nanochat.engine import Engine as Engine
from nano_inference.nanochat.engine import KVCache as KVCache
from nano_inference.nanochat.engine import RowState as RowState
from nano_inference.nanochat.engine import eval_with_timeout as eval_with_timeout
from nano_inference.nanochat.engine import sample_next_token as sample_next_token
from nano_inference.nanochat.engine import timeout as timeout
from nano_inference.nanochat.engine import use_calculator as use_calculator
from nano_inference.nanochat.gpt import GPT as GPT
from nano_inference.nanochat.gpt import GPTConfig as GPTConfig
from nano_inference.nanochat.tokenizer import RustBPETokenizer as RustBPETokenizer
from nano_inference.nanochat.tokenizer import get_tokenizer as get_tokenizer

__all__: list[str]
