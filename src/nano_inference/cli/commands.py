"""The commands' options. Implementations are imported when a command runs, so that `--help` does not import torch."""

from __future__ import annotations

import json
import sys
from typing import Annotated, Literal

from cyclopts import Parameter

from nano_inference.cli.arguments import DEFAULT
from nano_inference.cli.options import (
    CHAT,
    COMMON,
    PLAIN,
    SERVER,
    SETTINGS,
    SYSTEM_HELP,
    ChatFlags,
    CommonFlags,
    EngineFlags,
    JsonFlag,
    ModelFlag,
    OverrideFlag,
    SamplingFlags,
    ServedEngineFlags,
    ServerFlags,
    SettingsFlags,
    TypedFields,
    cached_names,
    known_names,
    removable_names,
)
from nano_inference.types import BadRequest

CachedName = Annotated[str, Parameter(completer=cached_names, help="a model, as for --model")]
RemovableName = Annotated[str, Parameter(completer=removable_names, help="a model in the caches")]
KnownName = Annotated[
    str, Parameter(completer=known_names, help="a built-in name, or a hub id: org/name[@revision][:file.gguf]")
]


def chat(
    *,
    chat_options: ChatFlags = CHAT,
    engine: EngineFlags,
    sampling: SamplingFlags = PLAIN,
    common: CommonFlags = COMMON,
    typed: TypedFields,
) -> int:
    """Chat with a model in the terminal; each line of piped input is one message.

    The first Ctrl-C stops an answer, the second quits; Ctrl-D quits. /help lists the slash commands.
    With --server, a running OpenAI-compatible server answers; --model then selects one of its models.
    """
    from nano_inference.cli.sampling import requested_sampling

    requested = requested_sampling(sampling, typed.fields)
    if chat_options.server is not None:
        from nano_inference.cli.chat import remote

        return remote.run(chat_options, engine.model_path, requested, common)
    from nano_inference.cli.chat import local

    return local.run(chat_options, engine, requested, common, typed)


def generate(
    prompt: Annotated[
        str | None,
        Parameter(
            allow_leading_hyphen=True,  # for "-" alone; `read_prompts` rejects text that looks like an option
            help='the prompt; "-" or nothing reads piped stdin to its end',
        ),
    ] = None,
    /,
    *,
    file: Annotated[
        str | None,
        Parameter(
            allow_leading_hyphen=True,
            help='file with one prompt per line ("-": stdin): text, or JSON with "prompt", "messages" or "token_ids"',
        ),
    ] = None,
    n: Annotated[int, Parameter(help="samples per prompt")] = 1,
    raw: Annotated[bool, Parameter(negative="", help="continue the text without the chat template")] = False,
    system: Annotated[str | None, Parameter(help=SYSTEM_HELP)] = None,
    as_json: JsonFlag = False,
    engine: EngineFlags,
    sampling: SamplingFlags = PLAIN,
    common: CommonFlags = COMMON,
    typed: TypedFields,
) -> int:
    """Answer or continue one prompt, or many as one batch. A single sample is streamed.

    --json prints one object per sample: text, token ids, log-probabilities, mask, weight versions and finish reason.

    nano-inference generate "The capital of France is" --raw
    nano-inference generate --file prompts.jsonl --n 4 --json
    nano-inference generate - < letter.txt
    """
    from nano_inference.cli import generate as work
    from nano_inference.cli.place import read_prompts
    from nano_inference.cli.sampling import requested_sampling

    prompts = read_prompts(prompt, file)
    return work.run(
        prompts,
        work.Options(n, raw, system, as_json),
        engine,
        requested_sampling(sampling, typed.fields),
        common,
        typed,
    )


def serve(
    *, server: ServerFlags = SERVER, engine: ServedEngineFlags, common: CommonFlags = COMMON, typed: TypedFields
) -> int:
    """Serve a model behind an OpenAI-compatible URL; reachable from this machine only, unless --host is given.

    The first Ctrl-C or SIGTERM drains open requests, the second aborts them.

    nano-inference serve -m Qwen/Qwen3-0.6B --port 9000
    nano-inference serve --host 0.0.0.0 --api-key-file keys.txt
    nano-inference serve --print-config > serve.toml
    """
    from nano_inference.cli.app import no_collection

    with no_collection():
        from nano_inference.cli import serve as work

    return work.run(engine, server, common, typed)


def bench(
    *,
    workload: Annotated[
        tuple[str, ...],
        Parameter(negative_iterable="", help="a workload; may be repeated. An unknown name lists all workloads"),
    ] = ("decode1", "prefill"),
    repeat: Annotated[int, Parameter(help="measured runs of each, after one warm-up run")] = 3,
    engine: EngineFlags,
    common: CommonFlags = COMMON,
) -> int:
    """Measure this engine: prints a table of medians and ranges, and JSON on the last line.

    nano-inference bench --workload decode1 --repeat 5
    """
    from nano_inference.cli import bench as work

    return work.run(workload, repeat, engine, common)


def rl_check(
    url: Annotated[str, Parameter(help="the server, such as http://127.0.0.1:8000")],
    /,
    *,
    dialect: Annotated[Literal["vllm", "sglang"], Parameter(help="whose requests to send")] = "vllm",
    vocab: Annotated[int | None, Parameter(help="the model's number of token ids; needed")] = None,
    a: Annotated[str | None, Parameter(help="directory of the weights that the server starts with")] = None,
    b: Annotated[str | None, Parameter(help="directory of other weights")] = None,
    bad: Annotated[str | None, Parameter(help="directory of weights with a NaN")] = None,
    adapter: Annotated[str | None, Parameter(help="directory of a LoRA adapter")] = None,
    pid: Annotated[int | None, Parameter(help="the server's process, whose memory is read")] = None,
    tolerance: Annotated[float, Parameter(help="largest difference of log-probabilities that count as equal")] = 0.0,
    long: Annotated[int, Parameter(help="tokens of an answer that is interrupted")] = 1500,
    only: Annotated[str | None, Parameter(help="run the checks whose names contain this")] = None,
    api_key: Annotated[str | None, Parameter(help="the server's key")] = None,
    as_json: JsonFlag = False,
    settings: SettingsFlags = SETTINGS,
) -> int:
    """Check what an RL trainer may rely on in a rollout server: this one, vLLM or SGLang.

    nano-inference rl-check http://127.0.0.1:8000 --vocab 49152
    """
    from nano_inference.cli.rl_check import checks
    from nano_inference.cli.rl_check import run as work

    if vocab is None:
        raise BadRequest("--vocab", "give the model's number of token ids")
    options = checks.Options(
        vocab_size=vocab, a=a, b=b, bad=bad, adapter=adapter, pid=pid, tolerance=tolerance, long=long
    )
    return work.run(url, dialect, options, key=api_key, only=only.replace(" ", "_") if only else None, as_json=as_json)


def tokenize(
    text: Annotated[str | None, Parameter(help="the text; read from stdin if not given")] = None,
    /,
    *,
    decode: Annotated[
        tuple[int, ...], Parameter(consume_multiple=True, negative_iterable="", help="print the text of these ids")
    ] = (),
    no_special: Annotated[bool, Parameter(negative="", help="do not add the model's start and end tokens")] = False,
    as_json: JsonFlag = False,
    model: ModelFlag = DEFAULT,
    common: CommonFlags = COMMON,
) -> int:
    """Show the token ids of a text, or with --decode the text of token ids."""
    from nano_inference.cli.place import fetch, tokenizer_source
    from nano_inference.text.tokenizer import load_tokenizer

    if text is None and not decode and sys.stdin.isatty():
        raise BadRequest("", "no text: give one, or pipe it in")
    tokenizer = load_tokenizer(tokenizer_source(fetch(model, common)))
    if decode:
        for token in decode:
            if not 0 <= token < tokenizer.vocab_size:
                raise BadRequest("--decode", f"token id {token} is not in [0, {tokenizer.vocab_size - 1}]")
        shown = tokenizer.decode(decode, skip_special=False)
        print(json.dumps({"token_ids": decode, "text": shown}) if as_json else shown)
        return 0
    ids = tokenizer.encode(sys.stdin.read() if text is None else text, add_special=not no_special)
    if as_json:
        pieces = [tokenizer.token_bytes(token).decode("utf-8", "replace") for token in ids]
        print(json.dumps({"token_ids": ids, "pieces": pieces, "count": len(ids)}))
    else:
        print(*ids)
    return 0


def doctor(*, as_json: JsonFlag = False, common: CommonFlags = COMMON) -> int:
    """Show this machine: processor, memory, libraries, kernels, and the models that it can run."""
    from nano_inference.cli import doctor as work

    return work.run(as_json, common)


def models_list(*, as_json: JsonFlag = False, common: CommonFlags = COMMON) -> int:
    """List the models in the caches."""
    from rich.filesize import decimal

    from nano_inference.cli.place import cache_of
    from nano_inference.cli.terminal import note, print_rows
    from nano_inference.loading.catalog import list_models

    entries = list_models(cache_of(common))
    if as_json:
        rows = [{"name": e.name, "path": str(e.path), "bytes": e.bytes, "source": e.source} for e in entries]
        print(json.dumps(rows))
    elif entries:
        lines = [(e.name, decimal(e.bytes), e.source, str(e.path)) for e in entries]
        print_rows(("name", "size", "source", "path"), lines)
    else:
        note(f"no models in {cache_of(common)}; `nano-inference models pull default` fetches one", common.quiet)
    return 0


def models_pull(name: KnownName, /, *, common: CommonFlags = COMMON) -> int:
    """Fetch a model: a known name, or a hub id `org/name`, `org/name@revision`, `org/name:file.gguf`.

    nano-inference models pull default
    nano-inference models pull org/name:model-q4.gguf
    """
    from rich.filesize import decimal

    from nano_inference.cli.place import cache_of
    from nano_inference.cli.terminal import bar, note
    from nano_inference.loading.catalog import files_of, pull

    with bar(f"fetching {name}", is_bytes=True, quiet=common.quiet) as progress:
        path = pull(name, cache_of(common), progress)
    files = files_of(path)
    for file in files:
        checked = f"sha256 {file.sha256}" if file.sha256 else "the source gives no sha256"
        note(f"  {file.name}: {file.bytes:,} bytes, {checked}", common.quiet)
    total = sum(file.bytes for file in files)
    note(f"{name}: {total:,} bytes ({decimal(total)}) in {path}", common.quiet)
    print(path)
    return 0


def models_info(
    name: CachedName = DEFAULT,
    /,
    *,
    override: OverrideFlag = (),
    as_json: JsonFlag = False,
    common: CommonFlags = COMMON,
) -> int:
    """Show a model's architecture, files and memory use; fetches the model if it is not in the cache.

    Constants that the checkpoint's files do not name are listed with their inferred values and the reasons.
    """
    from nano_inference.cli import doctor as work

    return work.show_info(name, override, as_json, common)


def models_rm(name: RemovableName, /, *, common: CommonFlags = COMMON) -> int:
    """Delete a model from the caches."""
    from rich.filesize import decimal

    from nano_inference.cli.place import cache_of
    from nano_inference.cli.terminal import note
    from nano_inference.loading.catalog import remove

    note(f"removed {name}: {decimal(remove(name, cache_of(common)))} freed", common.quiet)
    return 0


def completion(
    *,
    shell: Annotated[Literal["bash", "zsh", "fish"] | None, Parameter(help="detected if not given")] = None,
    to_stdout: Annotated[
        bool, Parameter(name="--print", negative="", help="print the script to stdout instead of installing it")
    ] = False,
    settings: SettingsFlags = SETTINGS,
) -> int:
    """Install shell completion for this user and print the path of the script.

    TAB then completes commands, options, their choices, and the names of models on this machine.

    nano-inference completion --shell zsh --print > ~/.zfunc/_nano-inference
    """
    from nano_inference.cli import shells as work
    from nano_inference.cli.app import build_app

    chosen = work.choose_shell(shell)
    print(work.script(build_app(), chosen) if to_stdout else work.install(build_app(), chosen))
    return 0
