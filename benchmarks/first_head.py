"""Makes a first EAGLE-3 head for the embedded policy, for benchmarks and tests that need a drafter that
works.

    prompts ─► rlspec rollout (T = 1) ─► hidden states (transformers) ─► Eagle3DraftModel (speculators) ─►
    head/

With --sharpness 2 the policy is the one of `sharp_policy.py`; with --ignore-eos responses go on past their
end, as those of the benchmark do, whose lengths are given.

Recipe: forward KL, three test-time-training steps, AdamW with a cosine schedule, one decoder layer, a draft
vocabulary of the tokens seen most. `make setup-train` installs what it needs. Everything is kept in --out,
and what is there already is not made again. Prompts come from other seeds than those of the benchmarks.
"""

from __future__ import annotations

import argparse
import collections
import json
import math
import random
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from benchmarks.sharp_policy import sharpened_policy
from rlspec.arithmetic import arithmetic_prompts
from rlspec.config import EMBEDDED_VLLM_ARGS
from rlspec.provenance import hardware, versions

PROMPT_SEED = 1000
LAYERS = (2, 15, 27)
"""vLLM's own choice of the policy's layers for a policy of 30: outputs of layers 1, 14 and 26."""
DRAFT_VOCABULARY = 4096
NUM_HELD_OUT = 48
TOKENS_A_STEP = 1000
LEARNING_RATE = 2e-3
WARM_UP_STEPS = 15
TTT_STEPS = 3

Document = dict[str, Any]


def sample(out: Path, policy: Path, num_prompts: int, max_tokens: int, ignore_eos: bool) -> list[Document]:
    """Responses of the policy at temperature 1, resumed after a kill."""
    prompts = out / "prompts.jsonl"
    rows = [
        {"messages": [dict(message) for message in prompt.messages or ()], "group_id": prompt.group_id}
        for prompt in arithmetic_prompts(num_prompts, PROMPT_SEED)
    ]
    prompts.write_text("".join(json.dumps(row) + "\n" for row in rows))
    rollouts = out / "rollouts.jsonl"
    if not rollouts.exists() or len(rollouts.read_text().splitlines()) < num_prompts:
        settings = ["sampling.n=1", f"sampling.max_tokens={max_tokens}", "sampling.seed=1"]
        settings += [f"sampling.ignore_eos={str(ignore_eos).lower()}", "speculation.policy=off"]
        settings += [f"policy.model={policy}", f"engine.vllm_args={json.dumps(dict(EMBEDDED_VLLM_ARGS))}"]
        command = [sys.executable, "-m", "rlspec.cli", "rollout", "--prompts", str(prompts)]
        command += ["--out", str(rollouts), "--config", "configs/plain.yaml", "--resume"]
        command += [part for setting in settings for part in ("--set", setting)]
        subprocess.run(command, check=True)
    return [json.loads(line) for line in rollouts.read_text().splitlines()]


def add_states(documents: list[Document], policy: Path) -> None:
    """Give each document `ids` S, `aux` S x 3D (the layers' outputs) and `last` S x D (before the final
    norm)."""
    model = AutoModelForCausalLM.from_pretrained(policy, dtype=torch.float32).eval()
    last: list[torch.Tensor] = []
    model.model.norm.register_forward_pre_hook(lambda module, inputs: last.append(inputs[0][0].half()))
    with torch.inference_mode():
        for document in documents:
            ids = document["prompt_token_ids"] + document["completion_token_ids"]
            states = model.model(torch.tensor([ids]), output_hidden_states=True).hidden_states
            document["ids"] = torch.tensor(ids)
            document["aux"] = torch.cat([states[layer] for layer in LAYERS], dim=-1)[0].half()
            document["last"] = last.pop()
            document["num_prompt"] = len(document["prompt_token_ids"])


def batch_of(documents: list[Document]) -> dict[str, torch.Tensor]:
    """Documents side by side; token t + 1 stands with state t and with the policy's state at t + 1."""

    def mask(document: Document) -> torch.Tensor:
        chosen = torch.zeros(len(document["ids"]), dtype=torch.bool)
        chosen[document["num_prompt"] - 1 :] = True
        return chosen[1:]

    def joined(parts: list[torch.Tensor]) -> torch.Tensor:
        return torch.cat(parts)[None]

    lengths = [len(document["ids"]) - 1 for document in documents]
    return {
        "input_ids": joined([document["ids"][1:] for document in documents]),
        "hidden_states": joined([document["aux"][:-1].float() for document in documents]),
        "verifier_last_hidden_states": joined([document["last"][1:].float() for document in documents]),
        "document_ids": joined([torch.full((length,), index) for index, length in enumerate(lengths)]),
        "loss_mask": joined([mask(document) for document in documents]),
        "position_ids": joined([torch.arange(1, length + 1) for length in lengths]),
    }


def batches(documents: list[Document]) -> Iterator[dict[str, torch.Tensor]]:
    """Batches of at most TOKENS_A_STEP tokens, or of one document."""
    chosen: list[Document] = []
    for document in documents:
        if chosen and sum(len(row["ids"]) for row in (*chosen, document)) > TOKENS_A_STEP:
            yield batch_of(chosen)
            chosen = []
        chosen.append(document)
    yield batch_of(chosen)


def new_head(documents: list[Document], policy: Path) -> Any:
    """A head with a random start, whose vocabulary is what the policy says most often here."""
    from speculators.models.eagle3 import Eagle3DraftModel

    config = AutoConfig.from_pretrained(policy)
    counts = collections.Counter(token for row in documents for token in row["completion_token_ids"])
    tokens = [token for token, _ in counts.most_common(DRAFT_VOCABULARY)]
    tokens += [token for token in range(config.vocab_size) if token not in counts]
    kept = sorted(tokens[:DRAFT_VOCABULARY])
    is_kept = torch.zeros(config.vocab_size, dtype=torch.bool)
    is_kept[kept] = True
    config.num_hidden_layers = 1
    head = Eagle3DraftModel.from_training_args(
        config,
        t2d=is_kept,
        d2t=torch.tensor(kept) - torch.arange(DRAFT_VOCABULARY),
        draft_vocab_size=DRAFT_VOCABULARY,
        norm_before_residual=True,
        target_layer_ids=list(LAYERS),
        verifier_name_or_path=str(policy),
        draft_attn_impl="eager",
        ttt_steps=TTT_STEPS,
        num_layers=1,
        norm_output=False,
        fc_norm=False,
    )
    head.load_verifier_weights()
    return head.float()


def losses() -> dict[str, Any]:
    """Forward KL without the Triton kernel, which a CPU cannot run."""
    from speculators.losses import eager

    return {"kl_div": (eager.kl_div_loss, 1.0)}


def accuracies(head: Any, documents: list[Document]) -> list[float]:
    """Held-out argmax accuracy at each position, given that all before were right."""
    totals: collections.Counter[str] = collections.Counter()
    head.eval()
    with torch.no_grad():
        for batch in batches(documents):
            metrics = head(**batch, ttt_steps=TTT_STEPS, loss_config=losses())[2]
            totals.update({name: float(value) for name, value in metrics.items()})
    head.train()
    names = [f"cond_acc_{position}" for position in range(TTT_STEPS)]
    return [round(totals[f"{name}_sum"] / max(totals[f"{name}_total"], 1.0), 4) for name in names]


def train(
    head: Any, documents: list[Document], held_out: list[Document], minutes: float, out: Path
) -> list[Any]:
    """Train until the minutes are over; the head is saved after each epoch, by rename."""
    parameters = [parameter for parameter in head.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(parameters, lr=LEARNING_RATE, betas=(0.9, 0.95), weight_decay=0.0)
    history: list[Any] = []
    started, num_steps, order = time.monotonic(), 0, list(documents)
    while (progress := (time.monotonic() - started) / (60 * minutes)) < 1.0:
        random.Random(len(history)).shuffle(order)
        for batch in batches(order):
            progress = min((time.monotonic() - started) / (60 * minutes), 1.0)
            scale = 0.05 + 0.95 * 0.5 * (1 + math.cos(math.pi * progress))
            for group in optimizer.param_groups:
                group["lr"] = LEARNING_RATE * scale * min(1.0, (num_steps + 1) / WARM_UP_STEPS)
            loss = head(**batch, ttt_steps=TTT_STEPS, loss_config=losses())[1]
            optimizer.zero_grad()
            loss.backward()
            torch.nn.utils.clip_grad_norm_(parameters, 1.0)
            optimizer.step()
            num_steps += 1
            if progress >= 1.0:
                break
        row = {
            "epoch": len(history) + 1,
            "minutes": round((time.monotonic() - started) / 60, 1),
            "loss": round(float(loss), 3),
            "accuracies": accuracies(head, held_out),
        }
        history.append(row)
        print(json.dumps(row), flush=True)
        save(head, out)
    return history


def save(head: Any, out: Path) -> None:
    """Replace the head in `out/head`."""
    partial, final = out / "head.partial", out / "head"
    shutil.rmtree(partial, ignore_errors=True)
    head.save_pretrained(partial)
    if final.exists():
        shutil.rmtree(final)
    partial.rename(final)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=Path("runs/first_head"))
    parser.add_argument("--prompts", type=int, default=1000)
    parser.add_argument("--max-tokens", type=int, default=80, help="of a response")
    parser.add_argument("--ignore-eos", action="store_true", help="sample max-tokens always")
    parser.add_argument("--sharpness", type=float, default=1.0, help="of the policy's logits")
    parser.add_argument("--minutes", type=float, default=25.0, help="of training")
    arguments = parser.parse_args()
    arguments.out.mkdir(parents=True, exist_ok=True)
    torch.manual_seed(0)
    policy = sharpened_policy(arguments.sharpness, arguments.out / "policy")
    documents = sample(
        arguments.out, policy.absolute(), arguments.prompts, arguments.max_tokens, arguments.ignore_eos
    )
    started = time.monotonic()
    add_states(documents, policy)
    print(f"hidden states: {time.monotonic() - started:.0f} s", flush=True)
    held_out, training = documents[:NUM_HELD_OUT], documents[NUM_HELD_OUT:]
    head = new_head(training, policy)
    history = train(head, training, held_out, arguments.minutes, arguments.out)
    facts = {
        "command": "python -m benchmarks.first_head " + " ".join(sys.argv[1:]),
        "num_training_tokens": sum(len(row["completion_token_ids"]) for row in training),
        "epochs": history,
        "versions": versions(),
        "hardware": hardware(),
    }
    (arguments.out / "training.json").write_text(json.dumps(facts, indent=1))


if __name__ == "__main__":
    main()
