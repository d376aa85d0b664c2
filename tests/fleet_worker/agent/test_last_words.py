"""What an engine died of, from its last lines."""

from __future__ import annotations

import pytest

from fleet_worker.agent.lastwords import Fatal, pick_cause

CORE = "(EngineCore pid=1400) ERROR 11-27 21:03:26 [core.py:1512] "
WORKER = "(Worker pid=1968) ERROR 11-27 21:03:25 [multiproc_executor.py:953] "
API = "(APIServer pid=32122) ERROR 11-27 21:03:26 [async_llm.py:906] "
TRACKER = "/lib/python3.11/multiprocessing/resource_tracker.py:254: UserWarning: resource_tracker: There appear to be 2 leaked"


def test_the_cause_is_the_last_line_that_is_no_traceback_frame():
    lines = [
        "Traceback (most recent call last):",
        '  File "x.py", line 1',
        "ValueError: no tensor lm_head.weight",
        "   ",
        "",
    ]
    assert pick_cause(lines) == "ValueError: no tensor lm_head.weight"


def test_what_python_says_of_memory_that_was_left_is_no_cause():
    """Of each vLLM that died it was told as what it had died of."""
    lines = ["ValueError: no tensor lm_head.weight", TRACKER, "  warnings.warn('resource_tracker: There appear to be %d '"]
    assert (pick_cause(lines), pick_cause(lines[1:])) == ("ValueError: no tensor lm_head.weight", "")


@pytest.mark.parametrize(
    ("lines", "words"),
    [
        pytest.param(
            [
                f"{CORE}EngineCore encountered a fatal error.", f"{CORE}Traceback (most recent call last):",
                f'{CORE}  File "/v/core.py", line 1496, in run_engine_core', f"{CORE}    engine_core.run_busy_loop()",
                f"{API}AsyncLLM output_handler failed.", f"{CORE}           ^^^^^^^^^^^^",
                f"{CORE}torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB.",
                f"{API}vllm.v1.engine.exceptions.EngineDeadError: EngineCore encountered an issue. See stack trace (above)",
            ],
            "EngineCore encountered a fatal error: torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB.",
            id="fatal",
        ),
        pytest.param(
            [
                f"{WORKER}WorkerProc failed to start.", f"{WORKER}Traceback (most recent call last):", f"{WORKER}    run()",
                f"{WORKER}ValueError: no GPU", f"{CORE}EngineCore failed to start.", f"{CORE}Traceback (most recent call last):",
                f"{CORE}Exception: WorkerProc initialization failed. See stack trace for root cause.",
            ],
            "WorkerProc failed to start: ValueError: no GPU",
            id="the-first-is-the-cause",
        ),
        pytest.param(
            [f"{CORE}Worker proc VllmWorker-0 died unexpectedly (exit code: -9), shutting down executor.", f"{CORE}And so on."],
            "Worker proc VllmWorker-0 died unexpectedly (exit code: -9), shutting down executor",
            id="killed",
        ),
        pytest.param([f"{API}Error in loading a chat template", "ERROR of somebody"], "", id="an-error-that-is-not-fatal"),
        pytest.param(
            ["INFO 11-27 21:03:26 [x.py:1] 'EngineCore encountered a fatal error.' was asked for"], "", id="a-prompt-that-says-so"
        ),
        pytest.param(
            ["ERROR 11-27 21:03:26 [core.py:1] EngineCore failed to start.", f"ERROR 11-27 21:03:26 [core.py:1] {'x' * 900}"],
            f"EngineCore failed to start: {'x' * 900}"[:500],
            id="without-processes-long",
        ),
    ],
)  # fmt: skip
def test_vllm_says_on_its_stdout_what_was_fatal(lines: list[str], words: str):
    fatal = Fatal()
    for line in lines:
        fatal.feed(line)
    assert fatal.words == words
