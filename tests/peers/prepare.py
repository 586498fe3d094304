"""`prepare.py JOB OUT MEAN P99 [section.key=value ...]`: prompts for peers, in the order in
which the job takes them, and the length of each sibling's response.

OUT gets train.json and heldout.json as verl and run_trl.py read them, lengths.json (token ids of
a prompt -> a length per sibling), and lengths.py, the environment with which the job draws the
very same. MEAN 0 is no distribution: every response has P99 tokens. MEAN -1: responses end where
the model ends them, and heldout.json is the job's own.
"""

import json
import sys
from pathlib import Path

from relax_hpc.cli.bench.long_tail import LengthDistribution
from relax_hpc.config import job_file
from relax_hpc.data import tokenizer
from relax_hpc.roles.rollout import prompt_check
from relax_hpc.roles.rollout.episodes import seed_of

job, out = Path(sys.argv[1]), Path(sys.argv[2])
mean, p99 = float(sys.argv[3]), int(sys.argv[4])
config = job_file.load(job, sys.argv[5:])
out.mkdir(parents=True, exist_ok=True)
sources = prompt_check.sources_of(
    config, prompt_check.open_files(config), tokenizer.load(config.model.path)
)


def row(index, prompt):
    return {
        "data_source": "gsm8k" if mean < 0 else "random",
        "prompt": prompt.messages,
        "ability": "math",
        "agent_name": "single_turn_agent",
        "reward_model": {"style": "rule", "ground_truth": prompt.answer},
        "extra_info": {"index": index},
    }


lengths, rows, taken = {}, [], len(sources.train)
if mean < 0:  # what the steps take, not an epoch
    taken = min(taken, config.schedule.num_steps * config.schedule.prompts_per_step)
for guid in range(taken):
    prompt = sources.train[guid]
    seeds = [seed_of(config.seed, guid, n) for n in range(config.rollout.samples_per_prompt)]
    key = ",".join(map(str, prompt.token_ids))
    assert mean < 0 or key not in lengths, "two prompts are alike: verl's could not be told apart"
    if mean > 0:
        lengths[key] = [LengthDistribution(mean, p99).draw(seed) for seed in seeds]
    else:
        lengths[key] = [p99] * len(seeds)
    rows.append(row(guid, prompt))
if mean > 0:
    LengthDistribution(mean, p99).write(out)
if mean >= 0:
    (out / "lengths.json").write_text(json.dumps(lengths))
heldout = rows[:16]
if mean < 0:
    [asked] = sources.heldout.values()
    heldout = [row(index, asked[index]) for index in range(len(asked))]
for name, some in (("train", rows), ("heldout", heldout)):
    (out / f"{name}.json").write_text("".join(json.dumps(row) + "\n" for row in some))
print(f"{len(rows)} prompts, {len(heldout)} held out")
