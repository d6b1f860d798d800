"""The commands' options. What a command does is imported when it runs: `--help` must not wait for torch."""

from __future__ import annotations

from typing import Annotated, Literal

from cyclopts import Parameter

from nano_inference.cli.completing import cached_names, known_names, removable_names
from nano_inference.cli.fallback import DEFAULT
from nano_inference.cli.options import (
    CHAT,
    COMMON,
    PLAIN,
    SERVER,
    SETTINGS,
    BenchFlag,
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
)

CachedName = Annotated[str, Parameter(completer=cached_names, help="a model, as for --model")]
RemovableName = Annotated[str, Parameter(completer=removable_names, help="a model in the caches")]
KnownName = Annotated[
    str, Parameter(completer=known_names, help="a known name, or a hub id: org/name[@revision][:file.gguf]")
]
PromptFlag = Annotated[
    str | None, Parameter(name=("--prompt", "-p"), allow_leading_hyphen=True, help="answer this one and leave")
]
SystemFlag = Annotated[str | None, Parameter(help="the system message; the template's own when not given")]


def chat(
    *,
    system: SystemFlag = None,
    prompt: PromptFlag = None,
    talk: ChatFlags = CHAT,
    engine: EngineFlags,
    sampling: SamplingFlags = PLAIN,
    common: CommonFlags = COMMON,
    typed: TypedFields,
) -> int:
    """Talk with a model in the terminal; piped input is taken line by line.

    The first Ctrl-C stops an answer, the second quits; Ctrl-D quits. /help lists what can be typed besides messages.
    With --server, a running OpenAI-compatible server answers; --model then is one of its names, if it has several.
    """
    from nano_inference.cli.chat import Options
    from nano_inference.cli.talk import asked_for

    wishes = Options(system, prompt, plain=talk.plain)
    asked = asked_for(sampling, typed.fields)
    if talk.server is not None:
        from nano_inference.cli import remote

        return remote.run(wishes, talk, engine.model_path, asked, common)
    from nano_inference.cli import local

    return local.run(wishes, engine, asked, common, typed)


def generate(
    prompt: Annotated[
        str | None,
        Parameter(
            allow_leading_hyphen=True,  # for "-" alone; `read_prompts` refuses what looks like a mistyped option
            help='the prompt; "-" or nothing reads all of a piped stdin',
        ),
    ] = None,
    /,
    *,
    file: Annotated[
        str | None,
        Parameter(
            allow_leading_hyphen=True,
            help='a prompt a line ("-" is stdin): text, or a JSON object with "prompt", "messages" or "token_ids"',
        ),
    ] = None,
    n: Annotated[int, Parameter(help="samples of each prompt")] = 1,
    raw: Annotated[bool, Parameter(negative="", help="continue the text as it is, without the chat template")] = False,
    system: SystemFlag = None,
    as_json: JsonFlag = False,
    engine: EngineFlags,
    sampling: SamplingFlags = PLAIN,
    common: CommonFlags = COMMON,
    typed: TypedFields,
) -> int:
    """Answer a prompt, or continue it with --raw. One sample is written as it comes; more run as one batch.

    --json prints an object for every sample: its text, token ids, log-probabilities, mask, versions and why it ended.
    """
    from nano_inference.cli import generate as work
    from nano_inference.cli.prompts import read_prompts
    from nano_inference.cli.talk import asked_for

    prompts = read_prompts(prompt, file)
    return work.run(
        prompts, work.Options(n, raw, system, as_json), engine, asked_for(sampling, typed.fields), common, typed
    )


def serve(
    *, server: ServerFlags = SERVER, engine: ServedEngineFlags, common: CommonFlags = COMMON, typed: TypedFields
) -> int:
    """Serve a model behind an OpenAI-compatible URL, on this machine only unless --host says otherwise.

    The first Ctrl-C or SIGTERM lets open requests finish, the second aborts them.
    """
    from nano_inference.cli.collection import no_collection

    with no_collection():
        from nano_inference.cli import serve as work

    return work.run(engine, server, common, typed)


def bench(
    *,
    workload: Annotated[
        tuple[str, ...],
        Parameter(negative_iterable="", help="a workload; may be repeated. An unknown name lists those that exist"),
    ] = ("decode1", "prefill"),
    repeat: Annotated[int, Parameter(help="runs of each, after one that is not counted")] = 3,
    engine: EngineFlags,
    common: CommonFlags = COMMON,
) -> int:
    """Measure this engine: a table of medians and ranges, and JSON on the last line."""
    from nano_inference.cli import bench as work

    return work.run(workload, repeat, engine, common)


def tokenize(
    text: Annotated[str | None, Parameter(help="the text; without it, stdin is read")] = None,
    /,
    *,
    decode: Annotated[
        tuple[int, ...], Parameter(consume_multiple=True, negative_iterable="", help="write the text of these ids")
    ] = (),
    no_special: Annotated[
        bool, Parameter(negative="", help="do not add the model's own first and last tokens")
    ] = False,
    as_json: JsonFlag = False,
    model: ModelFlag = DEFAULT,
    common: CommonFlags = COMMON,
) -> int:
    """Show the token ids of a text, or the text of ids."""
    from nano_inference.cli import tokenize as work

    if decode:
        return work.show_text(decode, as_json, model, common)
    return work.show_ids(text, not no_special, as_json, model, common)


def doctor(*, bench: BenchFlag = False, as_json: JsonFlag = False, common: CommonFlags = COMMON) -> int:
    """Show this machine: processor, memory, libraries, models, and two short measurements."""
    from nano_inference.cli import doctor as work

    return work.run(as_json, common, bench=bench)


def models_list(*, as_json: JsonFlag = False, common: CommonFlags = COMMON) -> int:
    """List the models in the caches."""
    from nano_inference.cli import models as work

    return work.show_list(as_json, common)


def models_pull(name: KnownName, /, *, common: CommonFlags = COMMON) -> int:
    """Fetch a model: a known name, or a hub id `org/name`, `org/name@revision`, `org/name:file.gguf`."""
    from nano_inference.cli import models as work

    return work.pull_model(name, common)


def models_info(
    name: CachedName = DEFAULT,
    /,
    *,
    override: OverrideFlag = (),
    as_json: JsonFlag = False,
    common: CommonFlags = COMMON,
) -> int:
    """Show what a model is made of, and what it costs to run; fetches it when it is not here.

    If the checkpoint's files leave constants open: each of them, with its value and the reason.
    """
    from nano_inference.cli import info as work

    return work.show_info(name, override, as_json, common)


def models_rm(name: RemovableName, /, *, common: CommonFlags = COMMON) -> int:
    """Delete a model from the caches."""
    from nano_inference.cli import models as work

    return work.remove_model(name, common)


def completion(
    *,
    shell: Annotated[Literal["bash", "zsh", "fish"] | None, Parameter(help="found out if not given")] = None,
    to_stdout: Annotated[
        bool, Parameter(name="--print", negative="", help="write the script to stdout and install nothing")
    ] = False,
    settings: SettingsFlags = SETTINGS,
) -> int:
    """Install shell completion for this user and print the file that was written.

    TAB then completes commands, options, their choices, and the names of the models on this machine.
    """
    from nano_inference.cli import shells as work
    from nano_inference.cli.app import build_app

    chosen = work.shell_here(shell)
    print(work.script(build_app(), chosen) if to_stdout else work.install(build_app(), chosen))
    return 0
