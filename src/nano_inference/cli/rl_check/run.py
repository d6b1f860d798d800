"""`rl-check`: run the checks and print a table."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import asdict, dataclass

import httpx2

from nano_inference.cli.rl_check import checks
from nano_inference.cli.rl_check.checks import Options, Trial
from nano_inference.cli.rl_check.servers import DIALECTS, Failed, NotOffered, Server
from nano_inference.cli.terminal import print_rows
from nano_inference.types import BadRequest

CHECKS: Sequence[tuple[Callable[[Trial], str | None], str]] = (
    (checks.seeds_repeat, "vllm#51226"),
    (checks.batch_invariance_under_load, "vllm#28326"),
    (checks.group_has_no_clones, "tt-metal#53077"),
    (checks.nucleus_is_normalised, "trl#6789"),
    (checks.temperature_is_accounted_for, "trl#4159"),
    (checks.prompt_scores_survive_prefix_hits, "vllm#42019"),
    (checks.prompt_scores_keep_their_order, "vllm#5344"),
    (checks.samples_equal_their_scores, "vllm#48305"),
    (checks.ids_are_not_retokenised, "trl#5224"),
    (checks.continuation_equals_whole, "verl#5071"),
    (checks.abort_returns_the_partial, "sglang#11673"),
    (checks.pause_keeps_requests, "vllm#32103"),
    (checks.update_drops_stale_kv, "prime-rl#1651"),
    (checks.versions_label_every_token, "vllm#54443"),
    (checks.bad_update_changes_nothing, "vllm#57374"),
    (checks.stop_token_has_a_logprob, "open-instruct#1473"),
    (checks.banned_tokens_leave_the_mass, "trl#7269"),
    (checks.values_are_json_numbers, "vllm#10234"),
    (checks.sleep_frees_memory, "vllm#16663"),
    (checks.streams_equal_whole_replies, ""),
    (checks.updates_at_once_do_not_mix, "verifiers#139"),
    (checks.forced_tokens_cost_nothing, ""),
    (checks.adapters_leave_the_base_alone, "vllm#42125"),
)
"""Each with the public report that it comes from, if there is one."""


@dataclass(frozen=True)
class Row:
    """The result of one check."""

    check: str
    result: str  # pass, FAIL or not offered
    seconds: float
    note: str  # what came back
    report: str


def run(url: str, dialect: str, options: Options, *, key: str | None, only: str | None, as_json: bool) -> int:
    """Run the checks and print a table; return 1 if one failed. Raises `BadRequest` for a server out of reach."""
    chosen = [(check, report) for check, report in CHECKS if only is None or only in check.__name__]
    if not chosen:
        raise BadRequest("--only", f"must be a part of a check's name, got {only!r}")
    server = Server(url, key, DIALECTS[dialect])
    rows: list[Row] = []
    try:
        for check, report in chosen:
            rows.append(run_one(check, report, server, options))
            if not as_json:
                print(f"{rows[-1].result:11}  {rows[-1].check}", flush=True)
    except httpx2.ConnectError as error:
        raise BadRequest("URL", f"{url}: {error}") from error
    finally:
        server.close()
    failed = sum(row.result == "FAIL" for row in rows)
    if as_json:
        print(json.dumps({"url": url, "dialect": dialect, "failed": failed, "checks": [asdict(row) for row in rows]}))
    else:
        cells = [(row.check, row.result, f"{row.seconds:.1f}", row.report, row.note) for row in rows]
        print_rows(("check", "result", "s", "report", "what came back"), cells)
    return min(failed, 1)


def run_one(check: Callable[[Trial], str | None], report: str, server: Server, options: Options) -> Row:
    started, result = time.monotonic(), "pass"
    with ThreadPoolExecutor(40) as pool:
        trial = Trial(server, options, pool)
        try:
            note = check(trial) or ""
            note = note if trial.is_bitwise else f"not bitwise; {note}".rstrip("; ")
        except (NotOffered, Failed) as error:
            result, note = error.result, str(error)
        except httpx2.ConnectError:
            raise
        except (LookupError, TypeError, ValueError, AttributeError, ArithmeticError, httpx2.TransportError) as error:
            result, note = "FAIL", f"{type(error).__name__}: {error}"  # a reply of another form, or none
        finally:
            with suppress(NotOffered, httpx2.TransportError):
                server.act("resume")
    return Row(check.__name__.replace("_", " "), result, round(time.monotonic() - started, 1), note[:300], report)
