# SPDX-License-Identifier: Apache-2.0
"""Eager answers without a server: a child process with stock vLLM, offline.

    python eager_answers.py CHECKPOINT [ARGUMENT ...] < messages.json > answers.json

``messages.json`` is a list of contents of one user message each, as a server takes them. Arguments
are those of ``vllm serve``.
"""

import contextlib
import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from vllm.vit_cudagraph.testing.serving import ARGUMENTS, ENVIRONMENT, LIMITS, STOCK, Answer


class EagerAnswers:
    """Starts at once, beside a server that comes up; :meth:`collect` waits for it."""

    def __init__(
        self,
        checkpoint: Path,
        contents: Sequence[list[dict[str, Any]]],
        arguments: Sequence[str] = (),
    ) -> None:
        own = {
            "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
            # transformers copies a checkpoint's code there, and so does the server meanwhile.
            "HF_MODULES_CACHE": str(checkpoint.parent / "modules"),
        }
        self._child = subprocess.Popen(
            [sys.executable, __file__, str(checkpoint), *arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env=os.environ | ENVIRONMENT | STOCK["env"] | own,
            text=True,
        )
        assert self._child.stdin is not None
        # The child reads all of it before it does anything else.
        self._child.stdin.write(json.dumps(list(contents)))
        self._child.stdin.close()
        self._child.stdin = None

    def collect(self) -> list[Answer]:
        output, log = self._child.communicate(timeout=240)
        assert self._child.returncode == 0, log[-3000:]
        assert "Encoder CUDA graphs" not in log
        return [
            Answer(text, tuple(tokens), tuple(logprobs), prompt)
            for text, tokens, logprobs, prompt in json.loads(output)
        ]

    def stop(self) -> None:
        self._child.kill()
        self._child.wait()


def main() -> None:
    contents = json.load(sys.stdin)
    with contextlib.redirect_stdout(sys.stderr):
        print(json.dumps(answers(sys.argv[1], sys.argv[2:], contents)), file=sys.__stdout__)


def answers(checkpoint: str, arguments: Sequence[str], contents: list[Any]) -> list[Any]:
    """Text, tokens, their log-probabilities and the prompt's length, one answer after another."""
    from vllm import SamplingParams
    from vllm.engine.arg_utils import EngineArgs
    from vllm.entrypoints.llm import LLM
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    parser = EngineArgs.add_cli_args(FlexibleArgumentParser())
    options = ["--model", checkpoint, "--limit-mm-per-prompt", json.dumps(LIMITS)]
    options += [*ARGUMENTS, *arguments]
    llm = LLM.from_engine_args(EngineArgs.from_cli_args(parser.parse_args(options)))
    sampling = SamplingParams(temperature=0.0, max_tokens=8, logprobs=0)
    made = []
    for content in contents:
        (request,) = llm.chat([{"role": "user", "content": content}], sampling, use_tqdm=False)
        answer, prompt = request.outputs[0], request.prompt_token_ids
        assert answer.logprobs is not None and prompt is not None
        chosen = zip(answer.token_ids, answer.logprobs, strict=True)
        logprobs = [entry[token].logprob for token, entry in chosen]
        made.append([answer.text, list(answer.token_ids), logprobs, len(prompt)])
    return made


if __name__ == "__main__":
    main()
