"""Owns the command line: `rlspec rollout | demo | explain | audit | config | env`, and the exit codes.

0 done; 1 a check failed (the audit, or the demo, which found a token that speculation changed);
2 something given was not accepted; 130 interrupted (finished groups are on disk).
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
from collections.abc import Sequence
from pathlib import Path

from rlspec.audit.verdicts import Check
from rlspec.config import Config
from rlspec.config_files import describe_config, load_config
from rlspec.console import print_error
from rlspec.errors import RlspecError
from rlspec.logs import configure_logs
from rlspec.openmp import openmp_environment, restart_with_openmp

EXIT_CHECK_FAILED = 1
EXIT_REFUSED = 2
EXIT_INTERRUPTED = 130


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; returns the exit code."""
    arguments = _parser().parse_args(argv)
    signal.signal(signal.SIGTERM, _terminate)
    try:
        config = load_config(arguments.config, [*arguments.preset, *arguments.set])
        configure_logs(config.observability.log_level, config.observability.log_format)
        return int(arguments.run(config, arguments))
    except RlspecError as error:
        print_error(error)
        return EXIT_REFUSED
    except KeyboardInterrupt:
        print("rlspec: interrupted; finished groups are on disk, --resume continues", file=sys.stderr)
        return EXIT_INTERRUPTED


def _terminate(signum: int, frame: object) -> None:
    """End as after Ctrl-C, so that engine processes are ended too."""
    raise KeyboardInterrupt


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="rlspec", description="Faster, lossless rollouts on stock vLLM.")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    shared = argparse.ArgumentParser(add_help=False)
    shared.set_defaults(preset=[])
    shared.add_argument("--config", type=Path, help="YAML file; without it the embedded default policy")
    shared.add_argument(
        "--set",
        action="append",
        default=[],
        metavar="KEY=VALUE",
        help="override a key: sampling.n=4 (repeatable)",
    )
    _add_rollout(commands, shared)
    demo = commands.add_parser("demo", parents=[shared], help="plain and speculating rollouts side by side")
    demo.add_argument("--runs", type=Path, default=Path("runs"), help="folder for results (default: runs)")
    # Two engines print every warning twice.
    demo.set_defaults(run=_demo, preset=["observability.vllm_log_level=error"])
    _add_explain(commands, shared)
    _add_profile(commands, shared)
    _add_audit(commands, shared)
    commands.add_parser(
        "env", parents=[shared], help='OpenMP settings for programs with a CPU engine: eval "$(rlspec env)"'
    ).set_defaults(run=_env)
    config = commands.add_parser("config", help="show or check a configuration")
    verbs = config.add_subparsers(required=True, metavar="VERB")
    verbs.add_parser("show", parents=[shared], help="print every key with its meaning").set_defaults(
        run=_show
    )
    check = verbs.add_parser("check", parents=[shared], help="check keys, values and vLLM's arguments")
    check.set_defaults(run=_check)
    return parser


def _add_rollout(
    commands: argparse._SubParsersAction[argparse.ArgumentParser], shared: argparse.ArgumentParser
) -> None:
    rollout = commands.add_parser("rollout", parents=[shared], help="prompts file in, rollouts file out")
    rollout.add_argument(
        "--prompts", type=Path, required=True, help="JSONL: prompt, messages or prompt_token_ids"
    )
    rollout.add_argument(
        "--out", type=Path, required=True, help="JSONL of rollouts, flushed a group at a time"
    )
    rollout.add_argument(
        "--skip-bad", action="store_true", help="bad lines go to rejected.jsonl with the reason"
    )
    rollout.add_argument(
        "--resume", action="store_true", help="continue --out without repeating finished groups"
    )
    rollout.add_argument("--k-trace", type=Path, help="replay K of each step from the .meta.json of a run")
    rollout.set_defaults(run=_rollout)


def _add_explain(
    commands: argparse._SubParsersAction[argparse.ArgumentParser], shared: argparse.ArgumentParser
) -> None:
    explain = commands.add_parser(
        "explain", parents=[shared], help="which K was chosen when, why, and what it saved"
    )
    explain.add_argument("recording", type=Path, metavar="RUN", help="folder of a run, or its steps.jsonl")
    explain.add_argument("--out", type=Path, help="the page with plots (default: explain.html beside it)")
    explain.add_argument("--rows", type=int, help="rows of the timeline at most")
    explain.add_argument("--json", type=Path, help="write summary and timeline as JSON")
    explain.set_defaults(run=_explain)


def _add_profile(
    commands: argparse._SubParsersAction[argparse.ArgumentParser], shared: argparse.ArgumentParser
) -> None:
    profile = commands.add_parser(
        "profile", parents=[shared], help="step costs on this machine: from which batch on drafts do not pay"
    )
    profile.add_argument(
        "--out", type=Path, default=Path("runs/profile"), help="folder (default: runs/profile)"
    )
    profile.add_argument("--batches", type=_integers, help="by comma (default: powers of two)")
    profile.add_argument("--contexts", type=_integers, help="prompt tokens, by comma (default: 64,512)")
    profile.set_defaults(run=_profile)


def _integers(text: str) -> list[int]:
    return [int(part) for part in text.split(",")]


def _add_audit(
    commands: argparse._SubParsersAction[argparse.ArgumentParser], shared: argparse.ArgumentParser
) -> None:
    audit = commands.add_parser(
        "audit",
        parents=[shared],
        help="is speculation lossless on this machine?",
        epilog="exit code 0: nothing failed (refused is safe, skipped says why); 1: a check failed; 2: not "
        "accepted. docs/correctness.md says what each check does and how long it takes. Without --model and "
        "without a policy in --config or --set, the tiny random policy is audited.",
    )
    audit.add_argument("--full", action="store_true", help="sees smaller errors; takes longer")
    audit.add_argument("--model", help="a directory, or `embedded`, instead of the tiny random policy")
    audit.add_argument("--drafter", help="its drafter's directory; without it the configuration's drafter")
    audit.add_argument("--method", help="vLLM's name of the drafting method: ngram, draft_model, eagle3, ...")
    audit.add_argument("--checks", help=f"some of {', '.join(Check)}, by comma (default: all)")
    audit.add_argument("--seed", type=int, default=0, help="of sampling and of the tiny policy (default: 0)")
    audit.add_argument("--out", type=Path, help="write the results as JSON")
    audit.set_defaults(run=_audit, preset=["observability.vllm_log_level=error"])


def _rollout(config: Config, arguments: argparse.Namespace) -> int:
    from rlspec.rollout_command import RolloutJob, run_rollouts

    restart_with_openmp()
    job = RolloutJob(
        prompts=arguments.prompts,
        out=arguments.out,
        skip_bad=arguments.skip_bad,
        resume=arguments.resume,
        k_trace=arguments.k_trace,
    )
    run_rollouts(config, job)
    return 0


def _demo(config: Config, arguments: argparse.Namespace) -> int:
    from rlspec.demo import run_demo

    restart_with_openmp()
    return 0 if run_demo(config, arguments.runs) else EXIT_CHECK_FAILED


def _explain(config: Config, arguments: argparse.Namespace) -> int:
    from rlspec.explain_command import ExplainJob, run_explain

    run_explain(ExplainJob(arguments.recording, arguments.out, arguments.rows, arguments.json))
    return 0


def _profile(config: Config, arguments: argparse.Namespace) -> int:
    from rlspec.profile_command import ProfileJob, run_profile

    restart_with_openmp()
    run_profile(config, ProfileJob(arguments.out, arguments.batches, arguments.contexts))
    return 0


def _audit(config: Config, arguments: argparse.Namespace) -> int:
    from rlspec.audit_command import AuditJob, run_audit_job

    restart_with_openmp()
    job = AuditJob(
        is_full=arguments.full,
        model=arguments.model,
        drafter=arguments.drafter,
        method=arguments.method,
        has_config=arguments.config is not None
        or any(override.startswith(("policy.", "drafter.")) for override in arguments.set),
        checks=arguments.checks,
        seed=arguments.seed,
        out=arguments.out,
    )
    return 0 if run_audit_job(config, job) else EXIT_CHECK_FAILED


def _show(config: Config, arguments: argparse.Namespace) -> int:
    print(describe_config(config))
    return 0


def _env(config: Config, arguments: argparse.Namespace) -> int:
    for name, value in openmp_environment(os.environ).items():
        print(f"export {name}='{value}'")
    return 0


def _check(config: Config, arguments: argparse.Namespace) -> int:
    from rollout.vllm_args import engine_arguments

    engine_arguments(config, config.policy.model)
    print("The configuration is accepted.")
    return 0


if __name__ == "__main__":
    sys.exit(main())
