"""`run_trl.py MODEL ROWS`: TRL's GRPOTrainer on rows of `prepare.py JOB ROWS -1 512`, on one GPU.

OUT/NAME.trl.jsonl gets a line per step (`seconds` without evaluations, `generate` of them) and a
line per evaluation (`heldout`, the share of all held-out rows with a right greedy response).

transformers' `generate` samples, with float32 weights that each token casts, as TRL is shipped.
With `--copy`, a copy in bf16 samples. `--paged` is continuous batching, always of the copy: TRL
would cast the weights it trains, and bf16 loses updates of 3e-6.
"""

import argparse
import json
import time
from pathlib import Path

import torch
from datasets import Dataset
from torch.optim.lr_scheduler import LambdaLR
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig
from trl import GRPOConfig, GRPOTrainer

from relax_hpc.environments.rewards.functions import gsm8k

WARM_UP = 5


class Trainer(GRPOTrainer):
    def begin(self, args, file):
        self.run, self.file = args, file
        self.copied = load(args, torch.bfloat16).requires_grad_(False).to(self.args.device)
        self.asked = read(args.rows / "heldout.json")
        self.tokens, self.generate_s = 0, 0.0
        self.evaluate_heldout()

    def create_scheduler(self, num_training_steps, optimizer=None):
        """Step 1 has a fifth of the rate; transformers' own schedules give it none."""
        rises = LambdaLR(optimizer or self.optimizer, lambda done: min(1, (done + 1) / WARM_UP))
        self.lr_scheduler = rises
        return rises

    def _generate_single_turn(self, *args, **kwargs):
        begun, trained = time.time(), self.model_wrapped
        if self.run.copy or self.run.paged:
            self.update_copy()
            self.model_wrapped = self.copied
        try:
            return super()._generate_single_turn(*args, **kwargs)
        finally:
            self.model_wrapped = trained
            self.generate_s = time.time() - begun

    @torch.no_grad()
    def update_copy(self):
        for into, of in zip(self.copied.parameters(), self.model.parameters(), strict=True):
            into.copy_(of)

    def log(self, logs, start_time=None):
        super().log(logs, start_time)  # puts its own metrics into `logs`
        if "reward" not in logs:  # the end's
            return
        self.write(
            reward=logs["reward"],
            seconds=time.time() - self.since,
            generate=self.generate_s,
            length=logs["completions/mean_length"],
            truncated=logs["completions/clipped_ratio"],
            tokens=logs["num_tokens"] - self.tokens,
            grad_norm=float(logs["grad_norm"]),
        )
        self.tokens = logs["num_tokens"]
        self.evaluate_heldout()

    def evaluate_heldout(self):
        if self.run.every and self.state.global_step % self.run.every == 0:
            self.update_copy()
            right, cut = heldout(self.copied, self.processing_class, self.asked, self.run)
            self.write(heldout=right, truncated=cut)
        self.since = time.time()

    def write(self, **row):
        row = {"step": self.state.global_step, "time": time.time(), **row}
        print(json.dumps(row), file=self.file, flush=True)


def load(args, dtype):
    """The model without habits of sampling of its own (repetition_penalty, top_k ...)."""
    model = AutoModelForCausalLM.from_pretrained(
        args.model, dtype=dtype, attn_implementation=args.attention
    )
    ends = model.generation_config.eos_token_id
    model.generation_config = GenerationConfig(eos_token_id=ends)
    return model


def heldout(model, tokenizer, rows, args):
    """The shares of greedy responses that are right, and that are cut off."""
    ends = torch.tensor(model.generation_config.eos_token_id, device=model.device)
    right, num_cut = 0.0, 0
    for begin in range(0, len(rows), args.batch):
        some = rows[begin : begin + args.batch]
        asked = tokenizer.apply_chat_template(
            [row["prompt"] for row in some],
            add_generation_prompt=True, padding=True, return_dict=True, return_tensors="pt",
        ).to(model.device)  # fmt: skip
        said = model.generate(**asked, do_sample=False, max_new_tokens=args.tokens,
                              pad_token_id=tokenizer.pad_token_id)  # fmt: skip
        said = said[:, asked["input_ids"].shape[1] :]
        num_cut += len(some) - int(torch.isin(said, ends).any(dim=1).sum())
        texts = tokenizer.batch_decode(said, skip_special_tokens=True)
        right += sum(map(gsm8k.score, texts, [row["answer"] for row in some]))
    return right / len(rows), num_cut / len(rows)


def reward(completions, answer, **_):
    return [gsm8k.score(said[0]["content"], a) for said, a in zip(completions, answer, strict=True)]


def read(path):
    rows = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    return [{"prompt": r["prompt"], "answer": r["reward_model"]["ground_truth"]} for r in rows]


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", type=Path)
    parser.add_argument("rows", type=Path)
    parser.add_argument("--out", type=Path, default=Path("out"))
    parser.add_argument("--name", default="gsm8k")
    for name, value in (("steps", 60), ("seed", 0), ("prompts", 64), ("siblings", 8),
                        ("tokens", 512), ("micro", 16), ("every", 20), ("batch", 660)):  # fmt: skip
        parser.add_argument(f"--{name}", type=int, default=value)
    parser.add_argument("--attention", default="sdpa", help="or flash_attention_2 or _4")
    for name in ("copy", "paged", "checkpointing"):
        parser.add_argument(f"--{name}", action="store_true")
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    config = GRPOConfig(
        output_dir=str(args.out / "trl"), seed=args.seed, max_steps=args.steps,
        per_device_train_batch_size=args.micro, num_generations=args.siblings,
        gradient_accumulation_steps=args.prompts * args.siblings // args.micro,
        max_completion_length=args.tokens, shuffle_dataset=False, temperature=1.0,
        learning_rate=3e-6, weight_decay=0.1, adam_beta1=0.9, adam_beta2=0.98, max_grad_norm=1.0,
        loss_type="dapo", scale_rewards="none", epsilon=0.2, epsilon_high=0.28, beta=0.0,
        num_iterations=1, mask_truncated_completions=False, use_vllm=False,
        bf16=True, use_cpu=not torch.cuda.is_available(), gradient_checkpointing=args.checkpointing,
        use_transformers_continuous_batching=args.paged,
        logging_steps=1, save_strategy="no", report_to="none", disable_tqdm=True,
    )  # fmt: skip
    rows = Dataset.from_list(read(args.rows / "train.json"))
    tokenizer = AutoTokenizer.from_pretrained(args.model, padding_side="left")
    model = load(args, torch.float32)
    trainer = Trainer(model, reward, config, rows, processing_class=tokenizer)
    with (args.out / f"{args.name}.trl.jsonl").open("w", encoding="utf-8") as file:
        trainer.begin(args, file)
        trainer.train()
    assert {each.dtype for each in trainer.model.parameters()} == {torch.float32}
    if torch.cuda.is_available():
        print(f"at most {torch.cuda.max_memory_allocated() / 2**30:.1f} GiB")


if __name__ == "__main__":
    main()
