"""Owns what a worker does with its drafter while K is 0: nothing, until it has to catch up.

Stock vLLM runs the drafter's forward at K = 0 too, so that its KV cache has no gap; that costs 12 to 19 % of
a step on two cores. Here:

    K = 0, decoding          keep the target's states of the new tokens, skip the drafter
    K = 0, prompts or drafts the stock path, one forward: prompts are long and states of them too many to keep
    K > 0, tokens missing    first one forward over what was kept, then the stock path

The drafter's KV cache has gaps where states gave way to the bound: acceptance suffers, never correctness.
All of it depends on the scheduler's output alone, so all ranks do the same.
"""

from __future__ import annotations

import dataclasses
import logging
from typing import TYPE_CHECKING, Any

import torch

from rollout.kept_states import KeptStates

if TYPE_CHECKING:
    from vllm.v1.attention.backend import CommonAttentionMetadata
    from vllm.v1.core.sched.output import SchedulerOutput

logger = logging.getLogger("rlspec.rollout.idle_drafter")

METHODS_THAT_CATCH_UP = frozenset({"eagle", "eagle3", "draft_model"})
"""Methods of vLLM 0.32 whose KV cache can be completed later by their own first pass."""

METHODS_WITHOUT_STATE = frozenset({"ngram"})
"""Methods that look drafts up in the tokens themselves: nothing is missing after a pause."""


class IdleDrafter:
    """Stands before `propose_draft_token_ids` of one model runner (vLLM's V1).

    Attributes:
        num_skipped_steps: Steps in which the drafter did not run.
        num_caught_up_tokens: Tokens given to the drafter later.
    """

    def __init__(self, runner: Any, window_tokens: int) -> None:
        """`window_tokens`: tokens of a request that are kept at most; 0 never catches up."""
        self.num_skipped_steps = self.num_caught_up_tokens = 0
        self._runner = runner
        self._stock = runner.propose_draft_token_ids
        self._stock_sample = runner._sample
        self._window_tokens = window_tokens
        self._has_state = runner.speculative_config.method not in METHODS_WITHOUT_STATE
        self._kept: KeptStates | None = None

    def propose(
        self,
        scheduler_output: SchedulerOutput,
        sampled_token_ids: Any,
        sampling_metadata: Any,
        hidden_states: torch.Tensor,
        sample_hidden_states: torch.Tensor,
        aux_hidden_states: list[torch.Tensor] | None,
        spec_decode_metadata: Any,
        common_attn_metadata: CommonAttentionMetadata,
        slot_mappings: Any,
    ) -> Any:
        """As `GPUModelRunner.propose_draft_token_ids`, the drafter's part of a step."""
        num_draft_tokens = scheduler_output.num_spec_tokens_to_schedule
        num_tokens = scheduler_output.total_num_scheduled_tokens
        request_ids = self._runner.input_batch.req_ids
        if not self._has_state and not num_draft_tokens:
            self.num_skipped_steps += 1
            return [[] for _ in request_ids]
        if self._kept is not None:
            self._kept.drop(scheduler_output.finished_req_ids)
        has_drafts = bool(scheduler_output.scheduled_spec_decode_tokens)
        is_decoding = not has_drafts and num_tokens == len(request_ids)
        if self._has_state and is_decoding and not num_draft_tokens:
            if self._window_tokens:
                self._keep(request_ids, slice(num_tokens), hidden_states, aux_hidden_states)
            return self._skip(num_tokens, sampled_token_ids)
        if self._kept:
            single = self._drop_recomputed(scheduler_output)
            if num_draft_tokens:
                self._catch_up(common_attn_metadata, sampling_metadata)
            elif single:
                # No gap in what is kept, although the stock path gives the drafter these tokens.
                index = self._runner.input_batch.req_id_to_index
                places = torch.tensor([index[name] for name in single], device=self._runner.device)
                rows = common_attn_metadata.query_start_loc[places].long()
                self._keep(single, rows, hidden_states, aux_hidden_states)
        return self._stock(
            scheduler_output,
            sampled_token_ids,
            sampling_metadata,
            hidden_states,
            sample_hidden_states,
            aux_hidden_states,
            spec_decode_metadata,
            common_attn_metadata,
            slot_mappings,
        )

    def sample(self, logits: torch.Tensor | None, spec_decode_metadata: Any) -> Any:
        """As `GPUModelRunner._sample`, with the plain sampler where no request has a draft to verify.

        vLLM 0.32 takes its rejection sampler in every step of an engine with a drafter.
        """
        if spec_decode_metadata is not None and not any(spec_decode_metadata.num_draft_tokens):
            spec_decode_metadata = None
        return self._stock_sample(logits, spec_decode_metadata)

    def forget(self) -> None:
        """The policy's weights changed: states of the old ones are of no use."""
        if self._kept is not None:
            self._kept.clear()

    def _keep(
        self,
        request_ids: list[str],
        rows: slice | torch.Tensor,
        hidden_states: torch.Tensor,
        aux_hidden_states: list[torch.Tensor] | None,
    ) -> None:
        """Keep what the drafter reads of the target at one row of each request; nothing for a draft model."""
        runner = self._runner
        parts: list[torch.Tensor] = []
        if runner.drafter.pass_hidden_states_to_model:
            all_states = aux_hidden_states if runner.use_aux_hidden_state_outputs else [hidden_states]
            parts = [states[rows] for states in all_states or ()]
        if self._kept is None:
            width = sum(part.shape[-1] for part in parts)
            dtype = parts[0].dtype if parts else torch.float32
            self._kept = KeptStates(self._window_tokens, runner.max_num_reqs, width, dtype, runner.device)
        wide = torch.cat(parts, dim=-1) if parts else hidden_states[rows, :0]
        num_tokens = hidden_states.shape[0]
        ids, positions = runner.input_ids.gpu[:num_tokens], runner._get_positions(num_tokens)
        self._kept.keep(request_ids, ids[rows], positions[rows], wide)

    def _skip(self, num_requests: int, sampled_token_ids: Any) -> torch.Tensor:
        """Propose nothing, without the drafter."""
        runner = self._runner
        if runner.valid_sampled_token_count_event is not None:  # asynchronous scheduling waits for it
            next_token_ids, num_valid = runner.drafter.prepare_next_token_ids_padded(
                sampled_token_ids, runner.requests, runner.input_batch, runner.discard_request_mask.gpu
            )
            runner._copy_valid_sampled_token_count(next_token_ids, num_valid)
        self.num_skipped_steps += 1
        return torch.empty(num_requests, 0, dtype=torch.int64, device=runner.device)

    def _drop_recomputed(self, scheduler_output: SchedulerOutput) -> list[str]:
        """Forget requests that compute many tokens now: after a preemption their cache is made anew.

        Returns:
            The requests of this step of which tokens are kept, and which compute one token.
        """
        assert self._kept is not None
        drafts = scheduler_output.scheduled_spec_decode_tokens
        scheduled = scheduler_output.num_scheduled_tokens
        many = {name for name, num in scheduled.items() if num - len(drafts.get(name, ())) > 1}
        self._kept.drop(many)
        return [name for name in scheduled if self._kept.rows_of(name) and name not in drafts]

    def _catch_up(self, attention: CommonAttentionMetadata, sampling_metadata: Any) -> None:
        """Give the drafter the kept tokens of the requests of this step, as many in a forward as fit."""
        assert self._kept is not None
        names = self._runner.input_batch.req_ids
        limit = self._runner.drafter.max_num_tokens - len(names)  # a draft model adds a token a request
        parts: list[tuple[int, list[int], bool]] = []  # index in the batch, rows, whether they are its last
        num_tokens = 0
        for index, name in enumerate(names):
            rows = list(self._kept.rows_of(name))
            while rows:
                if num_tokens == limit:
                    self._forward(parts, attention, sampling_metadata)
                    parts, num_tokens = [], 0
                taken, rows = rows[: limit - num_tokens], rows[limit - num_tokens :]
                # The token after the last row of this part is the first of the next part.
                parts.append((index, [*taken, *rows[:1]], not rows))
                num_tokens += len(taken)
        if parts:
            self._forward(parts, attention, sampling_metadata)
        self._kept.drop(names)

    def _forward(
        self,
        parts: list[tuple[int, list[int], bool]],
        attention: CommonAttentionMetadata,
        sampling_metadata: Any,
    ) -> None:
        """One first pass of the drafter over kept tokens, which drafts nothing."""
        assert self._kept is not None
        runner, device = self._runner, attention.seq_lens.device
        requests = torch.tensor([index for index, _, _ in parts], device=device)
        now = runner.input_ids.gpu[attention.query_start_loc[requests].long()]
        next_token_ids = now.clone()
        rows: list[int] = []
        for place, (_, part, is_last) in enumerate(parts):
            if not is_last:
                next_token_ids[place] = self._kept.read(part[-1:])[0][0]
            rows += part if is_last else part[:-1]
        lengths = torch.tensor([len(part) - (not is_last) for _, part, is_last in parts])
        ids, positions, states = self._kept.read(rows)
        starts_cpu = torch.zeros(len(parts) + 1, dtype=attention.query_start_loc_cpu.dtype)
        starts_cpu[1:] = lengths.cumsum(0)
        starts = starts_cpu.to(device)
        last_positions = positions[starts[1:].long() - 1]
        table = attention.block_table_tensor[requests]
        block_size = runner.drafter.block_size
        owners = torch.repeat_interleave(torch.arange(len(parts), device=device), lengths.to(device))
        slots = table[owners, positions // block_size].long() * block_size + positions % block_size
        longest = int(lengths.max())
        empty = {field.name: None for field in dataclasses.fields(attention) if field.default is None}
        batch = dataclasses.replace(
            attention,
            **{
                **empty,
                "query_start_loc": starts.to(attention.query_start_loc.dtype),
                "query_start_loc_cpu": starts_cpu,
                "seq_lens": (last_positions + 1).to(attention.seq_lens.dtype),
                "seq_lens_cpu_upper_bound": None
                if attention.seq_lens_cpu_upper_bound is None
                else attention.seq_lens_cpu_upper_bound[requests.cpu()],
                "num_reqs": len(parts),
                "num_actual_tokens": len(rows),
                "max_query_len": longest,
                "block_table_tensor": table,
                "slot_mapping": slots.to(attention.slot_mapping.dtype),
            },
        )
        runner.drafter.propose(
            num_speculative_tokens=0,
            target_token_ids=ids,
            target_positions=positions,
            target_hidden_states=states,
            next_token_ids=next_token_ids.to(ids.dtype),
            token_indices_to_sample=None,
            common_attn_metadata=batch,
            sampling_metadata=sampling_metadata,
        )
        self.num_caught_up_tokens += len(rows)
