"""The second act of the demo: one run on three meshes, killed on the way, and nothing converted.

    make demo            or            python examples/demo_meshes.py

A small model learns the Zen of Python by heart under the reference trainer (`examples/zen.yaml`):
two processes with FSDP2, killed with SIGKILL; then two with tensor parallelism, killed too; then
one process to the end. Each start is the same YAML with other mesh sizes. The losses follow those
of one process that nobody disturbed, because weights, moments and data position went along.
"""

from __future__ import annotations

import codecs
import contextlib
import io
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

from demo_tools import DemoFailedError, console, milepost, say

RECIPE = Path(__file__).with_name("zen.yaml")
STEPS, SAVE_EVERY = 200, 50
PROMPT, ANSWER = "Beautiful is better than", " ugly."
CLOSE = 0.02


def run_second_act(directory: Path) -> None:
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "zen.txt").write_text(zen() * 12)
    say(
        "8. One process that nobody disturbs",
        "A small model and the reference trainer, driven by examples/zen.yaml. Its losses are\n"
        "what the next run is measured by.",
    )
    follow(directory, "alone", {"output_dir": "alone"}, ranks=1)
    say(
        "9. The same YAML on two processes with FSDP2, killed with SIGKILL",
        "Each process holds half of every tensor and writes it to its final place. Both are\n"
        "killed some steps after the first checkpoint.",
    )
    follow(directory, "FSDP2", {"dp_shard_size": 2}, ranks=2, kill_after=SAVE_EVERY + 10)
    say(
        "10. Resumed with tensor parallelism, and killed again",
        "Other processes now need other parts of every tensor. They read just these from the same\n"
        "files; moments and data position too.",
    )
    follow(directory, "TP", {"tp_size": 2}, ranks=2, kill_after=2 * SAVE_EVERY + 10)
    say(
        "11. Resumed by one process, to the end",
        "No merge step, no conversion, nothing to clean up.",
    )
    follow(directory, "one process", {}, ranks=1)
    milepost("ls", str(directory / "moved"))
    compare(directory)
    say("12. Exported, loaded by transformers, generating", "It has learned its page by heart.")
    milepost("export", str(directory / "moved" / f"checkpoint-{STEPS}"), str(directory / "zen"))
    recite(directory / "zen")


def zen() -> str:
    with contextlib.redirect_stdout(io.StringIO()):
        import this
    return codecs.decode(this.s, "rot13") + "\n"


def follow(
    directory: Path,
    label: str,
    changes: dict[str, object],
    *,
    ranks: int,
    kill_after: int | None = None,
) -> None:
    """Start the trainer, show what it says, and kill all its ranks after a step."""
    import yaml

    recipe = {**yaml.safe_load(RECIPE.read_text()), **changes}
    (directory / "run.yaml").write_text(yaml.safe_dump(recipe, sort_keys=False))
    with started(directory, ranks) as job:
        assert job.stdout is not None
        for line in job.stdout:
            show(line.rstrip(), label)
            if kill_after is not None and line.startswith(f"step {kill_after}/"):
                kill_ranks(job.pid)
                break
        for _ in job.stdout:
            pass  # what was under way
    if kill_after is None and job.returncode != 0:
        raise DemoFailedError(f"{label}: {(directory / 'errors.txt').read_text()[-3000:]}")
    if kill_after is not None:
        if job.returncode == 0:
            raise DemoFailedError(f"{label}: the run was to be killed, but ended")
        console.print(f"  [{label}] killed after step {kill_after}", markup=False)


@contextlib.contextmanager
def started(directory: Path, ranks: int) -> Iterator[subprocess.Popen[str]]:
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
    command = [sys.executable, *(torchrun if ranks > 1 else []), "-m", "milepost_trainer"]
    environment = {
        **os.environ,
        "HF_HUB_OFFLINE": "1",
        "OMP_NUM_THREADS": "1",
        "PYTHONUNBUFFERED": "1",
        "TRANSFORMERS_VERBOSITY": "error",
    }
    with open(directory / "errors.txt", "w") as errors:
        job = subprocess.Popen(
            [*command, "run.yaml"],
            cwd=directory,
            stdout=subprocess.PIPE,
            stderr=errors,
            text=True,
            env=environment,
        )
    with job:
        try:
            yield job
        finally:
            if job.poll() is None and sys.exc_info()[0] is not None:
                kill_ranks(job.pid)
                job.kill()


def kill_ranks(launcher: int) -> None:
    """SIGKILL for every rank; torchrun sees it and ends."""
    listings = Path(f"/proc/{launcher}/task").glob("*/children")
    for pid in [int(pid) for listing in listings for pid in listing.read_text().split()]:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def show(line: str, label: str) -> None:
    """The lines that tell something: one step in 25, and all about checkpoints."""
    step = line.startswith("step ")
    if not step or int(line.split("/")[0].removeprefix("step ")) % 25 == 0:
        console.print(f"  [{label}] {line}", markup=False)


def losses_of(run: Path) -> dict[int, float]:
    history = json.loads((run / f"checkpoint-{STEPS}" / "trainer_state.json").read_text())
    return {e["step"]: e["loss"] for e in history["log_history"] if "learning_rate" in e}


def compare(directory: Path) -> None:
    alone, moved = losses_of(directory / "alone"), losses_of(directory / "moved")
    console.print("\n  step   undisturbed   moved      held as")
    rows = ((1, "FSDP2"), (50, "FSDP2"), (51, "TP"), (100, "TP"), (101, "one"), (200, "one"))
    for step, mesh in rows:
        console.print(f"  {step:4d}   {alone[step]:11.4f}   {moved[step]:6.4f}     {mesh}")
    if alone.keys() != moved.keys() or len(moved) != STEPS:
        raise DemoFailedError(f"steps are missing: {sorted(alone.keys() ^ moved.keys())[:5]}")
    apart = {step: abs(alone[step] - moved[step]) for step in alone}
    moves = (SAVE_EVERY, 2 * SAVE_EVERY)
    after = max(apart[step] for move in moves for step in range(move + 1, move + 11))
    console.print(
        f"  every step once; {after:.0e} apart at most in the ten steps after a move, and\n"
        f"  {max(apart.values()):.0e} in all {STEPS}: meshes add in another order, and training\n"
        "  amplifies the rounding; a wrong weight, moment or batch would be seen at once"
    )
    if after > CLOSE:
        raise DemoFailedError("the losses after a move are not those of the undisturbed run")


def recite(model_directory: Path) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from transformers.utils import logging

    logging.disable_progress_bar()
    model = AutoModelForCausalLM.from_pretrained(model_directory).eval()
    tokenizer = AutoTokenizer.from_pretrained(model_directory)
    ids = tokenizer(PROMPT, return_tensors="pt")["input_ids"]
    output = model.generate(
        ids, max_new_tokens=40, do_sample=False, pad_token_id=tokenizer.pad_token_id
    )
    said = tokenizer.decode(output[0])
    console.print(f"  {said!r}", markup=False)
    if not said.startswith(PROMPT + ANSWER):
        raise DemoFailedError(f"the model should have said {PROMPT + ANSWER!r}")


def main() -> int:
    directory = Path(tempfile.mkdtemp(prefix="milepost-demo-"))
    try:
        run_second_act(directory)
    except DemoFailedError as error:
        console.print(f"[bold red]demo failed:[/bold red] {error}")
        return 1
    finally:
        shutil.rmtree(directory, ignore_errors=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
