#!/usr/bin/env bash
# run_verl.sh [verl's overrides] - verl 0.9.1 with SGLang on the work of work.sh.
#   CKPT=True BYPASS=False POLL=2    as verl is shipped
#   CKPT=False BYPASS=True POLL=0.05 the leanest (default): no gradient checkpointing, the sampler's
#                                    logprobs instead of a pass for old ones, looks for samples often
#   MODEL=FOLDER ROWS=FOLDER          real weights on rows of `prepare.py JOB ROWS -1 512`: gsm8k, see README
# PEER: a folder with verl's packages, or empty where they are installed; verl has
# verl/verl-0.9.1.diff applied. OUT gets NAME.verl.jsonl (its metrics) and NAME.verl.log.
set -uo pipefail
source "$(dirname "$0")/work.sh"
if [ -n "${PEER:-}" ]; then export PYTHONPATH="$PEER/shim:$PEER/site${PYTHONPATH:+:$PYTHONPATH}"; fi
ckpt=${CKPT:-False} bypass=${BYPASS:-True} agents=${AGENTS:-8}
export VERL_POLL_INTERVAL=${POLL:-0.05}
score=compute_score prompt=64 lr=1e-6 decay=0.0 beta=0.95 test=-1 eos=True
if [ -n "${ROWS:-}" ]; then
  score=gsm8k prompt=512 lr=3e-6 decay=0.1 beta=0.98 test=20 eos=False
else
  export VERL_LENGTHS=$data/lengths.json VERL_ASKED=$data/asked # which siblings have their lengths
  rm -rf "$VERL_ASKED" && mkdir "$VERL_ASKED"
fi
export HF_HUB_OFFLINE=1 PYTHONUNBUFFERED=1 TOKENIZERS_PARALLELISM=true
# SGLang's engine needs NCCL_CUMEM_ENABLE=0 on both ends of a broadcast.
export NCCL_NVLS_ENABLE=0 NCCL_CUMEM_ENABLE=0 TORCH_SYMM_MEM_DISABLE_MULTICAST=1
# Ray's monitor kills workers where memory grows; nothing is to leave the machine.
export RAY_memory_monitor_refresh_ms=0 RAY_USAGE_STATS_ENABLED=0 RAY_DEDUP_LOGS=0
[ "$ckpt" = False ] || name=$name-ckpt
[ "$bypass" = True ] || name=$name-old
export VERL_FILE_LOGGER_PATH=$out/$name.verl.jsonl
rollout=actor_rollout_ref.rollout actor=actor_rollout_ref.actor
args=(
  trainer.v1.trainer_mode=sync algorithm.adv_estimator=grpo algorithm.norm_adv_by_std_in_grpo=False
  algorithm.use_kl_in_reward=False algorithm.rollout_correction.bypass_mode="$bypass"
  data.train_files="$data/train.json" data.val_files="$data/heldout.json"
  data.train_batch_size="$prompts" data.max_prompt_length="$prompt" data.max_response_length="$p99"
  data.filter_overlong_prompts=False data.dataloader_num_workers=0 data.shuffle=False
  actor_rollout_ref.model.path="${MODEL:-$model/model}" actor_rollout_ref.model.use_remove_padding=True
  actor_rollout_ref.model.enable_gradient_checkpointing="$ckpt"
  $actor.strategy=fsdp2 $actor.ppo_mini_batch_size="$prompts" $actor.use_dynamic_bsz=True
  $actor.ppo_max_token_len_per_gpu="$tokens" $actor.use_kl_loss=False $actor.entropy_coeff=0
  $actor.clip_ratio_high=0.28 $actor.loss_agg_mode=token-mean $actor.optim.lr="$lr"
  $actor.optim.weight_decay="$decay" "$actor.optim.betas=[0.9,$beta]"
  "+$actor.optim.override_optimizer_config={fused:true}"
  $actor.fsdp_config.model_dtype=fp32 $actor.fsdp_config.dtype=bfloat16
  $actor.fsdp_config.reshard_after_forward=False
  $rollout.name=sglang $rollout.mode=async $rollout.n="$n" $rollout.tensor_model_parallel_size=1
  $rollout.gpu_memory_utilization="$mem" $rollout.max_num_seqs="$max_run" $rollout.ignore_eos="$eos"
  $rollout.temperature=1.0 $rollout.log_prob_use_dynamic_bsz=True
  $rollout.log_prob_max_token_len_per_gpu="$tokens" $rollout.agent.num_workers="$agents"
  $rollout.checkpoint_engine.update_weights_bucket_megabytes=1024
  +$rollout.engine_kwargs.sglang.attention_backend=triton
  +$rollout.engine_kwargs.sglang.sampling_backend=pytorch
  +$rollout.engine_kwargs.sglang.grammar_backend=none
  +$rollout.engine_kwargs.sglang.cuda_graph_backend_prefill=disabled
  "+$rollout.engine_kwargs.sglang.cuda_graph_bs_decode=$graphs"
  reward.num_workers="$agents" reward.custom_reward_function.path="$here/reward.py"
  reward.custom_reward_function.name=$score
  transfer_queue.backend.SimpleStorage.num_data_storage_units=2
  trainer.n_gpus_per_node="$gpus" trainer.nnodes=1 trainer.total_training_steps="$steps"
  trainer.total_epochs=1000 trainer.val_before_train="$([ "$test" = -1 ] && echo False || echo True)" trainer.test_freq="$test"
  trainer.save_freq=-1 trainer.resume_mode=disable 'trainer.logger=[console,file]'
  trainer.project_name=peer trainer.experiment_name="$name"
  trainer.default_local_dir="$folder/verl-checkpoints" +ray_kwargs.ray_init.include_dashboard=False
)
[ -z "${ROWS:-}" ] || args+=($actor.optim.lr_warmup_steps=5 data.seed="${SEED:-0}" actor_rollout_ref.rollout.seed="${SEED:-0}")
half=$((gpus > 1 ? gpus / 2 : 1))
[ "$mode" = sync ] || args+=(
  trainer.v1.trainer_mode=separate_async trainer.v1.separate_async.parameter_sync_step=1
  trainer.v1.separate_async.num_warmup_batches=1 trainer.v1.sampler.max_off_policy_threshold=2
  trainer.v1.sampler.max_off_policy_strategy=wait actor_rollout_ref.hybrid_engine=False
  trainer.n_gpus_per_node="$half" $rollout.nnodes=1 $rollout.n_gpus_per_node="$half"
  $rollout.checkpoint_engine.backend=nccl
)
# Ray's processes leave the session, and some their names; by this they are found, and no others.
export RELAX_PEER_RUN=$$-$RANDOM
end_all() {
  for each in /proc/[0-9]*; do
    pid=${each#/proc/}
    if [ "$pid" != $$ ] && grep -qz "^RELAX_PEER_RUN=$RELAX_PEER_RUN\$" "$each/environ" 2>/dev/null; then
      kill -9 "$pid" 2>/dev/null
    fi
  done
  true
}
cd "$folder"
timeout "${LIMIT:-540}" python3 -m verl.trainer.main_ppo "${args[@]}" "$@" >"$out/$name.verl.log" 2>&1
status=$?
end_all 2>/dev/null
((status == 0)) || {
  grep -vE 'INFO|Warning|warn' "$out/$name.verl.log" | tail -n 40 | cut -c 1-300
  echo "exit $status"
}
exit $status
